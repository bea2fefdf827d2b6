//! What is measured.

use std::fmt;

/// Tokens of context before a sequence of a batch decodes.
pub const BATCH_PROMPT: usize = 128;

/// A test. Each engine that takes part gives one figure a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Test {
    /// Seconds until a model is ready.
    Load,
    /// Tokens a second of a prompt, from an empty context to the first sampled token.
    Prefill { tokens: usize },
    /// Tokens a second, one after the other, after `depth` others.
    Decode { tokens: usize, depth: usize },
    /// Tokens a second of all sequences together.
    Batch { tokens: usize, sequences: usize },
    /// Seconds from the start of a process to the first token of its answer to a prompt of about so many.
    FirstToken { tokens: usize },
    /// Bytes that such a process holds at most.
    PeakMemory,
}

/// What a figure counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    TokensPerSecond,
    Seconds,
    Bytes,
}

impl Test {
    pub fn unit(self) -> Unit {
        match self {
            Test::Prefill { .. } | Test::Decode { .. } | Test::Batch { .. } => Unit::TokensPerSecond,
            Test::Load | Test::FirstToken { .. } => Unit::Seconds,
            Test::PeakMemory => Unit::Bytes,
        }
    }

    /// Positions of the longest sequence.
    pub fn context(self) -> usize {
        match self {
            Test::Load | Test::PeakMemory => 0,
            Test::Prefill { tokens } => tokens,
            Test::FirstToken { tokens } => tokens + 1,
            Test::Decode { tokens, depth } => tokens + depth,
            Test::Batch { tokens, .. } => tokens + BATCH_PROMPT,
        }
    }
}

/// Names as llama-bench has them, where it has them.
impl fmt::Display for Test {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Test::Load => write!(f, "load"),
            Test::Prefill { tokens } => write!(f, "pp{tokens}"),
            Test::Decode { tokens, depth: 0 } => write!(f, "tg{tokens}"),
            Test::Decode { tokens, depth } => write!(f, "tg{tokens} @ d{depth}"),
            Test::Batch { tokens, sequences } => write!(f, "tg{tokens} x {sequences}"),
            Test::FirstToken { tokens } => write!(f, "ttft{tokens}"),
            Test::PeakMemory => write!(f, "peak memory"),
        }
    }
}

impl Unit {
    pub fn name(self) -> &'static str {
        match self {
            Unit::TokensPerSecond => "tok/s",
            Unit::Seconds => "s",
            Unit::Bytes => "bytes",
        }
    }

    /// For people, without the unit's name.
    pub fn show(self, value: f64) -> String {
        match self {
            Unit::TokensPerSecond => format!("{value:.1}"),
            Unit::Seconds => format!("{value:.3}"),
            Unit::Bytes => format!("{:.0}", value / f64::from(1 << 20)),
        }
    }

    /// The unit of what [`Unit::show`] gives.
    pub fn shown(self) -> &'static str {
        if self == Unit::Bytes { "MiB" } else { self.name() }
    }
}
