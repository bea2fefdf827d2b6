//! What an audit ends with.

use serde::Serialize;

/// The outcome, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Within the limit.
    Pass,
    /// Within the limit, but not every operator is certain, and that was asked for.
    Uncertain,
    /// More is predicted off the engine than was allowed.
    OverLimit,
    /// Something fails on the engine, or nothing at all runs there.
    Failed,
}

impl Verdict {
    /// `pass`, `uncertain`, `over-limit` or `failed`.
    pub fn name(self) -> &'static str {
        ["pass", "uncertain", "over-limit", "failed"][self as usize]
    }

    /// The exit status of `tandem audit`: 0, 3, 2, 2.
    pub fn exit_code(self) -> u8 {
        [0, 3, 2, 2][self as usize]
    }
}
