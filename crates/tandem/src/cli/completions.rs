use clap::Args;
use clap_complete::Shell;

#[derive(Debug, Args)]
#[command(
    after_help = "Example: tandem completions bash > ~/.local/share/bash-completion/completions/tandem"
)]
pub struct CompletionsArgs {
    /// The shell to complete in
    pub shell: Shell,
}
