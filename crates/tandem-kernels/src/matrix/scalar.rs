//! The portable kernels, and the specification of the SIMD ones: those repeat these steps bit for bit.

use half::{bf16, f16};
use tandem_model::format::{BLOCK, Format};

use super::pack::quant;
use super::{PANEL, packed_block_bytes};
use crate::activations::{FloatRows, IntRows};

/// Columns that the f32 kernels decode at a time.
pub(super) const CHUNK: usize = 256;

/// One panel of quantized weights times 8-bit rows: `out[row][lane]`.
///
/// For every block, `dot` is exact in i32 and as f32; then `acc = fma(d_w, d_x * dot, acc)` and, for affine weights,
/// `acc = fma(m_w, d_x * sum(q_x), acc)`.
pub(super) fn int(format: Format, panel: &[u8], x: &IntRows<'_>, out: &mut [[f32; PANEL]]) {
    let blocks = x.cols / BLOCK;
    let mut w = [[0i32; PANEL]; BLOCK];
    out.fill([0.0; PANEL]);
    for (b, block) in panel.chunks_exact(packed_block_bytes(format)).enumerate() {
        let half = |i: usize| f16::from_le_bytes([block[2 * i], block[2 * i + 1]]).to_f32();
        for (k, w) in w.iter_mut().enumerate() {
            *w = std::array::from_fn(|lane| i32::from(quant(format, block, k, lane)));
        }
        for (row, out) in out.iter_mut().enumerate() {
            let q = &x.q[row * x.cols + b * BLOCK..][..BLOCK];
            let i = row * blocks + b;
            let mut dot = [if format == Format::Q4_0 { -8 * x.totals[i] } else { 0 }; PANEL];
            for (w, q) in w.iter().zip(q) {
                for (dot, w) in dot.iter_mut().zip(w) {
                    *dot += w * i32::from(*q);
                }
            }
            for (lane, acc) in out.iter_mut().enumerate() {
                *acc = half(lane).mul_add(x.scales[i] * dot[lane] as f32, *acc);
                if format == Format::Q4_1 {
                    *acc = half(PANEL + lane).mul_add(x.sums[i], *acc);
                }
            }
        }
    }
}

/// Some panels of any weights times f32 rows, `out[panel][row][lane]`; for every column, `acc = fma(w, x, acc)`.
pub(super) fn float(format: Format, panels: &[u8], x: &FloatRows<'_>, out: &mut [[f32; PANEL]]) {
    let mut w = [[0f32; PANEL]; CHUNK];
    out.fill([0.0; PANEL]);
    for (panel, out) in each_panel(format, panels, x, out) {
        for (c, bytes) in panel.chunks(CHUNK / format.block_len() * packed_block_bytes(format)).enumerate() {
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

/// Each panel with its part of `out`.
///
/// # Panics
/// If the lengths do not fit each other.
pub(super) fn each_panel<'a>(
    format: Format,
    panels: &'a [u8],
    x: &FloatRows<'_>,
    out: &'a mut [[f32; PANEL]],
) -> impl Iterator<Item = (&'a [u8], &'a mut [[f32; PANEL]])> {
    let bytes = x.cols / format.block_len() * packed_block_bytes(format);
    let rows = x.values.len() / x.cols.max(1);
    let count = if bytes == 0 { 0 } else { out.len() / rows };
    assert!(panels.len() == count * bytes && (count * rows == out.len() || bytes == 0), "panels and outputs");
    panels.chunks_exact(bytes.max(1)).zip(out.chunks_exact_mut(rows.max(1)))
}

/// Decodes whole packed blocks to `[column][lane]`, and says how many columns those were.
fn expand(format: Format, bytes: &[u8], out: &mut [[f32; PANEL]; CHUNK]) -> usize {
    let len = format.block_len();
    let blocks = bytes.chunks_exact(packed_block_bytes(format));
    let count = blocks.len();
    for (block, out) in blocks.zip(out.chunks_exact_mut(len)) {
        let half = |i: usize| [block[2 * i], block[2 * i + 1]];
        let scale = |i: usize| f16::from_le_bytes(half(i)).to_f32();
        for (k, out) in out.iter_mut().enumerate() {
            *out = std::array::from_fn(|lane| match format {
                Format::F32 => f32::from_le_bytes(std::array::from_fn(|i| block[4 * lane + i])),
                Format::F16 => scale(lane),
                Format::Bf16 => bf16::from_le_bytes(half(lane)).to_f32(),
                // A scale has 11 bits and a value at most 8, so the product is exact: fused or not is the same.
                Format::Q4_0 => {
                    scale(lane).mul_add(f32::from(quant(format, block, k, lane)), -8.0 * scale(lane))
                }
                Format::Q4_1 => {
                    scale(lane).mul_add(f32::from(quant(format, block, k, lane)), scale(PANEL + lane))
                }
                Format::Q8_0 => scale(lane).mul_add(f32::from(quant(format, block, k, lane)), 0.0),
            });
        }
    }
    count * len
}
