//! The `tandem` command line. It alone wires models, the store and engines together.
//!
//! Two habits hold everywhere: standard output carries the answer and nothing else, so that it can be piped; and an
//! error says what happened, then what to do about it (`hint:`), on standard error. Exit codes: 0 done, 1 failed,
//! 2 used wrongly, 130 interrupted.

mod bench;
mod cli;
mod commands;
mod host;
mod interrupt;
mod measure;
mod model;
mod output;
mod progress;
mod prompt;
mod report;
mod session;

use std::process::ExitCode;

use crate::cli::{Cli, Command};

fn main() -> ExitCode {
    let cli = Cli::read();
    if cli.verbose {
        let level = tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG);
        level.with_writer(std::io::stderr).with_target(false).init();
    }
    let done = match &cli.command {
        Command::Run(args) => commands::run::run(args),
        Command::Serve(args) => commands::serve::run(args),
        Command::Pull(args) => commands::pull::run(args),
        Command::List(args) => commands::list::run(args),
        Command::Rm(args) => commands::rm::run(args),
        Command::Doctor(args) => commands::doctor::run(args),
        Command::Bench(args) => commands::bench::run(args),
        Command::Completions(args) => commands::completions::run(args),
    };
    done.unwrap_or_else(|error| report::failure(&error))
}
