//! From what the user named to a running engine.

use std::path::PathBuf;

use anyhow::bail;
use tandem::engines;
use tandem_cpu::{CpuOptions, Quant};
use tandem_engine::SampleSpec;
use tandem_mlx::MlxOptions;
use tandem_model::format::Format;
use tandem_model::{Checkpoint, GenerationConfig};
use tandem_runtime::{Coordinator, Options};
use tandem_store::Store;

use crate::cli::{DummyArgs, DummyFormat, EngineArgs, LoadArgs, QuantArg, SamplingArgs};
use crate::progress;

/// Seed of random weights; every run benchmarks the same ones.
const DUMMY_SEED: u64 = 0;

/// Finds the named model, fetching it if need be. `None` for random weights.
pub fn resolve(name: Option<&String>, dummy: &DummyArgs) -> anyhow::Result<Option<PathBuf>> {
    match (name, &dummy.weights) {
        (Some(name), None) => {
            let mut download = progress::Download::default();
            Ok(Some(Store::open(None)?.resolve(name, &mut download)?.path))
        }
        _ => Ok(None),
    }
}

/// Opens what [`resolve`] found.
pub fn open(path: Option<&PathBuf>, dummy: &DummyArgs) -> anyhow::Result<Checkpoint> {
    match (path, &dummy.weights) {
        (Some(path), _) => Ok(Checkpoint::open(path)?),
        (None, Some(config)) => Ok(Checkpoint::dummy(config, DUMMY_SEED, dummy.format.format())?),
        (None, None) => bail!("no model was named"),
    }
}

/// How the engine is to run.
pub fn options(args: &LoadArgs, threads: Option<usize>, context: usize) -> CpuOptions {
    let quant = match args.quant {
        QuantArg::Q4 => Some(Quant::Q4),
        QuantArg::Q8 => Some(Quant::Q8),
        QuantArg::None => None,
    };
    let options = CpuOptions {
        threads,
        context: Some(context),
        quant,
        kv: args.kv(),
        memory_budget: args.memory_budget,
        ..CpuOptions::default()
    };
    if args.exact { options.exact() } else { options }
}

/// How the MLX engine is to run. A budget that was not asked for is what its device has, which need not be the host's.
fn mlx_options(args: &LoadArgs, max_batch: usize) -> MlxOptions {
    let quant = match args.quant {
        QuantArg::Q4 => Some(tandem_mlx::Quant::Q4),
        QuantArg::Q8 => Some(tandem_mlx::Quant::Q8),
        QuantArg::None => None,
    };
    let (exact, memory_budget) = (args.exact, args.memory_budget);
    MlxOptions { quant, exact, memory_budget, max_batch, ..MlxOptions::default() }
}

/// Starts the engines for `model`, which load on their own threads. `cpu` is how the CPU's is to run.
pub fn start(
    coordinator: &mut Coordinator,
    model: &str,
    checkpoint: &Checkpoint,
    args: &EngineArgs,
    cpu: CpuOptions,
    requests: Options,
) -> anyhow::Result<()> {
    let what = if cpu.quant.is_some() { "quantizing" } else { "loading" };
    let mlx = mlx_options(&args.load, cpu.max_batch);
    let options = engines::Options { engine: args.engine.clone(), context: args.context, requests, cpu, mlx };
    Ok(engines::start(coordinator, model, checkpoint, &options, &mut |_| progress::load(what))?)
}

/// Says what the checkpoint asks for that nothing here does.
pub fn tell_not_honoured(checkpoint: &Checkpoint) {
    let not_read = &checkpoint.generation.not_read;
    if !not_read.is_empty() {
        eprintln!("note: generation_config.json: not honoured: {}", not_read.join(", "));
    }
}

/// How to choose tokens: what the user says, else what the checkpoint or Tandem does.
pub fn sampling(args: &SamplingArgs, checkpoint: &GenerationConfig) -> SampleSpec {
    let defaults = tandem::sampling(checkpoint);
    SampleSpec {
        temperature: args.temperature.unwrap_or(defaults.temperature),
        top_p: args.top_p.unwrap_or(defaults.top_p),
        top_k: args.top_k.unwrap_or(defaults.top_k),
        min_p: args.min_p.unwrap_or(defaults.min_p),
        repetition_penalty: args.repetition_penalty.unwrap_or(defaults.repetition_penalty),
        presence_penalty: args.presence_penalty,
        frequency_penalty: args.frequency_penalty,
        logit_bias: args.logit_bias.clone(),
        seed: args.seed,
        ..defaults
    }
}

impl DummyFormat {
    fn format(self) -> Format {
        match self {
            DummyFormat::F32 => Format::F32,
            DummyFormat::F16 => Format::F16,
            DummyFormat::Bf16 => Format::Bf16,
            DummyFormat::Q40 => Format::Q4_0,
            DummyFormat::Q41 => Format::Q4_1,
            DummyFormat::Q80 => Format::Q8_0,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    fn spec(flags: &[&str], checkpoint: &GenerationConfig) -> SampleSpec {
        let cli = Cli::try_parse_from(["tandem", "run", "m", "p"].iter().chain(flags)).unwrap();
        let Command::Run(args) = cli.command else { panic!("not run") };
        sampling(&args.sampling, checkpoint)
    }

    #[test]
    fn the_user_wins_over_the_checkpoint_over_the_defaults() {
        let silent = GenerationConfig::default();
        let says = GenerationConfig { temperature: Some(0.2), top_k: Some(50), ..silent.clone() };
        let greedy = GenerationConfig { do_sample: Some(false), ..says.clone() };
        let got = |flags: &[&str], c: &GenerationConfig| {
            let s = spec(flags, c);
            (s.temperature, s.top_p, s.top_k)
        };
        assert_eq!(got(&[], &silent), (0.7, 0.95, 0));
        assert_eq!(got(&[], &says), (0.2, 1.0, 50));
        assert_eq!(got(&[], &greedy), (0.0, 1.0, 50));
        assert_eq!(got(&["--temp", "1.5", "--top-p", "0.5"], &greedy), (1.5, 0.5, 50));
        assert_eq!(got(&["--top-k", "3"], &silent), (0.7, 0.95, 3));
    }

    #[test]
    fn flags_of_other_runners_are_known() {
        let flags =
            ["--temp", "0", "--repeat-penalty", "1.1", "-t", "1", "--ctx-size", "9", "--n-predict", "3"];
        let flags: Vec<&str> = flags.into_iter().chain(["--presence-penalty", "-0.5"]).collect();
        let spec = spec(&flags, &GenerationConfig::default());
        assert_eq!((spec.temperature, spec.repetition_penalty, spec.presence_penalty), (0.0, 1.1, -0.5));
    }
}
