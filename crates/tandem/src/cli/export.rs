use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::DummyArgs;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tandem export ./my-finetune out --quant lut4
  tandem export smollm2 out --context 4096 --prefill 128 --quant lut6 --group 32
  tandem export ./my-finetune out --chunks 4 --kv io")]
pub struct ExportArgs {
    /// A folder, a .gguf file, a Hugging Face id (owner/name) or an alias such as smollm2
    #[arg(value_name = "MODEL", required_unless_present = "weights")]
    pub model: Option<String>,

    /// A new folder for the packages, the embedding and tandem.json, which says how they belong together; with
    /// --dummy-weights the only argument
    #[arg(value_name = "OUT", required_unless_present = "weights")]
    pub out: Option<PathBuf>,

    /// The unit to make the graph for
    #[arg(long = "for", value_name = "UNIT", value_enum, default_value_t = TargetArg::Ane)]
    pub target: TargetArg,

    /// Tokens that the KV cache holds [default: 2048, or less if the model handles less]
    #[arg(long, short = 'c', value_name = "N")]
    pub context: Option<usize>,

    /// Tokens of one prefill call; divides the context
    #[arg(long, value_name = "T", default_value_t = 64)]
    pub prefill: usize,

    /// Sequences of one call; only 1 can be exported yet
    #[arg(long, value_name = "B", default_value_t = 1)]
    pub batch: usize,

    /// How matrices are stored
    #[arg(long, value_enum, default_value_t = ExportQuant::None)]
    pub quant: ExportQuant,

    /// Output channels that share a table, with lut4, lut6 and lut8
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub group: usize,

    /// Packages to spread the layers over; auto splits above 1 GiB
    #[arg(long, value_name = "N", value_parser = count, default_value = "auto")]
    pub chunks: Count,

    /// Where the KV cache lives between calls
    #[arg(long, value_enum, default_value_t = KvArg::State)]
    pub kv: KvArg,

    /// Parts of the output projection; auto keeps each within the engine's longest axis
    #[arg(long, value_name = "N", value_parser = count, default_value = "auto")]
    pub head_split: Count,

    /// Oldest systems that will run it
    #[arg(long, value_enum, default_value_t = OpsetArg::Ios18)]
    pub opset: OpsetArg,

    /// Do not run the model on a short text to learn how large its values become; tandem.json then says that they are not
    /// known, and families that are known to need more than fp16 are scaled by guess
    #[arg(long)]
    pub no_trace: bool,

    #[command(flatten)]
    pub dummy: DummyArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TargetArg {
    /// The Neural Engine: static shapes
    Ane,
    /// The GPU: any number of tokens a call
    Gpu,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ExportQuant {
    /// As fp16
    None,
    /// Tables of 16 values
    Lut4,
    /// Tables of 64 values
    Lut6,
    /// Tables of 256 values
    Lut8,
    /// 4-bit integers in blocks of 32 under a scale, for the GPU
    Int4,
    /// 8-bit integers in blocks of 32 under a scale, for the GPU
    Int8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum KvArg {
    /// In states of the model
    State,
    /// With the caller: the cache goes in, new rows come out
    Io,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OpsetArg {
    /// iOS 18 and macOS 15
    Ios18,
    /// iOS 26 and macOS 26
    Ios26,
}

/// A number, or `None` for `auto`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Count(pub Option<usize>);

fn count(text: &str) -> Result<Count, String> {
    match text {
        "auto" => Ok(Count(None)),
        _ => text.parse().map(|n| Count(Some(n))).map_err(|_| "give a number, or auto".to_owned()),
    }
}
