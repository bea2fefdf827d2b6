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
}

impl KvType {
    /// Bytes of one value.
    pub fn bytes(self) -> usize {
        match self {
            KvType::F16 => 2,
            KvType::F32 => 4,
        }
    }

    /// Its name (`f16`, `f32`).
    pub fn name(self) -> &'static str {
        match self {
            KvType::F16 => "f16",
            KvType::F32 => "f32",
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
    /// Keys after rope, little endian, `[length, kv_heads, head_dim]`.
    pub k: Vec<u8>,
    /// Values, little endian, `[length, kv_heads, head_dim]`.
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
