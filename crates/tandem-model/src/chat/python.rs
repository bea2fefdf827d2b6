//! What Python's jinja2 under transformers does and `minijinja` does not.

use std::fmt::Write as _;
use std::time::SystemTime;

use minijinja::value::{Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value, escape_formatter};

use super::json::{float_repr, tojson};

/// How `raise_exception` is told apart from other errors.
pub(super) const RAISED: ErrorKind = ErrorKind::InvalidOperation;
pub(super) const RAISE_MARK: &str = "raise_exception: ";

/// Adds transformers' functions and Python's behaviour of tests and methods.
pub(super) fn install(environment: &mut Environment<'_>, now: Option<SystemTime>) {
    environment.set_unknown_method_callback(method);
    environment.set_formatter(|out, state, value| match f64::try_from(value.clone()) {
        Ok(float) if value.is_number() && !value.is_integer() => Ok(out.write_str(&float_repr(float))?),
        _ => escape_formatter(out, state, value),
    });
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(RAISED, format!("{RAISE_MARK}{message}")))
    });
    environment.add_function("strftime_now", move |format: String| strftime(now, &format));
    environment.add_filter("tojson", tojson);
    environment.add_filter("truncate", truncate);
    // In Python strings and dicts have a length and can be indexed, so jinja2 counts them as sequences.
    let is_sequence =
        |value: &Value| matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String);
    environment.add_test("sequence", is_sequence);
}

/// Methods of Python's strings that `minijinja_contrib` lacks, then those it has.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let texts: Option<Vec<&str>> = args.iter().map(Value::as_str).collect();
    let pieces = |parts: [&str; 3]| Ok(Value::from(parts.map(str::to_owned).to_vec()));
    match (value.as_str(), name, texts.as_deref()) {
        (Some(text), "removeprefix", Some([affix])) => Ok(text.strip_prefix(affix).unwrap_or(text).into()),
        (Some(text), "removesuffix", Some([affix])) => Ok(text.strip_suffix(affix).unwrap_or(text).into()),
        (Some(text), "partition", Some([separator])) => match text.split_once(separator) {
            Some((before, after)) => pieces([before, separator, after]),
            None => pieces([text, "", ""]),
        },
        (Some(text), "rpartition", Some([separator])) => match text.rsplit_once(separator) {
            Some((before, after)) => pieces([before, separator, after]),
            None => pieces(["", "", text]),
        },
        (Some(text), "rsplit", _) if !args.is_empty() => {
            let separator = args[0].as_str().filter(|separator| !separator.is_empty());
            let separator = separator.ok_or_else(|| invalid("rsplit wants a separator"))?;
            let most = args.get(1).map_or(Ok(-1), |most| i64::try_from(most.clone()))?;
            let mut parts: Vec<&str> = match usize::try_from(most) {
                Ok(most) => text.rsplitn(most.saturating_add(1), separator).collect(),
                Err(_) => text.rsplit(separator).collect(),
            };
            parts.reverse();
            Ok(Value::from(parts.into_iter().map(str::to_owned).collect::<Vec<_>>()))
        }
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args),
    }
}

fn invalid(what: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, what)
}

/// jinja2's filter: `truncate(length=255, killwords=False, end='...', leeway=5)`, counted in characters.
#[allow(clippy::needless_pass_by_value)] // minijinja hands filters their arguments by value
fn truncate(text: &str, args: Rest<Value>) -> Result<String, Error> {
    let (positional, kwargs) = minijinja::value::from_args::<(Rest<Value>, minijinja::value::Kwargs)>(&args)?;
    let argument = |at: usize, name: &str| -> Result<Option<Value>, Error> {
        let named = kwargs.get::<Option<Value>>(name)?;
        Ok(positional.get(at).cloned().or(named).filter(|value| !value.is_none()))
    };
    let length = argument(0, "length")?.map_or(Ok(255), usize::try_from)?;
    let kill_words = argument(1, "killwords")?.is_some_and(|value| value.is_true());
    let end = argument(2, "end")?.map_or_else(|| "...".to_owned(), |end| end.to_string());
    let leeway = argument(3, "leeway")?.map_or(Ok(5), usize::try_from)?;
    kwargs.assert_all_used()?;
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text.to_owned());
    }
    let kept = length
        .checked_sub(end.chars().count())
        .ok_or_else(|| invalid("truncate: length is below that of end"))?;
    let cut: String = text.chars().take(kept).collect();
    let cut =
        if kill_words { cut.as_str() } else { cut.rsplit_once(' ').map_or(cut.as_str(), |(words, _)| words) };
    Ok(format!("{cut}{end}"))
}

fn strftime(now: Option<SystemTime>, format: &str) -> Result<String, Error> {
    let now = chrono::DateTime::<chrono::Local>::from(now.unwrap_or_else(SystemTime::now));
    let mut text = String::new();
    // chrono reports an unknown directive as a formatting error.
    write!(text, "{}", now.format(format)).map_err(|_| {
        Error::new(ErrorKind::InvalidOperation, format!("strftime_now cannot print {format:?}"))
    })?;
    Ok(text)
}

/// Turns the tags `{% generation %}` and `{% endgeneration %}` (transformers' marks for training, around what the
/// assistant says) into a scope, which is what they are when rendering. Whitespace control stays.
pub(super) fn replace_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + 2);
        out.push_str(before);
        rest = tag;
        let Some((inside, _)) = tag.split_once("%}") else { break };
        let name = inside.trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace());
        let scope = match name {
            "generation" => "with",
            "endgeneration" => "endwith",
            _ => continue,
        };
        out.push_str(&inside.replacen(name, scope, 1));
        rest = &tag[inside.len()..];
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_tags_become_scopes_and_keep_their_dashes() {
        assert_eq!(
            replace_generation_tags("a{%- generation -%}b{% endgeneration %}{% if generation %}{% endif %}"),
            "a{%- with -%}b{% endwith %}{% if generation %}{% endif %}"
        );
        assert_eq!(replace_generation_tags("{% generation"), "{% generation");
    }
}
