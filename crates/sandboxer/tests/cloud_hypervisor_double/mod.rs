//! A double of Cloud Hypervisor: a process that speaks its API and runs nothing.
//!
//! The double is this test program under another name, so a driver starts it as it starts the real one. It knows the
//! published description of the API (`description.rs`), and which call is possible in which state (`vm.rs`);
//! its guest (`guest.rs`) is a few threads.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test helper fails its test")]

pub mod behaviour;
mod description;
mod guest;
mod http;
mod vm;

use std::{
    env,
    fs::{self, File},
    os::{
        fd::{FromRawFd, RawFd},
        unix::{fs::symlink, net::UnixListener},
    },
    path::{Path, PathBuf},
    process::ExitCode,
    sync::mpsc,
    thread,
};

use self::{behaviour::Behaviour, http::serve, vm::Vm};

/// Under this name the program is the double.
const NAME: &str = "cloud-hypervisor";

/// Installs a double with this behaviour into `dir`. Returns its program.
pub fn install(dir: &Path, behaviour: &Behaviour) -> PathBuf {
    let program = dir.join(NAME);
    if !program.exists() {
        symlink(env::current_exe().unwrap(), &program).unwrap();
    }
    behaviour.store(dir);
    program
}

/// Runs the double, if this process was started as one. To be called first in `main`.
pub fn run_if_asked() -> Option<ExitCode> {
    let program = PathBuf::from(env::args_os().next()?);
    if program.file_name()? != NAME {
        return None;
    }
    let behaviour = Behaviour::load(program.parent()?);
    let arguments: Vec<String> = env::args().skip(1).collect();
    if arguments == ["--version"] {
        println!("cloud-hypervisor {}", behaviour.version);
        return Some(ExitCode::SUCCESS);
    }
    Some(match Given::parse(&arguments) {
        Ok(given) => given.run(behaviour),
        Err(why) => {
            eprintln!("error: {why}");
            ExitCode::from(2)
        }
    })
}

/// The descriptors on the command line.
struct Given {
    api: RawFd,
    events: RawFd,
}

impl Given {
    fn parse(arguments: &[String]) -> Result<Self, String> {
        let (mut api, mut events) = (None, None);
        let fd = |value: &str| value.strip_prefix("fd=")?.parse::<RawFd>().ok();
        let mut left = arguments.iter().map(String::as_str);
        while let Some(name) = left.next() {
            match name {
                "--seccomp" if left.next() == Some("true") => {}
                "--api-socket" => api = left.next().and_then(fd),
                "--event-monitor" => events = left.next().and_then(fd),
                other => return Err(format!("unexpected argument {other:?}")),
            }
        }
        match (api, events) {
            (Some(api), Some(events)) => Ok(Self { api, events }),
            _ => Err("--api-socket fd=N and --event-monitor fd=N are needed".into()),
        }
    }

    fn run(self, behaviour: Behaviour) -> ExitCode {
        assert!(
            fs::read_link(format!("/proc/self/fd/{}", self.api))
                .unwrap()
                .to_string_lossy()
                .starts_with("socket:"),
            "--api-socket is no socket"
        );
        // SAFETY: both were opened for this process, and no other code uses them.
        let (api, events) = unsafe { (UnixListener::from_raw_fd(self.api), File::from_raw_fd(self.events)) };
        let (end, ended) = mpsc::channel();
        let vm = Vm::new(behaviour, events, end);
        thread::spawn(move || {
            for connection in api.incoming() {
                let (connection, vm) = (connection.unwrap(), vm.clone());
                thread::spawn(move || serve(connection, &vm));
            }
        });
        ended.recv().unwrap()
    }
}
