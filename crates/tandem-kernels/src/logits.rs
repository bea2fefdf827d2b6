//! Reductions over the logits of one token.
//!
//! The vocabulary is cut into pieces of fixed size, so that results do not depend on the number of threads.

use crate::lanes::{LANES, Lanes, with_lanes};
use crate::team::Team;

/// Logits that a thread reduces at a time.
const PIECE: usize = 8192;

/// Vectors that are accumulated side by side.
const CHAINS: usize = 4;

/// Where the greatest logit is, the first of equals; NaN is never it. `None` if there is no number at all.
pub fn argmax(team: &Team, logits: &[f32]) -> Option<usize> {
    let maxima = maxima(team, logits);
    let max = maxima.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    maxima.iter().zip(logits.chunks(PIECE)).enumerate().find_map(|(i, (greatest, piece))| {
        let at = if *greatest == max { piece.iter().position(|x| *x == max) } else { None };
        at.map(|at| i * PIECE + at)
    })
}

/// ln Σ exp(logit): what to subtract from a logit to get its log-probability. Negative infinity for no logits; NaN if
/// one is NaN.
pub fn log_sum_exp(team: &Team, logits: &[f32]) -> f32 {
    let max = maxima(team, logits).into_iter().fold(f32::NEG_INFINITY, f32::max);
    if max.is_infinite() {
        return if logits.iter().any(|x| x.is_nan()) { f32::NAN } else { max };
    }
    let sums = with_lanes!(team.path(), lanes => pieces(team, logits, |piece| lanes.vectorize(
        #[inline(always)]
        || {
            let shift = lanes.splat(max);
            let sums = fold(lanes, piece, 0.0, f32::NEG_INFINITY, |sum, x| {
                lanes.add(sum, lanes.exp(lanes.sub(x, shift)))
            });
            lanes.sum(lanes.add(lanes.add(sums[0], sums[2]), lanes.add(sums[1], sums[3])))
        },
    )));
    let sum: f64 = sums.into_iter().map(f64::from).sum();
    (f64::from(max) + sum.ln()) as f32
}

/// The greatest number of each piece.
fn maxima(team: &Team, logits: &[f32]) -> Vec<f32> {
    with_lanes!(team.path(), lanes => pieces(team, logits, |piece| lanes.vectorize(
        #[inline(always)]
        || {
            let lowest = f32::NEG_INFINITY;
            // `max` gives its second operand where the first is NaN.
            let max = fold(lanes, piece, lowest, lowest, |max, x| lanes.max(x, max));
            lanes.greatest(lanes.max(lanes.max(max[0], max[2]), lanes.max(max[1], max[3])))
        },
    )))
}

fn pieces(team: &Team, logits: &[f32], f: impl Fn(&[f32]) -> f32 + Sync) -> Vec<f32> {
    let mut results = vec![0.0; logits.len().div_ceil(PIECE)];
    team.chunks_mut(&mut results, 1, 1, |i, result| {
        let first = i * PIECE;
        result[0] = f(&logits[first..logits.len().min(first + PIECE)]);
    });
    results
}

/// Folds the vectors of `x`, the last of them filled up with `fill`, into four accumulators in turn.
#[inline(always)]
fn fold<L: Lanes>(
    lanes: L,
    x: &[f32],
    start: f32,
    fill: f32,
    f: impl Fn(L::V, L::V) -> L::V,
) -> [L::V; CHAINS] {
    let mut chains = [lanes.splat(start); CHAINS];
    let (vectors, tail) = x.as_chunks::<LANES>();
    let (groups, rest) = vectors.as_chunks::<CHAINS>();
    for group in groups {
        for (chain, x) in chains.iter_mut().zip(group) {
            *chain = f(*chain, lanes.load(x));
        }
    }
    let mut last = [fill; LANES];
    last[..tail.len()].copy_from_slice(tail);
    for (chain, x) in chains.iter_mut().zip(rest.iter().chain([&last])) {
        *chain = f(*chain, lanes.load(x));
    }
    chains
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::path::Path;
    use proptest::prelude::*;

    fn teams() -> Vec<Team> {
        let teams =
            |threads| Path::supported().into_iter().map(move |path| Team::with_path(threads, path).unwrap());
        (1..=3).flat_map(teams).collect()
    }

    fn lengths() -> impl Strategy<Value = usize> {
        prop_oneof![0usize..80, PIECE - 2..PIECE + 20, 20_000usize..20_100]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases.min(64)))]

        #[test]
        fn the_first_greatest_number_wins(
            length in lengths(),
            seed in prop::collection::vec(
                prop_oneof![8 => (-9i8..9).prop_map(f32::from), 1 => Just(f32::NAN), 1 => Just(f32::NEG_INFINITY)],
                53,
            ),
            peaks in prop::collection::vec((0usize..21_000, 9f32..12.0), 0..4),
        ) {
            let mut logits: Vec<f32> = seed.iter().cycle().take(length).copied().collect();
            for (at, peak) in peaks {
                if let Some(logit) = logits.get_mut(at) {
                    *logit = peak;
                }
            }
            let mut want: Option<usize> = None;
            for (i, x) in logits.iter().enumerate() {
                if !x.is_nan() && want.is_none_or(|best| *x > logits[best]) {
                    want = Some(i);
                }
            }
            for team in teams() {
                prop_assert_eq!(argmax(&team, &logits), want);
            }
        }

        #[test]
        fn log_sum_exp_is_the_definition(
            length in lengths(),
            seed in prop::collection::vec(-40f32..40.0, 61),
            shift in -1e3f32..1e3,
        ) {
            let logits: Vec<f32> = seed.iter().cycle().take(length).map(|x| x + shift).collect();
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = logits.iter().map(|x| (f64::from(*x) - f64::from(max)).exp()).sum();
            let want = f64::from(max) + sum.ln();
            let mut same: Option<f32> = None;
            for team in teams() {
                let got = log_sum_exp(&team, &logits);
                prop_assert!(got == want as f32 || (f64::from(got) - want).abs() < 2e-6 + 1e-7 * want.abs());
                prop_assert_eq!(same.get_or_insert(got).to_bits(), got.to_bits());
            }
        }
    }

    #[test]
    fn logits_that_are_no_numbers() {
        let team = Team::new(1).unwrap();
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        assert_eq!(argmax(&team, &[nan, nan]), None);
        assert_eq!(argmax(&team, &[nan, -inf, -inf]), Some(1));
        assert_eq!(argmax(&team, &[1.0, inf, nan, inf]), Some(1));
        assert_eq!(argmax(&team, &[-0.0, 0.0]), Some(0));
        assert_eq!(log_sum_exp(&team, &[]), -inf);
        assert_eq!(log_sum_exp(&team, &[-inf, -inf]), -inf);
        assert_eq!(log_sum_exp(&team, &[-inf, 2.0]), 2.0);
        assert_eq!(log_sum_exp(&team, &[1.0, inf]), inf);
        assert!(log_sum_exp(&team, &[1.0, nan]).is_nan());
        assert!(log_sum_exp(&team, &[inf, nan]).is_nan());
    }
}
