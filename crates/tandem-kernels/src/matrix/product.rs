//! Matrix products: which thread does which panels of which rows.
//!
//! With few rows a product is a stream of weights from memory, and panels are dealt out in contiguous runs: two at a
//! time, that lie far from each other, as a core reads more from two streams than from one. With many, a panel stays in
//! the first-level cache while the rows stream past it; those are taken in parts that stay in the second level. Neither
//! choice touches the order of a sum, so no result depends on it.

use std::ops::Range;

use tandem_model::format::BLOCK;

#[cfg(target_arch = "aarch64")]
use super::neon;
use super::{PANEL, PackedMatrix, scalar};
#[cfg(target_arch = "x86_64")]
use super::{amx, avx2, avx512};
use crate::activations::{Activations, Writer};
use crate::math::Activation;
use crate::path::{Isa, Path};
use crate::team::{SharedMut, Team};

/// Rows of activations that a kernel call handles: their outputs are collected on the stack.
const TILE: usize = 128;
/// The same where there are only so many rows: few. In decoding, clearing a large tile would be felt.
const SMALL_TILE: usize = 8;
/// Panels that a kernel call handles at most: together they can make a block of 32 outputs.
const STRIP: usize = BLOCK / PANEL;
/// Rows from which on the AMX path multiplies in tiles.
const TILED: usize = 16;
/// Values of activations that should stay in the second-level cache.
const CACHED: usize = 512 << 10;
/// Parts for each thread when work is dealt out.
const DEALS: usize = 8;

/// Outputs of some panels for some rows, `[panel][row][lane]`, without gaps where there are fewer rows than `T`.
type Tile<const T: usize> = [[[f32; PANEL]; T]; STRIP];

/// What a product does with the output that is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Overwrite it.
    Store,
    /// Add to it, as a residual connection does.
    Add,
}

impl Mode {
    #[inline(always)]
    fn put(self, out: &mut [f32], sums: &[f32]) {
        match self {
            Mode::Store => out.copy_from_slice(sums),
            Mode::Add => out.iter_mut().zip(sums).for_each(|(out, sum)| *out += *sum),
        }
    }
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
    matmul_each(team, &[(weights, offset)], x, out, stride, mode);
}

/// [`matmul`] with several matrices, each with the offset of its outputs, in one pass of the team.
///
/// # Panics
/// As [`matmul`], or if outputs overlap.
pub fn matmul_each(
    team: &Team,
    weights: &[(&PackedMatrix, usize)],
    x: &Activations,
    out: &mut [f32],
    stride: usize,
    mode: Mode,
) {
    if x.rows() == 0 {
        return;
    }
    let mut free = 0;
    for (weights, offset) in weights {
        assert_eq!(x.cols(), weights.cols(), "columns of activations and weights");
        let end = offset + weights.rows();
        assert!(*offset >= free, "outputs from {offset} on, which others before them reach");
        assert!(end <= stride, "outputs {offset} + {} in rows of {stride}", weights.rows());
        assert!((x.rows() - 1) * stride + end <= out.len(), "output of {}", out.len());
        free = end;
    }
    let out = SharedMut::new(out);
    if x.rows() <= SMALL_TILE {
        products::<SMALL_TILE>(team, weights, x, &out, stride, mode);
    } else {
        products::<TILE>(team, weights, x, &out, stride, mode);
    }
}

/// [`matmul_each`] in tiles of `T` rows, with all shapes checked.
fn products<const T: usize>(
    team: &Team,
    weights: &[(&PackedMatrix, usize)],
    x: &Activations,
    out: &SharedMut<'_, f32>,
    stride: usize,
    mode: Mode,
) {
    let path = team.path();
    let panels: usize = weights.iter().map(|(weights, _)| weights.panels()).sum();
    // Few rows gain by pairs from a few for each thread on, and tiles always do.
    let pairs = match path.isa() {
        Isa::Amx if x.rows() >= TILED => 0,
        _ if T == SMALL_TILE => 4,
        _ => DEALS,
    };
    let strip = if panels >= team.threads() * pairs * STRIP { STRIP } else { 1 };
    let strips = weights.iter().map(|(weights, _)| weights.panels().div_ceil(strip)).sum();
    for_parts(team, strips, x, |strips, rows| {
        let mut tile: Tile<T> = [[[0.0; PANEL]; T]; STRIP];
        let mut before = 0;
        for (weights, offset) in weights {
            let (panels, strips_here) = (weights.panels(), weights.panels().div_ceil(strip));
            let mine = strips.start.max(before)..strips.end.min(before + strips_here);
            for i in mine.map(|i| i - before) {
                let (first, second) =
                    if T == SMALL_TILE { (i, i + strips_here) } else { (i * strip, i * strip + 1) };
                let both = [(*weights, first), (*weights, second)];
                let both = &both[..if strip == 2 && second < panels { 2 } else { 1 }];
                for_tiles::<T>(rows.clone(), |rows| {
                    let [a, b] = tile.each_mut().map(|tile| &mut tile[..rows.len()]);
                    panel_products(path, both, x, rows.clone(), &mut [a, b][..both.len()]);
                    for ((_, panel), sums) in both.iter().zip(&tile) {
                        let lanes = PANEL.min(weights.rows() - panel * PANEL);
                        for (row, sums) in rows.clone().zip(sums) {
                            let start = row * stride + offset + panel * PANEL;
                            // SAFETY: only this thread handles this panel for this row.
                            let out = unsafe { out.slice(start..start + lanes) };
                            match out.as_mut_array::<PANEL>() {
                                Some(out) => mode.put(out, sums),
                                None => mode.put(out, &sums[..lanes]),
                            }
                        }
                    }
                });
            }
            before += strips_here;
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
    let (cols, out) = (out.cols(), out.writer(quantize));
    if x.rows() <= SMALL_TILE {
        gated::<SMALL_TILE>(team, gate, up, x, activation, cols, &out);
    } else {
        gated::<TILE>(team, gate, up, x, activation, cols, &out);
    }
}

/// [`gate_up`] in tiles of `T` rows, with all shapes checked.
fn gated<const T: usize>(
    team: &Team,
    gate: &PackedMatrix,
    up: &PackedMatrix,
    x: &Activations,
    activation: Activation,
    cols: usize,
    out: &Writer<'_>,
) {
    let path = team.path();
    // A strip is a block of the output, so that the thread that made it can quantize it.
    for_parts(team, cols.div_ceil(BLOCK), x, |strips, rows| {
        let mut gates: Tile<T> = [[[0.0; PANEL]; T]; STRIP];
        let mut ups = gates;
        let (gates, ups) = (gates.as_flattened_mut(), ups.as_flattened_mut());
        for strip in strips {
            let part = strip * BLOCK..cols.min((strip + 1) * BLOCK);
            let panels = strip * STRIP..gate.panels().min((strip + 1) * STRIP);
            for_tiles::<T>(rows.clone(), |rows| {
                let (count, used) = (rows.len(), rows.len() * panels.len());
                let outputs = gates.chunks_exact_mut(count).zip(ups.chunks_exact_mut(count));
                for (panel, (gates, ups)) in panels.clone().zip(outputs) {
                    let both = [(gate, panel), (up, panel)];
                    panel_products(path, &both, x, rows.clone(), &mut [gates, ups]);
                }
                // All at once, so that the long chain of one exponential overlaps with the next.
                activation.gate(path, gates[..used].as_flattened_mut(), ups[..used].as_flattened());
                for (i, row) in rows.enumerate() {
                    let write = |out: &mut [f32]| {
                        let mut gates = gates[i..].iter().step_by(count);
                        let (whole, rest) = out.as_chunks_mut::<PANEL>();
                        whole.iter_mut().zip(&mut gates).for_each(|(out, gates)| *out = *gates);
                        if let (false, Some(gates)) = (rest.is_empty(), gates.next()) {
                            rest.copy_from_slice(&gates[..rest.len()]);
                        }
                    };
                    // SAFETY: only this thread handles this strip for this row.
                    unsafe { out.write(path, row, part.clone(), write) };
                }
            });
        }
    });
}

/// Deals `strips x rows of x` out to the team: `f(strips, rows)`.
fn for_parts(team: &Team, strips: usize, x: &Activations, f: impl Fn(Range<usize>, Range<usize>) + Sync) {
    if x.rows() == 0 || strips == 0 {
        return;
    }
    let deals = team.threads() * DEALS;
    // As many rows as the cache holds, fewer if there are not enough strips for all threads.
    let cached = (CACHED / x.cols().max(1)).next_multiple_of(TILE);
    let spread = x.rows().div_ceil(deals.div_ceil(strips)).next_multiple_of(8);
    let rows = cached.min(spread).min(x.rows());
    // Rounded down: what is dealt out last is then a small part of the whole.
    let run = (strips / deals).max(1);
    let (parts, runs) = (x.rows().div_ceil(rows), strips.div_ceil(run));
    team.deal(parts * runs, 1, |items| {
        for item in items {
            let (row, strip) = (item / runs * rows, item % runs * run);
            f(strip..strips.min(strip + run), row..x.rows().min(row + rows));
        }
    });
}

/// Cuts rows into tiles of `T`.
fn for_tiles<const T: usize>(rows: Range<usize>, mut f: impl FnMut(Range<usize>)) {
    for start in rows.clone().step_by(T) {
        f(start..rows.end.min(start + T));
    }
}

/// At most `STRIP` panels, of one matrix or more, times at most `TILE` rows, into `out[panel][row][lane]`.
fn panel_products(
    path: Path,
    panels: &[(&PackedMatrix, usize)],
    x: &Activations,
    rows: Range<usize>,
    out: &mut [&mut [[f32; PANEL]]],
) {
    let format = panels[0].0.format();
    if let ([first, second], [a, b]) = (panels, &mut *out)
        && second.0.format() != format
    {
        panel_products(path, &[*first], x, rows.clone(), &mut [a]);
        return panel_products(path, &[*second], x, rows, &mut [b]);
    }
    let mut bytes: [&[u8]; STRIP] = [&[]; STRIP];
    for (bytes, (weights, panel)) in bytes.iter_mut().zip(panels) {
        *bytes = weights.panel_bytes(*panel);
    }
    let panels = &bytes[..panels.len()];
    match x.int_rows(rows.clone()) {
        Some(x) if format.is_quantized() => {
            #[cfg(target_arch = "x86_64")]
            match path.isa() {
                Isa::Amx if rows.len() >= TILED && x.cols > 0 => {
                    // SAFETY: such a path exists only where the CPU has these features and the system allows them.
                    return unsafe { amx::int(format, panels, &x, out) };
                }
                // SAFETY: as above.
                Isa::Avx512 | Isa::Amx => return unsafe { avx512::int(format, panels, &x, out) },
                _ => {}
            }
            for (panel, out) in panels.iter().zip(out) {
                match path.isa() {
                    #[cfg(target_arch = "x86_64")]
                    // SAFETY: as above.
                    Isa::Avx2 => unsafe { avx2::int(format, panel, &x, out) },
                    #[cfg(target_arch = "aarch64")]
                    // SAFETY: as above.
                    Isa::Neon => unsafe { neon::int(format, panel, &x, out) },
                    _ => scalar::int(format, panel, &x, out),
                }
            }
        }
        _ => {
            let x = x.float_rows(rows);
            match path.isa() {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: such a path exists only where the CPU has these features.
                Isa::Avx2 => unsafe { avx2::float(format, panels, &x, out) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                Isa::Avx512 | Isa::Amx => unsafe { avx512::float(format, panels, &x, out) },
                #[cfg(target_arch = "aarch64")]
                // SAFETY: as above.
                Isa::Neon => unsafe { neon::float(format, panels, &x, out) },
                _ => scalar::float(format, panels, &x, out),
            }
        }
    }
}
