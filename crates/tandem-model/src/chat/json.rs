//! JSON and numbers as Python prints them.

use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{Error, Value};

use super::filters::Arguments;
use super::python::invalid;

/// `json.dumps` with the arguments of transformers' filter: `tojson(ensure_ascii=False, indent=None, separators=None,
/// sort_keys=False)`. No HTML escapes, a space after `,` and `:`.
pub(super) fn tojson(value: &Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = Arguments::new(args.into_values())?;
    let ensure_ascii = args.flag(0, "ensure_ascii")?;
    let indent = args.some(1, "indent")?;
    let separators = args.some(2, "separators")?;
    let sort_keys = args.flag(3, "sort_keys")?;
    args.done(4)?;
    let separators = separators.map(|pair| pair.try_iter()).transpose()?;
    let separators: Option<Vec<String>> = separators.map(|pair| pair.map(|part| part.to_string()).collect());
    let indent = match indent {
        None => None,
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(indent)?.min(64)),
        }),
    };
    let (item, key) = match separators.as_deref() {
        None if indent.is_some() => (",", ": "),
        None => (", ", ": "),
        Some([item, key]) => (item.as_str(), key.as_str()),
        Some(_) => return Err(invalid("tojson: separators must be a pair")),
    };
    let mut dump = Dump { out: String::new(), indent: indent.as_deref(), item, key, ensure_ascii, sort_keys };
    dump.value(value, 0)?;
    Ok(Value::from_safe_string(dump.out))
}

/// Deepest nesting, as deep as Python's own recursion goes at most.
const MAX_DEPTH: usize = 200;

/// Python's JSON encoder.
struct Dump<'a> {
    out: String,
    indent: Option<&'a str>,
    item: &'a str,
    key: &'a str,
    ensure_ascii: bool,
    sort_keys: bool,
}

impl Dump<'_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(invalid("tojson: the value is nested too deeply"));
        }
        match value.kind() {
            ValueKind::None | ValueKind::Bool | ValueKind::Number => self.out.push_str(&plain(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq => {
                let mut count = 0;
                self.out.push('[');
                for item in value.try_iter()? {
                    self.separate(count, depth + 1);
                    self.value(&item, depth + 1)?;
                    count += 1;
                }
                self.close(count, depth, ']');
            }
            ValueKind::Map => {
                let mut entries = Vec::new();
                for key in value.try_iter()? {
                    let text = match key.kind() {
                        ValueKind::String => key.as_str().unwrap_or_default().to_owned(),
                        ValueKind::None | ValueKind::Bool | ValueKind::Number => plain(&key),
                        kind => return Err(invalid(format!("tojson: a key is of type {kind}"))),
                    };
                    entries.push((text, value.get_item(&key)?));
                }
                if self.sort_keys {
                    entries.sort_by(|(a, _), (b, _)| a.cmp(b));
                }
                self.out.push('{');
                for (i, (key, item)) in entries.iter().enumerate() {
                    self.separate(i, depth + 1);
                    self.string(key);
                    self.out.push_str(self.key);
                    self.value(item, depth + 1)?;
                }
                self.close(entries.len(), depth, '}');
            }
            kind => return Err(invalid(format!("tojson: a value of type {kind} is no JSON"))),
        }
        Ok(())
    }

    fn separate(&mut self, index: usize, depth: usize) {
        if index > 0 {
            self.out.push_str(self.item);
        }
        self.line(depth);
    }

    fn close(&mut self, items: usize, depth: usize, bracket: char) {
        if items > 0 {
            self.line(depth);
        }
        self.out.push(bracket);
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = self.indent {
            self.out.push('\n');
            for _ in 0..depth {
                self.out.push_str(indent);
            }
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if u32::from(c) < 0x20 || (self.ensure_ascii && !(' '..='~').contains(&c)) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        self.out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// `null`, a truth value or a number.
fn plain(value: &Value) -> String {
    match value.kind() {
        ValueKind::None => "null".to_owned(),
        ValueKind::Bool => if value.is_true() { "true" } else { "false" }.to_owned(),
        _ => match f64::try_from(value.clone()) {
            Ok(float) if !value.is_integer() => float_repr(float),
            _ => value.to_string(),
        },
    }
}

/// `repr` of a Python float: the shortest digits that read back, in scientific form below 1e-4 and from 1e16.
pub(super) fn float_repr(value: f64) -> String {
    let scientific = format!("{value:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        // Debug formatting keeps the `.0` of whole numbers and, in this range, never turns scientific.
        let plain = format!("{value}");
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_print_as_python_prints_them() {
        for (value, python) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (-2.5, "-2.5"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (0.0, "0.0"),
        ] {
            assert_eq!(float_repr(value), python);
        }
    }
}
