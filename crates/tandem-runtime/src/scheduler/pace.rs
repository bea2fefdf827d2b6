//! How much of the waiting prompts a step takes on while others wait for their next token.
//!
//! A step's time is close to that of its decoding rows plus a cost for each prompt token. Both are measured as steps
//! come back. Prompts get as much time as decoding, so that a step takes twice what it takes without them; or more where
//! more prompts are read than answers run, so that each request has an equal share of the time and a crowd of prompts is
//! not read in crumbs.
//!
//! What counts is the longest time that a reader waits, so the estimate errs on the slow side. Medians of the last few
//! measurements are taken, so that one hiccup of the machine does not count; but tokens that have just been dearer are
//! believed at once, up to a bound. And a step takes on little more than the last one did, because what was measured on
//! few tokens says little about many. Decoding grows dearer with its contexts, so now and then a step leaves the prompts
//! out and measures it anew; else the growth would be held against the prompts.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// How much of the time that decoding takes the prompts have at most, however many they are.
const CROWD: f64 = 8.0;
/// Prompt tokens that a step takes at least, so that prompts get on whatever they cost.
const LEAST: usize = 2;
/// Prompt tokens of the first steps that are shared, before their cost is known.
const FIRST: usize = 4;
/// Measurements that are remembered.
const RECENT: usize = 5;
/// Steps with prompt tokens between two that leave them out.
const SHARED: usize = 12;

/// The last few measurements of something.
#[derive(Debug, Default)]
struct Recent(VecDeque<f64>);

impl Recent {
    fn push(&mut self, value: f64) {
        if self.0.len() == RECENT {
            self.0.pop_front();
        }
        self.0.push_back(value);
    }

    fn median(&self) -> Option<f64> {
        let mut sorted: Vec<f64> = self.0.iter().copied().collect();
        sorted.sort_unstable_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied()
    }

    /// The median, or the last one if it was larger, up to twice the median.
    fn cautious(&self) -> Option<f64> {
        let (median, last) = (self.median()?, *self.0.back()?);
        Some(last.clamp(median, 2.0 * median))
    }
}

/// What steps took.
#[derive(Debug)]
pub(crate) struct Pace {
    /// Seconds of steps that only decode, by their number of rows.
    decoding: BTreeMap<usize, Recent>,
    /// Seconds that a prompt token adds.
    token: Recent,
    /// Prompt tokens of the last shared step.
    last: usize,
    /// Shared steps since the last one that only decoded.
    shared: usize,
}

impl Pace {
    pub fn new() -> Self {
        Self { decoding: BTreeMap::new(), token: Recent::default(), last: FIRST, shared: 0 }
    }

    /// Tokens for the next step of `prompts` prompts, beside which `rows` rows decode; none decoding is no limit.
    pub fn prompt_tokens(&self, rows: usize, prompts: usize) -> usize {
        if rows == 0 {
            return usize::MAX;
        }
        if self.shared == SHARED {
            return 0;
        }
        let (Some(step), Some(token)) = (self.decoding(rows), self.token.cautious()) else { return FIRST };
        let share = (prompts as f64 / rows as f64).clamp(1.0, CROWD);
        ((share * step / token) as usize).clamp(LEAST, LEAST + self.last * 3 / 2)
    }

    /// A step of `rows` decoding rows and `prompt` tokens of prompts took `time`.
    pub fn observe(&mut self, time: Duration, rows: usize, prompt: usize) {
        let seconds = time.as_secs_f64();
        if prompt == 0 {
            self.shared = 0;
            self.decoding.entry(rows).or_default().push(seconds);
            return;
        }
        let alone = self.decoding(rows);
        if let Some(alone) = alone.or((rows == 0).then_some(0.0)) {
            self.token.push((seconds - alone).max(0.0) / prompt as f64);
        }
        if rows > 0 {
            // A static engine may be unable to leave prompts out; then the count starts anew.
            self.shared = if self.shared == SHARED { 0 } else { self.shared + 1 };
            // The end of a prompt may be short.
            self.last = prompt.max(self.last * 2 / 3);
        }
    }

    /// Seconds of a step in which `rows` rows decode, or of the next smaller that is known, or of the smallest.
    fn decoding(&self, rows: usize) -> Option<f64> {
        let smaller = self.decoding.range(..=rows).next_back();
        smaller.or_else(|| self.decoding.first_key_value()).and_then(|(_, recent)| recent.median())
    }
}

/// Deals `budget` tokens to prompts of which `ahead` are left, the first in line first: half of them to the first, so
/// that it gets on, and the rest in equal parts to those behind it, so that a short prompt does not wait for a long one.
/// What somebody does not need goes to the others in order.
pub(crate) fn deal(budget: usize, ahead: &[usize]) -> Vec<usize> {
    let mut left = budget;
    let mut dealt = vec![0; ahead.len()];
    let behind = ahead.len().saturating_sub(1).max(1);
    let first = if ahead.len() > 1 { budget.div_ceil(2) } else { budget };
    let part = ((budget - first) / behind).max(1);
    for round in [[first, part], [budget, budget]] {
        for (i, (dealt, ahead)) in dealt.iter_mut().zip(ahead).enumerate() {
            let more = round[i.min(1)].min(ahead - *dealt).min(left);
            *dealt += more;
            left -= more;
        }
    }
    dealt
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: f64) -> Duration {
        Duration::from_secs_f64(ms / 1000.0)
    }

    /// Shared steps of four rows with the prompt tokens they are given, by what decoding and a token cost.
    fn shared_of(pace: &mut Pace, steps: usize, alone: f64, token: f64) -> Vec<usize> {
        let step = |_| {
            if pace.prompt_tokens(4, 1) == 0 {
                pace.observe(ms(alone), 4, 0);
            }
            let tokens = pace.prompt_tokens(4, 1);
            pace.observe(ms(alone + token * tokens as f64), 4, tokens);
            tokens
        };
        (0..steps).map(step).collect()
    }

    fn shared(pace: &mut Pace, steps: usize, token: f64) -> Vec<usize> {
        shared_of(pace, steps, 10.0, token)
    }

    #[test]
    fn prompts_get_what_stretches_a_step_to_twice_its_time() {
        let mut pace = Pace::new();
        assert_eq!(pace.prompt_tokens(0, 1), usize::MAX);
        assert_eq!(pace.prompt_tokens(4, 1), FIRST, "nothing is known yet");
        (0..20).for_each(|_| pace.observe(ms(10.0), 4, 0));
        // 0.1 ms a token: 100 tokens make it 20 ms.
        let given = shared(&mut pace, 20, 0.1);
        assert_eq!(given[..7], [4, 8, 14, 23, 36, 56, 86], "{given:?}");
        assert!(given[7..].iter().all(|tokens| (99..=100).contains(tokens)), "{given:?}");
        // Tokens that become dearer are noticed within a step and never cost more than twice what was foreseen.
        let given = shared(&mut pace, 12, 0.2);
        assert!(given[1] <= 50 && (49..=50).contains(&given[11]), "{given:?}");
        // A hiccup halves the next step and is forgotten.
        pace.observe(ms(500.0), 4, 50);
        let given = shared(&mut pace, 4, 0.2);
        assert!((24..=25).contains(&given[0]) && (49..=50).contains(&given[3]), "{given:?}");
        assert_eq!(shared(&mut pace, 20, 50.0)[19], LEAST, "they get on all the same");
    }

    #[test]
    fn decoding_that_grows_dearer_is_not_held_against_the_prompts() {
        let mut pace = Pace::new();
        (0..9).for_each(|_| pace.observe(ms(10.0), 4, 0));
        assert!((99..=100).contains(&shared(&mut pace, 40, 0.1)[39]));
        // Contexts grow until decoding takes twice as long: so may the prompts' part.
        for tenths in 101..=200 {
            shared_of(&mut pace, 3, f64::from(tenths) / 10.0, 0.1);
        }
        let given = shared_of(&mut pace, 80, 20.0, 0.1);
        assert!((198..=200).contains(&given[79]), "{given:?}");
    }

    #[test]
    fn more_rows_make_a_longer_step_and_more_room_for_prompts() {
        let mut pace = Pace::new();
        pace.observe(ms(10.0), 1, 0);
        pace.observe(ms(20.0), 8, 0);
        // Without any, the time beyond that of one row is the prompt's.
        (0..9).for_each(|_| pace.observe(ms(74.0), 0, 64));
        pace.observe(ms(28.0), 1, 18);
        for (rows, tokens) in [(1, 10), (4, 10), (8, 20), (20, 20)] {
            assert!((tokens - 1..=tokens).contains(&pace.prompt_tokens(rows, 1)), "{rows} rows");
        }
        // Half as many prompts as answers have what one has; twice as many have twice that.
        for (prompts, tokens) in [(4, 20), (8, 20), (9, 22), (10, 25)] {
            let given = pace.prompt_tokens(8, prompts);
            assert!((tokens - 1..=tokens).contains(&given), "{prompts} prompts: {given}");
        }
    }

    #[test]
    fn a_budget_is_dealt_in_parts() {
        assert_eq!(deal(64, &[]), [0usize; 0]);
        assert_eq!(deal(64, &[200]), [64]);
        assert_eq!(deal(64, &[200, 200]), [32, 32]);
        assert_eq!(deal(64, &[200, 20]), [44, 20]);
        assert_eq!(deal(64, &[10, 20, 300]), [10, 20, 34]);
        assert_eq!(deal(64, &[200, 200, 200, 200, 200]), [32, 8, 8, 8, 8]);
        assert_eq!(deal(4, &[9, 9, 9, 9, 9, 9]), [2, 1, 1, 0, 0, 0]);
        assert_eq!(deal(500, &[9, 9]), [9, 9]);
    }
}
