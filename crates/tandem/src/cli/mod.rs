//! The command line's grammar. A flag stands together with its documentation; each command's are one struct in its own
//! file.

mod bench;
mod completions;
mod doctor;
mod engine;
mod list;
mod pull;
mod rm;
mod run;
mod sampling;
mod serve;

use clap::{Parser, Subcommand};

pub use bench::{BenchArgs, BenchOutput};
pub use completions::CompletionsArgs;
pub use doctor::DoctorArgs;
pub use engine::{EngineArgs, LoadArgs, QuantArg};
pub use list::ListArgs;
pub use pull::PullArgs;
pub use rm::RmArgs;
pub use run::{DummyArgs, DummyFormat, RunArgs};
pub use sampling::SamplingArgs;
pub use serve::ServeArgs;

/// Runs fine-tuned language models on the machine in front of you.
#[derive(Debug, Parser)]
#[command(name = "tandem", version, max_term_width = 100)]
pub struct Cli {
    /// Tell what happens inside, on standard error
    #[arg(long, short = 'v', global = true)]
    pub verbose: bool,

    #[command(subcommand)]
    pub command: Command,
}

impl Cli {
    /// Reads the command line. `-np` is what llama.cpp calls `--parallel`, and no flag that clap could read.
    pub fn read() -> Self {
        let serves = std::env::args_os().nth(1).is_some_and(|command| command == "serve");
        Self::parse_from(
            std::env::args_os().map(
                |argument| {
                    if serves && argument == "-np" { "--parallel".into() } else { argument }
                },
            ),
        )
    }
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Answer a prompt, or chat
    Run(Box<RunArgs>),
    /// Answer over HTTP, as OpenAI's API does
    Serve(Box<ServeArgs>),
    /// Fetch a model, or bring it up to date
    Pull(PullArgs),
    /// Show the models on this machine
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// Remove a model from this machine
    Rm(RmArgs),
    /// Show what this machine offers and what Tandem makes of it
    Doctor(DoctorArgs),
    /// Measure speed and memory, beside another runner and the limits of this machine
    Bench(Box<BenchArgs>),
    /// Print a shell's completion script
    Completions(CompletionsArgs),
}
