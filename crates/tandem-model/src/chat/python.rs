//! What Python's jinja2 under transformers does and `minijinja` does not.

use std::fmt::Write as _;
use std::time::SystemTime;

use minijinja::value::ValueKind;
use minijinja::{Environment, Error, ErrorKind, State, Value, escape_formatter};

use super::filters::Arguments;
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
    // In Python strings and dicts have a length and can be indexed, so jinja2 counts them as sequences.
    let is_sequence =
        |value: &Value| matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String);
    environment.add_test("sequence", is_sequence);
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
}

/// Methods of Python's strings and lists that `minijinja_contrib` lacks or has otherwise, then those it has.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let own = match (value.as_str(), value.kind()) {
        (Some(text), _) => of_string(text, name, args)?,
        (None, ValueKind::Seq) => of_list(value, name, args)?,
        _ => None,
    };
    match own {
        Some(value) => Ok(value),
        None => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args),
    }
}

fn of_list(list: &Value, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let [wanted] = args else { return Ok(None) };
    let mut items = list.try_iter()?;
    Ok(match name {
        "count" => Some(Value::from(items.filter(|item| item == wanted).count())),
        "index" => match items.position(|item| item == *wanted) {
            None => return Err(invalid("index: the list has no such element")),
            Some(at) => Some(Value::from(at)),
        },
        _ => None,
    })
}

fn of_string(text: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let texts: Option<Vec<&str>> = args.iter().map(Value::as_str).collect();
    let pieces = |parts: [&str; 3]| Value::from(parts.map(str::to_owned).to_vec());
    Ok(Some(match (name, texts.as_deref()) {
        ("removeprefix", Some([affix])) => text.strip_prefix(affix).unwrap_or(text).into(),
        ("removesuffix", Some([affix])) => text.strip_suffix(affix).unwrap_or(text).into(),
        ("partition", Some([separator])) => match text.split_once(separator) {
            Some((before, after)) => pieces([before, separator, after]),
            None => pieces([text, "", ""]),
        },
        ("rpartition", Some([separator])) => match text.rsplit_once(separator) {
            Some((before, after)) => pieces([before, separator, after]),
            None => pieces(["", "", text]),
        },
        ("index" | "rindex", Some([part])) => {
            let at = if name == "index" { text.find(part) } else { text.rfind(part) };
            let at = at.ok_or_else(|| invalid("index: the string has no such part"))?;
            Value::from(text[..at].chars().count())
        }
        ("title", Some([])) => title(text).into(),
        ("ljust" | "rjust" | "center" | "zfill", _) => pad(text, name, args)?.into(),
        ("format", _) if has_absurd_width(text) => {
            return Err(invalid("format: a width must be given as a number below 10000"));
        }
        ("split" | "rsplit", _) => Value::from(split(text, name == "rsplit", args)?),
        _ => return Ok(None),
    }))
}

/// Whether a field of a format (`{:>8}`) has a width or precision of more than four digits, or one from another field.
fn has_absurd_width(format: &str) -> bool {
    format.split('{').skip(1).any(|part| {
        let (field, whole) = part.split_once('}').map_or((part, false), |(field, _)| (field, true));
        let Some((_, spec)) = field.split_once(':') else { return false };
        !whole || spec.split(|c: char| !c.is_ascii_digit()).any(|digits| digits.len() > 4)
    })
}

/// A letter is upper case after what is none, and lower case after another letter.
fn title(text: &str) -> String {
    let (mut out, mut inside) = (String::with_capacity(text.len()), false);
    for c in text.chars() {
        if inside {
            out.extend(c.to_lowercase());
        } else {
            out.extend(c.to_uppercase());
        }
        inside = c.is_alphabetic();
    }
    out
}

fn pad(text: &str, name: &str, args: &[Value]) -> Result<String, Error> {
    let (width, fill) = minijinja::value::from_args::<(usize, Option<&str>)>(args)?;
    let fill = fill.unwrap_or(if name == "zfill" { "0" } else { " " });
    let missing = width.saturating_sub(text.chars().count());
    if missing > 1 << 16 || fill.chars().count() != 1 {
        return Err(invalid(format!("{name}: wants a width and one character to fill it with")));
    }
    let (left, right) = match name {
        "ljust" => (0, missing),
        // An odd number leaves the longer half on the left where the width is odd too.
        "center" => {
            let left = missing / 2 + (missing & width & 1);
            (left, missing - left)
        }
        _ => (missing, 0),
    };
    let (sign, digits) = match text.strip_prefix(['-', '+']) {
        Some(digits) if name == "zfill" => text.split_at(text.len() - digits.len()),
        _ => ("", text),
    };
    Ok(format!("{sign}{}{digits}{}", fill.repeat(left), fill.repeat(right)))
}

/// `split(sep=None, maxsplit=-1)`, and the same from the right. Without a separator, at runs of white space.
fn split(text: &str, from_right: bool, args: &[Value]) -> Result<Vec<String>, Error> {
    let args = Arguments::new(args.to_vec())?;
    let (separator, most) = (args.some(0, "sep")?, args.some(1, "maxsplit")?);
    args.done(2)?;
    let most = most.map_or(Ok(-1), i64::try_from)?;
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    let mut parts: Vec<&str> = match &separator {
        Some(separator) => {
            let separator = separator.as_str().filter(|separator| !separator.is_empty());
            let separator = separator.ok_or_else(|| invalid("split wants a separator that is a text"))?;
            let pieces = most.saturating_add(1);
            if from_right {
                text.rsplitn(pieces, separator).collect()
            } else {
                text.splitn(pieces, separator).collect()
            }
        }
        None => {
            let keep = if from_right { str::trim_end } else { str::trim_start };
            let (mut rest, mut parts) = (keep(text), Vec::new());
            while !rest.is_empty() {
                let cut =
                    if from_right { rest.rfind(char::is_whitespace) } else { rest.find(char::is_whitespace) };
                let Some(cut) = cut.filter(|_| parts.len() < most) else {
                    parts.push(rest);
                    break;
                };
                let (left, right) = rest.split_at(cut);
                let (part, others) = if from_right { (right.trim_start(), left) } else { (left, right) };
                parts.push(part);
                rest = keep(others);
            }
            parts
        }
    };
    if from_right {
        parts.reverse();
    }
    Ok(parts.into_iter().map(str::to_owned).collect())
}

pub(super) fn invalid(what: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, what)
}

/// `datetime.now().strftime(format)`: a local time that does not know its zone, microseconds with six digits.
fn strftime(now: Option<SystemTime>, format: &str) -> Result<String, Error> {
    let now = chrono::DateTime::<chrono::Local>::from(now.unwrap_or_else(SystemTime::now)).naive_local();
    let mut items = String::with_capacity(format.len());
    let mut rest = format.chars();
    while let Some(c) = rest.next() {
        match (c, rest.clone().next()) {
            ('%', Some('z' | 'Z')) => _ = rest.next(),
            ('%', Some('f')) => {
                rest.next();
                items.push_str("%6f");
            }
            ('%', Some('%')) => {
                rest.next();
                items.push_str("%%");
            }
            _ => items.push(c),
        }
    }
    let mut text = String::new();
    // chrono reports an unknown directive as a formatting error.
    write!(text, "{}", now.format(&items))
        .map_err(|_| invalid(format!("strftime_now cannot print {format:?}")))?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widths_are_numbers_below_ten_thousand() {
        for format in ["{}: {}", "{:>8}", "{a:9999.3f}: 123456", "{{:", "x", "{0:}"] {
            assert_eq!(has_absurd_width(format), format == "{{:", "{format}");
        }
        assert!(has_absurd_width("{:10000}") && has_absurd_width("a{:{}}"));
    }
}
