//! Keys and values as plain data and back.
//!
//! A cache in bfloat16 travels as f32, which holds each of its values.

use tandem_engine::{EngineError, KvSnapshot, KvType, LayerKv};

use crate::array::{Array, Dtype, Result, evaluate};
use crate::kv::{Kv, KvShape};

fn stored(shape: &KvShape) -> (KvType, Dtype) {
    if shape.float == Dtype::F16 { (KvType::F16, Dtype::F16) } else { (KvType::F32, Dtype::F32) }
}

/// The first `len` tokens.
pub(crate) fn export(shape: &KvShape, kv: Option<&Kv>, len: usize) -> Result<Vec<LayerKv>> {
    let (dtype, format) = stored(shape);
    let mut layers = Vec::with_capacity(shape.layers.len());
    for (i, &(kv_heads, head_dim)) in shape.layers.iter().enumerate() {
        let bytes = |x: &Array| -> Result<Vec<u8>> {
            let held = x.slice([0; 4], [1, kv_heads, len, head_dim])?;
            held.transpose([0, 2, 1, 3])?.as_type(format)?.read_bytes()
        };
        let (k, v) = match kv {
            Some(kv) if len > 0 => (bytes(&kv.layers[i].0)?, bytes(&kv.layers[i].1)?),
            _ => Default::default(),
        };
        layers.push(LayerKv { start: 0, length: len, kv_heads, head_dim, dtype, k, v });
    }
    Ok(layers)
}

/// Whether a snapshot is of this shape.
///
/// # Errors
/// [`EngineError::SnapshotMismatch`] naming the first field that differs.
pub(crate) fn check(shape: &KvShape, snapshot: &KvSnapshot) -> Result<()> {
    let mismatch = |field: String, expected: String, found: String| {
        if expected == found { Ok(()) } else { Err(EngineError::SnapshotMismatch { field, expected, found }) }
    };
    let (format, _) = stored(shape);
    let tokens = snapshot.tokens.len();
    mismatch("layers".into(), shape.layers.len().to_string(), snapshot.layers.len().to_string())?;
    for (i, (layer, &(heads, dim))) in snapshot.layers.iter().zip(&shape.layers).enumerate() {
        let LayerKv { start, length, kv_heads, head_dim, dtype, k, v } = layer;
        let bytes = tokens * heads * format.head_bytes(dim);
        for (field, expected, found) in [
            ("start", 0, *start),
            ("length", tokens, *length),
            ("kv_heads", heads, *kv_heads),
            ("head_dim", dim, *head_dim),
            ("bytes of k", bytes, k.len()),
            ("bytes of v", bytes, v.len()),
        ] {
            mismatch(format!("{field} of layer {i}"), expected.to_string(), found.to_string())?;
        }
        mismatch(format!("dtype of layer {i}"), format.name().into(), dtype.name().into())?;
    }
    Ok(())
}

/// Buffers with the tokens of a snapshot that [`check`] let pass; there is at least one.
pub(crate) fn import(shape: &KvShape, snapshot: &KvSnapshot, capacity: usize) -> Result<Kv> {
    let (_, format) = stored(shape);
    let len = snapshot.tokens.len();
    let mut layers = Vec::with_capacity(shape.layers.len());
    for (layer, &(heads, dim)) in snapshot.layers.iter().zip(&shape.layers) {
        let array = |bytes: &[u8]| {
            Array::from_bytes(bytes, format, [1, len, heads, dim])?
                .transpose([0, 2, 1, 3])?
                .as_type(shape.float)
        };
        layers.push((array(&layer.k)?, array(&layer.v)?));
    }
    let kv = shape.with_room(Some(&Kv { layers, capacity: len }), len, capacity)?;
    evaluate(kv.arrays())?;
    Ok(kv)
}
