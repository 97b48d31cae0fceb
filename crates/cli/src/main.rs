//! `sandboxer-cli`: inspects a running daemon.

mod client;
mod commands;
mod render;

use std::{io, path::PathBuf, process::ExitCode};

use clap::{Args, CommandFactory, Parser, error::ErrorKind};

use commands::Command;

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

/// Options of all commands.
#[derive(Debug, Args)]
pub struct Global {
    /// The daemon's admin socket
    #[arg(
        long,
        global = true,
        env = "SANDBOXER_SOCKET",
        default_value = "/run/sandboxer/admin.sock",
        value_name = "PATH"
    )]
    pub socket: PathBuf,
    /// Print JSON instead of text
    #[arg(long, global = true)]
    pub json: bool,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    if cli.global.json && !cli.command.has_json() {
        let usage = Cli::command().error(ErrorKind::ArgumentConflict, "this command has no JSON output");
        let _ = usage.print();
        return ExitCode::from(2);
    }
    let failed = cli.command.exit_code_of_errors();
    match run(cli) {
        Ok(code) => code,
        // The reader closed the pipe (`… | head`).
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("sandboxer-cli: {}", render::plain(&format!("{error:#}")));
            failed
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(cli.command.run(&cli.global))
}

/// Returns whether stdout is a closed pipe. A broken connection to the daemon is the source of another error.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}
