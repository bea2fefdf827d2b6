//! What is known about the engine, as data: one record a rule.
//!
//! A rule says what it looks at, what follows and for which chips, who says so and how sure that is, and what to change.
//! Its check finds the place. Each has a case in `cases.rs` that triggers it and one that does not.

mod attention;
mod operators;
mod program;
mod range;
mod reach;
mod tensors;
mod weights;

use serde::Serialize;

use super::graph::{Graph, Site};
use super::{Chip, Unit};

/// One fact about the engine.
#[derive(Debug)]
pub struct Rule {
    /// Its name, which stays the same from version to version.
    pub id: &'static str,
    /// What it is about, for the summary.
    pub kind: &'static str,
    /// What it looks at, in words.
    pub looks_at: &'static str,
    /// What follows.
    pub effect: Effect,
    /// For which chips.
    pub chips: &'static [Chip],
    /// Who says so.
    pub sources: &'static [Source],
    /// What to change.
    pub advice: &'static str,
    pub(super) check: Check,
}

/// Who says something, and on what ground.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Source {
    /// Document, issue or data set.
    pub name: &'static str,
    /// How sure it is.
    pub confidence: Confidence,
}

/// How sure a source is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Confidence {
    /// Apple's own text.
    Apple,
    /// Measured by somebody else on hardware.
    Measured,
    /// Old, or a guess.
    Guess,
}

/// What follows from a rule, mildest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Effect {
    /// The operator runs there.
    Native,
    /// It runs there and costs memory, time or precision.
    Cost,
    /// It may run there or not, or be right or not.
    Uncertain,
    /// Nobody says.
    Unknown,
    /// It runs on GPU or CPU instead.
    Off,
    /// On the engine it does not load, does not run or gives wrong results. A package with it never passes.
    Fails,
}

impl Effect {
    /// `native`, `cost`, `uncertain`, `unknown`, `off` or `fails`.
    pub fn name(self) -> &'static str {
        ["native", "cost", "uncertain", "unknown", "off", "fails"][self as usize]
    }

    /// Where an operator is expected to run for which this is the worst.
    pub fn unit(self) -> Unit {
        match self {
            Self::Native | Self::Cost => Unit::Ane,
            Self::Uncertain => Unit::Uncertain,
            Self::Unknown => Unit::Unknown,
            Self::Off | Self::Fails => Unit::GpuCpu,
        }
    }
}

/// How the place is found. Both give words that say what was found there.
#[derive(Debug)]
pub(super) enum Check {
    /// Operators of these kinds (none listed: of every kind) for which `when` says something.
    Operator { ops: &'static [&'static str], when: fn(Site<'_, '_>, Chip) -> Option<String> },
    /// A function as a whole.
    Function(fn(&Graph<'_>, Chip) -> Vec<String>),
}

impl Check {
    pub fn operator(&self, site: Site<'_, '_>, chip: Chip) -> Option<String> {
        match self {
            Self::Operator { ops, when } if ops.is_empty() || site.is(ops) => when(site, chip),
            _ => None,
        }
    }

    pub fn function(&self, graph: &Graph<'_>, chip: Chip) -> Vec<String> {
        match self {
            Self::Function(when) => when(graph, chip),
            Self::Operator { .. } => Vec::new(),
        }
    }
}

/// Counts the changes of the rules: what one state of them says need not hold for the next.
pub const RULES_VERSION: u32 = 2;

/// All rules.
pub fn rules() -> impl Iterator<Item = &'static Rule> {
    let tables = [
        program::RULES,
        tensors::RULES,
        attention::RULES,
        weights::RULES,
        operators::RULES,
        range::RULES,
        reach::RULES,
    ];
    tables.into_iter().flatten()
}

/// A rule by its name.
pub fn rule(id: &str) -> Option<&'static Rule> {
    rules().find(|rule| rule.id == id)
}

const ALL: &[Chip] = &Chip::ALL;

const fn apple(name: &'static str) -> Source {
    Source { name, confidence: Confidence::Apple }
}

const fn measured(name: &'static str) -> Source {
    Source { name, confidence: Confidence::Measured }
}

const fn guess(name: &'static str) -> Source {
    Source { name, confidence: Confidence::Guess }
}

const APPLE_RULES: Source = apple("apple/coreai-models skills, neural_engine_rules.md");
const SWEEP: Source = measured("aneforge 0.4.0, full_mil_vocabulary_sweep.json (M5 Pro)");
const CATALOG: Source = measured("aneforge 0.4.0, _op_catalog.py");
const LIMITS: Source = measured("aneforge 0.4.0, _targets.py");

/// Every operator of the kinds that a rule lists.
fn always(_: Site<'_, '_>, _: Chip) -> Option<String> {
    Some(String::new())
}
