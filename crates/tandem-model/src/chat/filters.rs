//! jinja2's filters where minijinja's differ.

use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, Value};

use super::python::invalid;
use super::source::JOINED;

pub(super) fn install(environment: &mut Environment<'_>) {
    environment.add_filter("default", default);
    environment.add_filter("d", default);
    environment.add_filter("float", float);
    environment.add_filter("indent", indent);
    environment.add_filter("int", int);
    environment.add_filter("round", round);
    environment.add_filter("truncate", truncate);
    environment.add_filter(JOINED, |_: Value| -> Result<Value, Error> {
        Err(invalid(
            "what is added to a text from `safe` or `escape` is escaped in Python; Tandem cannot do that",
        ))
    });
    // Python looks for an attribute, which a dictionary's entries are not; minijinja for an entry.
    environment.remove_filter("attr");
}

/// Arguments by position or name, as Python takes them.
pub(super) struct Arguments {
    positional: Vec<Value>,
    named: Kwargs,
}

impl Arguments {
    pub(super) fn new(mut values: Vec<Value>) -> Result<Self, Error> {
        let named = values.pop_if(|last| last.is_kwargs());
        let named =
            named.map_or_else(|| Ok(Kwargs::from_iter::<[(String, Value); 0]>([])), Kwargs::try_from)?;
        Ok(Self { positional: values, named })
    }

    /// The argument, unless it is not there or none.
    pub(super) fn some(&self, at: usize, name: &str) -> Result<Option<Value>, Error> {
        Ok(self.get(at, name)?.filter(|value| !value.is_none()))
    }

    fn get(&self, at: usize, name: &str) -> Result<Option<Value>, Error> {
        let named = self.named.get::<Option<Value>>(name)?;
        Ok(self.positional.get(at).cloned().or(named))
    }

    pub(super) fn flag(&self, at: usize, name: &str) -> Result<bool, Error> {
        Ok(self.get(at, name)?.is_some_and(|value| value.is_true()))
    }

    fn text(&self, at: usize, name: &str, default: &str) -> Result<String, Error> {
        Ok(self.get(at, name)?.map_or_else(|| default.to_owned(), |value| value.to_string()))
    }

    /// The end of the list: what was not asked for is an error.
    pub(super) fn done(&self, most: usize) -> Result<(), Error> {
        if self.positional.len() > most {
            return Err(invalid(format!(
                "{} arguments are more than the {most} there are",
                self.positional.len()
            )));
        }
        self.named.assert_all_used()
    }
}

/// `default(value, default_value='', boolean=False)`.
fn default(value: Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = Arguments::new(args.into_values())?;
    let other = args.get(0, "default_value")?.unwrap_or_else(|| Value::from(""));
    let boolean = args.flag(1, "boolean")?;
    args.done(2)?;
    Ok(if value.is_undefined() || (boolean && !value.is_true()) { other } else { value })
}

/// `int(value, default=0, base=10)`.
fn int(value: Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = Arguments::new(args.into_values())?;
    let other = args.get(0, "default")?.unwrap_or_else(|| Value::from(0));
    let base = args.get(1, "base")?.map_or(Ok(10), u32::try_from)?;
    args.done(2)?;
    let Some(text) = value.as_str() else {
        return Ok(match f64::try_from(value.clone()) {
            Ok(_) if value.is_integer() => value,
            Ok(float) if float.abs() < 9e18 => Value::from(float as i64),
            _ if value.kind() == ValueKind::Bool => Value::from(i64::from(value.is_true())),
            _ => other,
        });
    };
    let text = text.trim();
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let prefix = match base {
        2 => Some("0b"),
        8 => Some("0o"),
        16 => Some("0x"),
        _ => None,
    };
    let lower = digits.to_lowercase();
    let bare = prefix.and_then(|prefix| lower.strip_prefix(prefix)).unwrap_or(&lower);
    if (2..=36).contains(&base)
        && bare.starts_with(|c: char| c.is_ascii_alphanumeric())
        && let Ok(number) = i64::from_str_radix(&bare.replace('_', ""), base)
    {
        return Ok(Value::from(if negative { -number } else { number }));
    }
    Ok(match text.parse::<f64>() {
        Ok(float) if float.abs() < 9e18 => Value::from(float as i64),
        _ => other,
    })
}

/// `float(value, default=0.0)`.
fn float(value: Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = Arguments::new(args.into_values())?;
    let other = args.get(0, "default")?.unwrap_or_else(|| Value::from(0.0));
    args.done(1)?;
    let float = match value.as_str() {
        Some(text) => text.trim().parse().ok(),
        None => f64::try_from(value).ok(),
    };
    Ok(float.map_or(other, Value::from))
}

/// `round(value, precision=0, method='common')`; halves go to the even neighbour, as Python's do.
fn round(value: Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = Arguments::new(args.into_values())?;
    let precision = args.get(0, "precision")?.map_or(Ok(0), i32::try_from)?;
    let method = args.text(1, "method", "common")?;
    args.done(2)?;
    if !(0..=300).contains(&precision) {
        return Err(invalid("round: the precision must be between 0 and 300"));
    }
    if value.is_integer() && method == "common" {
        return Ok(value);
    }
    let float = f64::try_from(value)?;
    let scale = 10f64.powi(precision);
    let rounded = match method.as_str() {
        // Formatting rounds the exact value, halves to even.
        "common" => format!("{float:.0$}", precision as usize).parse().unwrap_or(float),
        "ceil" => (float * scale).ceil() / scale,
        "floor" => (float * scale).floor() / scale,
        _ => return Err(invalid("round: the method must be common, ceil or floor")),
    };
    Ok(Value::from(rounded))
}

/// `indent(width=4, first=False, blank=False)`; `width` may be the text itself.
fn indent(text: &str, args: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let args = Arguments::new(args.into_values())?;
    let width = match args.get(0, "width")? {
        None => " ".repeat(4),
        Some(width) => match width.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(width)?.min(1024)),
        },
    };
    let (first, blank) = (args.flag(1, "first")?, args.flag(2, "blank")?);
    args.done(3)?;
    let mut out = String::with_capacity(text.len() + width.len());
    for (i, line) in text.split('\n').enumerate() {
        if i > 0 {
            out.push('\n');
        }
        if if i == 0 { first } else { blank || !line.is_empty() } {
            out.push_str(&width);
        }
        out.push_str(line);
    }
    Ok(out)
}

/// `truncate(length=255, killwords=False, end='...', leeway=5)`, counted in characters.
fn truncate(text: &str, args: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let args = Arguments::new(args.into_values())?;
    let length = args.get(0, "length")?.map_or(Ok(255), usize::try_from)?;
    let kill_words = args.flag(1, "killwords")?;
    let end = args.text(2, "end", "...")?;
    let leeway = args.some(3, "leeway")?.map_or(Ok(5), usize::try_from)?;
    args.done(4)?;
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
