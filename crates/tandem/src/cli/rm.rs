use clap::Args;

#[derive(Debug, Args)]
pub struct RmArgs {
    /// The model, as `tandem list` names it
    #[arg(value_name = "NAME")]
    pub name: String,
}
