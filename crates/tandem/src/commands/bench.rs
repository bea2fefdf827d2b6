//! `tandem bench`.

use std::io::Write;
use std::process::ExitCode;

use anyhow::bail;

use crate::bench;
use crate::cli::{BenchArgs, BenchOutput};

/// Set to anything, this lets a debug build report, for the tests of this command itself. The report says so.
const ALLOW_DEBUG: &str = "TANDEM_BENCH_DEBUG_BUILD";

pub fn run(args: &BenchArgs) -> anyhow::Result<ExitCode> {
    if cfg!(debug_assertions) && std::env::var_os(ALLOW_DEBUG).is_none() {
        bail!(
            "this is a debug build, and its speed says nothing. hint: cargo run --release -- bench, or \
             target/release/tandem bench"
        );
    }
    let report = bench::run(args)?;
    let text = match args.output {
        BenchOutput::Json => serde_json::to_string_pretty(&report)? + "\n",
        BenchOutput::Table => report.table(),
    };
    std::io::stdout().write_all(text.as_bytes())?;
    Ok(if report.tandem_failed() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
