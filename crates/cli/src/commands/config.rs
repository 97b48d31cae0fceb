//! `config`: the daemon's configuration.

use clap::Subcommand;

use crate::render;

/// The configuration file that packages install.
const DEFAULT: &str = include_str!("../../../../vmm-configs/sandboxer.toml");

const EXAMPLES: &str = "\
Examples:
  sandboxer-cli config default > /etc/sandboxer/config.toml
  sandboxer --check-config --config /etc/sandboxer/config.toml";

/// Show the daemon's configuration
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Print every key with its default and its meaning (TOML)
    Default,
}

/// Prints the file.
pub fn run(args: Args) -> anyhow::Result<()> {
    match args.what {
        What::Default => Ok(render::print(DEFAULT.trim_end())?),
    }
}
