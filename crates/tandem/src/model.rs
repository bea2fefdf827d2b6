//! From what the user named to a running engine.

use std::path::PathBuf;

use anyhow::bail;
use tandem_cpu::{CpuFactory, CpuOptions, Quant};
use tandem_engine::SampleSpec;
use tandem_model::format::Format;
use tandem_model::{Checkpoint, GenerationConfig};
use tandem_runtime::{Actor, Options};
use tandem_store::Store;

use crate::cli::{DummyArgs, DummyFormat, EngineArgs, LoadArgs, QuantArg, SamplingArgs};
use crate::progress;

/// Tokens of context where the user does not say: enough to work with, and small enough for any machine.
const DEFAULT_CONTEXT: usize = 4096;

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

/// Tokens of context for a model that handles `handles`.
pub fn context(asked: Option<usize>, handles: usize) -> anyhow::Result<usize> {
    match asked {
        None => Ok(handles.min(DEFAULT_CONTEXT)),
        Some(0) => Ok(handles),
        Some(n) if n > handles => {
            bail!(
                "a context of {n} tokens is more than the {handles} this model handles. hint: --context 0 takes all"
            )
        }
        Some(n) => Ok(n),
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

/// Starts the engine, which loads on its own thread.
pub fn start(checkpoint: &Checkpoint, args: &EngineArgs, context: usize) -> anyhow::Result<Actor> {
    let options = options(&args.load, args.threads, context);
    let progress = progress::load(if options.quant.is_some() { "quantizing" } else { "loading" });
    let (decoder, weights) = (checkpoint.decoder.clone(), checkpoint.weights.clone());
    let factory = CpuFactory::new(decoder, weights, options, progress);
    Ok(Actor::spawn(Box::new(factory), &Options::default())?)
}

/// Says what the checkpoint asks for that nothing here does.
pub fn tell_not_honoured(checkpoint: &Checkpoint) {
    let not_read = &checkpoint.generation.not_read;
    if !not_read.is_empty() {
        eprintln!("note: generation_config.json: not honoured: {}", not_read.join(", "));
    }
}

/// How to choose tokens: what the user says, else what the checkpoint says, else Tandem's own defaults.
///
/// A checkpoint that says anything is taken at its word: what it leaves out is off, as its authors measured it.
pub fn sampling(args: &SamplingArgs, checkpoint: &GenerationConfig) -> SampleSpec {
    let GenerationConfig { do_sample, temperature, top_p, top_k, min_p, repetition_penalty, .. } = checkpoint;
    let silent =
        do_sample.is_none() && temperature.is_none() && top_p.is_none() && top_k.is_none() && min_p.is_none();
    let (default_temperature, default_top_p) = match (silent, do_sample) {
        (true, _) => (0.7, 0.95),
        (false, Some(false)) => (0.0, 1.0),
        (false, _) => (temperature.unwrap_or(1.0), 1.0),
    };
    SampleSpec {
        temperature: args.temperature.unwrap_or(default_temperature),
        top_p: args.top_p.or(*top_p).unwrap_or(default_top_p),
        top_k: args.top_k.or(*top_k).unwrap_or(0),
        min_p: args.min_p.or(*min_p).unwrap_or(0.0),
        repetition_penalty: args.repetition_penalty.or(*repetition_penalty).unwrap_or(1.0),
        presence_penalty: args.presence_penalty,
        frequency_penalty: args.frequency_penalty,
        logit_bias: args.logit_bias.clone(),
        seed: args.seed,
        ..SampleSpec::greedy()
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

    #[test]
    fn the_context_never_exceeds_what_the_model_handles() {
        assert_eq!(context(None, 8192).unwrap(), 4096);
        assert_eq!(context(None, 2048).unwrap(), 2048);
        assert_eq!(context(Some(0), 8192).unwrap(), 8192);
        assert_eq!(context(Some(5000), 8192).unwrap(), 5000);
        let text = context(Some(9000), 8192).unwrap_err().to_string();
        assert!(text.contains("9000") && text.contains("8192"), "{text}");
    }
}
