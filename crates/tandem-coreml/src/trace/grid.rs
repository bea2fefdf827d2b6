//! Values of some channels for some tokens, and the few operations that a forward pass needs, in f32.

use rayon::prelude::*;
use tandem_model::weights::Matrix;

/// Tokens that lie side by side: enough for the compiler to use vectors whatever the machine has.
const LANES: usize = 32;

/// `channels` values for each of `tokens` tokens. Tokens lie in blocks of [`LANES`], channel after channel; what a last
/// block has too many has no meaning.
#[derive(Debug, Clone)]
pub(super) struct Grid {
    pub channels: usize,
    pub tokens: usize,
    values: Vec<[f32; LANES]>,
}

impl Grid {
    pub fn zeros(channels: usize, tokens: usize) -> Self {
        Self { channels, tokens, values: vec![[0.0; LANES]; channels * tokens.div_ceil(LANES)] }
    }

    pub fn at(&self, channel: usize, token: usize) -> f32 {
        self.values[token / LANES * self.channels + channel][token % LANES]
    }

    pub fn set(&mut self, channel: usize, token: usize, value: f32) {
        self.values[token / LANES * self.channels + channel][token % LANES] = value;
    }

    /// Every value replaced by what `of` makes of it.
    pub fn map(&mut self, of: impl Fn(f32) -> f32) {
        self.values.iter_mut().flatten().for_each(|value| *value = of(*value));
    }

    /// Every value replaced by what `of` makes of it and the one at its place in `other`, of the same shape.
    pub fn zip(&mut self, other: &Self, of: impl Fn(f32, f32) -> f32) {
        for (value, other) in self.values.iter_mut().flatten().zip(other.values.iter().flatten()) {
            *value = of(*value, *other);
        }
    }

    /// Adds `bias[channel]`.
    pub fn add_bias(&mut self, bias: &[f32]) {
        for block in self.values.chunks_mut(self.channels) {
            for (lanes, bias) in block.iter_mut().zip(bias) {
                lanes.iter_mut().for_each(|value| *value += bias);
            }
        }
    }

    /// RMS norm over each run of `weight.len()` channels.
    pub fn rms_norm(&mut self, weight: &[f32], eps: f32) {
        let width = weight.len();
        for run in self.values.chunks_mut(width) {
            let mut scale = [0.0f32; LANES];
            for lanes in run.iter() {
                scale.iter_mut().zip(lanes).for_each(|(sum, value)| *sum += value * value);
            }
            scale.iter_mut().for_each(|sum| *sum = 1.0 / (*sum / width as f32 + eps).sqrt());
            for (lanes, weight) in run.iter_mut().zip(weight) {
                lanes.iter_mut().zip(&scale).for_each(|(value, scale)| *value *= scale * weight);
            }
        }
    }

    /// `matrix · self`: a token's column times each row. Sums run in the order of channels, whatever the number of
    /// threads.
    pub fn product(&self, matrix: &Matrix<'_>) -> Self {
        let mut out = Self::zeros(matrix.rows, self.tokens);
        for (from, to) in self.values.chunks(self.channels).zip(out.values.chunks_mut(matrix.rows)) {
            let rows = to.par_iter_mut().enumerate();
            rows.for_each_init(
                || vec![0.0; matrix.cols],
                |weights, (row, sums)| {
                    matrix.row_f32(row, weights);
                    *sums = [0.0; LANES];
                    for (lanes, weight) in from.iter().zip(weights.iter()) {
                        sums.iter_mut().zip(lanes).for_each(|(sum, value)| *sum += weight * value);
                    }
                },
            );
        }
        out
    }

    /// The largest magnitude; infinite if a value is not a number.
    pub fn largest(&self) -> f32 {
        let blocks = self.values.chunks(self.channels.max(1)).enumerate();
        let lanes = blocks.flat_map(|(block, values)| {
            let tokens = LANES.min(self.tokens - block * LANES);
            values.iter().flat_map(move |lanes| &lanes[..tokens])
        });
        lanes.fold(
            0.0f32,
            |largest, value| if value.is_nan() { f32::INFINITY } else { largest.max(value.abs()) },
        )
    }
}
