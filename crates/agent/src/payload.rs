//! The last step of a process that becomes a container's program: finds the program, drops the last privileges,
//! executes it, and reports in plain words why that fails.

use std::{
    collections::HashMap,
    env,
    ffi::{CString, OsStr},
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

use caps::{CapSet, CapsHashSet};
use libcontainer::{
    capabilities::CapabilityExt as _,
    oci_spec::runtime::{Capabilities, LinuxCapabilities, LinuxSeccomp, Process, Spec},
    seccomp,
    workload::{Executor, ExecutorError, ExecutorSetEnvsError, ExecutorValidationError},
};
use nix::{
    errno::Errno,
    fcntl::AtFlags,
    sys::signal::{SigHandler, SigSet, SigmaskHow, Signal, sigprocmask},
    unistd::{AccessFlags, execve, faccessat},
};

use sandboxer_base::chain;

use crate::log;

/// The search path for a program whose environment has no PATH.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Executes the spec's program.
#[derive(Clone, Default)]
pub struct Payload {
    /// The seccomp filter of an exec: libcontainer applies a container's filter to its init only.
    pub filter: Option<LinuxSeccomp>,
    /// The final capabilities of an exec that may gain privileges: it keeps CAP_SYS_ADMIN until it has loaded its
    /// filter.
    pub drop_to: Option<LinuxCapabilities>,
}

impl Executor for Payload {
    fn validate(&self, spec: &Spec) -> Result<(), ExecutorValidationError> {
        let refuse = |why: String| {
            log::cause(log::PAYLOAD, &why);
            ExecutorValidationError::ArgValidationError(why)
        };
        let process = spec.process().as_ref().ok_or_else(|| refuse("spec has no process".into()))?;
        find(process).map(drop).map_err(refuse)
    }

    fn setup_envs(&self, envs: HashMap<String, String>) -> Result<(), ExecutorSetEnvsError> {
        // The environment is set at `exec` in its own order, and libcontainer only adds HOME.
        if let Some(home) = envs.get("HOME") {
            // SAFETY: this process has one thread.
            unsafe { env::set_var("HOME", home) };
        }
        Ok(())
    }

    fn exec(&self, spec: &Spec) -> Result<(), ExecutorError> {
        let why = match spec.process() {
            Some(process) => match self.execute(process) {
                Ok(never) => match never {},
                Err(why) => why,
            },
            None => "spec has no process".to_owned(),
        };
        log::cause(log::PAYLOAD, &why);
        Err(ExecutorError::Other(why))
    }
}

impl Payload {
    fn execute(&self, process: &Process) -> Result<std::convert::Infallible, String> {
        let program = find(process)?;
        let c_string = |text: &[u8]| {
            CString::new(text)
                .map_err(|_| format!("exec: {program:?}: an argument or variable holds a zero byte"))
        };
        let path = c_string(program.as_os_str().as_bytes())?;
        let args: Vec<CString> =
            arguments(process).iter().map(|arg| c_string(arg.as_bytes())).collect::<Result<_, _>>()?;
        let env: Vec<CString> =
            environment(process).iter().map(|var| c_string(var.as_bytes())).collect::<Result<_, _>>()?;

        reset_signals().map_err(|error| format!("exec: {program:?}: cannot reset signals: {error}"))?;
        if let Some(filter) = &self.filter {
            seccomp::initialize_seccomp(filter).map_err(|error| {
                format!("exec: {program:?}: cannot load the seccomp filter: {}", chain(&error))
            })?;
        }
        if let Some(target) = &self.drop_to {
            drop_to(target)
                .map_err(|error| format!("exec: {program:?}: cannot drop capabilities: {}", chain(&error)))?;
        }
        let Err(error) = execve(&path, &args, &env);
        Err(format!("exec: {program:?}: {}", words(error)))
    }
}

/// Returns the program's path, or the reason why there is none.
fn find(process: &Process) -> Result<PathBuf, String> {
    let args = arguments(process);
    let name = args.first().filter(|name| !name.is_empty()).ok_or("exec: no command was given")?;
    if name.contains('/') {
        let path = PathBuf::from(name);
        return match usable(&path) {
            Ok(()) => Ok(path),
            Err(error) => Err(format!("exec: {name:?}: {}", words(error))),
        };
    }
    let env = process.env().as_deref().unwrap_or_default();
    let search = env.iter().rev().find_map(|var| var.strip_prefix("PATH=")).unwrap_or(DEFAULT_PATH);
    let mut denied = None;
    for dir in search.split(':') {
        // An empty entry means the working directory, as in shells.
        let path = Path::new(if dir.is_empty() { "." } else { dir }).join(name);
        match usable(&path) {
            Ok(()) => return Ok(path),
            Err(Errno::EACCES) => denied = Some(path),
            Err(_) => {}
        }
    }
    Err(match denied {
        Some(path) => format!("exec: {path:?}: {}", words(Errno::EACCES)),
        None => format!("exec: {name:?}: executable file not found in $PATH"),
    })
}

fn usable(path: &Path) -> nix::Result<()> {
    let metadata =
        path.metadata().map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO)))?;
    if metadata.is_dir() {
        return Err(Errno::EISDIR);
    }
    faccessat(nix::fcntl::AT_FDCWD, path, AccessFlags::X_OK, AtFlags::AT_EACCESS)
}

/// Returns the error's description from `strerror`, in lower case.
fn words(error: Errno) -> String {
    let words = error.desc();
    let mut chars = words.chars();
    chars.next().map(|first| first.to_lowercase().chain(chars).collect()).unwrap_or_default()
}

fn arguments(process: &Process) -> &[String] {
    process.args().as_deref().unwrap_or_default()
}

fn environment(process: &Process) -> Vec<String> {
    let mut env = process.env().clone().unwrap_or_default();
    if !env.iter().any(|var| var.starts_with("HOME=")) {
        let home = env::var_os("HOME").unwrap_or_else(|| OsStr::new("/").to_owned());
        env.push(format!("HOME={}", home.to_string_lossy()));
    }
    env
}

/// Resets signals: Rust ignores SIGPIPE, and an ignored signal stays ignored after an exec.
fn reset_signals() -> nix::Result<()> {
    // SAFETY: the default action runs no code of ours.
    unsafe { nix::sys::signal::signal(Signal::SIGPIPE, SigHandler::SigDfl) }?;
    sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None)
}

fn drop_to(target: &LinuxCapabilities) -> Result<(), caps::errors::CapsError> {
    let set = |capabilities: &Option<Capabilities>| -> CapsHashSet {
        capabilities.iter().flatten().map(|capability| capability.to_cap()).collect()
    };
    caps::set(None, CapSet::Effective, &set(target.effective()))?;
    caps::set(None, CapSet::Permitted, &set(target.permitted()))
}

#[cfg(test)]
mod tests {
    use libcontainer::oci_spec::runtime::ProcessBuilder;

    use super::*;

    fn search(args: &[&str], env: &[&str]) -> Result<PathBuf, String> {
        let strings = |list: &[&str]| list.iter().map(|&text| text.to_owned()).collect::<Vec<_>>();
        find(&ProcessBuilder::default().args(strings(args)).env(strings(env)).build().unwrap())
    }

    #[test]
    fn a_program_is_found_as_a_shell_would() {
        assert_eq!(search(&["sh"], &["PATH=/nowhere:/bin"]), Ok("/bin/sh".into()));
        assert_eq!(
            search(&["sh"], &[]).map(|path| path.ends_with("sh")),
            Ok(true),
            "no PATH means the usual one"
        );
        assert_eq!(search(&["/bin/sh"], &["PATH=/nowhere"]), Ok("/bin/sh".into()));
    }

    #[test]
    fn each_refusal_names_the_program_and_the_reason() {
        let why = |args: &[&str]| search(args, &["PATH=/usr/bin:/bin"]).unwrap_err();
        assert_eq!(why(&["nosuch"]), r#"exec: "nosuch": executable file not found in $PATH"#);
        assert_eq!(why(&["/no/such"]), r#"exec: "/no/such": no such file or directory"#);
        assert_eq!(why(&["/etc/passwd"]), r#"exec: "/etc/passwd": permission denied"#);
        assert_eq!(why(&["/etc"]), r#"exec: "/etc": is a directory"#);
        assert_eq!(why(&[]), "exec: no command was given");
    }
}
