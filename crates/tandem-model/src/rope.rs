//! Rotary position embedding: how fast each pair of dimensions turns.
//!
//! Names and formulas are those of transformers' `modeling_rope_utils`. Two kinds, `dynamic` and `longrope`, depend on
//! how long the sequence will be. transformers looks at the length so far and changes the frequencies under keys that
//! are already cached; here the total length is known when a sequence is opened, and everything is fixed from it.

/// Rotary position embedding in Hugging Face's half-split order: dimension `i` pairs with `i + rotary_dim / 2`.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Base of the geometric series of wavelengths (`rope_theta`).
    pub theta: f32,
    /// Leading dimensions of each head that are rotated; `head_dim` unless rotary is partial.
    pub rotary_dim: usize,
    /// How the frequencies are stretched past the context the model was trained on.
    pub scaling: RopeScaling,
}

/// How rope frequencies are stretched.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// `theta^(-2i/d)` as it is.
    Default,
    /// Every frequency divided by `factor`.
    Linear {
        /// Stretch.
        factor: f32,
    },
    /// "NTK-aware": past the original context the base grows with the length of the sequence.
    Dynamic {
        /// Stretch.
        factor: f32,
        /// Context length of the original training, in tokens.
        original_context: usize,
    },
    /// YaRN (Peng et al., 2023): slow pairs divided by `factor`, fast ones kept, a ramp between, and a factor on cosine
    /// and sine.
    Yarn {
        /// Stretch of the slow pairs.
        factor: f32,
        /// Context length of the original training, in tokens.
        original_context: usize,
        /// Pairs that turn more often than this over the original context are kept.
        beta_fast: f32,
        /// Pairs that turn less often than this are stretched in full.
        beta_slow: f32,
        /// Whether the ramp's ends are rounded outwards to whole pairs.
        truncate: bool,
        /// Factor on cosine and sine.
        attention_factor: f32,
    },
    /// LongRoPE (Ding et al., 2024): frequency `i` divided by `short[i]`, or by `long[i]` for a sequence that will grow
    /// past the original context; `rotary_dim / 2` of each.
    LongRope {
        /// Divisors up to the original context.
        short: Vec<f32>,
        /// Divisors past it.
        long: Vec<f32>,
        /// Context length of the original training, in tokens.
        original_context: usize,
        /// Factor on cosine and sine, at any length.
        attention_factor: f32,
    },
    /// Llama 3.1: long wavelengths divided by `factor`, short ones kept, a ramp between.
    Llama3 {
        /// Stretch of the long wavelengths.
        factor: f32,
        /// Wavelengths above `original_context / low_freq_factor` are stretched in full.
        low_freq_factor: f32,
        /// Wavelengths below `original_context / high_freq_factor` are kept.
        high_freq_factor: f32,
        /// Context length of the original training, in tokens.
        original_context: usize,
    },
    /// Frequency `i` divided by `factors[i]`, `rotary_dim / 2` of them (GGUF's `rope_freqs.weight`).
    Factors(Vec<f32>),
}

/// What fixes the angles of a sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeFactors {
    /// Angular frequency of each rotated pair in radians per position, `rotary_dim / 2` values; transformers'
    /// `inv_freq`.
    pub inverse_frequencies: Vec<f32>,
    /// Factor on cosine and sine; transformers' `attention_scaling`.
    pub attention_factor: f32,
}

impl Rope {
    /// The factors of a sequence that will grow to at most `max_len` tokens. Computed in f64 and rounded once.
    pub fn factors(&self, max_len: usize) -> RopeFactors {
        let dim = self.rotary_dim as f64;
        let theta = f64::from(self.theta) * self.base_growth(max_len);
        let plain = |i: usize| theta.powf(-2.0 * i as f64 / dim);
        let each = |stretch: &dyn Fn(usize) -> f64| {
            (0..self.rotary_dim / 2).map(|i| (plain(i) / stretch(i)) as f32).collect()
        };
        let listed = |divisors: &[f32]| each(&|i| divisors.get(i).copied().map_or(1.0, f64::from));
        let mut attention_factor = 1.0;
        let inverse_frequencies = match &self.scaling {
            RopeScaling::Default | RopeScaling::Dynamic { .. } => each(&|_| 1.0),
            RopeScaling::Linear { factor } => each(&|_| f64::from(*factor)),
            RopeScaling::Factors(divisors) => listed(divisors),
            RopeScaling::LongRope { short, long, original_context, attention_factor: on_turns } => {
                attention_factor = *on_turns;
                listed(if max_len > *original_context { long } else { short })
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                let (low, high) = (f64::from(*low_freq_factor), f64::from(*high_freq_factor));
                each(&|i| {
                    let wavelengths = *original_context as f64 * plain(i) / std::f64::consts::TAU;
                    // 0 where the wavelength is long (stretched in full), 1 where it is short (kept).
                    blend(*factor, ((wavelengths - low) / (high - low)).clamp(0.0, 1.0))
                })
            }
            RopeScaling::Yarn {
                factor,
                original_context,
                beta_fast,
                beta_slow,
                truncate,
                attention_factor: on_turns,
            } => {
                attention_factor = *on_turns;
                // The pair that turns `turns` times over the original context.
                let pair = |turns: f32| {
                    let wavelength = *original_context as f64 / (f64::from(turns) * std::f64::consts::TAU);
                    dim * wavelength.ln() / (2.0 * theta.ln())
                };
                let (mut low, mut high) = (pair(*beta_fast), pair(*beta_slow));
                if *truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                (low, high) = (low.max(0.0), high.min(dim - 1.0));
                if low == high {
                    high += 0.001;
                }
                each(&|i| blend(*factor, 1.0 - ((i as f64 - low) / (high - low)).clamp(0.0, 1.0)))
            }
        };
        RopeFactors { inverse_frequencies, attention_factor }
    }

    /// Whether [`Rope::factors`] gives different answers for different lengths.
    pub fn depends_on_length(&self) -> bool {
        matches!(self.scaling, RopeScaling::Dynamic { .. } | RopeScaling::LongRope { .. })
    }

    /// The longest sequence, in tokens, of a model that states `stated` (`max_position_embeddings`): `dynamic` and
    /// `yarn` are switched on in configs that still state the original length.
    pub fn context(&self, stated: usize) -> usize {
        const MOST: f64 = (1 << 30) as f64;
        match self.scaling {
            RopeScaling::Dynamic { factor, original_context }
            | RopeScaling::Yarn { factor, original_context, .. } => {
                stated.max((f64::from(factor) * original_context as f64).min(MOST) as usize)
            }
            _ => stated,
        }
    }

    /// What `theta` is multiplied by.
    fn base_growth(&self, max_len: usize) -> f64 {
        let RopeScaling::Dynamic { factor, original_context } = self.scaling else { return 1.0 };
        let (factor, dim) = (f64::from(factor), self.rotary_dim as f64);
        let ratio = max_len.max(original_context) as f64 / original_context as f64;
        (factor * ratio - (factor - 1.0)).powf(dim / (dim - 2.0))
    }
}

/// The divisor of a frequency that is `keep` parts itself and the rest itself over `factor`.
fn blend(factor: f32, keep: f64) -> f64 {
    1.0 / ((1.0 - keep) / f64::from(factor) + keep)
}

impl RopeFactors {
    /// What two sequences must agree on to share keys: BLAKE3 over all factors of a model's ropes, as hexadecimal.
    pub fn fingerprint<'a>(ropes: impl IntoIterator<Item = &'a RopeFactors>) -> String {
        let mut hasher = blake3::Hasher::new();
        for RopeFactors { inverse_frequencies, attention_factor } in ropes {
            hasher.update(&(inverse_frequencies.len() as u64).to_le_bytes());
            for value in inverse_frequencies.iter().chain([attention_factor]) {
                hasher.update(&value.to_le_bytes());
            }
        }
        hasher.finalize().to_hex().to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(rope: &Rope, max_len: usize, theirs: &[f32]) {
        let ours = rope.factors(max_len).inverse_frequencies;
        assert_eq!(ours.len(), theirs.len());
        for (ours, theirs) in ours.iter().zip(theirs) {
            assert!((ours / theirs - 1.0).abs() < 5e-7, "{ours} {theirs}");
        }
    }

    #[test]
    fn llama3_frequencies_are_those_of_transformers() {
        // ROPE_INIT_FUNCTIONS["llama3"] of transformers 5.24 for these numbers.
        #[rustfmt::skip]
        let theirs = [
            1.0, 0.562_341_3, 0.244_384_59, 0.064_309_87, 0.013_042_256, 0.007_029_266, 0.003_952_847_3,
            0.002_222_849_3, 0.00125, 7.029_266_6e-4, 3.952_847_3e-4, 2.222_849_3e-4, 1.25e-4, 7.029_266e-5,
            3.952_847_3e-5, 2.222_849_3e-5,
        ];
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 64,
        };
        check(&Rope { theta: 10_000.0, rotary_dim: 32, scaling }, 1, &theirs);
    }

    #[test]
    fn linear_scaling_divides_and_factors_divide_each() {
        let rope = |scaling| Rope { theta: 100.0, rotary_dim: 4, scaling }.factors(9).inverse_frequencies;
        assert_eq!(rope(RopeScaling::Default), [1.0, 0.1]);
        assert_eq!(rope(RopeScaling::Linear { factor: 4.0 }), [0.25, 0.025]);
        assert_eq!(rope(RopeScaling::Factors(vec![1.0, 10.0])), [1.0, 0.01]);
    }

    #[test]
    fn yarn_and_dynamic_frequencies_are_those_of_transformers() {
        // ROPE_INIT_FUNCTIONS of transformers 5.24 for head_dim 16 and an original context of 64.
        let yarn = |beta_fast, beta_slow, truncate| RopeScaling::Yarn {
            factor: 4.0,
            original_context: 64,
            beta_fast,
            beta_slow,
            truncate,
            attention_factor: 1.0,
        };
        #[rustfmt::skip]
        let mut theirs = [
            1.0, 0.237_170_82, 0.05, 0.007_905_695, 0.0025, 7.905_694_7e-4, 2.5e-4, 7.905_695e-5,
        ];
        check(&Rope { theta: 10_000.0, rotary_dim: 16, scaling: yarn(32.0, 1.0, true) }, 1, &theirs);
        (theirs[1], theirs[2]) = (0.160_589_16, 0.025);
        check(&Rope { theta: 10_000.0, rotary_dim: 16, scaling: yarn(8.0, 2.0, false) }, 1, &theirs);

        let dynamic = RopeScaling::Dynamic { factor: 2.0, original_context: 64 };
        let rope = Rope { theta: 10_000.0, rotary_dim: 16, scaling: dynamic };
        #[rustfmt::skip]
        let grown = [
            1.0, 0.276_936_83, 0.076_694, 0.021_239_394, 0.005_881_970_7, 0.001_628_934_3, 4.511_119e-4, 1.249_294_9e-4,
        ];
        check(&rope, 113, &grown);
        assert_eq!(rope.factors(64), Rope { scaling: RopeScaling::Default, ..rope.clone() }.factors(64));
        assert_eq!((rope.context(64), rope.context(512)), (128, 512));
    }

    #[test]
    fn longrope_takes_the_long_factors_past_the_original_context() {
        let scaling = RopeScaling::LongRope {
            short: vec![1.0, 2.0],
            long: vec![4.0, 5.0],
            original_context: 64,
            attention_factor: 1.25,
        };
        let rope = Rope { theta: 100.0, rotary_dim: 4, scaling };
        assert_eq!(rope.factors(64).inverse_frequencies, [1.0, 0.05]);
        assert_eq!(rope.factors(65).inverse_frequencies, [0.25, 0.02]);
        assert_eq!((rope.factors(1).attention_factor, rope.factors(99).attention_factor), (1.25, 1.25));
        assert!(rope.depends_on_length());
        let fingerprint = |max_len| RopeFactors::fingerprint([&rope.factors(max_len)]);
        assert_eq!(fingerprint(3), fingerprint(64));
        assert_ne!(fingerprint(3), fingerprint(65));
    }
}
