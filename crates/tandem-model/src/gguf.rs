//! The GGUF container, versions 2 and 3: metadata, a table of tensors, then their bytes.
//!
//! The reader trusts nothing: every count is held against the bytes that are left before anything is allocated for it.
//! Arrays stay where they are in the file (a vocabulary holds up to 262 thousand strings) and are walked when asked for.
//! Layout: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use crate::error::ModelError;
use crate::format::Format;

const HINT: &str = "download the file again";

/// A parsed file. Strings and arrays borrow from its bytes.
#[derive(Debug)]
pub struct Gguf<'a> {
    /// Metadata by key.
    pub metadata: BTreeMap<&'a str, Value<'a>>,
    /// Tensors by name.
    pub tensors: BTreeMap<&'a str, TensorInfo>,
}

/// A tensor of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Stored format.
    pub format: Format,
    /// Slowest dimension first (the file counts from the fastest).
    pub shape: Vec<usize>,
    /// Its bytes, counted from the start of the file.
    pub range: Range<usize>,
}

/// A metadata value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value<'a> {
    /// Any unsigned integer.
    Unsigned(u64),
    /// Any signed integer.
    Signed(i64),
    /// f32 or f64.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// A string.
    Text(&'a str),
    /// An array.
    Array(Array<'a>),
}

/// An array, left in the file.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Array<'a> {
    kind: Kind,
    /// Elements.
    pub len: usize,
    bytes: &'a [u8],
}

/// Type of a metadata value, numbered as in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    Array,
    U64,
    I64,
    F64,
}

impl Kind {
    const ALL: [Kind; 13] = [
        Kind::U8,
        Kind::I8,
        Kind::U16,
        Kind::I16,
        Kind::U32,
        Kind::I32,
        Kind::F32,
        Kind::Bool,
        Kind::Text,
        Kind::Array,
        Kind::U64,
        Kind::I64,
        Kind::F64,
    ];

    /// Least bytes that one value takes.
    fn min_bytes(self) -> usize {
        match self {
            Kind::U8 | Kind::I8 | Kind::Bool => 1,
            Kind::U16 | Kind::I16 => 2,
            Kind::U32 | Kind::I32 | Kind::F32 => 4,
            Kind::Text | Kind::U64 | Kind::I64 | Kind::F64 => 8,
            Kind::Array => 12,
        }
    }
}

impl<'a> Array<'a> {
    /// The elements as strings; `None` if they are of another type. The reader has checked that they are UTF-8.
    pub fn texts(self) -> Option<impl Iterator<Item = &'a str>> {
        let mut reader = Reader { bytes: self.bytes, at: 0, path: Path::new("") };
        (self.kind == Kind::Text).then(|| (0..self.len).map_while(move |_| reader.text("").ok()))
    }

    /// The elements as whole numbers; `None` if they are of another type.
    pub fn integers(self) -> Option<impl Iterator<Item = i64>> {
        let mut reader = Reader { bytes: self.bytes, at: 0, path: Path::new("") };
        let whole = !matches!(self.kind, Kind::F32 | Kind::F64 | Kind::Bool | Kind::Text | Kind::Array);
        whole.then(|| {
            (0..self.len).map_while(move |_| match reader.value(self.kind, "") {
                Ok(Value::Signed(n)) => Some(n),
                Ok(Value::Unsigned(n)) => i64::try_from(n).ok(),
                _ => None,
            })
        })
    }
}

impl Array<'_> {
    /// The elements as booleans; `None` if they are of another type.
    pub fn flags(self) -> Option<impl Iterator<Item = bool>> {
        (self.kind == Kind::Bool).then(|| self.bytes.iter().take(self.len).map(|byte| *byte != 0))
    }

    /// The elements as floating-point numbers; `None` if they are of another type.
    pub fn floats(self) -> Option<impl Iterator<Item = f64>> {
        let mut reader = Reader { bytes: self.bytes, at: 0, path: Path::new("") };
        matches!(self.kind, Kind::F32 | Kind::F64).then(|| {
            (0..self.len).map_while(move |_| match reader.value(self.kind, "") {
                Ok(Value::Float(x)) => Some(x),
                _ => None,
            })
        })
    }
}

impl<'a> Gguf<'a> {
    /// The string at `key`.
    pub fn text(&self, key: &str) -> Option<&'a str> {
        match self.metadata.get(key) {
            Some(Value::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// The array at `key`.
    pub fn array(&self, key: &str) -> Option<Array<'a>> {
        match self.metadata.get(key) {
            Some(Value::Array(array)) => Some(*array),
            _ => None,
        }
    }

    /// The token id at `tokenizer.ggml.{which}_token_id`.
    pub fn token_id(&self, which: &str) -> Option<u32> {
        match self.metadata.get(format!("tokenizer.ggml.{which}_token_id").as_str()) {
            Some(Value::Unsigned(id)) => u32::try_from(*id).ok(),
            _ => None,
        }
    }
}

/// Reads a whole file. `path` is for messages.
///
/// # Errors
/// [`ModelError::Malformed`] or [`ModelError::Unsupported`], naming the key or tensor.
pub fn parse<'a>(path: &'a Path, bytes: &'a [u8]) -> Result<Gguf<'a>, ModelError> {
    let mut reader = Reader { bytes, at: 0, path };
    let (tensor_count, metadata_count) = reader.header()?;
    let mut metadata = BTreeMap::new();
    for _ in 0..metadata_count {
        let key = reader.text("a metadata key")?;
        let kind = reader.kind(key)?;
        let value = reader.value(kind, key)?;
        if metadata.insert(key, value).is_some() {
            return Err(reader.malformed(format!("the metadata key {key} is there twice")));
        }
    }
    if let Some(Value::Unsigned(parts @ 2..)) = metadata.get("split.count") {
        return Err(ModelError::unsupported(
            path,
            "split.count",
            parts.to_string(),
            "join the parts into one file with llama.cpp's `llama-gguf-split --merge`",
        ));
    }
    let mut raw = Vec::new();
    for _ in 0..tensor_count {
        raw.push(reader.tensor()?);
    }
    let alignment = match metadata.get("general.alignment") {
        None => 32,
        Some(Value::Unsigned(n)) if n.is_power_of_two() && *n <= 1 << 20 => *n as usize,
        Some(other) => {
            return Err(
                reader.malformed(format!("general.alignment is {other:?}, not a power of two up to 2^20"))
            );
        }
    };
    let tensors = place(&reader, raw, alignment)?;
    Ok(Gguf { metadata, tensors })
}

/// A tensor before its offset was checked.
struct RawTensor<'a> {
    name: &'a str,
    format: Format,
    shape: Vec<usize>,
    bytes: usize,
    offset: u64,
}

/// Turns offsets into ranges of the file; they must be aligned, inside and apart from each other.
fn place<'a>(
    reader: &Reader<'a>,
    mut raw: Vec<RawTensor<'a>>,
    alignment: usize,
) -> Result<BTreeMap<&'a str, TensorInfo>, ModelError> {
    let base = reader.at.next_multiple_of(alignment);
    raw.sort_by_key(|tensor| tensor.offset);
    let mut tensors = BTreeMap::new();
    let mut free = base;
    for RawTensor { name, format, shape, bytes, offset } in raw {
        let start = usize::try_from(offset).ok().and_then(|offset| base.checked_add(offset));
        let end = start.and_then(|start| start.checked_add(bytes));
        let (Some(start), Some(end)) = (start, end) else {
            return Err(reader.malformed(format!("tensor {name} has the absurd offset {offset}")));
        };
        if !(start - base).is_multiple_of(alignment) {
            return Err(
                reader.malformed(format!("tensor {name} lies at {offset}, not a multiple of {alignment}"))
            );
        }
        if end > reader.bytes.len() {
            return Err(reader.malformed(format!(
                "tensor {name} ends at byte {end}, but the file has {}: it was cut short",
                reader.bytes.len()
            )));
        }
        if start < free {
            return Err(reader.malformed(format!("tensor {name} overlaps the one before it")));
        }
        free = end;
        if tensors.insert(name, TensorInfo { format, shape, range: start..end }).is_some() {
            return Err(reader.malformed(format!("tensor {name} is there twice")));
        }
    }
    Ok(tensors)
}

/// A cursor that never leaves the file.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    path: &'a Path,
}

impl<'a> Reader<'a> {
    fn malformed(&self, what: impl Into<String>) -> ModelError {
        ModelError::malformed(self.path, what, HINT)
    }

    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn take(&mut self, len: usize, what: &str) -> Result<&'a [u8], ModelError> {
        let Some(taken) = self.bytes[self.at..].get(..len) else {
            return Err(self.malformed(format!(
                "{what} at byte {} needs {len} bytes, but only {} are left: the file was cut short or lies",
                self.at,
                self.left()
            )));
        };
        self.at += len;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], ModelError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N, what)?);
        Ok(out)
    }

    fn u32(&mut self, what: &str) -> Result<u32, ModelError> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64, ModelError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A count of things that take at least `min_bytes` each.
    fn count(&mut self, what: &str, min_bytes: usize) -> Result<usize, ModelError> {
        let count = self.u64(what)?;
        match usize::try_from(count) {
            Ok(n) if n <= self.left() / min_bytes => Ok(n),
            _ => Err(self.malformed(format!("{what} is {count}, more than the file can hold"))),
        }
    }

    fn text(&mut self, what: &str) -> Result<&'a str, ModelError> {
        let len = self.u64(what)?;
        let at = self.at;
        let bytes = self.take(usize::try_from(len).unwrap_or(usize::MAX), what)?;
        std::str::from_utf8(bytes).map_err(|_| self.malformed(format!("{what} at byte {at} is not UTF-8")))
    }

    /// Magic and version; returns the counts of tensors and of metadata entries.
    fn header(&mut self) -> Result<(usize, usize), ModelError> {
        if self.bytes.is_empty() {
            return Err(self.malformed("the file is empty"));
        }
        let magic = self.take(4.min(self.bytes.len()), "the magic number")?;
        if magic != b"GGUF" {
            return Err(ModelError::malformed(
                self.path,
                format!("it starts with {:?}, not with GGUF", magic.escape_ascii().to_string()),
                "this is not a GGUF file; a Hugging Face checkpoint is given as its folder",
            ));
        }
        let version = self.u32("the version")?;
        if !(2..=3).contains(&version) {
            let hint = if (2..=3).contains(&version.swap_bytes()) {
                "the file is big endian; convert it with llama.cpp's gguf_convert_endian.py"
            } else {
                "Tandem reads versions 2 and 3; convert the model again with a present llama.cpp"
            };
            return Err(ModelError::unsupported(self.path, "GGUF version", version.to_string(), hint));
        }
        // A tensor takes at least: name length, count of dimensions, type, offset. An entry: key length, type, a byte.
        let tensors = self.count("the count of tensors", 8 + 4 + 4 + 8)?;
        let entries = self.count("the count of metadata entries", 8 + 4 + 1)?;
        Ok((tensors, entries))
    }

    fn kind(&mut self, key: &str) -> Result<Kind, ModelError> {
        let kind = self.u32(key)?;
        Kind::ALL
            .get(kind as usize)
            .copied()
            .ok_or_else(|| self.malformed(format!("{key} has the unknown value type {kind}")))
    }

    fn value(&mut self, kind: Kind, key: &str) -> Result<Value<'a>, ModelError> {
        Ok(match kind {
            Kind::U8 => Value::Unsigned(u8::from_le_bytes(self.array(key)?).into()),
            Kind::I8 => Value::Signed(i8::from_le_bytes(self.array(key)?).into()),
            Kind::U16 => Value::Unsigned(u16::from_le_bytes(self.array(key)?).into()),
            Kind::I16 => Value::Signed(i16::from_le_bytes(self.array(key)?).into()),
            Kind::U32 => Value::Unsigned(self.u32(key)?.into()),
            Kind::I32 => Value::Signed(i32::from_le_bytes(self.array(key)?).into()),
            Kind::F32 => Value::Float(f32::from_le_bytes(self.array(key)?).into()),
            Kind::U64 => Value::Unsigned(self.u64(key)?),
            Kind::I64 => Value::Signed(i64::from_le_bytes(self.array(key)?)),
            Kind::F64 => Value::Float(f64::from_le_bytes(self.array(key)?)),
            Kind::Bool => match self.array::<1>(key)? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [other] => return Err(self.malformed(format!("{key} is the boolean {other}"))),
            },
            Kind::Text => Value::Text(self.text(key)?),
            Kind::Array => Value::Array(self.elements(key)?),
        })
    }

    /// Walks an array once, so that later walks cannot fail.
    fn elements(&mut self, key: &str) -> Result<Array<'a>, ModelError> {
        let kind = self.kind(key)?;
        if kind == Kind::Array {
            return Err(ModelError::unsupported(
                self.path,
                key,
                "an array of arrays",
                "no known model has one",
            ));
        }
        let len = self.count(&format!("the length of {key}"), kind.min_bytes())?;
        let start = self.at;
        if kind == Kind::Text {
            for _ in 0..len {
                self.text(key)?;
            }
        } else {
            self.take(len * kind.min_bytes(), key)?;
        }
        Ok(Array { kind, len, bytes: &self.bytes[start..self.at] })
    }

    fn tensor(&mut self) -> Result<RawTensor<'a>, ModelError> {
        let name = self.text("a tensor's name")?;
        let dims = self.u32(name)?;
        if dims > 4 {
            return Err(self.malformed(format!("tensor {name} has {dims} dimensions, the format allows 4")));
        }
        let mut shape = Vec::with_capacity(4);
        for _ in 0..dims {
            let n = self.u64(name)?;
            shape.push(usize::try_from(n).unwrap_or(usize::MAX));
        }
        shape.reverse();
        let kind = self.u32(name)?;
        let Some(format) = format_of(kind) else {
            return Err(ModelError::unsupported(
                self.path,
                format!("type of tensor {name}"),
                type_name(kind).map_or_else(|| format!("ggml type {kind}"), str::to_owned),
                "Tandem reads F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K; quantize the model to \
                 one of these",
            ));
        };
        let offset = self.u64(name)?;
        let cols = shape.last().copied().unwrap_or(1);
        let rows = shape.iter().rev().skip(1).try_fold(1usize, |product, &n| product.checked_mul(n));
        let bytes = rows.and_then(|rows| format.row_bytes(cols)?.checked_mul(rows));
        let Some(bytes) = bytes else {
            return Err(self.malformed(format!(
                "tensor {name} has shape {shape:?}, which {} cannot store",
                format.name()
            )));
        };
        Ok(RawTensor { name, format, shape, bytes, offset })
    }
}

fn format_of(ggml_type: u32) -> Option<Format> {
    Some(match ggml_type {
        0 => Format::F32,
        1 => Format::F16,
        2 => Format::Q4_0,
        3 => Format::Q4_1,
        6 => Format::Q5_0,
        7 => Format::Q5_1,
        8 => Format::Q8_0,
        12 => Format::Q4K,
        13 => Format::Q5K,
        14 => Format::Q6K,
        30 => Format::Bf16,
        _ => return None,
    })
}

/// Names of the ggml types that are refused, for the message.
fn type_name(ggml_type: u32) -> Option<&'static str> {
    Some(match ggml_type {
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        _ => return None,
    })
}
