//! `tandem completions`.

use std::io::Write;
use std::process::ExitCode;

use clap::CommandFactory;

use crate::cli::{Cli, CompletionsArgs};

pub fn run(args: &CompletionsArgs) -> anyhow::Result<ExitCode> {
    // Generated into memory first: a reader that goes away must not become a panic.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "tandem", &mut script);
    std::io::stdout().write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}
