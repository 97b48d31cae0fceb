//! The launcher, which containerd finds by name.

use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use super::{
    cri::RuntimeStatus,
    host::Host,
    program::{self, Answer},
    verdict::{Check, Fix, Subject},
};

/// Program name that containerd derives from the runtime type.
const NAME: &str = "containerd-shim-sandboxer-v1";

const LAUNCHER: Subject = Subject { name: "launcher", why: "containerd runs it for each container" };

/// The launcher's location and version output.
#[derive(Debug, Clone, Default)]
pub struct Reading {
    /// Path of the program, if found.
    pub program: Option<PathBuf>,
    /// Places that were searched, as text.
    pub looked: String,
    /// Output of `-v`.
    pub answer: Option<Answer>,
}

/// Searches like containerd: at the configured path, in containerd's `PATH`, and next to containerd's program. Uses
/// this process's `PATH` if containerd's process is not visible.
pub async fn read(host: &Host, runtime: Option<&RuntimeStatus>) -> Reading {
    let configured =
        runtime.and_then(RuntimeStatus::handler).and_then(|handler| handler.get("runtimePath")?.as_str());
    let (program, looked) = match configured.filter(|path| !path.is_empty()) {
        Some(path) => (host.program(Path::new(path), OsStr::new("")), path.to_owned()),
        None => match runtime.and_then(|runtime| containerd_path(host, runtime.pid?)) {
            Some(path) => (host.program(NAME.as_ref(), &path), "containerd's PATH".to_owned()),
            None => {
                let path = std::env::var_os("PATH").unwrap_or_default();
                (
                    host.program(NAME.as_ref(), &path),
                    "this shell's PATH (containerd's PATH is unknown)".to_owned(),
                )
            }
        },
    };
    let answer = match &program {
        Some(program) => Some(program::ask(&host.path(program), "-v").await),
        None => None,
    };
    Reading { program, looked, answer }
}

/// Returns the `PATH` of process `pid`, followed by the directory of its program.
fn containerd_path(host: &Host, pid: u32) -> Option<OsString> {
    let environ = std::fs::read(host.path(format!("/proc/{pid}/environ"))).ok()?;
    let path = environ.split(|byte| *byte == 0).find_map(|entry| entry.strip_prefix(b"PATH="));
    let exe = std::fs::read_link(host.path(format!("/proc/{pid}/exe"))).ok();
    let beside = exe.as_deref().and_then(Path::parent).map(Path::to_owned);
    let dirs = path.map(|path| std::env::split_paths(OsStr::from_bytes(path)).collect::<Vec<_>>());
    std::env::join_paths(dirs.unwrap_or_default().into_iter().chain(beside)).ok()
}

/// Checks the launcher's version against this program's.
pub fn judge(reading: &Reading) -> Check {
    let install = || {
        Fix::commands(
            "install it in containerd's PATH",
            ["install -D -t /usr/bin containerd-shim-sandboxer-v1"],
        )
    };
    let (path, answer) = match reading {
        Reading { program: Some(program), answer: Some(answer), .. } => (program, answer),
        Reading { looked, .. } => return LAUNCHER.failure(format!("no {NAME} in {looked}"), install()),
    };
    let program = path.display();
    let ours = concat!(" ", env!("CARGO_PKG_VERSION"));
    match answer {
        Answer::Printed(line) if line.starts_with(NAME) && line.ends_with(ours) => {
            LAUNCHER.ok(format!("{program},{ours} ({})", reading.looked))
        }
        Answer::Printed(line) => LAUNCHER.warning(
            format!("{program} has version {line:?}, the daemon{ours}"),
            Fix::words("install the launcher of the daemon's version"),
        ),
        Answer::Missing => LAUNCHER.failure(format!("cannot run {program}: no such file"), install()),
        Answer::Broken(how) => LAUNCHER.failure(format!("{program} {how}"), install()),
        Answer::Silent => LAUNCHER.warning(
            program::too_slow(path),
            Fix::words("retry when the host is less busy; if it stays slow, check the program"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;
    use crate::Verdict;

    #[test]
    fn it_must_be_there_and_ours() {
        let ours = format!("{NAME} {}", env!("CARGO_PKG_VERSION"));
        for (answer, verdict) in [
            (None, Verdict::Failure),
            (Some(Answer::Printed(ours)), Verdict::Ok),
            (Some(Answer::Printed(format!("{NAME} 0.0.1"))), Verdict::Warning),
            (Some(Answer::Printed("something else".into())), Verdict::Warning),
            (Some(Answer::Missing), Verdict::Failure),
            (Some(Answer::Broken("ended with 1".into())), Verdict::Failure),
            (Some(Answer::Silent), Verdict::Warning),
        ] {
            let program = answer.is_some().then(|| PathBuf::from("/usr/bin").join(NAME));
            let reading = Reading { program, looked: "PATH".into(), answer };
            assert_eq!(judge(&reading).verdict, verdict, "{reading:?}");
        }
    }

    fn runtime(pid: u32, runtime_path: &str) -> RuntimeStatus {
        let handler = serde_json::json!({ "runtimePath": runtime_path });
        RuntimeStatus {
            name: "containerd".into(),
            version: "v2.4.2".into(),
            pid: Some(pid),
            config: serde_json::json!({ "containerd": { "runtimes": { "sandboxer": handler } } }),
            network: Ok(()),
        }
    }

    #[tokio::test]
    async fn it_is_looked_for_where_containerd_looks() {
        let root = tempfile::tempdir().unwrap();
        let host = Host::below(root.path());
        let place = |path: &str| {
            let path = host.path(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "#!/bin/sh\necho here\n").unwrap();
            fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        };
        fs::create_dir_all(host.path("/proc/7")).unwrap();
        fs::write(host.path("/proc/7/environ"), b"HOME=/\0PATH=/a:/b\0X=").unwrap();
        std::os::unix::fs::symlink("/opt/containerd/bin/containerd", host.path("/proc/7/exe")).unwrap();

        let found = async |runtime: &RuntimeStatus| read(&host, Some(runtime)).await.program;
        assert_eq!(found(&runtime(7, "")).await, None);
        for path in ["/opt/containerd/bin", "/b", "/a"] {
            let path = format!("{path}/{NAME}");
            place(&path);
            assert_eq!(found(&runtime(7, "")).await, Some(path.into()));
        }
        assert_eq!(found(&runtime(7, "/elsewhere/shim")).await, None);
        place("/elsewhere/shim");
        let reading = read(&host, Some(&runtime(7, "/elsewhere/shim"))).await;
        assert_eq!(reading.answer, Some(Answer::Printed("here".into())));
    }
}
