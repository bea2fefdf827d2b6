//! `tandem audit`: which operators of a Core ML package will not run on the Neural Engine.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::ExitCode;

use serde::Serialize;
use tandem_coreml::audit::placement::{Placement, placement};
use tandem_coreml::audit::{Audit, Chip, Confidence, Effect, FunctionAudit, Options, Shares, audit};

use crate::cli::AuditArgs;
use crate::measure::size;
use crate::package::{open, plain};

/// Places that are named before the rest is only counted.
const PLACES: usize = 4;

/// Differences between plan and prediction that are named before the rest is only counted.
const DIFFERENCES: usize = 20;

/// As `--json` shows it.
#[derive(Serialize)]
struct Report {
    package: String,
    #[serde(flatten)]
    audit: Audit,
    /// What Core ML plans; null where it was not asked.
    placement: Option<Placement>,
}

pub fn run(args: &AuditArgs) -> anyhow::Result<ExitCode> {
    let package = open(&args.package)?;
    let options =
        Options { devices: args.device.0.clone(), max_fallback: args.max_fallback.0, strict: args.strict };
    let audit = audit(&package, &options)?;
    let placement = match args.no_plan {
        true => None,
        false => placement(&args.package, &audit).unwrap_or_else(|why| {
            eprintln!("note: no plan of Core ML to compare with: {}", plain(&why));
            None
        }),
    };
    let code = ExitCode::from(audit.verdict.exit_code());
    let package = args.package.display().to_string();
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&Report { package, audit, placement })?)?;
    } else {
        print(&mut out, &package, &audit, placement.as_ref())?;
    }
    Ok(code)
}

fn print(
    out: &mut impl Write,
    package: &str,
    audit: &Audit,
    placement: Option<&Placement>,
) -> std::io::Result<()> {
    for function in &audit.functions {
        print_totals(out, package, function)?;
        print_devices(out, function)?;
        print_kinds(out, function)?;
        print_findings(out, function, audit)?;
    }
    for function in &audit.functions {
        for (reasons, devices) in reasons(function) {
            writeln!(out, "{} on {}: {}", plain(&function.name), list(&devices), reasons.join("; "))?;
        }
    }
    if let Some(placement) = placement {
        print_placement(out, placement)?;
    }
    writeln!(out, "verdict: {} (predicted by rules; nothing was run)", audit.verdict.name())
}

/// Where Core ML would run the operators, and where that is not what was predicted.
fn print_placement(out: &mut impl Write, placement: &Placement) -> std::io::Result<()> {
    let beside = placement.compared.map_or_else(|| "the worst chip".into(), |chip| chip.to_string());
    let machine = plain(&placement.machine);
    for function in &placement.functions {
        let on: Vec<String> =
            function.on.iter().map(|(on, count)| format!("{count} on {}", on.name())).collect();
        writeln!(
            out,
            "Core ML's plan for {} on this {machine}: {}, {} not named",
            plain(&function.function),
            on.join(", "),
            function.not_planned
        )?;
        writeln!(out, "  differs from what is predicted for {beside}: {}", function.differences.len())?;
        for difference in function.differences.iter().take(DIFFERENCES) {
            let layer = difference.layer.as_ref().map_or_else(String::new, |layer| format!("{layer}: "));
            writeln!(
                out,
                "    {}: predicted {} ({}), planned {}",
                plain(&format!("{layer}{} {}", difference.op, difference.name)),
                difference.predicted.name(),
                difference.rule,
                difference.on.name()
            )?;
        }
        match function.differences.len().saturating_sub(DIFFERENCES) {
            0 => writeln!(out)?,
            more => writeln!(out, "    and {more} more, with --json\n")?,
        }
    }
    Ok(())
}

fn print_totals(out: &mut impl Write, package: &str, function: &FunctionAudit) -> std::io::Result<()> {
    let totals = &function.totals;
    let adds = totals.multiply_adds.map_or_else(|| "unknown".to_owned(), count);
    writeln!(
        out,
        "{package}, function {} ({}): {} operators, {} of weights, {adds} multiply-adds\n",
        plain(&function.name),
        plain(&function.opset),
        totals.operators,
        size(totals.weight_bytes)
    )
}

fn print_devices(out: &mut impl Write, function: &FunctionAudit) -> std::io::Result<()> {
    writeln!(out, "                                             OFF THE ENGINE, SHARE OF")?;
    writeln!(out, "DEVICE  ENGINE  UNCERTAIN  UNKNOWN  GPU/CPU  OPERATORS  WEIGHTS  MULTIPLY-ADDS  VERDICT")?;
    for device in &function.devices {
        let counts = &device.operators;
        let [operators, weights, adds] = columns(&device.off_engine);
        writeln!(
            out,
            "{:6}  {:>6}  {:>9}  {:>7}  {:>7}  {operators:>9}  {weights:>7}  {adds:>13}  {}",
            device.device.name(),
            counts.ane,
            counts.uncertain,
            counts.unknown,
            counts.gpu_cpu,
            device.verdict.name()
        )?;
    }
    writeln!(out)
}

fn print_kinds(out: &mut impl Write, function: &FunctionAudit) -> std::io::Result<()> {
    if function.kinds.is_empty() {
        return Ok(());
    }
    let width = function.kinds.iter().map(|kind| kind.kind.len()).max().unwrap_or(0).max(4);
    writeln!(out, "{:width$}  EFFECT     COUNT  OPERATORS  WEIGHTS  MULTIPLY-ADDS", "KIND")?;
    for kind in &function.kinds {
        let [operators, weights, adds] = columns(&kind.shares);
        writeln!(
            out,
            "{:width$}  {:9}  {:>5}  {operators:>9}  {weights:>7}  {adds:>13}",
            kind.kind,
            kind.effect.name(),
            kind.operators
        )?;
    }
    writeln!(out)
}

/// Where one rule found something.
#[derive(Default)]
struct Found {
    devices: Vec<Chip>,
    details: Vec<String>,
    places: Vec<String>,
}

impl Found {
    fn add(&mut self, devices: &[Chip], detail: &str, place: Option<String>) {
        self.devices.extend(devices);
        self.devices.sort();
        self.devices.dedup();
        let detail = plain(detail);
        if !detail.is_empty() && self.details.iter().all(|known| *known != detail) {
            self.details.push(detail);
        }
        self.places.extend(place.filter(|place| self.places.last() != Some(place)));
    }
}

fn print_findings(out: &mut impl Write, function: &FunctionAudit, audit: &Audit) -> std::io::Result<()> {
    let mut found: BTreeMap<(std::cmp::Reverse<Effect>, &str), Found> = BTreeMap::new();
    for finding in &function.findings {
        let key = (std::cmp::Reverse(finding.effect), finding.rule);
        found.entry(key).or_default().add(&finding.devices, &finding.detail, None);
    }
    for operator in &function.operators {
        let place = match &operator.layer {
            Some(layer) => plain(&format!("{layer}: {} {}", operator.op, operator.name)),
            None => plain(&format!("{} {}", operator.op, operator.name)),
        };
        for finding in operator.findings.iter().filter(|finding| finding.effect != Effect::Native) {
            let key = (std::cmp::Reverse(finding.effect), finding.rule);
            found.entry(key).or_default().add(&finding.devices, &finding.detail, Some(place.clone()));
        }
    }
    for ((effect, id), found) in found {
        let rule = &audit.rules[id];
        writeln!(out, "{} {id} ({}, {})", effect.0.name(), rule.kind, list(&found.devices))?;
        if !found.details.is_empty() {
            writeln!(out, "  found:  {}", some(&found.details, "; "))?;
        }
        if !found.places.is_empty() {
            writeln!(out, "  where:  {}", some(&found.places, ", "))?;
        }
        writeln!(out, "  change: {}", rule.advice)?;
        let sources = rule.sources.iter().map(|source| {
            let ground = match source.confidence {
                Confidence::Apple => "Apple",
                Confidence::Measured => "measured",
                Confidence::Guess => "a guess",
            };
            format!("{} ({ground})", source.name)
        });
        let sources: Vec<String> = sources.collect();
        let sources = if sources.is_empty() { "none".to_owned() } else { sources.join("; ") };
        writeln!(out, "  source: {sources}\n")?;
    }
    Ok(())
}

/// Devices that do not pass, those with the same reasons together.
fn reasons(function: &FunctionAudit) -> Vec<(&[String], Vec<Chip>)> {
    let mut groups: Vec<(&[String], Vec<Chip>)> = Vec::new();
    for device in function.devices.iter().filter(|device| !device.reasons.is_empty()) {
        match groups.iter_mut().find(|(reasons, _)| *reasons == device.reasons.as_slice()) {
            Some((_, devices)) => devices.push(device.device),
            None => groups.push((&device.reasons, vec![device.device])),
        }
    }
    groups
}

fn some(all: &[String], separator: &str) -> String {
    let shown = all[..all.len().min(PLACES)].join(separator);
    match all.len().saturating_sub(PLACES) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

fn list(chips: &[Chip]) -> String {
    match chips {
        [first, .., last] if chips.len() == Chip::ALL.len() => format!("{first} to {last}"),
        _ => chips.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
    }
}

fn columns(shares: &Shares) -> [String; 3] {
    let percent =
        |share: Option<f64>| share.map_or_else(|| "-".to_owned(), |share| format!("{:.1} %", share * 100.0));
    [percent(Some(shares.operators)), percent(shares.weight_bytes), percent(shares.multiply_adds)]
}

/// A large number in three digits or four.
fn count(number: u64) -> String {
    let units = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    let value = number as f64;
    match units.into_iter().find(|(unit, _)| value >= *unit) {
        Some((unit, letter)) => format!("{:.1} {letter}", value / unit),
        None => number.to_string(),
    }
}
