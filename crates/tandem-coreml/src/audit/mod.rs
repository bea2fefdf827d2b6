//! The operator audit: which operators of an ML Program will not run on the Neural Engine, and what to do about each.
//!
//! Knowledge lives in [`rules`], one record each, with where it was learned and how sure that is; nothing is run. A
//! program is turned into a graph, every rule looks at every operator and at every function, and the worst that any
//! rule says decides. What no rule and no catalogue knows is unknown, never fine.
//!
//! A prediction is no measurement: Core ML plans for itself, and may choose CPU or GPU for what the engine could do.

mod catalog;
mod cost;
mod graph;
mod layer;
pub mod placement;
mod report;
mod rules;
mod verdict;

#[cfg(test)]
mod cases;
#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use crate::error::CoremlError;
use crate::mil::Model;
use crate::package::Package;

pub use report::{
    Audit, DeviceSummary, Finding, FunctionAudit, FunctionFinding, KindSummary, OperatorAudit, Shares,
    Totals, UnitCounts,
};
pub use rules::{Confidence, Effect, RULES_VERSION, Rule, Source, rule, rules};
pub use verdict::Verdict;

/// A generation of the Neural Engine, named by the Mac chip that has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the names say it")]
pub enum Chip {
    M1,
    M2,
    M3,
    M4,
    M5,
}

impl Chip {
    /// All of them, oldest first.
    pub const ALL: [Self; 5] = [Self::M1, Self::M2, Self::M3, Self::M4, Self::M5];

    /// `m1` to `m5`.
    pub fn name(self) -> &'static str {
        ["m1", "m2", "m3", "m4", "m5"][self as usize]
    }
}

impl fmt::Display for Chip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Chip {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|chip| chip.name().eq_ignore_ascii_case(text))
            .ok_or_else(|| format!("device {text} is not known. hint: m1, m2, m3, m4, m5 or all"))
    }
}

/// Where an operator is expected to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unit {
    /// The Neural Engine.
    Ane,
    /// Sources contradict each other, or it depends on values that only a run shows.
    Uncertain,
    /// No source knows the operator.
    Unknown,
    /// GPU or CPU.
    GpuCpu,
}

impl Unit {
    /// `ane`, `uncertain`, `unknown` or `gpu-cpu`.
    pub fn name(self) -> &'static str {
        ["ane", "uncertain", "unknown", "gpu-cpu"][self as usize]
    }
}

/// What to audit for.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// For which chips; the worst of them decides.
    pub devices: Vec<Chip>,
    /// Largest share of operators, and of multiply-adds, that may be predicted off the engine; 0 to 1.
    pub max_fallback: f64,
    /// Whether an uncertain or unknown operator keeps a package from passing.
    pub strict: bool,
}

/// Every chip, at most 15 % off the engine, uncertain operators allowed.
impl Default for Options {
    fn default() -> Self {
        Self { devices: Chip::ALL.to_vec(), max_fallback: 0.15, strict: false }
    }
}

/// Audits a package.
///
/// # Errors
/// [`CoremlError::Refused`] for a program without a function.
pub fn audit(package: &Package, options: &Options) -> Result<Audit, CoremlError> {
    report::audit(package.model(), Some(package), options)
}

/// Audits a program that is not on the disk. Constants in weight files count with their size; their values are not
/// looked at.
///
/// # Errors
/// As [`audit`].
pub fn audit_model(model: &Model, options: &Options) -> Result<Audit, CoremlError> {
    report::audit(model, None, options)
}
