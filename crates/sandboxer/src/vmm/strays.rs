//! VMMs that no record names: left by a daemon that died between starting one and noting it.

use std::{collections::HashSet, ffi::OsStr, fs, os::unix::ffi::OsStrExt, path::Path};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use sandboxer_protocol::id::SandboxId;

use super::VmmError;

/// Environment variable by which every VMM process can be told from all others.
pub const MARK: &str = "SANDBOXER_RUN_DIR";

/// Ends whatever VMM was started for `run_dir`. Answers when told to end, not when gone.
pub fn end(pod: &SandboxId, run_dir: &Path) -> Result<(), VmmError> {
    end_those(pod, |marked, _| marked == run_dir)
}

/// Ends whatever VMMs were started for directories below `dir`, all but those whose pids are in `keep`.
pub fn end_below(owner: &SandboxId, dir: &Path, keep: &HashSet<u32>) -> Result<(), VmmError> {
    end_those(owner, |marked, pid| marked.starts_with(dir) && !keep.contains(&pid))
}

fn end_those(pod: &SandboxId, doomed: impl Fn(&Path, u32) -> bool) -> Result<(), VmmError> {
    let host = |action, path: &Path| {
        let (pod, path) = (pod.clone(), path.to_owned());
        move |source| VmmError::Host { pod, action, path, source }
    };
    let proc = Path::new("/proc");
    let mark = format!("{MARK}=");
    let marked = |variable: &[u8]| {
        variable.strip_prefix(mark.as_bytes()).map(|dir| Path::new(OsStr::from_bytes(dir)).to_owned())
    };
    for entry in fs::read_dir(proc).map_err(host("read", proc))?.flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw) else {
            continue;
        };
        // Held before it is looked at: the pid may change hands meanwhile, the pidfd may not.
        let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else {
            continue;
        };
        let Ok(environment) = fs::read(entry.path().join("environ")) else {
            continue;
        };
        let dir = environment.split(|&byte| byte == 0).find_map(marked);
        if dir.is_some_and(|dir| doomed(&dir, pid.as_raw_nonzero().get().unsigned_abs())) {
            tracing::warn!(%pod, pid = pid.as_raw_nonzero(), "ending a VMM that no record names");
            match pidfd_send_signal(&process, Signal::KILL) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(errno) => return Err(host("end the process of", &entry.path())(errno.into())),
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    #[test]
    fn only_the_process_of_that_directory_is_ended() {
        let dir = tempfile::tempdir().unwrap();
        let sleeper =
            |dir: &Path| std::process::Command::new("sleep").arg("60").env(MARK, dir).spawn().unwrap();
        let mut stray = sleeper(&dir.path().join("a"));
        let mut other = sleeper(&dir.path().join("ab"));
        end(&"p".parse().unwrap(), &dir.path().join("a")).unwrap();
        assert_eq!(stray.wait().unwrap().signal(), Some(9));
        assert!(other.try_wait().unwrap().is_none(), "another pod's VMM was ended");
        end_below(&"p".parse().unwrap(), dir.path(), &HashSet::from([other.id()])).unwrap();
        assert!(other.try_wait().unwrap().is_none(), "one that was to be kept was ended");
        end_below(&"p".parse().unwrap(), dir.path(), &HashSet::new()).unwrap();
        assert_eq!(other.wait().unwrap().signal(), Some(9));
    }
}
