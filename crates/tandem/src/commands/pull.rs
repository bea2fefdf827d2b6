//! `tandem pull`.

use std::io::Write;
use std::process::ExitCode;

use tandem_store::Store;

use crate::cli::PullArgs;
use crate::progress::Download;

pub fn run(args: &PullArgs) -> anyhow::Result<ExitCode> {
    let mut download = Download::default();
    let model = Store::open(None)?.pull(&args.name, &mut download)?;
    drop(download);
    if let Some(license) = model.license {
        eprintln!("note: {} comes under {license}", model.name);
    }
    writeln!(std::io::stdout(), "{}", model.path.display())?;
    Ok(ExitCode::SUCCESS)
}
