//! MLX's affine quantization: groups along a row share a scale and a bias, which are tensors of their own.
//!
//! A matrix `x` is stored as `x.weight`, the values packed into u32 from the lowest bits up, and `x.scales` and
//! `x.biases` of shape `[rows, cols / group]`. Value `i` is `scale * q + bias` with an unsigned `q`. Little-endian words
//! packed from the lowest bits are simply bytes in order: one byte a value at 8 bits, two values at 4 bits, the first in
//! the low nibble. Layout: `mx.quantize` in MLX's documentation.

use half::{bf16, f16};

use super::BLOCK;

/// An affine format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Affine {
    bits: u8,
    group: u8,
    scales: ScaleType,
}

/// The type of scales and biases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScaleType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
}

impl Affine {
    /// Widths that are read, in bits.
    pub const BITS: [usize; 2] = [4, 8];
    /// Group sizes that are read.
    pub const GROUPS: [usize; 3] = [32, 64, 128];

    /// `None` unless `bits` and `group` are among those above.
    pub fn new(bits: usize, group: usize, scales: ScaleType) -> Option<Self> {
        (Self::BITS.contains(&bits) && Self::GROUPS.contains(&group)).then_some(Self {
            bits: bits as u8,
            group: group as u8,
            scales,
        })
    }

    /// Bits of a value.
    pub fn bits(self) -> usize {
        self.bits.into()
    }

    /// Values that share a scale.
    pub fn group(self) -> usize {
        self.group.into()
    }

    /// The type of scales and biases.
    pub fn scales(self) -> ScaleType {
        self.scales
    }

    pub(super) fn name(self) -> &'static str {
        if self.bits == 4 { "MLX affine 4-bit" } else { "MLX affine 8-bit" }
    }

    /// 8-bit values are handed out less 128, so that they fit an `i8`.
    pub(super) fn quants(self, group: &[u8], part: usize, out: &mut [u8; BLOCK]) {
        if self.bits == 4 {
            let bytes = &group[part * BLOCK / 2..][..BLOCK / 2];
            for (pair, byte) in out.as_chunks_mut::<2>().0.iter_mut().zip(bytes) {
                *pair = [byte & 15, byte >> 4];
            }
        } else {
            for (q, byte) in out.iter_mut().zip(&group[part * BLOCK..][..BLOCK]) {
                *q = byte ^ 0x80;
            }
        }
    }
}

impl ScaleType {
    /// Bytes of one.
    pub fn bytes(self) -> usize {
        match self {
            ScaleType::F32 => 4,
            ScaleType::F16 | ScaleType::Bf16 => 2,
        }
    }

    /// Number `index` of `bytes`.
    ///
    /// # Panics
    /// If there are not as many.
    pub fn value(self, bytes: &[u8], index: usize) -> f32 {
        let bytes = &bytes[index * self.bytes()..];
        match self {
            ScaleType::F32 => f32::from_le_bytes(std::array::from_fn(|i| bytes[i])),
            ScaleType::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
            ScaleType::Bf16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        }
    }
}
