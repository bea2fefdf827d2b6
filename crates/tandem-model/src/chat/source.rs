//! A template's text, before minijinja reads it.
//!
//! What cannot be run as Python would run it, and would come out silently otherwise, is refused here by name.

use super::python::invalid;
use minijinja::Error;

/// Longest template, in bytes; the longest known has 20 thousand.
const MAX_SOURCE: usize = 1 << 20;

/// Longest line in bytes, and most lines: minijinja counts both in 16 bits.
const MAX_LINE: usize = u16::MAX as usize;

/// Most operators and names in one tag. An expression's tree may be as deep as it is long, and is walked recursively.
const MAX_TAG: usize = 1000;

/// Most `elif`s in a template: each nests in the one before it.
const MAX_ELIFS: usize = 500;

/// Stands for the filters `safe` and `escape` in a tag that also adds with `+`: what Python adds to their text it escapes
/// (`~` does not). The filter of this name refuses that, once it is reached.
pub(super) const JOINED: &str = "safe_then_joined";

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
    if source.split('\n').any(|line| line.len() > MAX_LINE) || source.split('\n').count() > MAX_LINE {
        return Err(invalid(format!(
            "the template has a line of more than {MAX_LINE} bytes, or as many lines"
        )));
    }
    let mut out = String::with_capacity(source.len());
    let (mut rest, mut elifs) = (source.as_str(), 0);
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
        let (len, inside) = read_tag(rest, end)?;
        rest = &rest[len..];
        let name = inside.trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace());
        elifs += usize::from(end == "%}" && name.starts_with("elif"));
        if elifs > MAX_ELIFS {
            return Err(invalid(format!("the template has more than {MAX_ELIFS} times elif")));
        }
        match name {
            "generation" if end == "%}" => out.push_str(&inside.replacen(name, "with", 1)),
            "endgeneration" if end == "%}" => out.push_str(&inside.replacen(name, "endwith", 1)),
            // What stands up to its end is no template.
            "raw" if end == "%}" => {
                let until = rest.find("endraw").unwrap_or(rest.len());
                out.push_str(&inside);
                out.push_str(&rest[..until]);
                rest = &rest[until..];
            }
            _ => out.push_str(&inside),
        }
    }
    out.push_str(rest);
    Ok(out)
}

/// The tag that starts at `text`: its length, up to `end` outside strings, and its text as minijinja takes it.
fn read_tag(text: &str, end: &str) -> Result<(usize, String), Error> {
    let bytes = text.as_bytes();
    let (mut at, mut tokens, mut braces, mut before) = (0, 0, 0usize, b' ');
    let (mut marks, mut joins) = (Vec::new(), false);
    while at < bytes.len() {
        if braces == 0 && text[at..].starts_with(end) {
            break;
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
                let name = &text[start..at];
                check_name(name, before == b'.', text[at..].trim_start().starts_with('('))?;
                if before == b'|' && ["safe", "e", "escape"].contains(&name) {
                    marks.push(start..at);
                }
            }
            _ => {
                braces = match c {
                    b'{' => braces + 1,
                    b'}' => braces.saturating_sub(1),
                    _ => braces,
                };
                joins |= c == b'+';
                at += 1;
            }
        }
        if !c.is_ascii_whitespace() {
            before = c;
            tokens += 1;
        }
        if tokens > MAX_TAG {
            return Err(invalid(format!("one tag has more than {MAX_TAG} names and signs")));
        }
    }
    let inside = &text[..at];
    let (mut out, mut done) = (String::with_capacity(at), 0);
    for mark in marks.iter().filter(|_| joins) {
        out.push_str(&inside[done..mark.start]);
        out.push_str(JOINED);
        done = mark.end;
    }
    out.push_str(&inside[done..]);
    Ok((at, out))
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
        assert!(prepare("{{ 'a' | safe }}{{ 'a' ~ 'b' }}").is_ok());
        assert_eq!(
            prepare("{{ a | safe + d + (d|e)+safe }}{{ a|e ~ b }}").unwrap(),
            "{{ a | safe_then_joined + d + (d|safe_then_joined)+safe }}{{ a|e ~ b }}"
        );
        assert!(
            prepare("{% macro m() %}{{ kwargs }}{% endmacro %}").unwrap_err().to_string().contains("kwargs")
        );
    }

    #[test]
    fn newlines_are_pythons() {
        assert_eq!(prepare("a\r\nb\rc\n").unwrap(), "a\nb\nc\n");
    }
}
