//! The results: as one JSON object, and as a table of the same figures.

use std::fmt::Write;

use serde::Serialize;

use super::limits::{Limit, Machine};
use super::test::Test;

/// All that is known of a run. `null` is unknown.
#[derive(Debug, Serialize)]
pub struct Report {
    pub tandem: Build,
    pub host: Host,
    /// When the run began, in UTC (RFC 3339).
    pub time: String,
    /// How long it took.
    pub seconds: f64,
    pub load_average: Load,
    pub warnings: Vec<String>,
    pub model: Option<ModelFacts>,
    pub settings: Settings,
    pub peers: Vec<Peer>,
    pub roofline: Vec<Machine>,
    pub rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
pub struct Build {
    pub version: &'static str,
    /// What `TANDEM_BUILD` said when this was compiled, such as the output of git describe.
    pub build: Option<&'static str>,
    pub debug_build: bool,
}

#[derive(Debug, Serialize)]
pub struct Host {
    pub platform: String,
    pub cpu: Option<String>,
    pub cores: Option<usize>,
    pub features: Vec<&'static str>,
    /// The kernel path that computes.
    pub kernels: &'static str,
    pub memory_bytes: Option<u64>,
    pub huge_pages: Option<String>,
}

/// Over the last minute.
#[derive(Debug, Serialize)]
pub struct Load {
    pub before: Option<f64>,
    pub after: Option<f64>,
}

#[derive(Debug, Serialize)]
pub struct ModelFacts {
    pub name: String,
    pub architecture: String,
    /// BLAKE3 over names, formats, shapes and bytes of all tensors.
    pub hash: String,
    /// Of all tensors as stored.
    pub stored_bytes: u64,
    /// As the engine holds them, which is what a decode step reads.
    pub weight_bytes: u64,
}

#[derive(Debug, Serialize)]
pub struct Settings {
    pub rounds: usize,
    pub threads: Vec<usize>,
    pub quant: String,
    pub kv: &'static str,
    pub exact: bool,
}

#[derive(Debug, Serialize)]
pub struct Peer {
    pub name: &'static str,
    pub path: String,
    /// The commit it says it was built from.
    pub build: Option<String>,
}

/// One engine in one test.
#[derive(Debug, Serialize)]
pub struct Row {
    pub test: String,
    pub threads: usize,
    pub engine: &'static str,
    pub unit: &'static str,
    /// Why there are no figures.
    pub error: Option<String>,
    /// One a round.
    pub samples: Vec<f64>,
    /// Of the samples.
    pub spread: Option<Spread>,
    /// Tokens that a round computed anew.
    pub new_tokens: Option<usize>,
    /// Tokens of a prompt that were not computed again.
    pub cached_tokens: Option<usize>,
    /// The best that this machine allows.
    pub limit: Option<Limit>,
    /// The median over the limit.
    pub share_of_limit: Option<f64>,
    /// On a peer's row: Tandem's figure over the peer's, round by round.
    pub tandem_over_peer: Option<Spread>,
    #[serde(skip)]
    pub kind: Test,
    /// 0 is Tandem, then the peers in the order they were given.
    #[serde(skip)]
    pub arm: usize,
}

/// Of several figures.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

/// The engine that this program is.
pub const TANDEM: &str = "tandem";

impl Spread {
    /// `None` of nothing.
    pub fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let middle = sorted.len() / 2;
        let median = if sorted.len() % 2 == 1 {
            sorted[middle]
        } else {
            f64::midpoint(sorted[middle - 1], sorted[middle])
        };
        Some(Self { median, min, max })
    }
}

impl Row {
    pub fn new(kind: Test, threads: usize, arm: usize, engine: &'static str) -> Self {
        Self {
            test: kind.to_string(),
            threads,
            engine,
            unit: kind.unit().name(),
            error: None,
            samples: Vec::new(),
            spread: None,
            new_tokens: None,
            cached_tokens: None,
            limit: None,
            share_of_limit: None,
            tandem_over_peer: None,
            kind,
            arm,
        }
    }

    fn cells(&self) -> [String; 7] {
        let unit = self.kind.unit();
        let figure = match (&self.error, self.spread) {
            (Some(_), _) => "failed".to_owned(),
            (None, None) => "unknown".to_owned(),
            (None, Some(Spread { median, min, max })) => {
                format!("{} ({} to {}) {}", unit.show(median), unit.show(min), unit.show(max), unit.shown())
            }
        };
        let tokens = match (self.new_tokens, self.cached_tokens) {
            (Some(new), Some(cached)) => format!("{new} + {cached}"),
            (Some(new), None) => new.to_string(),
            _ => String::new(),
        };
        let limit = match (self.limit, self.share_of_limit) {
            (Some(limit), Some(share)) => {
                let bound = format!("{:?}", limit.bound).to_lowercase();
                format!("{:.0} % of {} ({bound})", 100.0 * share, unit.show(limit.value))
            }
            _ => String::new(),
        };
        let ratio = self
            .tandem_over_peer
            .map(|Spread { median, min, max }| format!("{median:.2} ({min:.2} to {max:.2})"));
        let threads = self.threads.to_string();
        [self.test.clone(), threads, self.engine.to_owned(), figure, tokens, limit, ratio.unwrap_or_default()]
    }
}

impl Report {
    /// Whether a test of Tandem itself failed.
    pub fn tandem_failed(&self) -> bool {
        self.rows.iter().any(|row| row.engine == TANDEM && row.error.is_some())
    }

    /// For people.
    pub fn table(&self) -> String {
        let mut out = String::new();
        for (name, value) in self.facts() {
            // Writing to a string does not fail.
            let _ = writeln!(out, "{name:9} {value}");
        }
        for warning in &self.warnings {
            let _ = writeln!(out, "warning   {warning}");
        }
        if !self.roofline.is_empty() {
            let _ =
                writeln!(out, "\n{}", table(&LIMITS, &self.roofline.iter().map(limits).collect::<Vec<_>>()));
        }
        if !self.rows.is_empty() {
            let _ =
                writeln!(out, "\n{}", table(&HEADS, &self.rows.iter().map(Row::cells).collect::<Vec<_>>()));
            for row in &self.rows {
                if let Some(error) = &row.error {
                    let _ =
                        writeln!(out, "failed    {} -t {} {}: {error}", row.test, row.threads, row.engine);
                }
            }
        }
        out
    }

    fn facts(&self) -> Vec<(&'static str, String)> {
        let unknown = || "unknown".to_owned();
        let load = |load: Option<f64>| load.map_or_else(unknown, |load| format!("{load:.2}"));
        let Host { platform, cpu, cores, features, kernels, .. } = &self.host;
        let debug = if self.tandem.debug_build { ", DEBUG BUILD: its speed says nothing" } else { "" };
        let mut facts = vec![
            (
                "tandem",
                format!("{} (build {}){debug}", self.tandem.version, self.tandem.build.unwrap_or("unknown")),
            ),
            (
                "host",
                format!(
                    "{}, {} cores, {platform}; {kernels} kernels",
                    cpu.clone().unwrap_or_else(unknown),
                    cores.map_or_else(unknown, |n| n.to_string())
                ),
            ),
            ("features", features.join(" ")),
            (
                "load",
                format!("{} before, {} after", load(self.load_average.before), load(self.load_average.after)),
            ),
            ("time", format!("{}, {:.0} s", self.time, self.seconds)),
        ];
        if let Some(ModelFacts { name, architecture, hash, weight_bytes, .. }) = &self.model {
            let short = hash.get(..16).unwrap_or(hash);
            let weights = weight_bytes >> 20;
            facts.push(("model", format!("{name} ({architecture}, {weights} MiB packed, blake3 {short})")));
            let exact = if self.settings.exact { ", exact" } else { "" };
            let Settings { rounds, kv, .. } = &self.settings;
            facts.push(("rounds", format!("{rounds}, interleaved; KV in {kv}{exact}")));
        }
        for Peer { name, path, build } in &self.peers {
            facts.push(("peer", format!("{name} {path} (build {})", build.clone().unwrap_or_else(unknown))));
        }
        facts
    }
}

const HEADS: [&str; 7] = [
    "test",
    "threads",
    "engine",
    "median (min to max)",
    "prompt: new + cached",
    "of its limit",
    "tandem / peer",
];

const LIMITS: [&str; 6] =
    ["threads", "read, small pages", "read, huge pages", "int8", "int8 without tiles", "f32"];

fn limits(machine: &Machine) -> [String; 6] {
    let giga = |rate: f64, unit: &str| format!("{:.1} {unit}", rate / 1e9);
    let read = |rate: Option<f64>| rate.map_or_else(|| "unknown".to_owned(), |rate| giga(rate, "GB/s"));
    [
        machine.threads.to_string(),
        read(machine.read_small_pages_bytes_per_second),
        read(machine.read_huge_pages_bytes_per_second),
        giga(machine.int8_operations_per_second, "GOP/s"),
        machine.int8_vector_operations_per_second.map_or_else(String::new, |rate| giga(rate, "GOP/s")),
        giga(machine.f32_operations_per_second, "GFLOP/s"),
    ]
}

/// Columns under their heads, those that are empty left out, as Markdown too would have them.
fn table<const N: usize>(heads: &[&str; N], rows: &[[String; N]]) -> String {
    let widths: [usize; N] = std::array::from_fn(|i| {
        let widest = rows.iter().map(|row| row[i].chars().count()).max().unwrap_or(0);
        if widest == 0 { 0 } else { widest.max(heads[i].chars().count()) }
    });
    let line = |cells: [&str; N]| {
        let cells = cells.iter().zip(widths).filter(|(_, width)| *width > 0);
        let cells: Vec<String> = cells.map(|(cell, width)| format!("{cell:width$}")).collect();
        format!("| {} |", cells.join(" | "))
    };
    let rule = widths.map(|width| "-".repeat(width));
    let mut lines = vec![line(*heads), line(std::array::from_fn(|i| rule[i].as_str()))];
    lines.extend(rows.iter().map(|row| line(std::array::from_fn(|i| row[i].as_str()))));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::test::Unit;

    #[test]
    fn the_median_is_the_middle_or_between_the_two() {
        assert_eq!(Spread::of(&[]), None);
        assert_eq!(Spread::of(&[3.0, 1.0, 2.0]), Some(Spread { median: 2.0, min: 1.0, max: 3.0 }));
        assert_eq!(Spread::of(&[4.0, 1.0, 2.0, 3.0]).unwrap().median, 2.5);
    }

    #[test]
    fn what_was_not_measured_is_unknown_and_failures_stay() {
        let mut row = Row::new(Test::Prefill { tokens: 8 }, 2, 0, TANDEM);
        assert_eq!(row.cells()[3], "unknown");
        row.error = Some("no luck".to_owned());
        assert_eq!(row.cells()[3], "failed");
        row.error = None;
        row.spread = Spread::of(&[5.0]);
        assert_eq!(row.cells()[3], "5.0 (5.0 to 5.0) tok/s");
        assert_eq!(Unit::Bytes.show(3.0 * 1048576.0), "3");
    }
}
