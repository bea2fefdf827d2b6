//! Stored number formats: how a row of weights lies in a file.
//!
//! Quantized values share scales. Three families are read, and each value is `scale * (q + shift) + minimum`:
//!
//! | format | values in a block | bytes | value `i` |
//! | --- | --- | --- | --- |
//! | `Q4_0` | 32 | `d: f16`, 16 of nibbles | `d * (q - 8)` |
//! | `Q4_1` | 32 | `d: f16`, `m: f16`, 16 of nibbles | `d * q + m` |
//! | `Q5_0` | 32 | `d: f16`, 4 of fifth bits, 16 of nibbles | `d * (q - 16)` |
//! | `Q5_1` | 32 | `d: f16`, `m: f16`, 4 of fifth bits, 16 of nibbles | `d * q + m` |
//! | `Q8_0` | 32 | `d: f16`, 32 × `i8` | `d * q` |
//! | `Q4_K`, `Q5_K`, `Q6_K` | 256 | see the module `kquants` | scales of 6 or 8 bits under an f16 |
//! | MLX affine | 32, 64 or 128 | see the module `affine` | `scale * q + bias`, scales in tensors of their own |
//!
//! The block layouts are those of GGUF (ggml's `ggml-common.h`). In its blocks of 32, byte `i` holds value `i` in its
//! low and value `i + 16` in its high nibble, and bit `i` of the fifth bits, a little-endian word, belongs to value `i`.

mod affine;
mod kquants;

use half::{bf16, f16};

pub use affine::{Affine, ScaleType};

/// The unit in which quantized rows are taken apart: every format's block is one or several of these.
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
    /// 5-bit symmetric blocks of 32.
    Q5_0,
    /// 5-bit affine blocks of 32.
    Q5_1,
    /// 8-bit symmetric blocks of 32.
    Q8_0,
    /// 4-bit affine blocks of 32 in super-blocks of 256.
    Q4K,
    /// 5-bit affine blocks of 32 in super-blocks of 256.
    Q5K,
    /// 6-bit symmetric blocks of 16 in super-blocks of 256.
    Q6K,
    /// MLX's affine groups.
    Affine(Affine),
}

/// One stored row. Formats whose scales lie inside their blocks have only `values`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StoredRow<'a> {
    /// Blocks, or bare values.
    pub values: &'a [u8],
    /// One scale a group.
    pub scales: &'a [u8],
    /// One bias a group.
    pub biases: &'a [u8],
}

impl<'a> From<&'a [u8]> for StoredRow<'a> {
    fn from(values: &'a [u8]) -> Self {
        Self { values, ..Self::default() }
    }
}

impl<'a> From<&'a Vec<u8>> for StoredRow<'a> {
    fn from(values: &'a Vec<u8>) -> Self {
        values.as_slice().into()
    }
}

impl StoredRow<'_> {
    /// Bytes of all parts.
    pub fn len(&self) -> usize {
        self.values.len() + self.scales.len() + self.biases.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
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
            Format::Q5_0 => "Q5_0",
            Format::Q5_1 => "Q5_1",
            Format::Q8_0 => "Q8_0",
            Format::Q4K => "Q4_K",
            Format::Q5K => "Q5_K",
            Format::Q6K => "Q6_K",
            Format::Affine(affine) => affine.name(),
        }
    }

    /// Whether values share a scale.
    pub fn is_quantized(self) -> bool {
        self.block_len() > 1
    }

    /// Values in one block (1 for plain floats): rows are made of whole ones.
    pub fn block_len(self) -> usize {
        match self {
            Format::F32 | Format::F16 | Format::Bf16 => 1,
            Format::Q4_0 | Format::Q4_1 | Format::Q5_0 | Format::Q5_1 | Format::Q8_0 => BLOCK,
            Format::Q4K | Format::Q5K | Format::Q6K => kquants::SUPER_BLOCK,
            Format::Affine(affine) => affine.group(),
        }
    }

    /// Bytes of one block; for MLX's groups without scale and bias.
    pub fn block_bytes(self) -> usize {
        match self {
            Format::F32 => 4,
            Format::F16 | Format::Bf16 => 2,
            Format::Q4_0 => 2 + BLOCK / 2,
            Format::Q4_1 => 4 + BLOCK / 2,
            Format::Q5_0 => 2 + BLOCK / 8 + BLOCK / 2,
            Format::Q5_1 => 4 + BLOCK / 8 + BLOCK / 2,
            Format::Q8_0 => 2 + BLOCK,
            Format::Q4K => kquants::Q4K_BYTES,
            Format::Q5K => kquants::Q5K_BYTES,
            Format::Q6K => kquants::Q6K_BYTES,
            Format::Affine(affine) => affine.group() * affine.bits() / 8,
        }
    }

    /// Bytes of the values of a row of `cols`; `None` when `cols` does not divide into blocks or the product overflows.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        if !cols.is_multiple_of(self.block_len()) {
            return None;
        }
        (cols / self.block_len()).checked_mul(self.block_bytes())
    }

    /// Bytes of the scales of a row of `cols` values, and as many of the biases, where they lie apart from the values;
    /// else 0.
    pub fn scale_row_bytes(self, cols: usize) -> usize {
        match self {
            Format::Affine(affine) => cols / affine.group() * affine.scales().bytes(),
            _ => 0,
        }
    }

    /// Whether the parts of `row` have the lengths that `cols` values take.
    pub fn is_row(self, row: &StoredRow<'_>, cols: usize) -> bool {
        let scales = self.scale_row_bytes(cols);
        self.row_bytes(cols) == Some(row.values.len())
            && [row.scales.len(), row.biases.len()].iter().all(|&len| len == scales)
    }

    /// What is added to an integer of [`Format::quants`] before it is scaled.
    pub fn shift(self) -> i32 {
        match self {
            Format::Q4_0 => -8,
            Format::Affine(affine) if affine.bits() == 8 => 128,
            _ => 0,
        }
    }

    /// The integers of 32 values of a quantized block, from its value `32 * part` on: in 0..=15 for formats of 4 bits,
    /// else any that fit. `block` is [`Format::block_bytes`] long.
    ///
    /// # Panics
    /// If the block has no such part.
    pub fn quants(self, block: &[u8], part: usize) -> [i8; BLOCK] {
        let mut out = [0u8; BLOCK];
        match self {
            Format::F32 | Format::F16 | Format::Bf16 => {}
            Format::Q4_0 => nibbles(&block[2..], &mut out),
            Format::Q4_1 => nibbles(&block[4..], &mut out),
            Format::Q5_0 | Format::Q5_1 => {
                let head = if self == Format::Q5_0 { 2 } else { 4 };
                nibbles(&block[head + 4..], &mut out);
                let fifth = u32::from_le_bytes(std::array::from_fn(|i| block[head + i]));
                let offset = if self == Format::Q5_0 { 16 } else { 0 };
                for (i, q) in out.iter_mut().enumerate() {
                    *q = (*q | ((fifth >> i & 1) as u8) << 4).wrapping_sub(offset);
                }
            }
            Format::Q8_0 => out.copy_from_slice(&block[2..]),
            Format::Q4K => kquants::q4k(block, part, &mut out),
            Format::Q5K => kquants::q5k(block, part, &mut out),
            Format::Q6K => kquants::q6k(block, part, &mut out),
            Format::Affine(affine) => affine.quants(block, part, &mut out),
        }
        out.map(u8::cast_signed)
    }

    /// The two small integers that scale 32 values of a super-block, from its value `32 * part` on: scale and minimum of
    /// `Q4_K` and `Q5_K`, 6 bits each, or the scales of the first and the last 16 of `Q6_K`, as `i8`. `None` for other
    /// formats.
    ///
    /// # Panics
    /// If the block has no such part.
    pub fn small_scales(self, block: &[u8], part: usize) -> Option<[u8; 2]> {
        match self {
            Format::Q4K | Format::Q5K => Some(kquants::small_scales(block, part)),
            Format::Q6K => Some(kquants::q6k_small_scales(block, part)),
            _ => None,
        }
    }

    /// The f16 that all small scales of a super-block are multiplied by, and the one for minima (0 for `Q6_K`).
    /// `None` for other formats.
    ///
    /// # Panics
    /// If `block` is not a whole block.
    pub fn super_scales(self, block: &[u8]) -> Option<[f16; 2]> {
        match self {
            Format::Q4K | Format::Q5K => Some([half_at(block, 0), half_at(block, 2)]),
            Format::Q6K => Some([half_at(block, block.len() - 2), f16::ZERO]),
            _ => None,
        }
    }

    /// Decodes one stored row into f32. The reference for every faster reader.
    ///
    /// A product of scale and integer is exact in f32, but for MLX's f32 scales: there it is rounded before the bias is
    /// added, so that the zero that MLX provides for comes out as zero.
    ///
    /// # Panics
    /// If `row` is not exactly the row of `out.len()` values.
    pub fn dequantize_row<'a>(self, row: impl Into<StoredRow<'a>>, out: &mut [f32]) {
        let row = row.into();
        assert!(self.is_row(&row, out.len()), "row length");
        match self {
            Format::F32 => {
                for (v, b) in out.iter_mut().zip(row.values.as_chunks::<4>().0) {
                    *v = f32::from_le_bytes(*b);
                }
            }
            Format::F16 => {
                for (v, b) in out.iter_mut().zip(row.values.as_chunks::<2>().0) {
                    *v = f16::from_le_bytes(*b).to_f32();
                }
            }
            Format::Bf16 => {
                for (v, b) in out.iter_mut().zip(row.values.as_chunks::<2>().0) {
                    *v = bf16::from_le_bytes(*b).to_f32();
                }
            }
            _ => {
                let blocks = row.values.chunks_exact(self.block_bytes());
                for (i, (block, out)) in blocks.zip(out.chunks_exact_mut(self.block_len())).enumerate() {
                    for (part, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
                        self.dequantize_part(&row, i, block, part, out);
                    }
                }
            }
        }
    }

    /// Decodes 32 values of block `index` of a quantized row.
    fn dequantize_part(
        self,
        row: &StoredRow<'_>,
        index: usize,
        block: &[u8],
        part: usize,
        out: &mut [f32; BLOCK],
    ) {
        let half = |i: usize| half_at(block, i).to_f32();
        let (scales, minimum) = match self {
            Format::Q4_1 | Format::Q5_1 => ([half(0); 2], Some(half(2))),
            Format::Affine(affine) => {
                let value = |bytes| affine.scales().value(bytes, index);
                ([value(row.scales); 2], Some(value(row.biases)))
            }
            _ => match (self.super_scales(block), self.small_scales(block, part)) {
                (Some([d, _]), Some(small)) if self == Format::Q6K => {
                    (small.map(|scale| d.to_f32() * f32::from(scale.cast_signed())), None)
                }
                (Some([d, dmin]), Some([scale, minimum])) => {
                    ([d.to_f32() * f32::from(scale); 2], Some(-(dmin.to_f32() * f32::from(minimum))))
                }
                _ => ([half(0); 2], None),
            },
        };
        for (i, (out, q)) in out.iter_mut().zip(self.quants(block, part)).enumerate() {
            let (scale, q) = (scales[i / 16], (i32::from(q) + self.shift()) as f32);
            *out = minimum.map_or(scale * q, |minimum| scale * q + minimum);
        }
    }
}

/// Spreads 16 bytes: low nibbles first.
fn nibbles(bytes: &[u8], out: &mut [u8; BLOCK]) {
    let (low, high) = out.split_at_mut(BLOCK / 2);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(bytes) {
        (*low, *high) = (byte & 15, byte >> 4);
    }
}

/// The f16 at byte `at`.
fn half_at(bytes: &[u8], at: usize) -> f16 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]])
}
