//! `tandem rm`.

use std::process::ExitCode;

use tandem_store::Store;

use crate::cli::RmArgs;
use crate::measure::size;

pub fn run(args: &RmArgs) -> anyhow::Result<ExitCode> {
    let freed = Store::open(None)?.remove(&args.name)?;
    eprintln!("removed {} ({})", args.name, size(freed));
    Ok(ExitCode::SUCCESS)
}
