//! `completion`: completion scripts for shells.

use clap::CommandFactory;
use clap_complete::Shell;

use crate::{Cli, render};

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
    let shell: Shell = args.shell.parse().map_err(anyhow::Error::msg)?;
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "sandboxer-cli", &mut script);
    Ok(render::print(String::from_utf8(script)?.trim_end())?)
}
