//! What the daemon accepts on its command line. `sandboxer-cli man` reads this file too, and makes a man page of it.

use std::{os::fd::RawFd, path::PathBuf};

use clap::Parser;

/// Runs every pod of this node in a microVM of its own, for containerd.
///
/// The process becomes sandboxer-front, which containerd stays connected to, and which starts it again as its worker.
/// sandboxer-share serves live directories to one pod. containerd runs containerd-shim-sandboxer-v1, which answers
/// one question and exits. Nobody runs these three by hand.
#[derive(Debug, Parser)]
#[command(
    name = "sandboxer",
    version,
    after_help = "Examples:\n  \
        sandboxer                                    serve, with /etc/sandboxer/config.toml if it is there\n  \
        sandboxer --config ./my.toml --check-config  say what is wrong with a configuration\n  \
        sandboxer --log debug                        tell more"
)]
pub struct Options {
    /// Configuration file; its keys are shown by `sandboxer-cli config default`.
    #[arg(long, value_name = "FILE", env = "SANDBOXER_CONFIG")]
    pub config: Option<PathBuf>,
    /// Read the configuration, say whether it is fine, and exit.
    #[arg(long)]
    pub check_config: bool,
    /// Print the oldest and the latest protocol that this build speaks with pods' agents, and exit.
    #[arg(long)]
    pub protocols: bool,
    /// What to log: error, warn, info, debug, trace, or a filter such as sandboxer::pod=debug.
    #[arg(long, value_name = "FILTER", default_value = "info", env = "SANDBOXER_LOG")]
    pub log: String,
    /// Log JSON lines.
    #[arg(long)]
    pub log_json: bool,
    /// This process is the worker of a front, which is at the other end of this descriptor.
    #[arg(long, hide = true, value_name = "FD")]
    pub front_fd: Option<RawFd>,
    /// This process touches volumes in the place of a daemon, whose socket is its standard input.
    // `helper::OPTION`, which the program of the man pages does not have.
    #[arg(long = "path-helper", hide = true)]
    pub path_helper: bool,
}
