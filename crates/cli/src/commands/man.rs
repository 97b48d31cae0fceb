//! `man`: man pages of this program, of each of its commands, and of the daemon.

use std::path::PathBuf;

use clap::CommandFactory;
use sandboxer_command::man;

use crate::Cli;

#[allow(dead_code, reason = "a page needs the options, not their values")]
#[path = "../../../sandboxer/src/options.rs"]
mod daemon;

const EXAMPLES: &str = "\
Examples:
  sandboxer-cli man ~/.local/share/man
  man sandboxer-cli-check";

/// Write the man pages of all commands and of the daemon
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Directory for man1/sandboxer-cli.1, man1/sandboxer-cli-pods.1, …, man8/sandboxer.8
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

/// Writes the pages.
pub fn run(args: &Args) -> anyhow::Result<()> {
    man::program(Cli::command(), &args.dir)?;
    man::page(daemon::Options::command(), "8", &args.dir)
}
