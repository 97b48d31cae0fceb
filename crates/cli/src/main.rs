//! `sandboxer-cli`: inspects a running daemon.

mod client;
mod commands;
mod render;

use std::process::ExitCode;

use clap::Parser;
use commands::Command;
use sandboxer_command::{Global, Program};

const AFTER_HELP: &str = "\
Examples:
  sandboxer-cli pods
  sandboxer-cli inspect 3f2a                  any unique prefix of a pod's id
  sandboxer-cli --json pods | jq '.[].name'
  SANDBOXER_SOCKET=/tmp/admin.sock sandboxer-cli version

Exit codes: 0 done, 1 failed, 2 wrong usage.";

/// Inspect a running sandboxer daemon, its pods and its host.
#[derive(Debug, Parser)]
#[command(name = "sandboxer-cli", version, after_help = AFTER_HELP, max_term_width = 100)]
#[command(propagate_version = false, arg_required_else_help = true, subcommand_required = true)]
struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

impl Program for Cli {
    fn global(&self) -> &Global {
        &self.global
    }

    fn has_json(&self) -> bool {
        self.command.has_json()
    }

    fn exit_code_of_errors(&self) -> ExitCode {
        self.command.exit_code_of_errors()
    }

    async fn run(self) -> anyhow::Result<ExitCode> {
        self.command.run(&self.global).await
    }
}

fn main() -> ExitCode {
    sandboxer_command::main::<Cli>()
}
