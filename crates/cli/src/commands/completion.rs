//! `completion`: completion scripts for shells.

use clap::CommandFactory;
use sandboxer_command::completion;

use crate::Cli;

const EXAMPLES: &str = "\
Examples:
  source <(sandboxer-cli completion bash)
  sandboxer-cli completion zsh > \"${fpath[1]}/_sandboxer-cli\"
  sandboxer-cli completion fish > ~/.config/fish/completions/sandboxer-cli.fish";

/// Print a shell completion script
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Shell to write the script for
    #[arg(value_parser = ["bash", "zsh", "fish"])]
    shell: String,
}

/// Prints the script.
pub fn run(args: Args) -> anyhow::Result<()> {
    completion::print(Cli::command(), &args.shell)
}
