//! What sampling *means*: the specification every engine follows and its reference.
//!
//! In this order:
//!
//! 1. `logit_bias` is added.
//! 2. `repetition_penalty` `r`, for every token of the whole history: a positive logit is divided by `r`, any other
//!    multiplied (Keskar et al. 2019, as transformers does it).
//! 3. `frequency_penalty * count` and `presence_penalty` are subtracted for every token among the *generated* ones
//!    (OpenAI's definition).
//! 4. At temperature 0 the largest logit wins, the lowest id among equals. Otherwise logits are divided by the
//!    temperature, and tokens are removed, each filter seeing what the one before left:
//! 5. `top_k`: all but the `k` likeliest go.
//! 6. `top_p`: the likeliest stay until their probabilities sum to `p` or more.
//! 7. `min_p`: those under `min_p` times the largest probability go.
//! 8. One is drawn: `u` in `[0, 1)` comes from [`uniform`]`(seed, position)`, and the first token in order of *id* whose
//!    running sum of probabilities exceeds `u` is it.
//!
//! "Likelier" breaks ties by the lower id. NaN counts as minus infinity. Log-probabilities are of the model itself:
//! before all of these steps.
//!
//! Randomness is a function of the seed and of the position that the new token will have, nothing else: a request gives
//! the same answer alone and in a batch, on one engine and on another.

use serde::{Deserialize, Serialize};

use crate::EngineError;

/// How to choose a token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SampleSpec {
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep this many; 0 keeps all.
    pub top_k: u32,
    /// Keep the likeliest up to this mass; 1 keeps all.
    pub top_p: f32,
    /// Drop below this share of the likeliest; 0 drops none.
    pub min_p: f32,
    /// Over the whole history; 1 is off.
    pub repetition_penalty: f32,
    /// Over generated tokens; 0 is off.
    pub presence_penalty: f32,
    /// Over generated tokens, times their count; 0 is off.
    pub frequency_penalty: f32,
    /// Added to these tokens' logits.
    pub logit_bias: Vec<(u32, f32)>,
    /// Key of the randomness.
    pub seed: u64,
    /// How many of the likeliest tokens to report beside the chosen one; `None` reports no log-probability at all.
    pub top_logprobs: Option<u32>,
    /// Position of the first generated token: the length of the prompt.
    pub generated_from: usize,
}

impl SampleSpec {
    /// Greedy decoding without any modification.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
            top_logprobs: None,
            generated_from: 0,
        }
    }

    /// Whether the result is the largest raw logit and nothing else is asked: an engine may then skip all but an argmax.
    pub fn is_argmax(&self) -> bool {
        self.temperature == 0.0 && self.top_logprobs.is_none() && !self.changes_logits()
    }

    fn changes_logits(&self) -> bool {
        !self.logit_bias.is_empty()
            || self.repetition_penalty != 1.0
            || self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
    }

    /// Checks every parameter.
    ///
    /// # Errors
    /// [`EngineError::InvalidSpec`] naming the first one outside its range, [`EngineError::TokenOutOfRange`] for a bias
    /// on an id that does not exist.
    pub fn validate(&self, vocab_size: usize) -> Result<(), EngineError> {
        let check = |field: &str, value: f32, ok: bool, expected: &str| {
            if ok {
                return Ok(());
            }
            let (field, value, expected) = (field.to_owned(), value.to_string(), expected.to_owned());
            Err(EngineError::InvalidSpec { field, value, expected })
        };
        let Self {
            temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, ..
        } = *self;
        let finite = |v: f32| v.is_finite();
        check("temperature", temperature, finite(temperature) && temperature >= 0.0, "0 or above")?;
        check("top_p", top_p, top_p > 0.0 && top_p <= 1.0, "above 0, at most 1")?;
        check("min_p", min_p, (0.0..=1.0).contains(&min_p), "from 0 to 1")?;
        let positive = finite(repetition_penalty) && repetition_penalty > 0.0;
        check("repetition_penalty", repetition_penalty, positive, "above 0")?;
        check("presence_penalty", presence_penalty, finite(presence_penalty), "a finite number")?;
        check("frequency_penalty", frequency_penalty, finite(frequency_penalty), "a finite number")?;
        for &(token, bias) in &self.logit_bias {
            if token as usize >= vocab_size {
                return Err(EngineError::TokenOutOfRange { token, vocab: vocab_size });
            }
            check("logit_bias", bias, !bias.is_nan(), "a number")?;
        }
        Ok(())
    }
}

/// A chosen token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sampled {
    /// Its id.
    pub token: u32,
    /// Its natural log-probability under the model, if asked for.
    pub logprob: Option<f32>,
    /// The likeliest tokens with theirs, likeliest first.
    pub top: Vec<(u32, f32)>,
}

/// Chooses a token. `logits` is `[vocab]`; `history` is every token fed so far, so that the new one's position is its
/// length. `None` if no logit is finite.
pub fn sample(spec: &SampleSpec, logits: &[f32], history: &[u32]) -> Option<Sampled> {
    let raw_best = argmax(logits)?;
    let (logprob_of, top) = match spec.top_logprobs {
        None => (None, Vec::new()),
        Some(count) => {
            let log_sum = log_sum_exp(logits, logits[raw_best as usize]);
            let mut ranked: Vec<Candidate> = candidates(logits);
            keep_likeliest(&mut ranked, count as usize);
            ranked.sort_unstable_by(likelier);
            (Some(log_sum), ranked.iter().map(|c| (c.id, (f64::from(c.logit) - log_sum) as f32)).collect())
        }
    };
    let token = if spec.changes_logits() {
        choose(spec, &modified(spec, logits, history), history.len())?
    } else {
        choose(spec, logits, history.len())?
    };
    let logprob = logprob_of.map(|log_sum| (f64::from(logits[token as usize]) - log_sum) as f32);
    Some(Sampled { token, logprob, top })
}

/// The largest logit's id, the lowest among equals; `None` if none is above minus infinity.
pub fn argmax(logits: &[f32]) -> Option<u32> {
    let mut best: Option<(usize, f32)> = None;
    for (id, &logit) in logits.iter().enumerate() {
        if logit > best.map_or(f32::NEG_INFINITY, |(_, l)| l) {
            best = Some((id, logit));
        }
    }
    best.filter(|(_, logit)| logit.is_finite()).map(|(id, _)| id as u32)
}

/// The counter-based random number for a seed and a position, in `[0, 1)` with 53 bits.
///
/// SplitMix64's finalizer (Steele, Lea and Flood 2014) over the seed, then over the result plus the position times the
/// golden-ratio increment.
pub fn uniform(seed: u64, position: u64) -> f64 {
    fn mix(mut z: u64) -> u64 {
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
    let key = mix(seed.wrapping_add(GOLDEN));
    let bits = mix(key.wrapping_add(position.wrapping_add(1).wrapping_mul(GOLDEN)));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[derive(Debug, Clone, Copy)]
struct Candidate {
    id: u32,
    logit: f32,
}

fn likelier(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
}

fn candidates(logits: &[f32]) -> Vec<Candidate> {
    let live = logits.iter().enumerate().filter(|(_, l)| **l > f32::NEG_INFINITY);
    live.map(|(id, &logit)| Candidate { id: id as u32, logit }).collect()
}

/// Leaves the `count` likeliest, in no particular order.
fn keep_likeliest(candidates: &mut Vec<Candidate>, count: usize) {
    if count < candidates.len() {
        if count > 0 {
            candidates.select_nth_unstable_by(count - 1, likelier);
        }
        candidates.truncate(count);
    }
}

fn log_sum_exp(logits: &[f32], max: f32) -> f64 {
    let sum: f64 = logits.iter().filter(|l| !l.is_nan()).map(|l| f64::from((l - max).exp())).sum();
    f64::from(max) + sum.ln()
}

fn modified(spec: &SampleSpec, logits: &[f32], history: &[u32]) -> Vec<f32> {
    let mut out = logits.to_vec();
    for &(token, bias) in &spec.logit_bias {
        out[token as usize] += bias;
    }
    if spec.repetition_penalty != 1.0 {
        let mut seen = history.to_vec();
        seen.sort_unstable();
        seen.dedup();
        for token in seen {
            let logit = &mut out[token as usize];
            *logit = if *logit > 0.0 {
                *logit / spec.repetition_penalty
            } else {
                *logit * spec.repetition_penalty
            };
        }
    }
    if spec.presence_penalty != 0.0 || spec.frequency_penalty != 0.0 {
        let mut generated = history[spec.generated_from.min(history.len())..].to_vec();
        generated.sort_unstable();
        for run in generated.chunk_by(|a, b| a == b) {
            let penalty = spec.presence_penalty + spec.frequency_penalty * run.len() as f32;
            out[run[0] as usize] -= penalty;
        }
    }
    out
}

fn choose(spec: &SampleSpec, logits: &[f32], position: usize) -> Option<u32> {
    let best = argmax(logits)?;
    if spec.temperature == 0.0 {
        return Some(best);
    }
    let max = logits[best as usize];
    let weight = |logit: f32| f64::from(((logit - max) / spec.temperature).exp());
    let mut kept = candidates(logits);
    if spec.top_k > 0 {
        keep_likeliest(&mut kept, spec.top_k as usize);
    }
    if spec.top_p < 1.0 {
        keep_mass(&mut kept, f64::from(spec.top_p), weight);
    }
    if spec.min_p > 0.0 {
        kept.retain(|c| weight(c.logit) >= f64::from(spec.min_p));
    }
    kept.sort_unstable_by_key(|c| c.id);
    let total: f64 = kept.iter().map(|c| weight(c.logit)).sum();
    let target = uniform(spec.seed, position as u64) * total;
    let mut sum = 0.0;
    let drawn = kept.iter().find(|c| {
        sum += weight(c.logit);
        sum > target
    });
    Some(drawn.map_or(best, |c| c.id))
}

/// Leaves the shortest list of likeliest candidates whose mass reaches `p`.
///
/// A whole vocabulary need not be sorted for that: the head of the list almost always holds the mass, so it is selected
/// in growing pieces.
fn keep_mass(candidates: &mut Vec<Candidate>, p: f64, weight: impl Fn(f32) -> f64) {
    let goal = p * candidates.iter().map(|c| weight(c.logit)).sum::<f64>();
    let (mut mass, mut done, mut piece) = (0.0, 0, 64);
    while done < candidates.len() {
        let rest = &mut candidates[done..];
        let count = piece.min(rest.len());
        if count < rest.len() {
            rest.select_nth_unstable_by(count - 1, likelier);
        }
        rest[..count].sort_unstable_by(likelier);
        for (i, c) in rest[..count].iter().enumerate() {
            mass += weight(c.logit);
            if mass >= goal {
                candidates.truncate(done + i + 1);
                return;
            }
        }
        done += count;
        piece *= 4;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The specification once more, with a full sort, as plainly as it can be written.
    fn plain(spec: &SampleSpec, logits: &[f32], history: &[u32]) -> u32 {
        let mut l: Vec<f64> = logits.iter().map(|l| f64::from(*l)).collect();
        for (t, b) in &spec.logit_bias {
            l[*t as usize] = f64::from(logits[*t as usize] + b);
        }
        for t in 0..l.len() as u32 {
            let i = t as usize;
            if history.contains(&t) {
                let r = f64::from(spec.repetition_penalty);
                l[i] = if l[i] > 0.0 { l[i] / r } else { l[i] * r };
            }
            let count = history[spec.generated_from.min(history.len())..].iter().filter(|h| **h == t).count();
            if count > 0 {
                l[i] -= f64::from(spec.presence_penalty) + f64::from(spec.frequency_penalty) * count as f64;
            }
        }
        let mut order: Vec<usize> = (0..l.len()).collect();
        order.sort_by(|a, b| l[*b].total_cmp(&l[*a]).then(a.cmp(b)));
        if spec.temperature == 0.0 {
            return order[0] as u32;
        }
        let best = l[order[0]];
        let w: Vec<f64> = l.iter().map(|v| ((v - best) / f64::from(spec.temperature)).exp()).collect();
        if spec.top_k > 0 {
            order.truncate(spec.top_k as usize);
        }
        let total: f64 = order.iter().map(|i| w[*i]).sum();
        let mut mass = 0.0;
        let mut kept = Vec::new();
        for i in order {
            kept.push(i);
            mass += w[i];
            if spec.top_p < 1.0 && mass >= f64::from(spec.top_p) * total {
                break;
            }
        }
        kept.retain(|i| w[*i] >= f64::from(spec.min_p));
        kept.sort_unstable();
        let total: f64 = kept.iter().map(|i| w[*i]).sum();
        let target = uniform(spec.seed, history.len() as u64) * total;
        let mut sum = 0.0;
        for i in &kept {
            sum += w[*i];
            if sum > target {
                return *i as u32;
            }
        }
        kept[kept.len() - 1] as u32
    }

    prop_compose! {
        fn specs()(temperature in prop_oneof![Just(0.0f32), 0.3f32..1.5], top_k in prop_oneof![Just(0u32), 1u32..40],
                   top_p in prop_oneof![Just(1.0f32), 0.1f32..0.99], min_p in prop_oneof![Just(0.0f32), 0.01f32..0.5],
                   repetition_penalty in prop_oneof![Just(1.0f32), 0.8f32..1.5], presence_penalty in -1.0f32..1.0,
                   frequency_penalty in -0.5f32..0.5, logit_bias in prop::collection::vec((0u32..300, -3.0f32..3.0), 0..3),
                   seed: u64, generated_from in 0usize..20) -> SampleSpec {
            let mut logit_bias = logit_bias;
            logit_bias.dedup_by_key(|(t, _)| *t);
            logit_bias.sort_unstable_by_key(|(t, _)| *t);
            logit_bias.dedup_by_key(|(t, _)| *t);
            SampleSpec { temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty,
                         logit_bias, seed, top_logprobs: None, generated_from }
        }
    }

    proptest! {
        #[test]
        fn reference_equals_the_plain_reading(spec in specs(), logits in prop::collection::vec(-6.0f32..6.0, 300),
                                              history in prop::collection::vec(0u32..300, 0..30)) {
            let got = sample(&spec, &logits, &history).unwrap().token;
            prop_assert_eq!(got, plain(&spec, &logits, &history));
        }
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let logits: Vec<f32> = [0.1f32, 0.2, 0.3, 0.4].iter().map(|p| p.ln()).collect();
        let mut counts = [0.0f64; 4];
        let n = 40_000;
        for seed in 0..n {
            let spec = SampleSpec { temperature: 1.0, seed, ..SampleSpec::greedy() };
            counts[sample(&spec, &logits, &[1, 2]).unwrap().token as usize] += 1.0 / n as f64;
        }
        for (count, p) in counts.iter().zip([0.1, 0.2, 0.3, 0.4]) {
            assert!((count - p).abs() < 0.01, "{counts:?}");
        }
    }

    #[test]
    fn logprobs_are_of_the_model_and_ranked() {
        let logits: Vec<f32> = [0.5f32, 0.25, 0.25].iter().map(|p| p.ln()).collect();
        let spec = SampleSpec { top_logprobs: Some(2), logit_bias: vec![(2, 5.0)], ..SampleSpec::greedy() };
        let got = sample(&spec, &logits, &[]).unwrap();
        assert_eq!(got.token, 2);
        assert!((got.logprob.unwrap() - 0.25f32.ln()).abs() < 1e-6);
        assert_eq!(got.top.iter().map(|t| t.0).collect::<Vec<_>>(), [0, 1]);
        assert!((got.top[0].1 - 0.5f32.ln()).abs() < 1e-6);
    }

    #[test]
    fn logits_that_are_not_finite_give_nothing_and_single_ones_are_skipped() {
        assert_eq!(sample(&SampleSpec::greedy(), &[f32::NAN, f32::NEG_INFINITY], &[]), None);
        assert_eq!(sample(&SampleSpec::greedy(), &[f32::INFINITY, 1.0], &[]), None);
        let hot = SampleSpec { temperature: 1.0, ..SampleSpec::greedy() };
        assert_eq!(sample(&hot, &[f32::NAN, 1.0, f32::NEG_INFINITY], &[]).unwrap().token, 1);
    }

    #[test]
    fn parameters_out_of_range_are_named() {
        let bad = |change: fn(&mut SampleSpec)| {
            let mut spec = SampleSpec::greedy();
            change(&mut spec);
            spec.validate(10).unwrap_err().to_string()
        };
        assert!(bad(|s| s.temperature = -1.0).starts_with("temperature = -1"));
        assert!(bad(|s| s.temperature = f32::NAN).starts_with("temperature = NaN"));
        assert!(bad(|s| s.top_p = 0.0).starts_with("top_p = 0"));
        assert!(bad(|s| s.min_p = 1.5).starts_with("min_p = 1.5"));
        assert!(bad(|s| s.repetition_penalty = 0.0).starts_with("repetition_penalty = 0"));
        assert!(bad(|s| s.presence_penalty = f32::INFINITY).starts_with("presence_penalty"));
        assert!(bad(|s| s.frequency_penalty = f32::NAN).starts_with("frequency_penalty"));
        assert!(bad(|s| s.logit_bias = vec![(10, 1.0)]).starts_with("token 10 is outside"));
    }
}
