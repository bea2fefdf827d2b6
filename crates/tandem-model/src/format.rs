//! Stored number formats: how a row of weights lies in a file.
//!
//! The block layouts are those of GGUF (ggml's `ggml-common.h`): 32 consecutive values of one row share one scale.
//!
//! | format | bytes for 32 values | value `i` |
//! | --- | --- | --- |
//! | `Q4_0` | `d: f16`, 16 bytes of nibbles | `d * (q - 8)` |
//! | `Q4_1` | `d: f16`, `m: f16`, 16 bytes of nibbles | `d * q + m` |
//! | `Q8_0` | `d: f16`, 32 × `i8` | `d * q` |
//!
//! In the 4-bit blocks byte `i` holds value `i` in its low and value `i + 16` in its high nibble.

use half::{bf16, f16};

/// Values that share one scale in every quantized format read today.
pub const BLOCK: usize = 32;

/// A stored number format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// IEEE single precision, little endian.
    F32,
    /// IEEE half precision, little endian.
    F16,
    /// bfloat16, little endian.
    Bf16,
    /// 4-bit symmetric blocks of 32.
    Q4_0,
    /// 4-bit affine blocks of 32.
    Q4_1,
    /// 8-bit symmetric blocks of 32.
    Q8_0,
}

impl Format {
    /// The name users know it by (`F16`, `Q4_1`, ...).
    pub fn name(self) -> &'static str {
        match self {
            Format::F32 => "F32",
            Format::F16 => "F16",
            Format::Bf16 => "BF16",
            Format::Q4_0 => "Q4_0",
            Format::Q4_1 => "Q4_1",
            Format::Q8_0 => "Q8_0",
        }
    }

    /// Whether values share a scale.
    pub fn is_quantized(self) -> bool {
        self.block_len() > 1
    }

    /// Values in one block (1 for plain floats).
    pub fn block_len(self) -> usize {
        match self {
            Format::F32 | Format::F16 | Format::Bf16 => 1,
            Format::Q4_0 | Format::Q4_1 | Format::Q8_0 => BLOCK,
        }
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> usize {
        match self {
            Format::F32 => 4,
            Format::F16 | Format::Bf16 => 2,
            Format::Q4_0 => 2 + BLOCK / 2,
            Format::Q4_1 => 4 + BLOCK / 2,
            Format::Q8_0 => 2 + BLOCK,
        }
    }

    /// Bytes of a row of `cols` values; `None` when `cols` does not divide into blocks or the product overflows.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        if !cols.is_multiple_of(self.block_len()) {
            return None;
        }
        (cols / self.block_len()).checked_mul(self.block_bytes())
    }

    /// Decodes one stored row into f32. The reference for every faster reader.
    ///
    /// # Panics
    /// If `bytes` is not exactly the row of `out.len()` values.
    pub fn dequantize_row(self, bytes: &[u8], out: &mut [f32]) {
        assert_eq!(self.row_bytes(out.len()), Some(bytes.len()), "row length");
        let half_at = |b: &[u8], i: usize| f16::from_le_bytes([b[i], b[i + 1]]).to_f32();
        match self {
            Format::F32 => {
                for (v, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *v = f32::from_le_bytes(*b);
                }
            }
            Format::F16 => {
                for (v, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *v = f16::from_le_bytes(*b).to_f32();
                }
            }
            Format::Bf16 => {
                for (v, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *v = bf16::from_le_bytes(*b).to_f32();
                }
            }
            Format::Q4_0 | Format::Q4_1 => {
                let head = self.block_bytes() - BLOCK / 2;
                for (v, b) in out.chunks_exact_mut(BLOCK).zip(bytes.chunks_exact(self.block_bytes())) {
                    let d = half_at(b, 0);
                    let m = if self == Format::Q4_1 { half_at(b, 2) } else { -8.0 * d };
                    for (i, q) in b[head..].iter().enumerate() {
                        v[i] = d * f32::from(q & 15) + m;
                        v[i + BLOCK / 2] = d * f32::from(q >> 4) + m;
                    }
                }
            }
            Format::Q8_0 => {
                for (v, b) in out.chunks_exact_mut(BLOCK).zip(bytes.chunks_exact(self.block_bytes())) {
                    let d = half_at(b, 0);
                    for (v, q) in v.iter_mut().zip(&b[2..]) {
                        *v = d * f32::from(q.cast_signed());
                    }
                }
            }
        }
    }
}
