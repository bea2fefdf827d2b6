//! Quantizing float weights at load.

use half::f16;
use tandem_model::format::{BLOCK, Format};

use super::pack::{PackError, pack_lane};
use super::{PANEL, PackedMatrix};
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
        let format = target.format();
        let bytes = format.row_bytes(cols).ok_or(PackError::Columns { format, cols })?;
        PackedMatrix::build(team, format, rows, cols, |index, panel| {
            let (mut values, mut stored) = (vec![0.0; cols], vec![0; bytes]);
            for lane in 0..PANEL.min(rows - index * PANEL) {
                row(index * PANEL + lane, &mut values);
                let (values, _) = values.as_chunks();
                for (values, block) in values.iter().zip(stored.chunks_exact_mut(format.block_bytes())) {
                    match target {
                        Target::Q4 => quantize_q4_1(values, block),
                        Target::Q8 => quantize_q8_0(values, block),
                    }
                }
                pack_lane(format, &stored, lane, panel);
            }
        })
    }
}

/// Rounds a block to `d * q` with `d = max|x| / 127`.
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
fn quantize_q4_1(values: &[f32; BLOCK], block: &mut [u8]) {
    let low = values.iter().copied().fold(f32::INFINITY, f32::min);
    let high = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut best = Candidate::round(values, (high - low) / 15.0, low);
    for shrink in [0.0, 0.04, 0.08, 0.12, 0.16] {
        let margin = (high - low) * shrink / 2.0;
        let mut candidate = Candidate::round(values, (high - low - 2.0 * margin) / 15.0, low + margin);
        for _ in 0..2 {
            if candidate.error < best.error {
                best = candidate;
            }
            let Some((d, m)) = candidate.fit(values) else { break };
            candidate = Candidate::round(values, d, m);
        }
        if candidate.error < best.error {
            best = candidate;
        }
    }
    block[..2].copy_from_slice(&best.d.to_le_bytes());
    block[2..4].copy_from_slice(&best.m.to_le_bytes());
    for (i, byte) in block[4..].iter_mut().enumerate() {
        *byte = best.q[i] | best.q[i + BLOCK / 2] << 4;
    }
}

/// A block rounded with a given scale and minimum, which are those that f16 can hold.
#[derive(Clone, Copy)]
struct Candidate {
    d: f16,
    m: f16,
    q: [u8; BLOCK],
    error: f32,
}

impl Candidate {
    fn round(values: &[f32; BLOCK], d: f32, m: f32) -> Candidate {
        let (d, m) = (f16::from_f32(d), f16::from_f32(m));
        let (scale, min) = (d.to_f32(), m.to_f32());
        let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
        let q = values.map(|v| ((v - min) * inverse).round_ties_even().clamp(0.0, 15.0) as u8);
        let error = values.iter().zip(q).map(|(v, q)| (scale * f32::from(q) + min - v).powi(2)).sum();
        Candidate { d, m, q, error }
    }

    /// The scale and minimum that fit the values best, given how they were rounded.
    fn fit(&self, values: &[f32; BLOCK]) -> Option<(f32, f32)> {
        let n = BLOCK as f32;
        let (mut sq, mut sqq, mut sv, mut sqv) = (0.0, 0.0, 0.0, 0.0);
        for (v, q) in values.iter().zip(self.q.map(f32::from)) {
            sq += q;
            sqq += q * q;
            sv += v;
            sqv += q * v;
        }
        let determinant = n * sqq - sq * sq;
        let d = (n * sqv - sq * sv) / determinant;
        (determinant > 0.0 && d > 0.0).then(|| (d, (sv - d * sq) / n))
    }
}
