//! What the catalogue says of operators that no other rule speaks of.

use super::{ALL, CATALOG, Check, Effect, Rule, SWEEP, Site};
use crate::audit::Chip::{self, M4};
use crate::audit::catalog::{self, Reach, Sweep};

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "operator-walled",
        kind: "operator",
        looks_at: "operators that a generation cannot compile",
        effect: Effect::Off,
        chips: ALL,
        sources: &[CATALOG],
        advice: "compose it of operators that this generation has",
        check: Check::Operator { ops: &[], when: walled },
    },
    Rule {
        id: "operator-bridge",
        kind: "operator",
        looks_at: "operators that a generation runs only from private nets",
        effect: Effect::Uncertain,
        chips: ALL,
        sources: &[CATALOG],
        advice: "profile on the device, or compose it of other operators",
        check: Check::Operator { ops: &[], when: bridged },
    },
    Rule {
        id: "operator-unknown",
        kind: "unknown operator",
        looks_at: "operators that no source names",
        effect: Effect::Unknown,
        chips: ALL,
        sources: &[],
        advice: "profile on the device",
        check: Check::Operator { ops: &[], when: unknown },
    },
    Rule {
        id: "operator-native",
        kind: "operator",
        looks_at: "operators that a generation compiles",
        effect: Effect::Native,
        chips: ALL,
        sources: &[CATALOG, SWEEP],
        advice: "nothing",
        check: Check::Operator { ops: &[], when: native },
    },
];

/// How the operator gets to the engine of `chip`. A slice at a constant place is folded into its reader, and what ran
/// on an M5 Pro is reached on the generation it shares its column with.
fn reach(site: Site<'_, '_>, chip: Chip) -> Option<Reach> {
    let entry = catalog::find(&site.op.kind)?;
    let reach = entry.reach(chip);
    let ran = entry.sweep == Sweep::Ran && (chip >= M4 || site.op.kind == "slice_by_index");
    Some(if reach == Reach::Bridge && ran { Reach::Native } else { reach })
}

/// Those that did not compile alone have rules of their own, with better advice.
fn walled(site: Site<'_, '_>, chip: Chip) -> Option<String> {
    let own = catalog::find(&site.op.kind)?.sweep == Sweep::Refused;
    (!own && reach(site, chip)? == Reach::Walled).then(String::new)
}

fn bridged(site: Site<'_, '_>, chip: Chip) -> Option<String> {
    (reach(site, chip)? == Reach::Bridge).then(String::new)
}

/// Also those that the catalogue names without a word on any generation, if they did not run either.
fn unknown(site: Site<'_, '_>, chip: Chip) -> Option<String> {
    match catalog::find(&site.op.kind) {
        Some(entry) if entry.reach(chip) != Reach::Silent || entry.sweep != Sweep::Untried => None,
        _ => Some(String::new()),
    }
}

fn native(site: Site<'_, '_>, chip: Chip) -> Option<String> {
    let ran = catalog::find(&site.op.kind)?.sweep == Sweep::Ran;
    let reach = reach(site, chip)?;
    (reach == Reach::Native || reach == Reach::Silent && ran).then(String::new)
}
