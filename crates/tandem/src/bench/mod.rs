//! `tandem bench`: figures that can be trusted.
//!
//! Two figures can be compared only if the machine was the same for both, and a machine that others use never is. So
//! every round measures each test once with every engine, one right after the other, and the next round in the opposite
//! order; a comparison is the median of the rounds' *ratios*. Tandem's engine is loaded anew for each round and warmed up
//! before each test, as the peer's programs do it. What failed keeps its row and says why; what was not measured is
//! unknown; a build without optimization does not report at all.

mod child;
mod limits;
mod model;
mod ours;
mod peer;
mod report;
mod test;

use std::time::Instant;

use indicatif::ProgressBar;
use tandem_engine::KvType;
use tandem_kernels::path::Path;

use self::limits::{Costs, Machine};
use self::model::Model;
use self::ours::{Ours, Process};
use self::peer::LlamaCpp;
pub use self::report::Report;
use self::report::{Build, Host, Load, ModelFacts, Peer, Row, Settings, Spread, TANDEM};
use self::test::Test;
use crate::cli::{BenchArgs, QuantArg};
use crate::host;

/// Of the memory that is read for the roofline, where no model says how large.
const READ_BYTES: usize = 256 << 20;

/// The name of the peer that is known.
const LLAMA_CPP: &str = "llama.cpp";

/// Load average a core from which on figures are doubtful.
const BUSY: f64 = 0.5;

/// Measures all that was asked for.
///
/// # Errors
/// If the model cannot be opened or loaded, or a test does not fit its context. A test that fails is a row.
pub fn run(args: &BenchArgs) -> anyhow::Result<Report> {
    let begun = Instant::now();
    let time = chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Secs, true);
    let before = host::load_average();
    let kernels = Path::detect()?.name();
    let cores = std::thread::available_parallelism().ok().map(usize::from);
    let threads = if args.threads.is_empty() { vec![cores.unwrap_or(1)] } else { once(args.threads.clone()) };
    let tests = tests(args);
    let mut bench = Bench {
        peers: args.peer.iter().map(|peer| LlamaCpp::new(&peer.path)).collect(),
        rows: Vec::new(),
        rounds: args.rounds.get(),
    };
    let (mut facts, mut roofline) = (None, Vec::new());
    if args.model.is_some() || args.dummy.weights.is_some() {
        let context = tests.iter().map(|test| test.context()).max().unwrap_or(0);
        let model = Model::open(args, context)?;
        let (hash, weights) = (model.checkpoint.weights.hash().to_owned(), &model.checkpoint.weights);
        let weight_bytes = Ours::load(&model, threads[0])?.0.memory().weights;
        let decoder = &model.checkpoint.decoder;
        let costs = Costs::new(decoder, weights, &args.load, weight_bytes);
        facts = Some(ModelFacts {
            name: Model::name(args),
            architecture: decoder.architecture.clone(),
            hash,
            stored_bytes: weights.bytes(),
            weight_bytes,
        });
        if args.roofline {
            roofline = machines(&threads, (costs.weight_bytes() as usize).clamp(1 << 20, 4 * READ_BYTES))?;
        }
        bench.measure(&model, &tests, &threads)?;
        bench.summarize(&costs, &roofline);
    } else if args.roofline {
        roofline = machines(&threads, READ_BYTES)?;
    }
    let after = host::load_average();
    let peers = bench.peers.into_iter().map(|peer| Peer {
        name: LLAMA_CPP,
        path: peer.path().display().to_string(),
        build: peer.build,
    });
    Ok(Report {
        tandem: Build {
            version: env!("CARGO_PKG_VERSION"),
            build: option_env!("TANDEM_BUILD"),
            debug_build: cfg!(debug_assertions),
        },
        host: Host {
            platform: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            cpu: host::cpu_name(),
            cores,
            features: host::cpu_features(),
            kernels,
            memory_bytes: host::total_memory(),
            huge_pages: host::huge_pages(),
        },
        time,
        seconds: begun.elapsed().as_secs_f64(),
        load_average: Load { before, after },
        warnings: warnings(args, before, cores),
        model: facts,
        settings: Settings {
            rounds: args.rounds.get(),
            threads,
            quant: format!("{:?}", args.load.quant).to_lowercase(),
            kv: args.load.kv().name(),
            exact: args.load.exact,
        },
        peers: peers.collect(),
        roofline,
        rows: bench.rows,
    })
}

/// What is asked for, in the order in which it is measured.
fn tests(args: &BenchArgs) -> Vec<Test> {
    let mut tests = Vec::new();
    if args.n_prompt > 0 {
        tests.push(Test::Prefill { tokens: args.n_prompt });
    }
    if args.n_gen > 0 {
        let tokens = args.n_gen;
        tests.extend(args.n_depth.iter().map(|&depth| Test::Decode { tokens, depth }));
        tests.extend(args.batch.iter().map(|sequences| Test::Batch { tokens, sequences: sequences.get() }));
    }
    if args.n_prompt > 0 {
        tests.push(Test::FirstToken { tokens: args.n_prompt });
    }
    once(tests)
}

/// Without what stands there already.
fn once<T: PartialEq>(items: Vec<T>) -> Vec<T> {
    let mut kept = Vec::with_capacity(items.len());
    for item in items {
        if !kept.contains(&item) {
            kept.push(item);
        }
    }
    kept
}

fn machines(threads: &[usize], bytes: usize) -> anyhow::Result<Vec<Machine>> {
    threads.iter().map(|&threads| Machine::measure(threads, bytes)).collect()
}

fn warnings(args: &BenchArgs, load: Option<f64>, cores: Option<usize>) -> Vec<String> {
    let mut warnings = Vec::new();
    if let (Some(load), Some(cores)) = (load, cores)
        && load > BUSY * cores as f64
    {
        warnings.push(format!(
            "the machine was busy before this run (a load of {load:.2} on {cores} cores): only figures of one round \
             compare"
        ));
    }
    let default = args.load.quant == QuantArg::None && args.load.kv() == KvType::F16;
    if !args.peer.is_empty() && !default {
        warnings.push(format!(
            "{LLAMA_CPP} computes as it always does, whatever --exact, --quant and --kv-quant say"
        ));
    }
    warnings
}

/// The arms and what they gave.
struct Bench {
    peers: Vec<LlamaCpp>,
    rows: Vec<Row>,
    rounds: usize,
}

impl Bench {
    fn measure(&mut self, model: &Model, tests: &[Test], threads: &[usize]) -> anyhow::Result<()> {
        let engines = 1 + self.peers.len();
        let bar = ProgressBar::new((self.rounds * threads.len() * tests.len() * engines) as u64);
        for round in 0..self.rounds {
            for &threads in threads {
                let (mut ours, seconds) = Ours::load(model, threads)?;
                if model.path.is_some() {
                    self.record(Test::Load, threads, 0, Ok(seconds));
                }
                for &test in tests {
                    let mut arms: Vec<usize> = (0..engines).collect();
                    if round % 2 == 1 {
                        arms.reverse();
                    }
                    for arm in arms {
                        bar.set_message(format!("{test}, {threads} threads, {}", name(arm)));
                        self.measure_once(model, &mut ours, test, threads, arm);
                        bar.inc(1);
                    }
                }
            }
        }
        bar.finish_and_clear();
        Ok(())
    }

    /// One figure, or one failure; a test that failed is not tried again.
    fn measure_once(&mut self, model: &Model, ours: &mut Ours, test: Test, threads: usize, arm: usize) {
        if self.row(test, threads, arm).error.is_some() {
            return;
        }
        let peer = arm.checked_sub(1).and_then(|peer| self.peers.get_mut(peer));
        if let Test::FirstToken { .. } = test {
            let process = match peer {
                Some(peer) => peer.process(model, threads),
                None => ours::process(model, threads),
            };
            let (first, memory) = match process {
                Err(error) => (Err(error), Some(Err(anyhow::anyhow!("the process did not answer")))),
                Ok(Process { first, tokens, peak_memory }) => {
                    let row = self.row(test, threads, arm);
                    (row.new_tokens, row.cached_tokens) = tokens.unzip();
                    (Ok(first), peak_memory.map(|bytes| Ok(bytes as f64)))
                }
            };
            self.record(test, threads, arm, first);
            match memory {
                Some(memory) => self.record(Test::PeakMemory, threads, arm, memory),
                // The row says that it is unknown.
                None => drop(self.row(Test::PeakMemory, threads, arm)),
            }
            return;
        }
        let figure = match peer {
            Some(peer) => peer.measure(test, model, threads),
            None => ours.measure(test),
        };
        self.record(test, threads, arm, figure);
    }

    fn record(&mut self, test: Test, threads: usize, arm: usize, figure: anyhow::Result<f64>) {
        let row = self.row(test, threads, arm);
        match figure {
            Ok(figure) => row.samples.push(figure),
            Err(error) => row.error = Some(format!("{error:#}")),
        }
    }

    fn row(&mut self, test: Test, threads: usize, arm: usize) -> &mut Row {
        let is_it = |row: &Row| row.kind == test && row.threads == threads && row.arm == arm;
        let at = self.rows.iter().position(is_it).unwrap_or_else(|| {
            self.rows.push(Row::new(test, threads, arm, name(arm)));
            self.rows.len() - 1
        });
        &mut self.rows[at]
    }

    /// Medians, shares and ratios; rows that belong together side by side.
    fn summarize(&mut self, costs: &Costs, roofline: &[Machine]) {
        let mut order: Vec<(Test, usize)> = Vec::new();
        for row in &self.rows {
            if !order.contains(&(row.kind, row.threads)) {
                order.push((row.kind, row.threads));
            }
        }
        let place = |row: &Row| order.iter().position(|key| *key == (row.kind, row.threads));
        self.rows.sort_by_key(|row| (row.threads, place(row), row.arm));
        let mut ours: Vec<f64> = Vec::new();
        for row in &mut self.rows {
            if row.arm == 0 {
                ours.clone_from(&row.samples);
            }
            let machine = roofline.iter().find(|machine| machine.threads == row.threads);
            row.limit = machine.and_then(|machine| costs.limit(row.kind, machine));
            if row.error.is_some() {
                continue;
            }
            row.spread = Spread::of(&row.samples);
            row.share_of_limit = row.spread.zip(row.limit).map(|(spread, limit)| spread.median / limit.value);
            if row.arm > 0 && ours.len() == row.samples.len() {
                let ratios: Vec<f64> =
                    ours.iter().zip(&row.samples).map(|(ours, theirs)| ours / theirs).collect();
                row.tandem_over_peer = Spread::of(&ratios);
            }
        }
    }
}

fn name(arm: usize) -> &'static str {
    if arm == 0 { TANDEM } else { LLAMA_CPP }
}
