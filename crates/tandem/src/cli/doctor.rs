use clap::Args;

#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Print one JSON object; what is not known is null
    #[arg(long)]
    pub json: bool,
}
