use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
pub struct InspectArgs {
    /// A Core ML package (.mlpackage) that holds an ML Program, whoever made it
    pub package: PathBuf,

    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}
