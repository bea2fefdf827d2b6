use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::engine::threads;
use super::{DummyArgs, LoadArgs};

#[derive(Debug, Args)]
#[command(after_help = "\
Every round measures each test once with each engine, one right after the other (A B, then B A), so that whatever \
else the machine does meets them alike. Shown are the median of the rounds, the least and the greatest. Warm-ups do \
not count.

Examples:
  tandem bench model.Q4_0.gguf
  tandem bench model.Q4_0.gguf --roofline --peer llama.cpp=./build/bin/llama-bench
  tandem bench model.Q4_0.gguf -t 1,2 -d 0,2048 --batch 1,4
  tandem bench --roofline                  (the limits of this machine)")]
pub struct BenchArgs {
    /// A folder, a .gguf file, a Hugging Face id (owner/name) or an alias such as smollm2
    #[arg(value_name = "MODEL", required_unless_present_any = ["weights", "roofline"])]
    pub model: Option<String>,

    /// Tokens to prefill, and of the prompt for the time to a process's first token; 0 leaves both out
    #[arg(long, short = 'p', value_name = "N", default_value_t = 512)]
    pub n_prompt: usize,

    /// Tokens to decode; 0 leaves decoding out
    #[arg(long, short = 'n', value_name = "N", default_value_t = 128)]
    pub n_gen: usize,

    /// Decode after this many tokens of context; a list
    #[arg(long, short = 'd', value_name = "N,...", value_delimiter = ',', default_value = "0")]
    pub n_depth: Vec<usize>,

    /// Also decode this many sequences at once, each after 128 tokens of context; a list
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    pub batch: Vec<NonZeroUsize>,

    /// Threads to compute with; a list [default: as many as the machine runs at once]
    #[arg(long, short = 't', value_name = "N,...", value_delimiter = ',', value_parser = threads)]
    pub threads: Vec<usize>,

    /// Times that each test is measured
    #[arg(long, short = 'r', value_name = "N", default_value = "5")]
    pub rounds: NonZeroUsize,

    /// Measure another runner on the same .gguf file too; `llama.cpp` is known, by its llama-bench. May be repeated
    #[arg(long, value_name = "llama.cpp=PATH", value_parser = peer)]
    pub peer: Vec<PeerArg>,

    /// Measure the limits of this machine (memory and arithmetic), and show what share of its limit each figure reaches
    #[arg(long)]
    pub roofline: bool,

    /// How to print the results
    #[arg(long, short = 'o', value_enum, default_value_t = BenchOutput::Table)]
    pub output: BenchOutput,

    #[command(flatten)]
    pub load: LoadArgs,

    #[command(flatten)]
    pub dummy: DummyArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BenchOutput {
    /// For people
    Table,
    /// One JSON object; what is not known is null
    Json,
}

/// Another runner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerArg {
    /// The llama-bench of a llama.cpp.
    pub path: PathBuf,
}

fn peer(text: &str) -> Result<PeerArg, String> {
    match text.split_once('=') {
        Some(("llama.cpp", path)) if !path.is_empty() => Ok(PeerArg { path: path.into() }),
        Some((name, _)) if name != "llama.cpp" => {
            Err(format!("no runner `{name}` is known; give llama.cpp=PATH of its llama-bench"))
        }
        _ => Err("give llama.cpp=PATH of its llama-bench".to_owned()),
    }
}
