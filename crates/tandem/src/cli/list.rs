use clap::Args;

#[derive(Debug, Args)]
pub struct ListArgs {
    /// Print one JSON array
    #[arg(long)]
    pub json: bool,
}
