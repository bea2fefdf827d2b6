use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{EngineArgs, SamplingArgs};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tandem run smollm2 \"What is the capital of France?\"
  tandem run ./my-finetune -f question.txt --temperature 0
  git diff | tandem run owner/name --system \"Write a commit message.\"
  tandem run smollm2                       (chats; /help tells more)")]
pub struct RunArgs {
    /// A folder, a .gguf file, a Hugging Face id (owner/name) or an alias such as smollm2
    #[arg(value_name = "MODEL", required_unless_present = "weights")]
    pub model: Option<String>,

    #[command(flatten)]
    pub prompt: PromptArgs,

    #[command(flatten)]
    pub answer: AnswerArgs,

    #[command(flatten)]
    pub sampling: SamplingArgs,

    #[command(flatten)]
    pub engine: EngineArgs,

    #[command(flatten)]
    pub output: OutputArgs,

    #[command(flatten)]
    pub dummy: DummyArgs,

    /// In place of PROMPT: this many tokens
    #[arg(
        long = "dummy-prompt",
        value_name = "N",
        requires = "weights",
        conflicts_with_all = ["model", "text", "file", "system"],
        id = "tokens",
        help_heading = "Benchmarks"
    )]
    pub dummy_prompt: Option<NonZeroUsize>,
}

#[derive(Debug, Clone, Args)]
pub struct PromptArgs {
    /// What to answer; `-` reads standard input. Without a prompt, standard input is read, or on a terminal a chat
    /// begins
    #[arg(value_name = "PROMPT", conflicts_with = "file")]
    pub text: Option<String>,

    /// Read the prompt from a file; its last line break is left out
    #[arg(long, short = 'f', value_name = "FILE", help_heading = "Prompt")]
    pub file: Option<PathBuf>,

    /// Say who the model is and how it answers, through its chat template
    #[arg(long, value_name = "TEXT", help_heading = "Prompt", conflicts_with = "raw")]
    pub system: Option<String>,

    /// Complete the prompt as it is, without the chat template
    #[arg(long, help_heading = "Prompt")]
    pub raw: bool,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Answer")]
pub struct AnswerArgs {
    /// Most tokens to generate [default: until the model ends or the context is full]
    #[arg(long, short = 'n', value_name = "N", visible_alias = "n-predict")]
    pub max_tokens: Option<NonZeroUsize>,

    /// End at this text and leave it out; may be repeated
    #[arg(long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub stop: Vec<String>,

    /// Go on when the model ends
    #[arg(long)]
    pub ignore_eos: bool,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Output")]
pub struct OutputArgs {
    /// Print events instead of text, one JSON object a line
    #[arg(long)]
    pub json: bool,

    /// With --json, report each token's log-probability and those of the N likeliest
    #[arg(long, value_name = "N", requires = "json")]
    pub logprobs: Option<u32>,

    /// Report time, speed and memory on standard error
    #[arg(long)]
    pub stats: bool,
}

/// A model without a checkpoint.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Benchmarks")]
pub struct DummyArgs {
    /// In place of MODEL: random weights in the shape that this config.json describes; texts are bytes
    #[arg(long = "dummy-weights", value_name = "CONFIG.json", id = "weights")]
    pub weights: Option<PathBuf>,

    /// Number format of the random weights
    #[arg(
        long = "dummy-format",
        value_name = "FORMAT",
        value_enum,
        default_value_t = DummyFormat::Bf16,
        requires = "weights",
        id = "format"
    )]
    pub format: DummyFormat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DummyFormat {
    F32,
    F16,
    Bf16,
    #[value(name = "q4_0")]
    Q40,
    #[value(name = "q4_1")]
    Q41,
    #[value(name = "q8_0")]
    Q80,
}
