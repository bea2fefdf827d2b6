//! A template's text, before minijinja reads it.
//!
//! What cannot be run as Python would run it, and would come out silently otherwise, is refused here by name.

use super::python::invalid;
use minijinja::Error;

/// Longest template, in bytes; the longest known has 20 thousand.
const MAX_SOURCE: usize = 1 << 20;

/// Most operators and names in one tag. An expression's tree may be as deep as it is long, and is walked recursively.
const MAX_TAG: usize = 1000;

/// Methods of Python's dictionaries: without a call, jinja2 takes `tool.items` for the method even where there is such
/// an entry.
const METHODS: [&str; 3] = ["items", "keys", "values"];

/// The template as minijinja takes it: newlines as jinja2 reads them, and the tags `{% generation %}` and
/// `{% endgeneration %}` (transformers' marks for training, around what the assistant says) as scopes, which is what
/// they are when rendering. Whitespace control stays.
pub(super) fn prepare(source: &str) -> Result<String, Error> {
    if source.len() > MAX_SOURCE {
        return Err(invalid(format!(
            "the template has {} bytes, more than the {MAX_SOURCE} that any honest one needs",
            source.len()
        )));
    }
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut out = String::with_capacity(source.len());
    let mut rest = source.as_str();
    let opens = |rest: &str, at: usize| rest[at + 1..].starts_with(['{', '%', '#']);
    while let Some((at, _)) = rest.match_indices('{').find(|&(at, _)| opens(rest, at)) {
        let (before, tag) = rest.split_at(at + 2);
        out.push_str(before);
        rest = tag;
        if before.ends_with("{#") {
            let end = rest.find("#}").map_or(rest.len(), |end| end + 2);
            out.push_str(&rest[..end]);
            rest = &rest[end..];
            continue;
        }
        let end = if before.ends_with("{%") { "%}" } else { "}}" };
        let inside = &rest[..end_of_tag(rest, end)?];
        rest = &rest[inside.len()..];
        let name = inside.trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace());
        match name {
            "generation" if end == "%}" => out.push_str(&inside.replacen(name, "with", 1)),
            "endgeneration" if end == "%}" => out.push_str(&inside.replacen(name, "endwith", 1)),
            // What stands up to its end is no template.
            "raw" if end == "%}" => {
                let until = rest.find("endraw").unwrap_or(rest.len());
                out.push_str(inside);
                out.push_str(&rest[..until]);
                rest = &rest[until..];
            }
            _ => out.push_str(inside),
        }
    }
    out.push_str(rest);
    Ok(out)
}

/// Where the tag that starts at `text` ends: at `end` outside strings. Its names are looked at on the way.
fn end_of_tag(text: &str, end: &str) -> Result<usize, Error> {
    let bytes = text.as_bytes();
    let (mut at, mut tokens, mut braces, mut after_dot) = (0, 0, 0usize, false);
    while at < bytes.len() {
        if braces == 0 && text[at..].starts_with(end) {
            return Ok(at);
        }
        let start = at;
        let c = bytes[at];
        match c {
            b'"' | b'\'' => {
                at += 1;
                while at < bytes.len() && bytes[at] != c {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
                at = (at + 1).min(bytes.len());
            }
            b'_' | b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' | 0x80.. => {
                while at < bytes.len()
                    && (bytes[at] == b'_' || bytes[at] >= 0x80 || bytes[at].is_ascii_alphanumeric())
                {
                    at += 1;
                }
                check_name(&text[start..at], after_dot, text[at..].trim_start().starts_with('('))?;
            }
            _ => {
                braces = match c {
                    b'{' => braces + 1,
                    b'}' => braces.saturating_sub(1),
                    _ => braces,
                };
                at += 1;
            }
        }
        if !c.is_ascii_whitespace() {
            after_dot = c == b'.';
            tokens += 1;
        }
        if tokens > MAX_TAG {
            return Err(invalid(format!("one tag has more than {MAX_TAG} names and signs")));
        }
    }
    Ok(bytes.len())
}

fn check_name(name: &str, after_dot: bool, called: bool) -> Result<(), Error> {
    if after_dot && !called && METHODS.contains(&name) {
        return Err(invalid(format!(
            "`.{name}` without a call is Python's method and not an entry; Tandem cannot do that"
        )));
    }
    if !after_dot && ["varargs", "kwargs"].contains(&name) {
        return Err(invalid(format!("macros have no `{name}` in Tandem")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_tags_become_scopes_and_keep_their_dashes() {
        assert_eq!(
            prepare("a{%- generation -%}b{% endgeneration %}{% if generation %}{% endif %}").unwrap(),
            "a{%- with -%}b{% endwith %}{% if generation %}{% endif %}"
        );
        assert_eq!(prepare("{% generation").unwrap(), "{% with");
    }

    #[test]
    fn only_tags_are_looked_at() {
        for text in [
            "x.items {# d.items #}{% raw %}{{ d.items }}{% endraw %}{{ 'd.items' }}",
            "{{ d.items() }}{{ d.items () }}{{ d['items'] }}{{ items }}{{ d.kwargs }}",
            "{{ '}}' }}{{ {'a': {'b': 1}} }}{% set x = '%}' %}\"",
            "{{",
            "{% '",
            "{{ '\\",
        ] {
            assert_eq!(prepare(text).unwrap(), text);
        }
        for text in [
            "{{ d.items }}",
            "{% for k in d . keys %}",
            "{{ '}}' ~ d.values }}",
            "{% raw %}{% endraw %}{{ d.items }}",
        ] {
            assert!(prepare(text).unwrap_err().to_string().contains("Python's method"), "{text}");
        }
        assert!(
            prepare("{% macro m() %}{{ kwargs }}{% endmacro %}").unwrap_err().to_string().contains("kwargs")
        );
    }

    #[test]
    fn newlines_are_pythons() {
        assert_eq!(prepare("a\r\nb\rc\n").unwrap(), "a\nb\nc\n");
    }
}
