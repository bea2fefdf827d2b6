use std::num::NonZeroUsize;
use std::time::Duration;

use clap::Args;
use tandem_runtime::Threshold;

use super::engine::bytes;
use super::{EngineArgs, SamplingArgs};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tandem serve smollm2
  tandem serve ./my-finetune --port 9000 --context 8192
  tandem serve smollm2 gemma3-270m --memory-budget 2GB
  curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' \\
       -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]}'")]
pub struct ServeArgs {
    /// Folders, .gguf files, Hugging Face ids (owner/name) or aliases such as smollm2; requests choose among several by
    /// name
    #[arg(value_name = "MODEL", required = true)]
    pub models: Vec<String>,

    /// Another name that requests may use for the model, where there is one; may be repeated
    #[arg(
        long,
        short = 'a',
        value_name = "NAME",
        value_parser = clap::builder::NonEmptyStringValueParser::new(),
        help_heading = "Server"
    )]
    pub alias: Vec<String>,

    /// Address to listen on; 0.0.0.0 lets other machines in
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1", help_heading = "Server")]
    pub host: String,

    /// Port to listen on; 0 takes a free one
    #[arg(long, short = 'p', value_name = "N", default_value_t = 8080, help_heading = "Server")]
    pub port: u16,

    /// Answer only clients that show this as their bearer token [default: TANDEM_API_KEY, else none]
    #[arg(
        long,
        value_name = "KEY",
        value_parser = clap::builder::NonEmptyStringValueParser::new(),
        help_heading = "Server"
    )]
    pub api_key: Option<String>,

    /// Let pages of this origin, such as `https://example.org`, use the server from a browser; * for all
    #[arg(
        long,
        value_name = "ORIGIN",
        value_parser = clap::builder::NonEmptyStringValueParser::new(),
        help_heading = "Server"
    )]
    pub cors: Option<String>,

    /// Answers that each engine computes at once (also -np)
    #[arg(long, visible_alias = "np", value_name = "N", default_value = "64", help_heading = "Limits")]
    pub parallel: NonZeroUsize,

    /// Answers that may wait for each engine beside those; what comes then is refused with 429
    #[arg(long, value_name = "N", default_value_t = 192, help_heading = "Limits")]
    pub queue: usize,

    /// Longest body of a request
    #[arg(long, value_name = "SIZE", value_parser = bytes, default_value = "16MiB", help_heading = "Limits")]
    pub max_body: u64,

    /// For a client to send its request, or to take the next piece of its answer [default: 30 and 60]
    #[arg(long, value_name = "SECONDS", value_parser = seconds, help_heading = "Limits")]
    pub timeout: Option<Duration>,

    /// For answers under way to end after Ctrl-C or SIGTERM; a second one ends at once
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "30", help_heading = "Limits")]
    pub drain_timeout: Duration,

    /// A static engine, where there is one, serves requests of fewer tokens than this, prompt and answer together
    #[arg(long, value_name = "N", default_value_t = Threshold::default().cutoff, help_heading = "Engine")]
    pub static_cutoff: usize,

    #[command(flatten)]
    pub sampling: SamplingArgs,

    #[command(flatten)]
    pub engine: EngineArgs,
}

/// A time of at most a year.
fn seconds(text: &str) -> Result<Duration, String> {
    const LONGEST: f64 = 365.0 * 24.0 * 3600.0;
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    if (0.0..=LONGEST).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err(format!("give 0 to {LONGEST} seconds"))
    }
}
