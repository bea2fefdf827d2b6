//! Who of several engines that can serve a request is to.

use std::fmt::Debug;

use tandem_engine::{Capabilities, Kind};

use crate::Request;

/// What of a request decides its route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Tokens of the longest prompt.
    pub prompt: usize,
    /// Most tokens to generate for it; `None` goes on until the context is full.
    pub max_tokens: Option<usize>,
    /// Answers that are wanted at once.
    pub sequences: usize,
}

impl Shape {
    /// Of requests that are to run together.
    pub fn of(requests: &[Request]) -> Self {
        let prompt = requests.iter().map(|r| r.tokens.len()).max().unwrap_or(0);
        let most = |r: &Request| {
            let room = r.context.map(|context| context.saturating_sub(r.tokens.len()));
            r.max_tokens.or(room)
        };
        let max_tokens = requests.iter().map(most).reduce(|a, b| Some(a?.max(b?))).flatten();
        Self { prompt, max_tokens, sequences: requests.len() }
    }

    /// Tokens of prompt and answer together, if the answer has an end.
    pub fn total(&self) -> Option<usize> {
        Some(self.prompt.saturating_add(self.max_tokens?))
    }
}

/// An engine that can serve the request.
#[derive(Debug, Clone)]
pub struct Candidate<'a> {
    /// Its name in the registry.
    pub engine: &'a str,
    /// What it can do.
    pub capabilities: &'a Capabilities,
    /// Requests that it runs or that wait for it.
    pub requests: usize,
}

/// What a policy has decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// Which of the candidates.
    pub index: usize,
    /// Why, as one word for counters.
    pub kind: &'static str,
    /// Why, in words.
    pub reason: String,
}

/// Chooses among engines. It is asked only where there is a choice.
pub trait Policy: Debug + Send + Sync {
    /// Which of `candidates`, at least one, is to serve a request of this shape. They are in the order in which they
    /// were registered.
    fn choose(&self, shape: &Shape, candidates: &[Candidate<'_>]) -> Choice;
}

/// Short requests that come alone go to a static engine, all others to a dynamic one.
///
/// A static engine is quick at what it was compiled for and computes its whole shape whatever it is given: it pays for
/// short contexts, and a batch pays on the dynamic engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Threshold {
    /// Prompt and answer together must be shorter than this.
    pub cutoff: usize,
}

impl Default for Threshold {
    fn default() -> Self {
        Self { cutoff: 1024 }
    }
}

impl Threshold {
    /// What speaks against the static engine `candidate`.
    fn objection(&self, shape: &Shape, candidate: &Candidate<'_>) -> Option<(&'static str, String)> {
        let Self { cutoff } = self;
        match shape.total() {
            None => Some(("unbounded", "the answer may fill the context".to_owned())),
            Some(total) if total >= *cutoff => {
                Some(("long", format!("{total} tokens of prompt and answer, not below {cutoff}")))
            }
            _ if shape.sequences > 1 => {
                Some(("batch", format!("{} answers run as one batch", shape.sequences)))
            }
            _ if candidate.requests > 0 => {
                let Candidate { engine, requests, .. } = candidate;
                let words = if *requests == 1 { "request" } else { "requests" };
                Some(("occupied", format!("{engine} has {requests} {words} already")))
            }
            Some(_) => None,
        }
    }
}

impl Policy for Threshold {
    fn choose(&self, shape: &Shape, candidates: &[Candidate<'_>]) -> Choice {
        let is_static = |c: &Candidate<'_>| matches!(c.capabilities.kind, Kind::Static { .. });
        let (fixed, dynamic) =
            (candidates.iter().position(is_static), candidates.iter().position(|c| !is_static(c)));
        match (fixed, dynamic) {
            (Some(fixed), Some(dynamic)) => match self.objection(shape, &candidates[fixed]) {
                Some((kind, reason)) => Choice { index: dynamic, kind, reason },
                None => {
                    let total = shape.total().unwrap_or(shape.prompt);
                    let reason =
                        format!("{total} tokens of prompt and answer, below {}, and alone", self.cutoff);
                    Choice { index: fixed, kind: "short", reason }
                }
            },
            _ => {
                let kind = if fixed.is_some() { "static" } else { "dynamic" };
                Choice {
                    index: 0,
                    kind: "first",
                    reason: format!("the first of {} {kind} engines", candidates.len()),
                }
            }
        }
    }
}
