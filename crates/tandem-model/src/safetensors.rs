//! The safetensors header: `u64` length, that many bytes of JSON, then the tensors back to back.
//!
//! Own reader rather than the `safetensors` crate, because a checkpoint's faults must name file and tensor, duplicate
//! names must be seen (a JSON map drops them), and tensors of other types may be present as long as nothing reads them.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::Path;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};

use crate::error::ModelError;
use crate::format::Format;

/// Longest accepted header in bytes, the limit of the reference implementation.
const MAX_HEADER: u64 = 100_000_000;

const HINT: &str = "download the file again, or write it anew with safetensors' save_file";

/// One tensor as the header describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Name.
    pub name: String,
    /// Type as spelled in the file (`BF16`, `I64`).
    pub dtype: String,
    /// Slowest dimension first.
    pub shape: Vec<usize>,
    /// Its bytes, counted from the start of the file.
    pub range: Range<usize>,
}

impl Entry {
    /// The format, where it is one that weights may have.
    pub fn format(&self) -> Option<Format> {
        match self.dtype.as_str() {
            "F32" => Some(Format::F32),
            "F16" => Some(Format::F16),
            "BF16" => Some(Format::Bf16),
            _ => None,
        }
    }
}

/// Reads the header of a whole file and checks every claim in it against the file's length. `path` is for messages.
///
/// # Errors
/// [`ModelError::Malformed`] saying which tensor is wrong and how.
pub fn parse(path: &Path, file: &[u8]) -> Result<Vec<Entry>, ModelError> {
    let malformed = |what: String| ModelError::malformed(path, what, HINT);
    if file.is_empty() {
        return Err(malformed("the file is empty".into()));
    }
    if file.starts_with(b"version https://git-lfs") {
        return Err(ModelError::malformed(
            path,
            "a Git LFS pointer, not the weights",
            "run `git lfs pull` in the folder",
        ));
    }
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return Err(malformed(format!("{} bytes are too short for a header", file.len())));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER {
        return Err(malformed(format!(
            "the header claims {length} bytes, more than the {MAX_HEADER} allowed"
        )));
    }
    let Some((json, data)) = rest.split_at_checked(length as usize) else {
        return Err(malformed(format!(
            "the header claims {length} bytes, but only {} follow: the file was cut short",
            rest.len()
        )));
    };
    let Header(raw) = serde_json::from_slice(json).map_err(|e| malformed(format!("bad header: {e}")))?;

    let base = 8 + json.len();
    let mut entries = Vec::with_capacity(raw.len());
    for (name, Raw { dtype, shape, data_offsets: (start, end) }) in raw {
        let Some(bits) = bits_of(&dtype) else {
            return Err(malformed(format!("tensor {name} has the unknown type {dtype}")));
        };
        if start > end || end > data.len() {
            return Err(malformed(format!(
                "tensor {name} claims bytes {start} to {end}, but the file holds {}: it was cut short or its header lies",
                data.len()
            )));
        }
        let wanted = shape
            .iter()
            .try_fold(bits, |product, &n| product.checked_mul(n))
            .filter(|bits| bits.is_multiple_of(8))
            .map(|bits| bits / 8);
        if wanted != Some(end - start) {
            return Err(malformed(format!(
                "tensor {name} of shape {shape:?} and type {dtype} does not fill its {} bytes",
                end - start
            )));
        }
        entries.push(Entry { name, dtype, shape, range: base + start..base + end });
    }
    entries.sort_by_key(|entry| (entry.range.start, entry.range.end));
    let mut at = base;
    for entry in &entries {
        if entry.range.start != at {
            let fault =
                if entry.range.start < at { "overlaps the one before it" } else { "leaves a hole before it" };
            return Err(malformed(format!("tensor {} {fault}", entry.name)));
        }
        at = entry.range.end;
    }
    if at != file.len() {
        return Err(malformed(format!("{} bytes at the end belong to no tensor", file.len() - at)));
    }
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    if let Some(pair) = entries.windows(2).find(|pair| pair[0].name == pair[1].name) {
        return Err(malformed(format!("tensor {} is there twice", pair[0].name)));
    }
    Ok(entries)
}

/// Reads model.safetensors.index.json: tensor name to the name of its file in the same folder. `path` is for messages.
///
/// # Errors
/// [`ModelError::Malformed`].
pub fn parse_index(path: &Path, json: &[u8]) -> Result<BTreeMap<String, String>, ModelError> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let index: Index = serde_json::from_slice(json)
        .map_err(|error| ModelError::malformed(path, format!("not an index of shards: {error}"), HINT))?;
    match index.weight_map.values().find(|name| name.contains(['/', '\\']) || !name.ends_with(".safetensors"))
    {
        None => Ok(index.weight_map),
        Some(name) => Err(ModelError::malformed(
            path,
            format!("it names {name:?}, which is no .safetensors file of this folder"),
            HINT,
        )),
    }
}

/// Bits per value of every type the format knows.
fn bits_of(dtype: &str) -> Option<usize> {
    Some(match dtype {
        "F4" => 4,
        "F6_E2M3" | "F6_E3M2" => 6,
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" | "F8_E4M3FNUZ" | "F8_E5M2FNUZ" => 8,
        "I16" | "U16" | "F16" | "BF16" => 16,
        "I32" | "U32" | "F32" => 32,
        "I64" | "U64" | "F64" | "C64" => 64,
        _ => return None,
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

/// The header's tensors in file order, duplicates kept; `__metadata__` is checked and dropped.
struct Header(Vec<(String, Raw)>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut tensors = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<BTreeMap<String, String>>()?;
                    } else {
                        tensors.push((name, map.next_value()?));
                    }
                }
                Ok(Header(tensors))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}
