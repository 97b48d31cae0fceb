//! Resources of a container, read from inside: the same files under every runtime.

use std::fs;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

/// Limits above this mean none: cgroup v1 has a number for "unlimited".
const UNLIMITED: u64 = 1 << 60;

/// Processors and memory of a container. A limit that is not set or that the runtime does not show is `None`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Facts {
    /// Number of processors on which the container's processes may run.
    pub cpus: usize,
    /// CPU time per second by the container's quota.
    pub quota_cpus: Option<f64>,
    /// Memory limit of the container, bytes.
    pub memory_limit: Option<u64>,
    /// Memory of the kernel on which the container runs, bytes.
    pub memory_total: Option<u64>,
    /// Release of the kernel on which the container runs.
    pub kernel: Option<String>,
}

impl Facts {
    /// Reads the facts of this container.
    pub fn of_container() -> Self {
        Self::read(Path::new("/"))
    }

    /// Reads the facts below `root`; the processors are always this process's.
    fn read(root: &Path) -> Self {
        let text = |path: &str| fs::read_to_string(root.join(path)).ok().map(|text| text.trim().to_owned());
        let v2 = text("sys/fs/cgroup/cpu.max").and_then(|max| quota_of_v2(&max));
        let v1 = || {
            let number = |path: &str| text(path)?.parse::<f64>().ok().filter(|number| *number > 0.0);
            Some(
                number("sys/fs/cgroup/cpu/cpu.cfs_quota_us")?
                    / number("sys/fs/cgroup/cpu/cpu.cfs_period_us")?,
            )
        };
        let limit = text("sys/fs/cgroup/memory.max")
            .or_else(|| text("sys/fs/cgroup/memory/memory.limit_in_bytes"))
            .and_then(|limit| limit.parse().ok())
            .filter(|limit| *limit < UNLIMITED);
        Self {
            cpus: cpus(),
            quota_cpus: v2.or_else(v1),
            memory_limit: limit,
            memory_total: text("proc/meminfo").and_then(|memory| total_of(&memory)),
            kernel: text("proc/sys/kernel/osrelease"),
        }
    }

    /// Prints the facts on stdout as `{"bench_facts":{…}}`.
    pub fn print(&self) -> Result<()> {
        writeln!(std::io::stdout(), "{}", self.line()?).context("cannot print the facts")
    }

    /// Returns the facts as a line of JSON.
    pub fn line(&self) -> Result<String> {
        Ok(serde_json::to_string(&serde_json::json!({ "bench_facts": self }))?)
    }
}

/// Returns the number of processors in the CPU affinity; a quota does not change it.
fn cpus() -> usize {
    rustix::thread::sched_getaffinity(None).map_or(1, |set| set.count() as usize)
}

/// Parses a quota such as "200000 100000", µs; `None` for "max 100000".
fn quota_of_v2(text: &str) -> Option<f64> {
    let (quota, period) = text.split_once(' ')?;
    let (quota, period) = (quota.parse::<f64>().ok()?, period.parse::<f64>().ok()?);
    (period > 0.0).then(|| quota / period)
}

/// Parses the kernel's `MemTotal: N kB` to bytes.
fn total_of(memory: &str) -> Option<u64> {
    let line = memory.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts_of(files: &[(&str, &str)]) -> Facts {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        Facts::read(root.path())
    }

    #[test]
    fn limits_of_both_kinds_of_cgroups() {
        let facts = facts_of(&[
            ("sys/fs/cgroup/cpu.max", "150000 100000\n"),
            ("sys/fs/cgroup/memory.max", "268435456\n"),
            ("proc/meminfo", "MemTotal:         524288 kB\nMemFree: 1 kB\n"),
        ]);
        assert_eq!(facts.quota_cpus, Some(1.5));
        assert_eq!((facts.memory_limit, facts.memory_total), (Some(256 << 20), Some(512 << 20)));
        let facts = facts_of(&[
            ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "100000\n"),
            ("sys/fs/cgroup/cpu/cpu.cfs_period_us", "50000\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824\n"),
        ]);
        assert_eq!((facts.quota_cpus, facts.memory_limit), (Some(2.0), Some(1 << 30)));
    }

    #[test]
    fn no_limit_is_none() {
        let facts =
            facts_of(&[("sys/fs/cgroup/cpu.max", "max 100000\n"), ("sys/fs/cgroup/memory.max", "max\n")]);
        assert_eq!((facts.quota_cpus, facts.memory_limit), (None, None));
        let facts = facts_of(&[
            ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ]);
        assert_eq!((facts.quota_cpus, facts.memory_limit), (None, None));
        assert!(facts.cpus > 0);
    }
}
