//! A sequence's KV as plain data.

use serde::{Deserialize, Serialize};

use crate::{AdapterId, EngineError};

/// Number format of cached keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum KvType {
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
    /// 8-bit integers, and for each head of a token one scale in single precision that they are multiplied by.
    Q8,
}

impl KvType {
    /// Bytes of a key, or a value, of one head of one token: `head_dim` numbers, and their scale if they have one.
    pub fn head_bytes(self, head_dim: usize) -> usize {
        match self {
            KvType::F16 => 2 * head_dim,
            KvType::F32 => 4 * head_dim,
            KvType::Q8 => head_dim + 4,
        }
    }

    /// Its name (`f16`, `f32`, `q8`).
    pub fn name(self) -> &'static str {
        match self {
            KvType::F16 => "f16",
            KvType::F32 => "f32",
            KvType::Q8 => "q8",
        }
    }
}

/// Everything another engine of the same model needs to go on with a sequence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvSnapshot {
    /// Hash of the weights it was computed with.
    pub model: String,
    /// The adapter it was computed with.
    pub adapter: Option<AdapterId>,
    /// Fingerprint of the rope frequencies that `open` fixed.
    pub rope: String,
    /// The token history.
    pub tokens: Vec<u32>,
    /// One entry per layer.
    pub layers: Vec<LayerKv>,
}

/// One layer's keys and values.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerKv {
    /// Position of the first token held; above 0 only where a window has dropped what lies before.
    pub start: usize,
    /// Tokens held.
    pub length: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Values per head.
    pub head_dim: usize,
    /// Number format of `k` and `v`.
    pub dtype: KvType,
    /// Keys after rope, little endian, `[length, kv_heads, head_dim]`; with `q8`, each head's scale follows its integers.
    pub k: Vec<u8>,
    /// Values, in the same order.
    pub v: Vec<u8>,
}

impl KvSnapshot {
    /// Checks that the snapshot comes from the same weights, no adapter and the same rope frequencies.
    ///
    /// # Errors
    /// [`EngineError::SnapshotMismatch`] naming the first field that differs.
    pub fn check_origin(&self, model: &str, rope: &str) -> Result<(), EngineError> {
        let adapter = self.adapter.map_or("none".to_owned(), |adapter| format!("{adapter:?}"));
        for (field, expected, found) in
            [("model", model, self.model.as_str()), ("adapter", "none", &adapter), ("rope", rope, &self.rope)]
        {
            if expected != found {
                let (field, expected, found) = (field.into(), expected.into(), found.into());
                return Err(EngineError::SnapshotMismatch { field, expected, found });
            }
        }
        Ok(())
    }
}
