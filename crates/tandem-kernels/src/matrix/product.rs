//! Matrix products: which thread does which panels of which rows.
//!
//! With few rows a product is a stream of weights from memory, and panels are dealt out in contiguous runs. With many,
//! a panel stays in the first-level cache while the rows stream past it; those are taken in parts that stay in the
//! second level. Neither choice touches the order of a sum, so no result depends on it.

use std::ops::Range;

use tandem_model::format::BLOCK;

use super::{PANEL, PackedMatrix, scalar};
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use crate::activations::Activations;
use crate::math::Activation;
use crate::path::{Isa, Path};
use crate::team::{SharedMut, Team};

/// Rows of activations that a kernel call handles: their outputs are collected on the stack.
const TILE: usize = 64;
/// Values of activations that should stay in the second-level cache.
const CACHED: usize = 512 << 10;

/// What a product does with the output that is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Overwrite it.
    Store,
    /// Add to it, as a residual connection does.
    Add,
}

/// `out[m * stride + offset + n] (+)= sum over k of x[m][k] * weights[n][k]`.
///
/// Runs on integers when the weights are quantized and `x` has its 8-bit form; else in f32. Each output has the same
/// bits for any number of rows and threads.
///
/// # Panics
/// If `x.cols()` is not `weights.cols()`, `offset + weights.rows()` exceeds `stride`, or `out` is too short.
pub fn matmul(
    team: &Team,
    weights: &PackedMatrix,
    x: &Activations,
    out: &mut [f32],
    stride: usize,
    offset: usize,
    mode: Mode,
) {
    assert_eq!(x.cols(), weights.cols(), "columns of activations and weights");
    if x.rows() == 0 || weights.rows() == 0 {
        return;
    }
    assert!(offset + weights.rows() <= stride, "outputs {offset} + {} in rows of {stride}", weights.rows());
    assert!((x.rows() - 1) * stride + offset + weights.rows() <= out.len(), "output of {}", out.len());
    let (out, path) = (SharedMut::new(out), team.path());
    for_parts(team, weights.panels(), x, |panels, rows| {
        let mut tile = [[0.0; PANEL]; TILE];
        for panel in panels {
            let lanes = PANEL.min(weights.rows() - panel * PANEL);
            for_tiles(rows.clone(), |rows| {
                let tile = &mut tile[..rows.len()];
                panel_product(path, weights, panel, x, rows.clone(), tile);
                for (row, sums) in rows.zip(tile) {
                    let start = row * stride + offset + panel * PANEL;
                    // SAFETY: only this thread handles this panel for this row.
                    let out = unsafe { out.slice(start..start + lanes) };
                    match mode {
                        Mode::Store => out.copy_from_slice(&sums[..lanes]),
                        Mode::Add => out.iter_mut().zip(sums).for_each(|(out, sum)| *out += *sum),
                    }
                }
            });
        }
    });
}

/// The gated half of an MLP: `out[m][n] = activation(gate x)[n] * (up x)[n]`, quantized at once if `quantize` is set
/// and the rows divide into blocks. `out` is resized to the rows of `x`.
///
/// # Panics
/// If the shapes of `gate` and `up` differ, `x.cols()` is not theirs, or `out.cols()` is not their rows.
pub fn gate_up(
    team: &Team,
    gate: &PackedMatrix,
    up: &PackedMatrix,
    x: &Activations,
    activation: Activation,
    out: &mut Activations,
    quantize: bool,
) {
    assert_eq!((gate.rows(), gate.cols()), (up.rows(), up.cols()), "shapes of gate and up");
    assert_eq!(x.cols(), gate.cols(), "columns of activations and weights");
    assert_eq!(out.cols(), gate.rows(), "columns of the output and rows of the weights");
    out.resize(x.rows());
    let path = team.path();
    let (cols, out) = (out.cols(), out.writer(quantize));
    // One part is a block of the output, so that the thread that made it can quantize it.
    for_parts(team, cols.div_ceil(BLOCK), x, |blocks, rows| {
        let mut gates = [[[0.0; PANEL]; TILE]; BLOCK / PANEL];
        let mut ups = gates;
        for block in blocks {
            let part = block * BLOCK..cols.min((block + 1) * BLOCK);
            for_tiles(rows.clone(), |rows| {
                for half in 0..part.len().div_ceil(PANEL) {
                    let panel = block * (BLOCK / PANEL) + half;
                    panel_product(path, gate, panel, x, rows.clone(), &mut gates[half][..rows.len()]);
                    panel_product(path, up, panel, x, rows.clone(), &mut ups[half][..rows.len()]);
                }
                for (i, row) in rows.enumerate() {
                    let write = |out: &mut [f32]| {
                        for (half, out) in out.chunks_mut(PANEL).enumerate() {
                            out.copy_from_slice(&gates[half][i][..out.len()]);
                            activation.gate(path, out, &ups[half][i][..out.len()]);
                        }
                    };
                    // SAFETY: only this thread handles this block of this row.
                    unsafe { out.write(path, row, part.clone(), write) };
                }
            });
        }
    });
}

/// Deals `panels x rows of x` out to the team.
fn for_parts(team: &Team, panels: usize, x: &Activations, f: impl Fn(Range<usize>, Range<usize>) + Sync) {
    if x.rows() == 0 || panels == 0 {
        return;
    }
    let threads = team.threads();
    // As many rows as the cache holds, fewer if there are not enough panels for all threads.
    let cached = (CACHED / x.cols().max(1)).next_multiple_of(TILE);
    let spread = (x.rows() * panels).div_ceil(threads * 4).div_ceil(panels).next_multiple_of(8);
    let rows = if panels < threads * 4 { cached.min(spread) } else { cached }.min(x.rows());
    let run = (panels / (threads * 8)).max(1);
    let (parts, runs) = (x.rows().div_ceil(rows), panels.div_ceil(run));
    team.deal(parts * runs, 1, |items| {
        for item in items {
            let (part, start) = (item / runs * rows, item % runs * run);
            f(start..panels.min(start + run), part..x.rows().min(part + rows));
        }
    });
}

/// Cuts rows into tiles.
fn for_tiles(rows: Range<usize>, mut f: impl FnMut(Range<usize>)) {
    for start in rows.clone().step_by(TILE) {
        f(start..rows.end.min(start + TILE));
    }
}

/// One panel times some rows: `out[row][lane]`.
fn panel_product(
    path: Path,
    weights: &PackedMatrix,
    panel: usize,
    x: &Activations,
    rows: Range<usize>,
    out: &mut [[f32; PANEL]],
) {
    let (format, panel) = (weights.format(), weights.panel(panel));
    match x.int_rows(rows.clone()) {
        Some(x) if format.is_quantized() => match path.isa() {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: such a path exists only where the CPU has these features.
            Isa::Avx2 => unsafe { avx2::int(format, panel, &x, out) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Isa::Avx512 => unsafe { avx512::int(format, panel, &x, out) },
            _ => scalar::int(format, panel, &x, out),
        },
        _ => {
            let x = x.float_rows(rows);
            match path.isa() {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: such a path exists only where the CPU has these features.
                Isa::Avx2 => unsafe { avx2::float(format, panel, &x, out) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                Isa::Avx512 => unsafe { avx512::float(format, panel, &x, out) },
                _ => scalar::float(format, panel, &x, out),
            }
        }
    }
}
