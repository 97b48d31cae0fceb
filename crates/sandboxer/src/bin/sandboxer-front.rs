//! `sandboxer-front WORKER ARGUMENT…`, which `sandboxer` executes. See the crate of that name.

use std::{
    env,
    ffi::OsString,
    io::{Write, stderr},
    os::fd::{FromRawFd, OwnedFd},
    path::PathBuf,
    process::ExitCode,
};

use sandboxer::api::preflight::{PROTOCOLS, unfit};
use sandboxer_front::{Build, FrontError, MAX_SILENCE};

/// Option passed by the running front: check the state in this descriptor.
const CHECK: &str = "--check-state";
/// Option: replace the front that wrote the state in this descriptor.
const RESUME: &str = "--resume";
const USAGE: &str = "usage: sandboxer-front WORKER ARGUMENT…; run sandboxer instead, which executes this";

fn main() -> ExitCode {
    let arguments: Vec<OsString> = env::args_os().skip(1).collect();
    match run(&arguments) {
        Some(Ok(code)) => code,
        Some(Err(error)) => {
            // Even if the log cannot be written, the exit code must be the same.
            let _ = match std::error::Error::source(&error) {
                Some(source) => writeln!(stderr(), "sandboxer-front: {error}: {source}"),
                None => writeln!(stderr(), "sandboxer-front: {error}"),
            };
            ExitCode::FAILURE
        }
        None => {
            let _ = writeln!(stderr(), "{USAGE}");
            ExitCode::from(2)
        }
    }
}

/// Runs the front; returns `None` if the arguments are wrong.
fn run(arguments: &[OsString]) -> Option<Result<ExitCode, FrontError>> {
    match arguments {
        [option, fd] if option == CHECK => {
            Some(sandboxer_front::check(descriptor(fd)?).map(|()| ExitCode::SUCCESS))
        }
        [option, fd, rest @ ..] if option == RESUME => {
            let (worker, build) = (PathBuf::from(rest.first()?), build(rest)?);
            Some(sandboxer_front::resume(&worker, &rest[1..], MAX_SILENCE, &build, descriptor(fd)?))
        }
        [worker, rest @ ..] => {
            Some(sandboxer_front::run(&PathBuf::from(worker), rest, MAX_SILENCE, &build(arguments)?))
        }
        [] => None,
    }
}

/// Returns the build that replaces this one at a reload: the program of this name next to the worker.
fn build(arguments: &[OsString]) -> Option<Build> {
    let program = PathBuf::from(arguments.first()?).with_file_name("sandboxer-front");
    Some(Build {
        program,
        check: CHECK.into(),
        resume: RESUME.into(),
        arguments: arguments.to_vec(),
        tell: PROTOCOLS.into(),
        unfit,
    })
}

fn descriptor(number: &OsString) -> Option<OwnedFd> {
    let fd = number.to_str()?.parse().ok().filter(|fd| *fd > 2)?;
    // SAFETY: the running front has opened it for this program, which owns nothing else of this number.
    Some(unsafe { OwnedFd::from_raw_fd(fd) })
}
