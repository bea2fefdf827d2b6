//! JSON and numbers as Python prints them.

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};

/// `json.dumps(value, ensure_ascii=False, ...)`: transformers' filter. No HTML escapes, a space after `,` and `:`.
#[allow(clippy::needless_pass_by_value)] // minijinja hands filters their keyword arguments by value
pub(super) fn tojson(value: &Value, indent: Option<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => kwargs.get::<Option<Value>>("indent")?,
    };
    let ensure_ascii = kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sort_keys = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let separators = kwargs.get::<Option<Vec<String>>>("separators")?;
    kwargs.assert_all_used()?;
    let indent = match indent.filter(|value| !value.is_none()) {
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
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "separators must be a pair")),
    };
    let json = serde_json::to_value(value).map_err(|error| {
        Error::new(ErrorKind::InvalidOperation, format!("tojson: the value is no JSON: {error}"))
    })?;
    let mut dump = Dump { out: String::new(), indent: indent.as_deref(), item, key, ensure_ascii, sort_keys };
    dump.value(&json, 0);
    Ok(Value::from_safe_string(dump.out))
}

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
    fn value(&mut self, value: &serde_json::Value, depth: usize) {
        use serde_json::Value as Json;
        match value {
            Json::Null => self.out.push_str("null"),
            Json::Bool(flag) => self.out.push_str(if *flag { "true" } else { "false" }),
            Json::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
                Some(float) => self.out.push_str(&float_repr(float)),
                None => self.out.push_str(&number.to_string()),
            },
            Json::String(text) => self.string(text),
            Json::Array(items) if items.is_empty() => self.out.push_str("[]"),
            Json::Array(items) => {
                self.out.push('[');
                for (i, item) in items.iter().enumerate() {
                    self.separate(i, depth + 1);
                    self.value(item, depth + 1);
                }
                self.line(depth);
                self.out.push(']');
            }
            Json::Object(map) if map.is_empty() => self.out.push_str("{}"),
            Json::Object(map) => {
                let mut entries: Vec<_> = map.iter().collect();
                if self.sort_keys {
                    entries.sort_by_key(|(key, _)| *key);
                }
                self.out.push('{');
                for (i, (key, item)) in entries.into_iter().enumerate() {
                    self.separate(i, depth + 1);
                    self.string(key);
                    self.out.push_str(self.key);
                    self.value(item, depth + 1);
                }
                self.line(depth);
                self.out.push('}');
            }
        }
    }

    fn separate(&mut self, index: usize, depth: usize) {
        if index > 0 {
            self.out.push_str(self.item);
        }
        self.line(depth);
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
