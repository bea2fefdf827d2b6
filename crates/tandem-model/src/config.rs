//! A typed reader over a checkpoint's settings that remembers which keys were read.
//!
//! A key that changes the mathematics and is silently ignored gives wrong text without a word, the worst fault a runner
//! can have. So an architecture reads each key it computes, lists those that do not matter, and [`Config::finish`]
//! refuses whatever is left, by name.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::error::ModelError;

/// Largest value accepted for a size: products of a few stay far below `usize::MAX`, and a lying file cannot make the
/// reader loop for hours.
const MAX_SIZE: usize = 1 << 30;

/// Settings as a JSON object, and which of its keys were read.
#[derive(Debug)]
pub struct Config {
    path: PathBuf,
    /// Where in the file this object lies (`rope_scaling.`), for messages.
    prefix: String,
    map: Map<String, Value>,
    read: RefCell<BTreeSet<String>>,
}

impl Config {
    /// Reads a JSON object; `path` is for messages.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] if `bytes` is not a JSON object.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self, ModelError> {
        let hint = "download the file again; it should be one JSON object";
        match serde_json::from_slice(bytes) {
            Ok(Value::Object(map)) => Ok(Self::new(path, "", map)),
            Ok(_) => Err(ModelError::malformed(path, "not a JSON object", hint)),
            Err(_) if bytes.is_empty() => Err(ModelError::malformed(path, "the file is empty", hint)),
            Err(error) => Err(ModelError::malformed(path, format!("not valid JSON: {error}"), hint)),
        }
    }

    /// Wraps an object that lies at `prefix` of the file.
    pub(crate) fn new(path: &Path, prefix: impl Into<String>, map: Map<String, Value>) -> Self {
        Self { path: path.to_owned(), prefix: prefix.into(), map, read: RefCell::default() }
    }

    /// The value at `key`, where `null` counts as absent.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.read.borrow_mut().insert(key.to_owned());
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// A whole number from 1 to 2^30.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] if it is absent or something else.
    pub fn size(&self, key: &str) -> Result<usize, ModelError> {
        self.size_up_to(key, MAX_SIZE)
    }

    /// A whole number from 1 to `max`.
    ///
    /// # Errors
    /// As [`Config::size`].
    pub fn size_up_to(&self, key: &str, max: usize) -> Result<usize, ModelError> {
        let value = self.get(key).ok_or_else(|| self.absent(key))?;
        match value.as_u64().map(usize::try_from) {
            Some(Ok(n)) if (1..=max).contains(&n) => Ok(n),
            _ => Err(self.wrong(key, value, &format!("a whole number from 1 to {max}"))),
        }
    }

    /// A size that may be absent.
    ///
    /// # Errors
    /// As [`Config::size`].
    pub fn size_or(&self, key: &str, default: usize) -> Result<usize, ModelError> {
        self.get(key).map_or(Ok(default), |_| self.size(key))
    }

    /// A size that may be `null` for none; `default` where the key is absent.
    ///
    /// # Errors
    /// As [`Config::size`].
    pub fn optional_size(&self, key: &str, default: Option<usize>) -> Result<Option<usize>, ModelError> {
        match self.get(key) {
            Some(_) => self.size(key).map(Some),
            None if self.map.contains_key(key) => Ok(None),
            None => Ok(default),
        }
    }

    /// A finite number above 0.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] if it is absent or something else.
    pub fn positive(&self, key: &str) -> Result<f32, ModelError> {
        let value = self.get(key).ok_or_else(|| self.absent(key))?;
        match value.as_f64().map(|v| v as f32) {
            Some(v) if v.is_finite() && v > 0.0 => Ok(v),
            _ => Err(self.wrong(key, value, "a positive number")),
        }
    }

    /// A positive number that may be absent.
    ///
    /// # Errors
    /// As [`Config::positive`].
    pub fn positive_or(&self, key: &str, default: f32) -> Result<f32, ModelError> {
        self.get(key).map_or(Ok(default), |_| self.positive(key))
    }

    /// A positive number that may be absent.
    ///
    /// # Errors
    /// As [`Config::positive`].
    pub fn optional_positive(&self, key: &str) -> Result<Option<f32>, ModelError> {
        self.get(key).map(|_| self.positive(key)).transpose()
    }

    /// A list that may be absent, of elements that `read` accepts; `what` says which those are.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] if it is something else.
    pub fn list<'a, T>(
        &'a self,
        key: &str,
        what: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<Vec<T>>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let list = value.as_array().and_then(|list| list.iter().map(read).collect());
        list.map(Some).ok_or_else(|| self.wrong(key, value, &format!("a list of {what}")))
    }

    /// A boolean that may be absent.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] if it is something else.
    pub fn flag_or(&self, key: &str, default: bool) -> Result<bool, ModelError> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(value) => Err(self.wrong(key, value, "true or false")),
        }
    }

    /// A string that may be absent.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] if it is something else.
    pub fn text(&self, key: &str) -> Result<Option<&str>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(value) => Err(self.wrong(key, value, "a string")),
        }
    }

    /// A nested object that may be absent.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] if it is something else.
    pub fn object(&self, key: &str) -> Result<Option<Config>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => {
                Ok(Some(Self::new(&self.path, format!("{}{key}.", self.prefix), map.clone())))
            }
            Some(value) => Err(self.wrong(key, value, "an object")),
        }
    }

    /// Takes over values of an outer object for keys that are absent here.
    pub(crate) fn inherit(&mut self, outer: &Config, keys: &[&str]) {
        for &key in keys {
            if let (Some(value), true) = (outer.get(key), self.get(key).is_none()) {
                self.map.insert(key.to_owned(), value.clone());
            }
        }
    }

    /// Whether every value is an object or null.
    pub(crate) fn is_nested(&self) -> bool {
        !self.map.is_empty() && self.map.values().all(|value| value.is_object() || value.is_null())
    }

    /// Demands that `key`, if present, has the one value that is computed.
    ///
    /// # Errors
    /// [`ModelError::Unsupported`] for any other value.
    pub fn expect(&self, key: &str, only: impl Into<Value>) -> Result<(), ModelError> {
        let only = only.into();
        match self.get(key) {
            // 1 and 1.0 are the same number.
            Some(value)
                if *value != only && (value.as_f64().is_none() || value.as_f64() != only.as_f64()) =>
            {
                Err(self.unsupported(key, &format!("Tandem computes only {key} = {only} here")))
            }
            _ => Ok(()),
        }
    }

    /// Marks keys as known and without influence on inference.
    pub fn ignore(&self, keys: &[&str]) {
        self.read.borrow_mut().extend(keys.iter().map(|&key| key.to_owned()));
    }

    /// Keys that nobody read.
    pub(crate) fn unread(&self) -> Vec<String> {
        let read = self.read.borrow();
        let unread = self.map.iter().filter(|(key, value)| !read.contains(*key) && !value.is_null());
        unread.map(|(key, _)| key.clone()).collect()
    }

    /// Refuses the first key that nobody read.
    ///
    /// # Errors
    /// [`ModelError::Unsupported`] naming it and its value.
    pub fn finish(&self) -> Result<(), ModelError> {
        match self.unread().first() {
            None => Ok(()),
            Some(key) => Err(self.unsupported(
                key,
                "Tandem does not know this key and refuses rather than compute something else; if it does not change \
                 inference, remove it from the file",
            )),
        }
    }

    /// An [`ModelError::Unsupported`] about `key` with its present value.
    pub fn unsupported(&self, key: &str, hint: &str) -> ModelError {
        let value = self.map.get(key).map_or_else(|| "(absent)".to_owned(), short);
        ModelError::unsupported(&self.path, format!("{}{key}", self.prefix), value, hint)
    }

    /// A [`ModelError::Malformed`] about `key`.
    pub fn malformed(&self, key: &str, what: &str) -> ModelError {
        ModelError::malformed(
            &self.path,
            format!("{}{key} {what}", self.prefix),
            "correct the file, or download the checkpoint again",
        )
    }

    fn absent(&self, key: &str) -> ModelError {
        self.malformed(key, "is not there, and has no default")
    }

    fn wrong(&self, key: &str, value: &Value, wanted: &str) -> ModelError {
        self.malformed(key, &format!("is {}, expected {wanted}", short(value)))
    }
}

/// A value as JSON, cut to a length that fits a message.
fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        None => text,
        Some((at, _)) => format!("{}...", &text[..at]),
    }
}
