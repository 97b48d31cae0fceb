//! `sandboxer-front WORKER ARGUMENT…`: `sandboxer` executes it. See the crate of that name.

use std::{
    env,
    ffi::OsString,
    io::{Write, stderr},
    os::fd::{FromRawFd, OwnedFd},
    path::PathBuf,
    process::ExitCode,
};

use sandboxer_front::{Build, FrontError, MAX_SILENCE};

/// Option of the front that runs: read the state in this descriptor.
const CHECK: &str = "--check-state";
/// Option: take the place of the front that has written it.
const RESUME: &str = "--resume";
const USAGE: &str = "usage: sandboxer-front WORKER ARGUMENT…; run sandboxer instead, which executes this";

fn main() -> ExitCode {
    let arguments: Vec<OsString> = env::args_os().skip(1).collect();
    match run(&arguments) {
        Some(Ok(code)) => code,
        Some(Err(error)) => {
            // If the log is gone, the exit code must still be the same.
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

/// Returns none if the arguments are wrong.
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

/// Returns the build that takes this one's place at a reload: the program of this name beside the worker.
fn build(arguments: &[OsString]) -> Option<Build> {
    let program = PathBuf::from(arguments.first()?).with_file_name("sandboxer-front");
    Some(Build { program, check: CHECK.into(), resume: RESUME.into(), arguments: arguments.to_vec() })
}

fn descriptor(number: &OsString) -> Option<OwnedFd> {
    let fd = number.to_str()?.parse().ok().filter(|fd| *fd > 2)?;
    // SAFETY: the front that runs has opened it for this program, which owns nothing else of this number.
    Some(unsafe { OwnedFd::from_raw_fd(fd) })
}
