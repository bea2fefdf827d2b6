//! Where Core ML itself would run each operator on this machine, beside what the rules predict.
//!
//! Only a Mac can say, from macOS 14.4 on: [`placement`] compiles the package there and asks Core ML for its plan.

#[cfg(target_os = "macos")]
mod macos;

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;

use super::report::{Audit, FunctionAudit, OperatorAudit};
use super::{Chip, Unit};

/// A processor that Core ML plans for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the names say it")]
pub enum Processor {
    Ane,
    Gpu,
    Cpu,
}

impl Processor {
    /// `ane`, `gpu` or `cpu`.
    pub fn name(self) -> &'static str {
        ["ane", "gpu", "cpu"][self as usize]
    }
}

/// What Core ML's plan says of one operator.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Planned {
    /// Where it would run.
    pub on: Processor,
    /// Where it could run.
    pub supported: Vec<Processor>,
    /// Its share of the function's time as Core ML estimates it, 0 to 1, where it does.
    pub cost: Option<f64>,
}

/// The plans for a package on one machine.
#[derive(Debug, Clone, PartialEq)]
pub struct Plans {
    /// The machine's chip as the system names it.
    pub machine: String,
    /// By function: operators by the name of a result.
    pub functions: BTreeMap<String, BTreeMap<String, Planned>>,
}

/// Plan and prediction side by side.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Placement {
    /// The machine's chip as the system names it.
    pub machine: String,
    /// The chip whose predictions are compared, if they were asked for; else the worst of all.
    pub compared: Option<Chip>,
    /// One for each function with a plan.
    pub functions: Vec<FunctionPlacement>,
}

/// Plan and prediction of a function.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FunctionPlacement {
    /// Its name.
    pub function: String,
    /// Operators by where they would run.
    pub on: BTreeMap<Processor, u64>,
    /// Operators that the plan does not name: Core ML has merged them into others, or constants of its own.
    pub not_planned: u64,
    /// Where plan and prediction part, in order of execution.
    pub differences: Vec<Difference>,
    /// The plan of every operator that it names, in order of execution.
    pub operators: Vec<PlacedOperator>,
}

/// An operator that runs elsewhere than predicted, or whose place was open.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Difference {
    /// Its name.
    pub name: String,
    /// Its kind.
    pub op: String,
    /// Which layer it belongs to.
    pub layer: Option<String>,
    /// What was predicted.
    pub predicted: Unit,
    /// The rule that it was predicted by.
    pub rule: &'static str,
    /// Where it would run.
    pub on: Processor,
}

/// An operator and its plan.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PlacedOperator {
    /// Its name.
    pub name: String,
    /// What the plan says.
    #[serde(flatten)]
    pub planned: Planned,
}

/// Asks Core ML how it would run `package` with every processor allowed, and compares. `None` where there is no Core ML.
///
/// # Errors
/// What Core ML says, in words.
pub fn placement(package: &Path, audit: &Audit) -> Result<Option<Placement>, String> {
    #[cfg(target_os = "macos")]
    {
        let names: Vec<&str> = audit.functions.iter().map(|function| function.name.as_str()).collect();
        Ok(Some(compare(audit, &macos::plans(package, &names)?)))
    }
    #[cfg(not(target_os = "macos"))]
    {
        let _ = (package, audit);
        Ok(None)
    }
}

/// Lays plans beside an audit of the same package.
pub fn compare(audit: &Audit, plans: &Plans) -> Placement {
    let compared = chip_of(&plans.machine).filter(|chip| audit.devices.contains(chip));
    let functions = audit.functions.iter().filter_map(|function| {
        Some(compare_function(function, plans.functions.get(&function.name)?, compared))
    });
    Placement { machine: plans.machine.clone(), compared, functions: functions.collect() }
}

fn compare_function(
    function: &FunctionAudit,
    plan: &BTreeMap<String, Planned>,
    chip: Option<Chip>,
) -> FunctionPlacement {
    let mut placed = FunctionPlacement {
        function: function.name.clone(),
        on: BTreeMap::new(),
        not_planned: 0,
        differences: Vec::new(),
        operators: Vec::new(),
    };
    for operator in &function.operators {
        let Some(planned) = operator.outputs.iter().find_map(|output| plan.get(output)) else {
            placed.not_planned += 1;
            continue;
        };
        *placed.on.entry(planned.on).or_default() += 1;
        placed.differences.extend(difference(operator, planned, chip));
        placed.operators.push(PlacedOperator { name: operator.name.clone(), planned: planned.clone() });
    }
    placed
}

fn difference(operator: &OperatorAudit, planned: &Planned, chip: Option<Chip>) -> Option<Difference> {
    let predicted = chip.and_then(|chip| operator.units.get(&chip).copied()).unwrap_or(operator.unit);
    let as_predicted = match predicted {
        Unit::Ane => planned.on == Processor::Ane,
        Unit::GpuCpu => planned.on != Processor::Ane,
        Unit::Uncertain | Unit::Unknown => false,
    };
    (!as_predicted).then(|| Difference {
        name: operator.name.clone(),
        op: operator.op.clone(),
        layer: operator.layer.clone(),
        predicted,
        rule: operator.rule,
        on: planned.on,
    })
}

/// The generation that a Mac's chip belongs to: `Apple M3 Pro` is an M3.
fn chip_of(machine: &str) -> Option<Chip> {
    machine.strip_prefix("Apple ")?.split(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::super::cases::Tiny;
    use super::super::{Options, audit_model};
    use super::*;
    use crate::dtype::DType::F16;

    #[test]
    fn the_generation_is_in_the_chips_name() {
        let names = ["Apple M1", "Apple M3 Pro", "Apple M5 Ultra", "Apple M17", "Intel(R) Core(TM) i9", ""];
        let chips = names.map(chip_of);
        assert_eq!(chips, [Some(Chip::M1), Some(Chip::M3), Some(Chip::M5), None, None, None]);
    }

    #[test]
    fn differences_are_what_was_predicted_otherwise_or_not_at_all() {
        let shape = [1, 64, 1, 32];
        let ops =
            [("relu", "a"), ("relu", "b"), ("cumsum", "c"), ("cumsum", "d"), ("mystery", "e"), ("relu", "f")];
        let tiny = ops.into_iter().fold(Tiny::new().input("x", F16, &shape), |tiny, (kind, name)| {
            tiny.op(kind, &[("x", "x")], name, F16, &shape)
        });
        let audit = audit_model(&tiny.model(), &Options::default()).unwrap();
        use Processor::{Ane, Cpu, Gpu};
        let planned = |on| Planned { on, supported: vec![Cpu], cost: None };
        // Nothing is said of f.
        let plan = [("a", Ane), ("b", Gpu), ("c", Cpu), ("d", Ane), ("e", Ane)];
        let plan = plan.map(|(name, on)| (name.to_owned(), planned(on))).into();
        let plans = Plans { machine: "Apple M2 Max".into(), functions: [("main".to_owned(), plan)].into() };
        let placement = compare(&audit, &plans);
        assert_eq!(placement.compared, Some(Chip::M2));
        let function = &placement.functions[0];
        assert_eq!((function.on.clone(), function.not_planned), ([(Ane, 3), (Gpu, 1), (Cpu, 1)].into(), 1));
        let found: Vec<_> =
            function.differences.iter().map(|d| (d.name.as_str(), d.predicted, d.on)).collect();
        assert_eq!(found, [("b", Unit::Ane, Gpu), ("d", Unit::GpuCpu, Ane), ("e", Unit::Unknown, Ane)]);
        assert_eq!(function.operators.len(), 5);
        // A function without a plan is left out.
        let none = Plans { functions: BTreeMap::new(), ..plans };
        assert!(compare(&audit, &none).functions.is_empty());
    }
}
