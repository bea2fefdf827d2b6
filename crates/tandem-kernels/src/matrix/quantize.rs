//! Quantizing float weights at load.

use half::f16;
use tandem_model::format::{BLOCK, Format};

use super::pack::{PackError, pack_lane};
use super::{PANEL, PackedMatrix};
#[cfg(target_arch = "x86_64")]
use crate::path::Isa;
use crate::team::Team;

/// What float weights can be quantized to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// 4-bit affine blocks of 32 (`Q4_1`), 5 bits a weight.
    Q4,
    /// 8-bit symmetric blocks of 32 (`Q8_0`), 8.5 bits a weight.
    Q8,
}

impl Target {
    /// The stored format.
    pub fn format(self) -> Format {
        match self {
            Target::Q4 => Format::Q4_1,
            Target::Q8 => Format::Q8_0,
        }
    }
}

impl PackedMatrix {
    /// Quantizes a matrix of floats; `row(i, out)` writes the `[cols]` values of row `i`.
    ///
    /// # Errors
    /// If `cols` does not divide into blocks of 32, or there is no memory.
    pub fn quantize(
        team: &Team,
        target: Target,
        rows: usize,
        cols: usize,
        row: impl Fn(usize, &mut [f32]) + Sync,
    ) -> Result<PackedMatrix, PackError> {
        PackedMatrix::quantize_in_parts(team, target, rows, cols, row, || ())
    }

    /// As [`PackedMatrix::quantize`], calling `packed` as [`PackedMatrix::pack_in_parts`] does.
    ///
    /// # Errors
    /// As [`PackedMatrix::quantize`].
    pub fn quantize_in_parts(
        team: &Team,
        target: Target,
        rows: usize,
        cols: usize,
        row: impl Fn(usize, &mut [f32]) + Sync,
        packed: impl FnMut(),
    ) -> Result<PackedMatrix, PackError> {
        let format = target.format();
        let path = team.path();
        let bytes = format.row_bytes(cols).ok_or(PackError::Columns { format, cols })?;
        let fill = |index: usize, panel: &mut [u8]| {
            let (mut values, mut stored) = (vec![0.0; cols], vec![0; bytes]);
            for lane in 0..PANEL.min(rows - index * PANEL) {
                row(index * PANEL + lane, &mut values);
                match path.isa() {
                    #[cfg(target_arch = "x86_64")]
                    // SAFETY: such a path exists only where the CPU has these features.
                    Isa::Avx2 | Isa::Avx512 | Isa::Amx => unsafe {
                        quantize_row_avx2(target, &values, &mut stored);
                    },
                    // Code for AArch64 is compiled for NEON in any case.
                    _ => quantize_row(target, &values, &mut stored),
                }
                pack_lane(format, (&stored).into(), lane, panel);
            }
        };
        PackedMatrix::build(team, format, rows, cols, fill, packed)
    }
}

/// Quantizes a row of whole blocks.
#[inline(always)]
fn quantize_row(target: Target, values: &[f32], stored: &mut [u8]) {
    let blocks = stored.chunks_exact_mut(target.format().block_bytes());
    for (values, block) in values.as_chunks().0.iter().zip(blocks) {
        match target {
            Target::Q4 => quantize_q4_1(values, block),
            Target::Q8 => quantize_q8_0(values, block),
        }
    }
}

/// [`quantize_row`] compiled for AVX2: the same operations, so the same bytes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn quantize_row_avx2(target: Target, values: &[f32], stored: &mut [u8]) {
    quantize_row(target, values, stored);
}

/// Rounds a block to `d * q` with `d = max|x| / 127`.
#[inline(always)]
fn quantize_q8_0(values: &[f32; BLOCK], block: &mut [u8]) {
    let largest = values.iter().fold(0f32, |largest, v| largest.max(v.abs()));
    let d = f16::from_f32(largest / 127.0);
    let inverse = if d > f16::ZERO { 1.0 / d.to_f32() } else { 0.0 };
    block[..2].copy_from_slice(&d.to_le_bytes());
    for (q, v) in block[2..].iter_mut().zip(values) {
        *q = ((v * inverse).round_ties_even().clamp(-127.0, 127.0) as i8).cast_unsigned();
    }
}

/// Rounds a block to `d * q + m`, `q` in 0..=15: the candidate with the least squared error among ranges that are a
/// little narrower than that of the values, each refined by a least-squares fit of `d` and `m` to its own rounding.
#[inline(always)]
fn quantize_q4_1(values: &[f32; BLOCK], block: &mut [u8]) {
    let low = values.iter().copied().fold(f32::INFINITY, f32::min);
    let high = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut best = Candidate::round(values, (high - low) / 15.0, low);
    for narrower in [0.0, 0.06, 0.12] {
        let margin = (high - low) * narrower / 2.0;
        let mut candidate = Candidate::round(values, (high - low - 2.0 * margin) / 15.0, low + margin);
        for _ in 0..2 {
            let Some((d, m)) = candidate.fit(values) else { break };
            candidate = Candidate::round(values, d, m);
            if candidate.error < best.error {
                best = candidate;
            }
        }
    }
    let (d, m) = (f16::from_f32(best.d), f16::from_f32(best.m));
    let best = Candidate::round(values, d.to_f32(), m.to_f32());
    block[..2].copy_from_slice(&d.to_le_bytes());
    block[2..4].copy_from_slice(&m.to_le_bytes());
    for (i, byte) in block[4..].iter_mut().enumerate() {
        *byte = best.q[i] as u8 | (best.q[i + BLOCK / 2] as u8) << 4;
    }
}

/// A block rounded with a given scale and minimum.
#[derive(Clone, Copy)]
struct Candidate {
    d: f32,
    m: f32,
    q: [f32; BLOCK],
    error: f32,
}

impl Candidate {
    #[inline(always)]
    fn round(values: &[f32; BLOCK], d: f32, m: f32) -> Candidate {
        /// Adding this to a small number leaves no place for a fraction.
        const WHOLE: f32 = 12_582_912.0;
        let inverse = if d > 0.0 { 1.0 / d } else { 0.0 };
        let (mut q, mut errors) = ([0.0; BLOCK], [0.0; BLOCK]);
        for i in 0..BLOCK {
            q[i] = ((values[i] - m) * inverse).clamp(0.0, 15.0) + WHOLE - WHOLE;
            let error = d * q[i] + m - values[i];
            errors[i] = error * error;
        }
        Candidate { d, m, q, error: sum(errors) }
    }

    /// The scale and minimum that fit the values best, given how they were rounded.
    #[inline(always)]
    fn fit(&self, values: &[f32; BLOCK]) -> Option<(f32, f32)> {
        let (n, q) = (BLOCK as f32, &self.q);
        let (sq, sqq) = (sum(*q), sum(q.map(|q| q * q)));
        let (sv, sqv) = (sum(*values), sum(std::array::from_fn(|i| q[i] * values[i])));
        let determinant = n * sqq - sq * sq;
        let d = (n * sqv - sq * sv) / determinant;
        (determinant > 0.0 && d > 0.0).then(|| (d, (sv - d * sq) / n))
    }
}

/// The sum of a block, in an order that suits SIMD.
#[inline(always)]
fn sum(values: [f32; BLOCK]) -> f32 {
    let mut lanes = [0f32; 8];
    for values in values.as_chunks::<8>().0 {
        for (lane, value) in lanes.iter_mut().zip(values) {
            *lane += value;
        }
    }
    let [a, b, c, d, e, f, g, h] = lanes;
    (a + b + (c + d)) + (e + f + (g + h))
}
