//! How much of the waiting prompts a step takes on while others wait for their next token.
//!
//! A step's time is close to that of its decoding rows plus a cost for each prompt token. Both are measured as steps
//! come back, and the prompts get as many tokens as stretch the step to [`STRETCH`] times what it takes without them.
//! The medians of the last few measurements are taken, so that one hiccup of the machine does not count.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// How much longer a step with prompt tokens may be. Readers are promised less than three times.
const STRETCH: f64 = 1.8;
/// Prompt tokens that a step takes at least, so that prompts get on whatever they cost.
const LEAST: usize = 4;
/// Prompt tokens of the first step that is shared, before their cost is known.
const FIRST: usize = 16;
/// Measurements that are remembered.
const RECENT: usize = 9;

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
}

impl Pace {
    pub fn new() -> Self {
        Self { decoding: BTreeMap::new(), token: Recent::default(), last: FIRST / 2 }
    }

    /// Prompt tokens for the next step, in which `rows` rows decode; none decoding is no limit.
    pub fn prompt_tokens(&self, rows: usize) -> usize {
        if rows == 0 {
            return usize::MAX;
        }
        let (Some(step), Some(token)) = (self.decoding(rows), self.token.median()) else { return FIRST };
        // Grows step by step, because what was measured on few tokens is uncertain.
        let most = 2 * self.last.max(FIRST / 2);
        (((STRETCH - 1.0) * step / token) as usize).clamp(LEAST, most)
    }

    /// A step of `rows` decoding rows and `prompt` tokens of prompts took `time`.
    pub fn observe(&mut self, time: Duration, rows: usize, prompt: usize) {
        let seconds = time.as_secs_f64();
        if prompt == 0 {
            self.decoding.entry(rows).or_default().push(seconds);
            return;
        }
        let alone = self.decoding(rows);
        if let Some(alone) = alone.or((rows == 0).then_some(0.0)) {
            self.token.push((seconds - alone).max(0.0) / prompt as f64);
        }
        if rows > 0 {
            self.last = prompt;
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

    #[test]
    fn prompts_get_what_stretches_a_step_to_the_bound() {
        let mut pace = Pace::new();
        assert_eq!(pace.prompt_tokens(0), usize::MAX);
        assert_eq!(pace.prompt_tokens(4), FIRST, "nothing is known yet");
        // 10 ms of decoding and 0.1 ms a token: 80 tokens make it 18 ms.
        (0..20).for_each(|_| pace.observe(ms(10.0), 4, 0));
        let mut given = Vec::new();
        for _ in 0..12 {
            let tokens = pace.prompt_tokens(4);
            given.push(tokens);
            pace.observe(ms(10.0 + 0.1 * tokens as f64), 4, tokens);
        }
        assert_eq!(given[..4], [16, 32, 64, 80], "{given:?}");
        assert!(given[4..].iter().all(|tokens| (79..=80).contains(tokens)), "{given:?}");
        // One hiccup changes nothing; tokens that become dearer do.
        pace.observe(ms(500.0), 4, 80);
        assert!((79..=80).contains(&pace.prompt_tokens(4)));
        (0..9).for_each(|_| pace.observe(ms(10.0 + 0.4 * 20.0), 4, 20));
        assert!((19..=20).contains(&pace.prompt_tokens(4)));
        (0..9).for_each(|_| pace.observe(ms(1000.0), 4, 20));
        assert_eq!(pace.prompt_tokens(4), LEAST, "they get on all the same");
    }

    #[test]
    fn more_rows_make_a_longer_step_and_more_room_for_prompts() {
        let mut pace = Pace::new();
        pace.observe(ms(10.0), 1, 0);
        pace.observe(ms(20.0), 8, 0);
        // Without any, the time beyond that of one row is the prompt's.
        (0..9).for_each(|_| pace.observe(ms(74.0), 0, 64));
        pace.observe(ms(18.0), 1, 8);
        assert_eq!([1, 4, 8, 20].map(|rows| pace.prompt_tokens(rows)), [8, 8, 16, 16]);
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
