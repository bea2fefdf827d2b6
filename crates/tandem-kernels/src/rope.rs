//! Rotary position embedding (Su et al., 2021) in the order of Hugging Face checkpoints: dimension i of the first half
//! turns with dimension i of the second half, by the angle `position * inverse_frequency[i]`.
//!
//! Angles are computed as transformers computes them, since that is what the model was trained and is checked with:
//! the product of two f32, rounded to f32, and then an accurate cosine and sine of *that* number. At far positions the
//! rounding of the product is visible, and is part of the model.
//!
//! The angles of a step are the same in all its layers, so they are computed once a step ([`RopeTable::rotations`])
//! and not kept: nothing grows with the context.

use crate::lanes::{LANES, Lanes, with_lanes};
use crate::path::Path;
use crate::team::Team;

/// What fixes the angles of a sequence: its inverse frequencies, and a factor on cosine and sine (the attention factor
/// of YaRN and its like, else 1).
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    inverse_frequencies: Vec<f32>,
    factor: f32,
}

impl RopeTable {
    /// With n inverse frequencies, the first 2 n dimensions of each head are turned and the others left alone.
    pub fn new(inverse_frequencies: Vec<f32>, factor: f32) -> Self {
        Self { inverse_frequencies, factor }
    }

    /// The dimensions that are turned.
    pub fn rotary_dim(&self) -> usize {
        2 * self.inverse_frequencies.len()
    }

    /// Cosines and sines for tokens at these positions.
    pub fn rotations(&self, positions: impl IntoIterator<Item = usize>) -> Rotations {
        let mut rotations = Rotations { half: self.inverse_frequencies.len(), tokens: 0, turns: Vec::new() };
        rotations.extend(self, positions);
        rotations
    }
}

/// The cosines and sines of the tokens of a step.
#[derive(Clone, Debug)]
pub struct Rotations {
    half: usize,
    tokens: usize,
    /// For each token its cosines, then its sines.
    turns: Vec<f32>,
}

impl Rotations {
    /// Appends tokens, which may be of another sequence with other frequencies.
    ///
    /// # Panics
    /// If `table` turns another number of dimensions.
    pub fn extend(&mut self, table: &RopeTable, positions: impl IntoIterator<Item = usize>) {
        assert!(
            table.rotary_dim() == 2 * self.half,
            "{} rotary dimensions beside {}",
            table.rotary_dim(),
            2 * self.half
        );
        let factor = table.factor;
        for position in positions {
            let angle = |frequency: &f32| f64::from(position as f32 * frequency);
            let frequencies = &table.inverse_frequencies;
            self.turns.extend(frequencies.iter().map(|f| angle(f).cos() as f32 * factor));
            self.turns.extend(frequencies.iter().map(|f| angle(f).sin() as f32 * factor));
            self.tokens += 1;
        }
    }

    /// The number of tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Turns all heads of one token: `x` is heads × `head_dim`.
    ///
    /// # Panics
    /// If there is no such token, `head_dim` is less than the rotary dimensions, or it does not divide `x`.
    pub fn apply(&self, path: Path, token: usize, x: &mut [f32], head_dim: usize) {
        let half = self.half;
        assert!(
            head_dim >= 2 * half && head_dim > 0 && x.len().is_multiple_of(head_dim),
            "{} floats are no heads of {head_dim} with {} rotary dimensions",
            x.len(),
            2 * half
        );
        assert!(token < self.tokens, "token {token} of {}", self.tokens);
        let (cos, sin) = self.turns[token * 2 * half..][..2 * half].split_at(half);
        with_lanes!(path, lanes => lanes.vectorize(
            #[inline(always)]
            || {
                for head in x.chunks_exact_mut(head_dim) {
                    let (first, second) = head[..2 * half].split_at_mut(half);
                    turn(lanes, cos, sin, first, second);
                }
            },
        ));
    }
}

/// Turns the heads at the start of every token's row: `x` is tokens × `stride` and holds `heads * head_dim` floats to
/// turn at the start of each row. Queries and keys that lie beside each other are turned together.
///
/// # Panics
/// If `x` has not as many rows as `rotations` has tokens, or the heads do not fit a row or the rotation.
pub fn rope(team: &Team, x: &mut [f32], stride: usize, heads: usize, head_dim: usize, rotations: &Rotations) {
    let width = heads * head_dim;
    assert!(stride > 0 && width <= stride, "{heads} heads of {head_dim} floats in rows of {stride}");
    assert!(
        x.len() == rotations.tokens() * stride,
        "{} floats for {} tokens of {stride}",
        x.len(),
        rotations.tokens()
    );
    let path = team.path();
    let grain = rotations.tokens().div_ceil(4 * team.threads());
    team.chunks_mut(x, stride, grain, |token, row| rotations.apply(path, token, &mut row[..width], head_dim));
}

#[inline(always)]
fn turn<L: Lanes>(lanes: L, cos: &[f32], sin: &[f32], first: &mut [f32], second: &mut [f32]) {
    let ((cos, cos_tail), (sin, sin_tail)) = (cos.as_chunks::<LANES>(), sin.as_chunks::<LANES>());
    let (first, first_tail) = first.as_chunks_mut::<LANES>();
    let (second, second_tail) = second.as_chunks_mut::<LANES>();
    for (((cos, sin), a), b) in cos.iter().zip(sin).zip(first).zip(second) {
        let (cos, sin) = (lanes.load(cos), lanes.load(sin));
        let (x, y) = (lanes.load(a), lanes.load(b));
        lanes.store(lanes.sub(lanes.mul(x, cos), lanes.mul(y, sin)), a);
        lanes.store(lanes.fma(y, cos, lanes.mul(x, sin)), b);
    }
    for (((cos, sin), a), b) in cos_tail.iter().zip(sin_tail).zip(first_tail).zip(second_tail) {
        let (x, y) = (*a, *b);
        *a = x * cos - y * sin;
        *b = y.mul_add(*cos, x * sin);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frequencies(count: usize) -> Vec<f32> {
        (0..count).map(|i| 10_000f32.powf(-(i as f32) / count as f32)).collect()
    }

    /// transformers 4 and 5, `apply_rotary_pos_emb` with `rotate_half`, in f64 on the f32 angle.
    fn reference(x: &[f32], frequencies: &[f32], factor: f32, position: usize) -> Vec<f64> {
        let half = frequencies.len();
        (0..x.len())
            .map(|i| {
                let x = |i: usize| f64::from(x[i]);
                if i >= 2 * half {
                    return x(i);
                }
                let (sin, cos) = f64::from(position as f32 * frequencies[i % half]).sin_cos();
                let turned = if i < half { -x(i + half) } else { x(i - half) };
                (x(i) * cos + turned * sin) * f64::from(factor)
            })
            .collect()
    }

    proptest! {
        #[test]
        fn it_is_rotate_half_on_every_path(
            half in 0usize..45,
            rest in 0usize..20,
            heads in 1usize..4,
            extra in 0usize..5,
            positions in prop::collection::vec(prop_oneof![0usize..4096, 0usize..2_000_000], 1..6),
            factor in prop_oneof![Just(1.0f32), Just(1.25)],
            seed in prop::collection::vec(-3f32..3.0, 101),
        ) {
            let head_dim = 2 * half + rest + usize::from(half + rest == 0);
            let stride = heads * head_dim + extra;
            let x: Vec<f32> = seed.iter().cycle().take(positions.len() * stride).copied().collect();
            let table = RopeTable::new(frequencies(half), factor);
            let rotations = table.rotations(positions.iter().copied());
            let mut scalar: Option<Vec<f32>> = None;
            for path in Path::supported() {
                let mut turned = x.clone();
                rope(&Team::with_path(2, path).unwrap(), &mut turned, stride, heads, head_dim, &rotations);
                for ((x, turned), position) in x.chunks(stride).zip(turned.chunks(stride)).zip(&positions) {
                    prop_assert_eq!(&x[heads * head_dim..], &turned[heads * head_dim..]);
                    for (x, turned) in x.chunks_exact(head_dim).zip(turned.chunks_exact(head_dim)).take(heads) {
                        for (turned, want) in turned.iter().zip(reference(x, &frequencies(half), factor, *position)) {
                            prop_assert!((f64::from(*turned) - want).abs() < 2e-6, "{turned} for {want}");
                        }
                    }
                }
                prop_assert_eq!(scalar.get_or_insert_with(|| turned.clone()), &turned, "{}", path);
            }
        }
    }

    #[test]
    fn sequences_with_other_frequencies_stand_side_by_side() {
        let (a, b) = (RopeTable::new(vec![1.0, 0.1], 1.0), RopeTable::new(vec![0.5, 0.01], 1.5));
        let mut both = a.rotations([3]);
        both.extend(&b, [4]);
        let mut x = [1.0, 2.0, 3.0, 4.0];
        both.apply(Path::SCALAR, 1, &mut x, 4);
        for (x, want) in x.iter().zip(reference(&[1.0, 2.0, 3.0, 4.0], &[0.5, 0.01], 1.5, 4)) {
            assert!((f64::from(*x) - want).abs() < 1e-6);
        }
    }

    #[test]
    #[should_panic(expected = "no heads of 6 with 8 rotary dimensions")]
    fn a_head_smaller_than_the_rotation_is_refused() {
        RopeTable::new(frequencies(4), 1.0).rotations([0]).apply(Path::SCALAR, 0, &mut [0.0; 12], 6);
    }
}
