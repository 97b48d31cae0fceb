//! A cgroup for one native tool: of cgroup v2, or of v1's controllers cpu and memory.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::options::Resources;

/// Pause before the next attempt to remove a group: its processes end asynchronously.
const AGAIN: Duration = Duration::from_millis(20);

/// Cgroups of one tool.
#[derive(Debug)]
pub struct Groups {
    paths: Vec<PathBuf>,
}

impl Groups {
    /// Creates groups with these limits below `root`, the cgroup file system.
    pub fn make(root: &Path, name: &str, limits: Resources) -> io::Result<Self> {
        let v2 = root.join("cgroup.controllers").exists();
        let paths = if v2 {
            vec![root.join(name)]
        } else {
            ["cpu", "memory"].map(|controller| root.join(controller).join(name)).into()
        };
        let mut made = Self { paths: Vec::new() };
        for path in paths {
            fs::create_dir(&path).map_err(|error| named(error, "create", &path))?;
            made.paths.push(path);
        }
        let (quota, period) = (limits.cpu_quota, limits.cpu_period);
        let last = made.paths.len() - 1;
        if quota > 0 && v2 {
            made.set(0, "cpu.max", &format!("{quota} {period}"))?;
        } else if quota > 0 {
            made.set(0, "cpu.cfs_period_us", &period.to_string())?;
            made.set(0, "cpu.cfs_quota_us", &quota.to_string())?;
        }
        if limits.memory_limit > 0 {
            let file = if v2 { "memory.max" } else { "memory.limit_in_bytes" };
            made.set(last, file, &limits.memory_limit.to_string())?;
        }
        Ok(made)
    }

    /// Returns the directories of the groups.
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    fn set(&self, index: usize, file: &str, value: &str) -> io::Result<()> {
        let path = self.paths[index].join(file);
        fs::write(&path, value).map_err(|error| named(error, "write", &path))
    }

    /// Kills all processes in the groups and removes the groups; leaves what remains after `limit`.
    #[expect(
        clippy::disallowed_methods,
        reason = "a group has no event for the end of its last process with cgroup v1"
    )]
    pub fn remove(&mut self, limit: Duration) {
        let end = Instant::now() + limit;
        while let Some(path) = self.paths.last() {
            kill_all(path);
            match fs::remove_dir(path) {
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < end => {
                    std::thread::sleep(AGAIN);
                }
                _ => drop(self.paths.pop()),
            }
        }
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        self.remove(Duration::ZERO);
    }
}

fn kill_all(group: &Path) {
    let listed = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    for pid in listed.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?)) {
        // The process may have ended since it was listed.
        let _ = kill_process(pid, Signal::KILL);
    }
}

fn named(error: io::Error, action: &str, path: &Path) -> io::Error {
    io::Error::new(
        error.kind(),
        format!(
            "cannot {action} {}: {error}; native tools need root and the controllers cpu and memory",
            path.display()
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Resources =
        Resources { cpu_quota: 150_000, cpu_period: 100_000, cpu_shares: 0, memory_limit: 1 << 28 };

    fn text(path: PathBuf) -> String {
        fs::read_to_string(path).unwrap()
    }

    #[test]
    fn limits_are_written_for_both_versions() {
        let double_v2 = tempfile::tempdir().unwrap();
        fs::write(double_v2.path().join("cgroup.controllers"), "cpu memory\n").unwrap();
        let groups = Groups::make(double_v2.path(), "a", LIMITS).unwrap();
        assert_eq!(groups.paths(), [double_v2.path().join("a")]);
        assert_eq!(text(double_v2.path().join("a/cpu.max")), "150000 100000");
        assert_eq!(text(double_v2.path().join("a/memory.max")), "268435456");
        let double_v1 = tempfile::tempdir().unwrap();
        for controller in ["cpu", "memory"] {
            fs::create_dir(double_v1.path().join(controller)).unwrap();
        }
        let groups = Groups::make(double_v1.path(), "a", LIMITS).unwrap();
        assert_eq!(groups.paths().len(), 2);
        assert_eq!(text(double_v1.path().join("cpu/a/cpu.cfs_quota_us")), "150000");
        assert_eq!(text(double_v1.path().join("memory/a/memory.limit_in_bytes")), "268435456");
    }

    #[test]
    fn a_group_without_limits_has_none_and_goes_when_it_is_dropped() {
        let double = tempfile::tempdir().unwrap();
        fs::write(double.path().join("cgroup.controllers"), "").unwrap();
        let groups = Groups::make(double.path(), "a", Resources::default()).unwrap();
        assert_eq!(fs::read_dir(&groups.paths()[0]).unwrap().count(), 0);
        drop(groups);
        assert!(!double.path().join("a").exists());
    }

    #[test]
    fn what_is_missing_is_named() {
        let double = tempfile::tempdir().unwrap();
        let why = Groups::make(double.path(), "a", LIMITS).unwrap_err().to_string();
        assert!(why.contains("/cpu/a") && why.contains("controllers cpu and memory"), "{why}");
    }
}
