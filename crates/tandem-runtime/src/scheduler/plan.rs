//! Which rows make the next step.
//!
//! One row for each sequence that decodes, and what is left of the step's tokens for prompts: as many as the [`Pace`]
//! allows while others decode, and all of them when nobody does. A sequence whose reader is behind gets no row. Where
//! more are ready than a step has rows, those come first that have waited longest.

use std::cmp::Reverse;

use tandem_engine::{Capabilities, Kind};

use super::job::Active;
use super::pace::{Pace, deal};

/// A row: how many tokens of which running request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Planned {
    pub index: usize,
    pub count: usize,
}

/// What one step does.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    pub rows: Vec<Planned>,
    /// How many of the rows decode: they come first.
    pub decoding: usize,
}

impl Plan {
    /// The best next step of `running`.
    pub fn new(running: &[Active], capabilities: &Capabilities, pace: &Pace) -> Self {
        let mut ready: Vec<usize> =
            (0..running.len()).filter(|i| running[*i].ahead() > 0 && running[*i].has_room()).collect();
        let most = row_limit(capabilities);
        if ready.len() > most {
            ready.sort_by_key(|i| running[*i].turn);
            ready.truncate(most);
        }
        let (decoding, mut prompts): (Vec<usize>, Vec<usize>) =
            ready.into_iter().partition(|i| running[*i].ahead() == 1);
        prompts.sort_by_key(|i| (Reverse(running[*i].job.request.priority), running[*i].job.id));
        let mut rows: Vec<Planned> = decoding.iter().map(|&index| Planned { index, count: 1 }).collect();

        let ahead: Vec<usize> = prompts.iter().map(|i| running[*i].ahead()).collect();
        let budget = pace.prompt_tokens(decoding.len(), prompts.len());
        let counts = match &capabilities.kind {
            Kind::Dynamic { max_step_tokens } => deal(budget.min(max_step_tokens - decoding.len()), &ahead),
            Kind::Static { chunks } => deal_chunks(budget, &ahead, chunks),
        };
        let prompts = prompts.into_iter().zip(counts).filter(|(_, count)| *count > 0);
        rows.extend(prompts.map(|(index, count)| Planned { index, count }));
        Self { rows, decoding: decoding.len() }
    }

    /// Tokens of prompts.
    pub fn prompt_tokens(&self) -> usize {
        self.rows[self.decoding..].iter().map(|row| row.count).sum()
    }
}

/// Rows that a step can have.
pub(crate) fn row_limit(capabilities: &Capabilities) -> usize {
    match &capabilities.kind {
        Kind::Dynamic { max_step_tokens } => capabilities.max_batch.min(*max_step_tokens),
        Kind::Static { .. } => capabilities.max_batch,
    }
}

/// As [`deal`], in lengths that there is a function for. The first in line always gets on.
fn deal_chunks(budget: usize, ahead: &[usize], chunks: &[usize]) -> Vec<usize> {
    let longest = chunks.last().copied().unwrap_or(1);
    let fit = |tokens: usize| chunks.iter().rev().copied().find(|chunk| *chunk <= tokens);
    let dealt = deal(budget.min(longest * ahead.len()), ahead);
    let fitted = dealt.into_iter().zip(ahead).enumerate().map(|(i, (dealt, &ahead))| {
        let shortest = chunks.first().copied().unwrap_or(1).min(ahead);
        // What is shorter than every function is padded.
        fit(dealt.min(longest)).unwrap_or(if i == 0 || dealt == ahead { shortest } else { 0 })
    });
    fitted.collect()
}
