//! The portable kernels, and the specification of the SIMD ones: those repeat these steps bit for bit.

use half::{bf16, f16};
use tandem_model::format::{BLOCK, Format};

use super::kind::{Scales, Shape};
use super::{PANEL, unit_bytes};
use crate::activations::{FloatRows, IntRows};

/// Columns that the f32 kernels decode at a time. A unit of any format divides it.
pub(super) const CHUNK: usize = 256;

/// 32 columns of a panel of quantized weights.
#[derive(Clone, Copy)]
pub(super) struct Block<'a> {
    shape: Shape,
    /// The unit's head.
    head: &'a [u8],
    /// Small scales and values.
    bytes: &'a [u8],
}

impl Block<'_> {
    /// The integer at column `k` in `lane`, shifted.
    pub fn quant(&self, k: usize, lane: usize) -> i32 {
        let values = &self.bytes[self.shape.block_head()..];
        let byte = |group: usize| values[group * 4 * PANEL + lane * 4 + k % 4];
        let quant = match self.shape.bits {
            8 => byte(k / 4).cast_signed().into(),
            _ if k < BLOCK / 2 => i32::from(byte(k / 4) & 15),
            _ => i32::from(byte(k / 4 - 4) >> 4),
        };
        quant + self.shape.shift
    }

    /// In `lane`, the scales of the first and the last 16 columns, and the minimum (0 where there is none).
    pub fn scales(&self, lane: usize) -> ([f32; 2], f32) {
        let head = |i: usize| {
            let bytes = &self.head[(i * PANEL + lane) * self.shape.scale_bytes()..];
            match self.shape.scales {
                Scales::F32 => f32::from_le_bytes(std::array::from_fn(|i| bytes[i])),
                Scales::Bf16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
                Scales::F16 | Scales::Nested => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
            }
        };
        let minimum = if self.shape.affine { head(1) } else { 0.0 };
        if self.shape.scales != Scales::Nested {
            return ([head(0); 2], minimum);
        }
        let small = [self.bytes[lane], self.bytes[PANEL + lane]];
        if self.shape.split {
            return (small.map(|scale| head(0) * f32::from(scale.cast_signed())), 0.0);
        }
        ([head(0) * f32::from(small[0]); 2], minimum * f32::from(small[1]))
    }

    /// The decoded value at column `k` in `lane`.
    pub fn value(&self, k: usize, lane: usize) -> f32 {
        let (scales, minimum) = self.scales(lane);
        let value = scales[k / 16] * self.quant(k, lane) as f32;
        if self.shape.affine { value + minimum } else { value }
    }
}

/// The blocks of whole units of a quantized format.
pub(super) fn blocks(format: Format, units: &[u8]) -> impl Iterator<Item = Block<'_>> {
    let shape = Shape::of(format);
    units.chunks_exact(unit_bytes(format)).flat_map(move |unit| {
        let (head, blocks) = unit.split_at(shape.head());
        blocks.chunks_exact(shape.block_bytes()).map(move |bytes| Block { shape, head, bytes })
    })
}

/// One panel of quantized weights times 8-bit rows: `out[row][lane]`.
///
/// For every block, `dot` is exact in i32 and as f32; then `acc = fma(d_x, d_w * dot, acc)` and, for affine weights,
/// `acc = fma(m_w, d_x * sum(q_x), acc)`. A split block has two `dot`s, of 16 columns each, added in turn.
pub(super) fn int(format: Format, panel: &[u8], x: &IntRows<'_>, out: &mut [[f32; PANEL]]) {
    let shape = Shape::of(format);
    let columns = if shape.split { BLOCK / 2 } else { BLOCK };
    let count = x.cols / BLOCK;
    let mut w = [[0i32; PANEL]; BLOCK];
    out.fill([0.0; PANEL]);
    for (b, block) in blocks(format, panel).enumerate() {
        for (k, w) in w.iter_mut().enumerate() {
            *w = std::array::from_fn(|lane| block.quant(k, lane));
        }
        let scales: [_; PANEL] = std::array::from_fn(|lane| block.scales(lane));
        for (row, out) in out.iter_mut().enumerate() {
            let q = &x.q[row * x.cols + b * BLOCK..][..BLOCK];
            let i = row * count + b;
            for (side, (w, q)) in w.chunks(columns).zip(q.chunks(columns)).enumerate() {
                let mut dot = [0; PANEL];
                for (w, q) in w.iter().zip(q) {
                    for (dot, w) in dot.iter_mut().zip(w) {
                        *dot += w * i32::from(*q);
                    }
                }
                for ((acc, dot), (scale, _)) in out.iter_mut().zip(dot).zip(&scales) {
                    *acc = x.scales[i].mul_add(scale[side] * dot as f32, *acc);
                }
            }
            if shape.affine {
                for (acc, (_, minimum)) in out.iter_mut().zip(&scales) {
                    *acc = minimum.mul_add(x.sums[i], *acc);
                }
            }
        }
    }
}

/// Some panels of any weights times f32 rows, `out[panel][row][lane]`; for every column, `acc = fma(w, x, acc)`.
pub(super) fn float(format: Format, panels: &[&[u8]], x: &FloatRows<'_>, out: &mut [&mut [[f32; PANEL]]]) {
    let mut w = [[0f32; PANEL]; CHUNK];
    for (panel, out) in each_panel(format, panels, x, out) {
        for (c, bytes) in panel.chunks(CHUNK / format.block_len() * unit_bytes(format)).enumerate() {
            let cols = expand(format, bytes, &mut w);
            for (row, out) in out.iter_mut().enumerate() {
                let x = &x.values[row * x.cols + c * CHUNK..][..cols];
                for (w, x) in w.iter().zip(x) {
                    for (acc, w) in out.iter_mut().zip(w) {
                        *acc = w.mul_add(*x, *acc);
                    }
                }
            }
        }
    }
}

/// Each panel with its output, cleared.
///
/// # Panics
/// If the lengths do not fit each other.
pub(super) fn each_panel<'a>(
    format: Format,
    panels: &'a [&'a [u8]],
    x: &FloatRows<'_>,
    out: &'a mut [&mut [[f32; PANEL]]],
) -> impl Iterator<Item = (&'a [u8], &'a mut [[f32; PANEL]])> {
    let bytes = x.cols / format.block_len() * unit_bytes(format);
    assert!(panels.iter().all(|panel| panel.len() == bytes) && panels.len() == out.len(), "panels");
    assert!(out.iter().all(|out| x.values.len() >= out.len() * x.cols), "rows");
    panels.iter().zip(out).map(|(panel, out)| {
        out.fill([0.0; PANEL]);
        (*panel, &mut **out)
    })
}

/// Decodes whole units to `[column][lane]`, and says how many columns those were.
fn expand(format: Format, bytes: &[u8], out: &mut [[f32; PANEL]; CHUNK]) -> usize {
    if format.is_quantized() {
        for (block, out) in blocks(format, bytes).zip(out.as_chunks_mut::<BLOCK>().0) {
            for (k, out) in out.iter_mut().enumerate() {
                *out = std::array::from_fn(|lane| block.value(k, lane));
            }
        }
    } else {
        for (column, out) in bytes.chunks_exact(unit_bytes(format)).zip(out.iter_mut()) {
            *out = std::array::from_fn(|lane| float_value(format, column, lane));
        }
    }
    bytes.len() / unit_bytes(format) * format.block_len()
}

/// The value in `lane` of a packed column of floats.
pub(super) fn float_value(format: Format, column: &[u8], lane: usize) -> f32 {
    let half = || [column[2 * lane], column[2 * lane + 1]];
    match format {
        Format::F16 => f16::from_le_bytes(half()).to_f32(),
        Format::Bf16 => bf16::from_le_bytes(half()).to_f32(),
        _ => f32::from_le_bytes(std::array::from_fn(|i| column[4 * lane + i])),
    }
}
