//! A JSON object whose fields are taken out one by one; what is left in the end is refused by name.

use axum::http::StatusCode;
use serde_json::{Map, Value};

use crate::ApiError;

/// An object under inspection.
#[derive(Debug)]
pub(crate) struct Fields {
    map: Map<String, Value>,
    /// Where it stands in the body, for error messages; empty for the body itself.
    path: String,
}

impl Fields {
    /// The body of a request.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let value: Value = serde_json::from_slice(body).map_err(|error| {
            ApiError::new(
                StatusCode::BAD_REQUEST,
                "invalid_json",
                format!("the body is not valid JSON: {error}"),
            )
        })?;
        match value {
            Value::Object(map) => Ok(Self { map, path: String::new() }),
            other => {
                let message = format!("the body must be a JSON object, not {}", kind(&other));
                Err(ApiError::new(StatusCode::BAD_REQUEST, "invalid_json", message))
            }
        }
    }

    /// An object inside the body.
    pub fn of(value: Value, path: String) -> Result<Self, ApiError> {
        match value {
            Value::Object(map) => Ok(Self { map, path }),
            other => Err(wrong(path, "an object", &other)),
        }
    }

    /// Where the field `name` stands, cut short where a client made it very long.
    pub fn path(&self, name: &str) -> String {
        const LONGEST: usize = 100;
        let path = if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) };
        match path.char_indices().nth(LONGEST) {
            Some((end, _)) => format!("{}…", &path[..end]),
            None => path,
        }
    }

    /// Takes a field; null is the same as nothing.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        self.map.remove(name).filter(|value| !value.is_null())
    }

    /// Takes a string.
    pub fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        self.typed(name, "a string", |value| match value {
            Value::String(text) => Ok(text),
            other => Err(other),
        })
    }

    /// Takes a boolean.
    pub fn flag(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        self.typed(name, "true or false", |value| value.as_bool().ok_or(value))
    }

    /// Takes a number. Its range is the sampler's to check.
    pub fn number(&mut self, name: &str) -> Result<Option<f32>, ApiError> {
        self.typed(name, "a number", |value| value.as_f64().map(|v| v as f32).ok_or(value))
    }

    /// Takes a whole number within `least..=most`.
    pub fn integer(&mut self, name: &str, least: u64, most: u64) -> Result<Option<u64>, ApiError> {
        let expected = format!("a whole number from {least} to {most}");
        self.typed(name, &expected, |value| {
            value.as_u64().filter(|v| (least..=most).contains(v)).ok_or(value)
        })
    }

    /// Takes an array.
    pub fn array(&mut self, name: &str) -> Result<Option<Vec<Value>>, ApiError> {
        self.typed(name, "an array", |value| match value {
            Value::Array(items) => Ok(items),
            other => Err(other),
        })
    }

    /// Takes an object.
    pub fn object(&mut self, name: &str) -> Result<Option<Self>, ApiError> {
        let path = self.path(name);
        self.take(name).map(|value| Self::of(value, path)).transpose()
    }

    fn typed<T>(
        &mut self,
        name: &str,
        expected: &str,
        read: impl FnOnce(Value) -> Result<T, Value>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        read(value).map(Some).map_err(|found| wrong(self.path(name), expected, &found))
    }

    /// Takes all that is left, by name.
    pub fn rest(&mut self) -> Map<String, Value> {
        std::mem::take(&mut self.map)
    }

    /// Refuses what nobody took, unless it says nothing.
    pub fn finish(self) -> Result<(), ApiError> {
        let Some((name, _)) = self.map.iter().find(|(_, value)| !value.is_null()) else { return Ok(()) };
        let path = self.path(name);
        let message = format!("`{path}` is not supported. hint: leave it out");
        Err(ApiError { code: Some("unsupported_parameter"), ..ApiError::field(path, message) })
    }
}

/// A field that is not of its type or out of its range.
pub(crate) fn wrong(path: String, expected: &str, found: &Value) -> ApiError {
    let message = format!("`{path}` must be {expected}, not {}", kind(found));
    ApiError::field(path, message)
}

/// A value in words: its type, and what it is where that is short.
fn kind(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(flag) => flag.to_string(),
        Value::Number(number) => number.to_string(),
        Value::String(_) => "a string".to_owned(),
        Value::Array(_) => "an array".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    }
}
