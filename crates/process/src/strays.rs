//! VMMs without a record, because their daemon died before it wrote the record, or because the record cannot be read.

use std::{
    collections::HashSet,
    ffi::OsStr,
    fs, io,
    os::{
        fd::OwnedFd,
        unix::{ffi::OsStrExt, fs::MetadataExt},
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use sandboxer_protocol::id::SandboxId;

use crate::jail;

/// Environment variable that marks every VMM process.
pub const MARK: &str = "SANDBOXER_RUN_DIR";

/// Name of the directory of VMs that wait for a pod, in a daemon's run directory.
pub const POOL: &str = "pool";
/// Name of the directory of the VM that is to be frozen, in a daemon's run directory.
pub const TEMPLATE: &str = "template";

/// Returns every process that was started for a VM of the daemon with this run directory.
pub fn below(run_dir: &Path) -> io::Result<Vec<Stray>> {
    Ok(all()?.into_iter().filter(|stray| stray.marked.starts_with(run_dir)).collect())
}

/// Returns every process that was started for `run_dir`.
pub fn started_for(run_dir: &Path) -> io::Result<Vec<Stray>> {
    Ok(all()?.into_iter().filter(|stray| stray.marked == run_dir).collect())
}

/// The reason why a VMM without a record could not be killed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {path:?} to kill a process of pod {pod} without a record")]
pub struct StrayError {
    /// The pod that owns the VMM.
    pub pod: SandboxId,
    /// The action that failed.
    pub action: &'static str,
    /// The path that the attempt was about.
    pub path: PathBuf,
    /// The error of the system.
    pub source: io::Error,
}

/// Kills all VMMs that were started for directories below `dir`, except those with PIDs in `keep`.
pub fn end_below(owner: &SandboxId, dir: &Path, keep: &HashSet<u32>) -> Result<(), StrayError> {
    end_those(owner, |stray| stray.marked.starts_with(dir) && !keep.contains(&stray.pid))
}

fn end_those(pod: &SandboxId, doomed: impl Fn(&Stray) -> bool) -> Result<(), StrayError> {
    let host = |action, path: PathBuf| {
        let pod = pod.clone();
        move |source| StrayError { pod, action, path, source }
    };
    for stray in all().map_err(host("read", PROC.into()))?.iter().filter(|stray| doomed(stray)) {
        tracing::warn!(%pod, pid = stray.pid, "killing a VMM without a record");
        stray.end().map_err(host("signal", stray.proc()))?;
    }
    Ok(())
}

const PROC: &str = "/proc";

/// A process that a daemon started for a VM, held by pidfd because its PID may be reused.
#[derive(Debug)]
pub struct Stray {
    /// PID of the process.
    pub pid: u32,
    /// Directory of the VM when it started.
    marked: PathBuf,
    pidfd: OwnedFd,
}

/// Returns every process that has [`MARK`] in its environment.
pub fn all() -> io::Result<Vec<Stray>> {
    let mark = format!("{MARK}=");
    let marked = |variable: &[u8]| {
        variable.strip_prefix(mark.as_bytes()).map(|dir| Path::new(OsStr::from_bytes(dir)).to_owned())
    };
    let mut found = Vec::new();
    for entry in fs::read_dir(PROC)?.flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw) else {
            continue;
        };
        // Opens the pidfd before reading: the PID may be reused meanwhile, the pidfd cannot.
        let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) else {
            continue;
        };
        let Ok(environment) = fs::read(entry.path().join("environ")) else {
            continue;
        };
        if let Some(marked) = environment.split(|&byte| byte == 0).find_map(marked) {
            found.push(Stray { pid: pid.as_raw_nonzero().get().unsigned_abs(), marked, pidfd });
        }
    }
    Ok(found)
}

impl Stray {
    /// Returns whether the process belongs to the VM with the current directory `run_dir`, which was created there or
    /// below `pool`.
    pub fn is_of(&self, run_dir: &Path, pool: &Path) -> bool {
        if self.marked.starts_with(run_dir) {
            return true;
        }
        // The VM was in the pool: its directory was moved, but the process's environment has the old path.
        if !self.marked.starts_with(pool) || self.marked.exists() {
            return false;
        }
        self.stands_in(run_dir)
    }

    /// Returns whether the process belongs to a VM without a pod: a VM in the pool, or a template that is being made.
    /// `run_dir` is the daemon's.
    pub fn is_spare(&self, run_dir: &Path) -> bool {
        let no_pods = [POOL, TEMPLATE].iter().any(|name| self.marked.starts_with(run_dir.join(name)));
        // If a pod got the VM, its directory was moved.
        no_pods && self.stands_in(&self.marked)
    }

    /// Returns whether the process was started in the directory that is now at this path.
    fn stands_in(&self, dir: &Path) -> bool {
        let Ok(dir) = fs::metadata(dir) else { return false };
        let stands_in = fs::metadata(self.proc().join("cwd"))
            .is_ok_and(|cwd| (cwd.dev(), cwd.ino()) == (dir.dev(), dir.ino()));
        // The working directory of a jailed process is in its jail, but its user belongs to that directory.
        let user = || {
            let process = procfs::process::Process::new(i32::try_from(self.pid).ok()?).ok()?;
            Some(process.status().ok()?.ruid)
        };
        stands_in || user() == Some(jail::user_of(&dir))
    }

    /// Returns the command name (`comm`) of the process; empty if it has ended.
    pub fn command(&self) -> String {
        let name = fs::read(self.proc().join("comm")).unwrap_or_default();
        String::from_utf8_lossy(&name).trim_end().to_owned()
    }

    /// Kills the process. No error if it has ended.
    pub fn end(&self) -> io::Result<()> {
        match pidfd_send_signal(&self.pidfd, Signal::KILL) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Waits for the end of the process. Returns false if it has not ended by `deadline`. Blocks.
    pub fn wait(&self, deadline: Instant) -> io::Result<bool> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now()).min(Duration::from_secs(60));
            let left = Timespec::try_from(left).map_err(io::Error::other)?;
            match poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&left)) {
                Ok(ready) => return Ok(ready > 0),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Returns the pidfd of the process.
    pub fn into_pidfd(self) -> OwnedFd {
        self.pidfd
    }

    fn proc(&self) -> PathBuf {
        Path::new(PROC).join(self.pid.to_string())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn only_the_process_of_that_directory_is_ended() {
        let dir = tempfile::tempdir().unwrap();
        let sleeper =
            |dir: &Path| std::process::Command::new("sleep").arg("60").env(MARK, dir).spawn().unwrap();
        let mut stray = sleeper(&dir.path().join("a"));
        let mut other = sleeper(&dir.path().join("ab"));
        let [found] = <[Stray; 1]>::try_from(started_for(&dir.path().join("a")).unwrap()).unwrap();
        found.end().unwrap();
        assert_eq!(stray.wait().unwrap().signal(), Some(9));
        assert!(other.try_wait().unwrap().is_none(), "another pod's VMM was ended");
        end_below(&"p".parse().unwrap(), dir.path(), &HashSet::from([other.id()])).unwrap();
        assert!(other.try_wait().unwrap().is_none(), "one that was to be kept was ended");
        end_below(&"p".parse().unwrap(), dir.path(), &HashSet::new()).unwrap();
        assert_eq!(other.wait().unwrap().signal(), Some(9));
    }

    #[test]
    fn a_vm_of_the_pool_is_found_by_the_directory_that_was_moved() {
        let dir = tempfile::tempdir().unwrap();
        let [pool, pods] = ["pool", "pods"].map(|name| dir.path().join(name));
        let [born, run_dir, other] = [pool.join("w1"), pods.join("p"), pods.join("q")];
        for made in [&born, &other] {
            fs::create_dir_all(made).unwrap();
        }
        let mut sleeper = std::process::Command::new("sleep");
        let mut child = sleeper.arg("60").env(MARK, &born).current_dir(&born).spawn().unwrap();
        let found = || all().unwrap().into_iter().find(|stray| stray.pid == child.id()).unwrap();
        // The VM is in the pool.
        assert!(!found().is_of(&run_dir, &pool));
        fs::rename(&born, &run_dir).unwrap();
        let stray = found();
        assert!(stray.is_of(&run_dir, &pool) && !stray.is_of(&other, &pool));
        assert!(!stray.is_of(&run_dir, &dir.path().join("another")), "of another daemon");
        assert_eq!(stray.command(), "sleep");
        assert!(!stray.wait(Instant::now()).unwrap());
        stray.end().unwrap();
        assert!(stray.wait(Instant::now() + Duration::from_secs(20)).unwrap());
        child.wait().unwrap();
        stray.end().expect("what has ended is ended");
    }
}
