//! What the command lines of `sandboxer-cli` and `sandboxer-bench` share: options, output, and how a program ends.

pub mod completion;
pub mod interrupt;
pub mod man;
pub mod output;
pub mod progress;
pub mod target;
pub mod vm;

use std::{io, path::PathBuf, process::ExitCode};

use clap::{Args, Parser, error::ErrorKind};

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

/// A program of several commands.
pub trait Program: Parser {
    /// Returns the options of all commands.
    fn global(&self) -> &Global;

    /// Returns whether the chosen command has JSON output.
    fn has_json(&self) -> bool;

    /// Returns the exit code for an error of the chosen command.
    fn exit_code_of_errors(&self) -> ExitCode {
        ExitCode::FAILURE
    }

    /// Runs the chosen command.
    fn run(self) -> impl Future<Output = anyhow::Result<ExitCode>>;
}

/// Parses the command line, runs the command, and prints its error.
pub fn main<P: Program>() -> ExitCode {
    let program = P::parse();
    if program.global().json && !program.has_json() {
        let usage = P::command().error(ErrorKind::ArgumentConflict, "this command has no JSON output");
        let _ = usage.print();
        return ExitCode::from(2);
    }
    let failed = program.exit_code_of_errors();
    match run(program) {
        Ok(code) => code,
        // The reader closed the pipe (`… | head`).
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}: {}", P::command().get_name(), output::plain(&format!("{error:#}")));
            failed
        }
    }
}

fn run(program: impl Program) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(program.run())
}

/// Returns whether stdout is a closed pipe. A broken connection to the daemon is the source of another error.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}
