//! `man`: man pages of this program, and of each of its commands.

use std::path::PathBuf;

use clap::CommandFactory;
use sandboxer_command::man;

use crate::Bench;

const EXAMPLES: &str = "\
Examples:
  sandboxer-bench man ~/.local/share/man
  man sandboxer-bench-workload";

/// Write the man pages of all commands
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Directory for man1/sandboxer-bench.1, man1/sandboxer-bench-workload.1, …
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

/// Writes the pages.
pub fn run(args: &Args) -> anyhow::Result<()> {
    man::program(Bench::command(), &args.dir)
}
