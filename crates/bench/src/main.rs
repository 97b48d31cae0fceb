//! `sandboxer-bench`: measures workloads on container runtimes, and judges results.

mod commands;

use std::process::ExitCode;

use clap::Parser;
use commands::Command;
use sandboxer_command::{Global, Program};

const AFTER_HELP: &str = "\
Examples:
  sandboxer-bench workload list
  sandboxer-bench workload --probe cpu --runtime runc --runtime sandboxer
  sandboxer-bench streams --runtime sandboxer --runtime runc

`sandboxer-cli` measures start-up and memory, makes pages of results, and compares them.

Exit codes: 0 done, 1 failed, 2 wrong usage.";

/// Measure workloads on any container runtimes, and judge results.
#[derive(Debug, Parser)]
#[command(name = "sandboxer-bench", version, after_help = AFTER_HELP, max_term_width = 100)]
#[command(propagate_version = false, arg_required_else_help = true, subcommand_required = true)]
struct Bench {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

impl Program for Bench {
    fn global(&self) -> &Global {
        &self.global
    }

    fn has_json(&self) -> bool {
        self.command.has_json()
    }

    async fn run(self) -> anyhow::Result<ExitCode> {
        self.command.run(&self.global).await.map(|()| ExitCode::SUCCESS)
    }
}

fn main() -> ExitCode {
    sandboxer_command::main::<Bench>()
}
