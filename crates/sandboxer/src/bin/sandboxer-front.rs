//! `sandboxer-front WORKER ARGUMENT…`: `sandboxer` executes it. See the crate of that name.

use std::{
    env,
    io::{Write, stderr},
    path::PathBuf,
    process::ExitCode,
};

fn main() -> ExitCode {
    let mut arguments = env::args_os().skip(1);
    let Some(worker) = arguments.next().map(PathBuf::from) else {
        eprintln!("usage: sandboxer-front WORKER ARGUMENT…; run sandboxer instead, which executes this");
        return ExitCode::from(2);
    };
    let arguments: Vec<_> = arguments.collect();
    match sandboxer_front::run(&worker, &arguments, sandboxer_front::MAX_SILENCE) {
        Ok(code) => code,
        Err(error) => {
            // If the log is gone, the exit code must still be the same.
            let _ = match std::error::Error::source(&error) {
                Some(source) => writeln!(stderr(), "sandboxer-front: {error}: {source}"),
                None => writeln!(stderr(), "sandboxer-front: {error}"),
            };
            ExitCode::FAILURE
        }
    }
}
