//! Root-mean-square normalisation (Zhang and Sennrich, 2019): `x / sqrt(mean(x²) + eps) * weight`.
//!
//! The sum of squares runs over 32 interleaved f32 chains in a fixed order, one per lane of four vectors: a chain is
//! short, which keeps rounding far below that of one long sum, and the bits depend on nothing but the row.

use std::ops::Range;

use crate::activations::Activations;
use crate::lanes::{LANES, Lanes, with_lanes};
use crate::path::Path;
use crate::team::Team;

/// Normalises every row of `x` (tokens × `weight.len()`) into `out`, which is resized to that many rows; with
/// `quantize`, rounds each row to `out`'s 8-bit form as well while it is in cache (see [`Activations::quantize`]).
///
/// # Panics
/// If `weight` is empty, does not divide `x`, or is not as long as a row of `out`.
pub fn rms_norm(team: &Team, x: &[f32], weight: &[f32], eps: f32, out: &mut Activations, quantize: bool) {
    let cols = weight.len();
    assert!(cols > 0 && x.len().is_multiple_of(cols), "{} floats are no rows of {cols}", x.len());
    assert!(out.cols() == cols, "rows of {cols} floats into rows of {}", out.cols());
    out.resize(x.len() / cols);
    with_lanes!(team.path(), lanes => out.fill_rows(team, quantize, |row, out| {
        let x = &x[row * cols..][..cols];
        lanes.vectorize(
            #[inline(always)]
            || {
                let scale = scale(lanes, x, eps);
                for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
                    *out = x * scale * weight;
                }
            },
        );
    }));
}

/// Normalises each row of `weight.len()` floats of `x` in place: the heads of one token's queries or keys.
///
/// # Panics
/// If `weight` is empty or does not divide `x`.
pub fn rms_norm_rows(path: Path, x: &mut [f32], weight: &[f32], eps: f32) {
    let cols = weight.len();
    assert!(cols > 0 && x.len().is_multiple_of(cols), "{} floats are no rows of {cols}", x.len());
    with_lanes!(path, lanes => lanes.vectorize(
        #[inline(always)]
        || {
            for row in x.chunks_exact_mut(cols) {
                let scale = scale(lanes, row, eps);
                for (x, weight) in row.iter_mut().zip(weight) {
                    *x = *x * scale * weight;
                }
            }
        },
    ));
}

/// Normalises, in place, the columns of every row of `x` (tokens × `stride`) that `columns` names, `weight.len()` at
/// a time: all heads of the queries or keys of a step.
///
/// # Panics
/// If `columns` does not fit a row, or `weight` is empty or does not divide it.
pub fn rms_norm_columns(
    team: &Team,
    x: &mut [f32],
    stride: usize,
    columns: Range<usize>,
    weight: &[f32],
    eps: f32,
) {
    assert!(stride > 0 && columns.end <= stride, "columns {columns:?} of rows of {stride}");
    assert!(x.len().is_multiple_of(stride), "{} floats are no rows of {stride}", x.len());
    let (path, rows) = (team.path(), x.len() / stride);
    team.chunks_mut(x, stride, rows.div_ceil(4 * team.threads()), |_, row| {
        rms_norm_rows(path, &mut row[columns.clone()], weight, eps);
    });
}

/// 1 / sqrt(mean(x²) + eps)
#[inline(always)]
fn scale<L: Lanes>(lanes: L, x: &[f32], eps: f32) -> f32 {
    const CHAINS: usize = 4;
    let mut sums = [lanes.splat(0.0); CHAINS];
    let (vectors, tail) = x.as_chunks::<LANES>();
    let (groups, rest) = vectors.as_chunks::<CHAINS>();
    for group in groups {
        for (sum, x) in sums.iter_mut().zip(group) {
            let x = lanes.load(x);
            *sum = lanes.fma(x, x, *sum);
        }
    }
    let mut last = [0.0; LANES];
    last[..tail.len()].copy_from_slice(tail);
    for (sum, x) in sums.iter_mut().zip(rest.iter().chain([&last])) {
        let x = lanes.load(x);
        *sum = lanes.fma(x, x, *sum);
    }
    let sum = lanes.sum(lanes.add(lanes.add(sums[0], sums[2]), lanes.add(sums[1], sums[3])));
    1.0 / (sum / x.len() as f32 + eps).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn reference(x: &[f32], weight: &[f32], eps: f32) -> Vec<f64> {
        let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / x.len() as f64;
        let scale = 1.0 / (mean + f64::from(eps)).sqrt();
        x.iter().zip(weight).map(|(x, w)| f64::from(*x) * scale * f64::from(*w)).collect()
    }

    proptest! {
        #[test]
        fn it_is_the_definition_on_every_path(
            weight in prop::collection::vec(-2f32..2.0, 1..300),
            rows in 0usize..6,
            seed in prop::collection::vec(-30f32..30.0, 97),
            threads in 1usize..4,
        ) {
            let cols = weight.len();
            let x: Vec<f32> = seed.iter().cycle().take(rows * cols).copied().collect();
            let mut scalar: Option<Vec<f32>> = None;
            for path in Path::supported() {
                let team = Team::with_path(threads, path).unwrap();
                let mut out = Activations::new(cols);
                rms_norm(&team, &x, &weight, 1e-5, &mut out, true);
                prop_assert_eq!(out.rows(), rows);
                for (x, out) in x.chunks(cols).zip(out.values().chunks(cols)) {
                    for (out, want) in out.iter().zip(reference(x, &weight, 1e-5)) {
                        prop_assert!((f64::from(*out) - want).abs() <= 1e-6 * want.abs(), "{out} for {want}");
                    }
                }
                let mut in_place = x.clone();
                rms_norm_rows(path, &mut in_place, &weight, 1e-5);
                prop_assert_eq!(&in_place, out.values());
                prop_assert_eq!(scalar.get_or_insert(in_place), out.values());
            }
        }
    }

    #[test]
    fn columns_are_normed_where_they_lie() {
        let x: Vec<f32> = (0..7 * 11).map(|i| (i as f32).sin()).collect();
        for path in Path::supported() {
            let mut got = x.clone();
            let team = Team::with_path(3, path).unwrap();
            rms_norm_columns(&team, &mut got, 11, 2..8, &[1.0, 2.0, 3.0], 1e-6);
            for (x, got) in x.chunks(11).zip(got.chunks(11)) {
                let mut want = x.to_vec();
                rms_norm_rows(path, &mut want[2..8], &[1.0, 2.0, 3.0], 1e-6);
                assert_eq!(got, want);
            }
        }
    }

    #[test]
    fn a_row_of_zeros_stays_zero() {
        let mut x = [0.0; 20];
        rms_norm_rows(Path::detect().unwrap(), &mut x, &[1.0; 10], 1e-6);
        assert_eq!(x, [0.0; 20]);
    }

    #[test]
    #[should_panic(expected = "7 floats are no rows of 2")]
    fn ragged_input_is_refused() {
        rms_norm_rows(Path::SCALAR, &mut [0.0; 7], &[1.0; 2], 1e-6);
    }
}
