use clap::Args;

use super::{EngineArgs, SamplingArgs};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tandem serve smollm2
  tandem serve ./my-finetune --port 9000 --context 8192
  curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' \\
       -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]}'")]
pub struct ServeArgs {
    /// A folder, a .gguf file, a Hugging Face id (owner/name) or an alias such as smollm2
    #[arg(value_name = "MODEL")]
    pub model: String,

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

    #[command(flatten)]
    pub sampling: SamplingArgs,

    #[command(flatten)]
    pub engine: EngineArgs,
}
