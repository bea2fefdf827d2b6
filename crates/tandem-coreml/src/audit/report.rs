//! Runs the rules and gathers what they say. These structs are what `--json` prints; `docs/audit.md` documents them.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::Serialize;

use super::cost::{multiply_adds, stored_bytes};
use super::graph::{Graph, Site};
use super::layer::layers;
use super::rules::{RULES_VERSION, Rule, rules};
use super::{Chip, Effect, Options, Source, Unit, Verdict};
use crate::dtype::DType;
use crate::error::CoremlError;
use crate::mil::{BlobRef, Data, Function, Model, Value};
use crate::package::Package;

/// An audited package.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Audit {
    /// Version of this form; it changes when a field changes its meaning or goes.
    pub schema: u32,
    /// Which state of the rules: [`RULES_VERSION`].
    pub rules_version: u32,
    /// The worst of all functions and devices.
    pub verdict: Verdict,
    /// Largest share allowed off the engine.
    pub max_fallback: f64,
    /// Whether uncertain operators keep a package from passing.
    pub strict: bool,
    /// For which chips.
    pub devices: Vec<Chip>,
    /// By name.
    pub functions: Vec<FunctionAudit>,
    /// The rules that the functions name.
    pub rules: BTreeMap<&'static str, RuleText>,
}

/// What a rule says, for the reader of a report.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[allow(missing_docs, reason = "as in `Rule`")]
pub struct RuleText {
    pub kind: &'static str,
    pub looks_at: &'static str,
    pub effect: Effect,
    pub sources: &'static [Source],
    pub advice: &'static str,
}

/// An audited function.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FunctionAudit {
    /// Its name.
    pub name: String,
    /// Its operator set.
    pub opset: String,
    /// Of all its operators.
    pub totals: Totals,
    /// One for each chip asked for.
    pub devices: Vec<DeviceSummary>,
    /// What holds for it as a whole.
    pub findings: Vec<FunctionFinding>,
    /// Worst first.
    pub kinds: Vec<KindSummary>,
    /// In order of execution, without constants.
    pub operators: Vec<OperatorAudit>,
}

/// What a set of operators amounts to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Totals {
    /// How many, without constants.
    pub operators: u64,
    /// Stored bytes of their weights, each counted once.
    pub weight_bytes: u64,
    /// Of products and convolutions in one run; `None` if a length is not known before.
    pub multiply_adds: Option<u64>,
}

/// Parts of a function's totals, 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Shares {
    /// Of operators.
    pub operators: f64,
    /// Of weight bytes; `None` if there are none.
    pub weight_bytes: Option<f64>,
    /// Of multiply-adds; `None` if they are not known, or there are none.
    pub multiply_adds: Option<f64>,
}

/// How a function fares on one chip.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DeviceSummary {
    /// The chip.
    pub device: Chip,
    /// How it ends there.
    pub verdict: Verdict,
    /// Why it does not pass.
    pub reasons: Vec<String>,
    /// Operators by unit.
    pub operators: UnitCounts,
    /// What is predicted off the engine.
    pub off_engine: Shares,
}

/// Operators by unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct UnitCounts {
    pub ane: u64,
    pub uncertain: u64,
    pub unknown: u64,
    pub gpu_cpu: u64,
}

/// What a rule says of a function as a whole.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FunctionFinding {
    /// Which rule.
    pub rule: &'static str,
    /// What follows.
    pub effect: Effect,
    /// For which of the chips asked for.
    pub devices: Vec<Chip>,
    /// What was found.
    pub detail: String,
}

/// Operators that one kind of finding concerns.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct KindSummary {
    /// The kind.
    pub kind: &'static str,
    /// The worst that follows.
    pub effect: Effect,
    /// Its rules that found something.
    pub rules: Vec<&'static str>,
    /// Operators concerned.
    pub operators: u64,
    /// Their part of the function.
    pub shares: Shares,
}

/// An audited operator.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OperatorAudit {
    /// Its name.
    pub name: String,
    /// Its kind.
    pub op: String,
    /// Names of its results.
    pub outputs: Vec<String>,
    /// Types of its results.
    pub results: Vec<String>,
    /// Which layer it belongs to, where names tell.
    pub layer: Option<String>,
    /// The worst of the chips asked for.
    pub unit: Unit,
    /// Chip by chip.
    pub units: BTreeMap<Chip, Unit>,
    /// The rule that decides [`OperatorAudit::unit`].
    pub rule: &'static str,
    /// Everything that rules say, worst first.
    pub findings: Vec<Finding>,
    /// Stored bytes of its weights; those that an operator before it uses too are counted there.
    pub weight_bytes: u64,
    /// Multiply-adds in one run; `None` if a length is not known before.
    pub multiply_adds: Option<u64>,
    /// Its part of the function.
    pub shares: Shares,
}

/// What a rule says of an operator.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Finding {
    /// Which rule.
    pub rule: &'static str,
    /// What follows.
    pub effect: Effect,
    /// For which of the chips asked for.
    pub devices: Vec<Chip>,
    /// What was found there; may be empty.
    pub detail: String,
}

pub(super) fn audit(
    model: &Model,
    package: Option<&Package>,
    options: &Options,
) -> Result<Audit, CoremlError> {
    let functions: Vec<FunctionAudit> = model
        .functions
        .iter()
        .map(|(name, function)| {
            audit_function(name, function, &Graph::new(model, function, package), options)
        })
        .collect();
    if functions.is_empty() {
        return Err(CoremlError::refused("the package has no function", "export it again"));
    }
    let verdicts = functions.iter().flat_map(|function| &function.devices).map(|device| device.verdict);
    Ok(Audit {
        schema: 1,
        rules_version: RULES_VERSION,
        verdict: verdicts.max().unwrap_or(Verdict::Failed),
        max_fallback: options.max_fallback,
        strict: options.strict,
        devices: options.devices.clone(),
        rules: texts(&functions),
        functions,
    })
}

fn texts(functions: &[FunctionAudit]) -> BTreeMap<&'static str, RuleText> {
    let operators = functions.iter().flat_map(|function| &function.operators);
    let named = operators.flat_map(|operator| &operator.findings).map(|finding| finding.rule);
    let whole = functions.iter().flat_map(|function| &function.findings).map(|finding| finding.rule);
    let named: BTreeSet<&str> = named.chain(whole).collect();
    let text = |rule: &'static Rule| RuleText {
        kind: rule.kind,
        looks_at: rule.looks_at,
        effect: rule.effect,
        sources: rule.sources,
        advice: rule.advice,
    };
    rules().filter(|rule| named.contains(rule.id)).map(|rule| (rule.id, text(rule))).collect()
}

fn audit_function(name: &str, function: &Function, graph: &Graph<'_>, options: &Options) -> FunctionAudit {
    let findings = whole(graph, &options.devices);
    let layers = layers(graph);
    let mut weights = Weights::default();
    let mut operators: Vec<OperatorAudit> = graph
        .computed()
        .map(|site| {
            let layer = layers[site.index].clone();
            operator(site, layer, weights.of(site), &findings, &options.devices)
        })
        .collect();
    let totals = Totals {
        operators: operators.len() as u64,
        weight_bytes: operators.iter().fold(0, |sum, op| sum.saturating_add(op.weight_bytes)),
        multiply_adds: sum_of_multiply_adds(&operators),
    };
    for operator in &mut operators {
        operator.shares = shares(std::iter::once(&*operator), &totals);
    }
    let device = |device: &Chip| device_summary(*device, &operators, &findings, &totals, options);
    FunctionAudit {
        name: name.to_owned(),
        opset: function.opset.clone(),
        devices: options.devices.iter().map(device).collect(),
        kinds: kinds(&operators, &totals),
        totals,
        findings,
        operators,
    }
}

/// What rules say of the function, chips with the same words together.
fn whole(graph: &Graph<'_>, devices: &[Chip]) -> Vec<FunctionFinding> {
    let mut found: Vec<FunctionFinding> = Vec::new();
    for rule in rules() {
        for device in devices.iter().filter(|device| rule.chips.contains(device)) {
            for detail in rule.check.function(graph, *device) {
                match found.iter_mut().find(|f| f.rule == rule.id && f.detail == detail) {
                    Some(finding) => finding.devices.push(*device),
                    None => {
                        let devices = vec![*device];
                        found.push(FunctionFinding { rule: rule.id, effect: rule.effect, devices, detail });
                    }
                }
            }
        }
    }
    found
}

fn operator(
    site: Site<'_, '_>,
    layer: Option<String>,
    weight_bytes: u64,
    whole: &[FunctionFinding],
    devices: &[Chip],
) -> OperatorAudit {
    let mut findings: Vec<Finding> = Vec::new();
    for rule in rules() {
        for device in devices.iter().filter(|device| rule.chips.contains(device)) {
            let Some(detail) = rule.check.operator(site, *device) else { continue };
            match findings.iter_mut().find(|f| f.rule == rule.id && f.detail == detail) {
                Some(finding) => finding.devices.push(*device),
                None => {
                    let devices = vec![*device];
                    findings.push(Finding { rule: rule.id, effect: rule.effect, devices, detail });
                }
            }
        }
    }
    // What moves the whole function moves each operator.
    findings.extend(whole.iter().filter(|finding| finding.effect == Effect::Off).map(|finding| Finding {
        rule: finding.rule,
        effect: finding.effect,
        devices: finding.devices.clone(),
        detail: String::new(),
    }));
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.effect));
    let worst = |device: &Chip| {
        let here = findings.iter().filter(|finding| finding.devices.contains(device));
        here.map(|finding| finding.effect).max().unwrap_or(Effect::Unknown).unit()
    };
    let units: BTreeMap<Chip, Unit> = devices.iter().map(|device| (*device, worst(device))).collect();
    let unit = units.values().copied().max().unwrap_or(Unit::Unknown);
    OperatorAudit {
        name: site.op.name().to_owned(),
        op: site.op.kind.clone(),
        outputs: site.op.outputs.iter().map(|output| output.name.clone()).collect(),
        results: site.outputs().map(ToString::to_string).collect(),
        layer,
        unit,
        units,
        rule: deciding(&findings, unit),
        findings,
        weight_bytes,
        multiply_adds: multiply_adds(site),
        shares: Shares { operators: 0.0, weight_bytes: None, multiply_adds: None },
    }
}

/// The rule that an operator's unit comes from; a mere cost decides nothing.
fn deciding(findings: &[Finding], unit: Unit) -> &'static str {
    let mut of_unit = findings.iter().filter(|finding| finding.effect.unit() == unit);
    let decides = of_unit.clone().find(|finding| finding.effect != Effect::Cost);
    decides.or_else(|| of_unit.next()).map_or("operator-unknown", |finding| finding.rule)
}

/// Stored constants of a function; each counts for the first operator that uses it.
#[derive(Default)]
struct Weights<'a> {
    records: BTreeSet<&'a BlobRef>,
    values: BTreeSet<*const Value>,
}

impl<'a> Weights<'a> {
    fn of(&mut self, site: Site<'_, 'a>) -> u64 {
        let mut bytes = 0u64;
        for value in site.stored() {
            let new = match &value.data {
                Data::Blob(blob) => self.records.insert(blob),
                _ => self.values.insert(std::ptr::from_ref(value)),
            };
            if new && value.ty.tensor().is_some_and(|ty| !ty.dims.is_empty() && ty.dtype != DType::String) {
                bytes = bytes.saturating_add(stored_bytes(value));
            }
        }
        bytes
    }
}

fn sum_of_multiply_adds(operators: &[OperatorAudit]) -> Option<u64> {
    operators.iter().try_fold(0u64, |sum, operator| sum.checked_add(operator.multiply_adds?))
}

fn shares<'a>(operators: impl Iterator<Item = &'a OperatorAudit>, totals: &Totals) -> Shares {
    let (mut count, mut bytes, mut adds) = (0u64, 0u64, Some(0u64));
    for operator in operators {
        count += 1;
        bytes = bytes.saturating_add(operator.weight_bytes);
        adds = adds.zip(operator.multiply_adds).and_then(|(sum, own)| sum.checked_add(own));
    }
    let part = |part: u64, whole: u64| (whole > 0).then(|| part as f64 / whole as f64);
    Shares {
        operators: part(count, totals.operators).unwrap_or(0.0),
        weight_bytes: part(bytes, totals.weight_bytes),
        multiply_adds: adds.zip(totals.multiply_adds).and_then(|(own, whole)| part(own, whole)),
    }
}

/// Operators grouped by what rules complain about.
fn kinds(operators: &[OperatorAudit], totals: &Totals) -> Vec<KindSummary> {
    let kind_of: HashMap<&str, &'static str> = rules().map(|rule| (rule.id, rule.kind)).collect();
    let mut groups: BTreeMap<&'static str, (Effect, BTreeSet<&'static str>, Vec<&OperatorAudit>)> =
        BTreeMap::new();
    for operator in operators {
        for finding in operator.findings.iter().filter(|finding| finding.effect != Effect::Native) {
            let group =
                groups.entry(kind_of[finding.rule]).or_insert((Effect::Native, BTreeSet::new(), Vec::new()));
            group.0 = group.0.max(finding.effect);
            group.1.insert(finding.rule);
            if group.2.last().is_none_or(|last| !std::ptr::eq(*last, operator)) {
                group.2.push(operator);
            }
        }
    }
    let summary =
        |(kind, (effect, rules, operators)): (_, (_, BTreeSet<&'static str>, Vec<&OperatorAudit>))| {
            KindSummary {
                kind,
                effect,
                rules: rules.into_iter().collect(),
                operators: operators.len() as u64,
                shares: shares(operators.into_iter(), totals),
            }
        };
    let mut kinds: Vec<KindSummary> = groups.into_iter().map(summary).collect();
    kinds.sort_by_key(|kind| std::cmp::Reverse((kind.effect, kind.operators)));
    kinds
}

fn device_summary(
    device: Chip,
    operators: &[OperatorAudit],
    whole: &[FunctionFinding],
    totals: &Totals,
    options: &Options,
) -> DeviceSummary {
    let mut counts = UnitCounts::default();
    for operator in operators {
        match operator.units[&device] {
            Unit::Ane => counts.ane += 1,
            Unit::Uncertain => counts.uncertain += 1,
            Unit::Unknown => counts.unknown += 1,
            Unit::GpuCpu => counts.gpu_cpu += 1,
        }
    }
    let off = operators.iter().filter(|operator| operator.units[&device] == Unit::GpuCpu);
    let off_engine = shares(off, totals);
    let (verdict, reasons) = judge(device, operators, whole, &counts, &off_engine, options);
    DeviceSummary { device, verdict, reasons, operators: counts, off_engine }
}

fn judge(
    device: Chip,
    operators: &[OperatorAudit],
    whole: &[FunctionFinding],
    counts: &UnitCounts,
    off_engine: &Shares,
    options: &Options,
) -> (Verdict, Vec<String>) {
    let mut found: Vec<(Verdict, String)> = Vec::new();
    if counts.ane == 0 {
        found.push((Verdict::Failed, "no operator is predicted on the engine".into()));
    }
    let here = |effect: Effect, devices: &[Chip]| effect == Effect::Fails && devices.contains(&device);
    let fatal = whole.iter().filter(|f| here(f.effect, &f.devices)).map(|f| f.rule);
    let fatal_operators = operators.iter().flat_map(|operator| &operator.findings);
    let fatal: BTreeSet<&str> =
        fatal.chain(fatal_operators.filter(|f| here(f.effect, &f.devices)).map(|f| f.rule)).collect();
    found.extend(fatal.into_iter().map(|rule| (Verdict::Failed, format!("{rule} fails on the engine"))));
    let limit = options.max_fallback;
    for (share, what) in
        [(Some(off_engine.operators), "operators"), (off_engine.multiply_adds, "multiply-adds")]
    {
        if let Some(share) = share.filter(|share| *share > limit) {
            let text =
                format!("{:.1} % of {what} off the engine, {:.1} % allowed", share * 100.0, limit * 100.0);
            found.push((Verdict::OverLimit, text));
        }
    }
    let open = counts.uncertain + counts.unknown;
    if options.strict && open > 0 {
        found.push((Verdict::Uncertain, format!("{open} operators uncertain or unknown")));
    }
    let verdict = found.iter().map(|(verdict, _)| *verdict).max().unwrap_or(Verdict::Pass);
    (verdict, found.into_iter().map(|(_, reason)| reason).collect())
}
