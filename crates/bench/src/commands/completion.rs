//! `completion`: completion scripts for shells.

use clap::CommandFactory;
use sandboxer_command::completion;

use crate::Bench;

const EXAMPLES: &str = "\
Examples:
  source <(sandboxer-bench completion bash)
  sandboxer-bench completion zsh > \"${fpath[1]}/_sandboxer-bench\"
  sandboxer-bench completion fish > ~/.config/fish/completions/sandboxer-bench.fish";

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
    completion::print(Bench::command(), &args.shell)
}
