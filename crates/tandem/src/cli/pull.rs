use clap::Args;

#[derive(Debug, Args)]
pub struct PullArgs {
    /// A Hugging Face id (owner/name, owner/name@revision, owner/name:file.gguf) or an alias
    #[arg(value_name = "NAME")]
    pub name: String,
}
