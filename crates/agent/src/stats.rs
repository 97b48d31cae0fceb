//! Resource usage of a container, or of the whole guest.

use std::{fs, path::Path};

use nix::sys::statvfs::statvfs;

use crate::cgroup::{Cgroup, keyed};

/// The value of a limit that is not set.
pub const UNLIMITED: u64 = u64::MAX;

/// Resource usage from cgroup v2. Times in µs, sizes in bytes.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Stats {
    pub cpu_usage_us: u64,
    pub cpu_user_us: u64,
    pub cpu_system_us: u64,
    pub cpu_periods: u64,
    pub cpu_throttled_periods: u64,
    pub cpu_throttled_us: u64,
    pub memory_usage: u64,
    pub memory_limit: u64,
    pub memory_anon: u64,
    pub memory_file: u64,
    pub memory_inactive_file: u64,
    pub memory_page_faults: u64,
    pub memory_major_page_faults: u64,
    pub memory_swap: u64,
    pub pids: u64,
    pub pids_limit: u64,
    pub oom_kills: u64,
    pub fs_used: u64,
    pub fs_inodes: u64,
}

/// Reads the usage of one container with its written data in `writable`; `None`: the host has it.
pub fn of_container(cgroup: &Cgroup, writable: Option<&Path>) -> Stats {
    let mut stats = of_group(cgroup);
    stats.memory_usage = number(cgroup, "memory.current").unwrap_or(0);
    stats.memory_limit = number(cgroup, "memory.max").unwrap_or(UNLIMITED);
    stats.memory_swap = number(cgroup, "memory.swap.current").unwrap_or(0);
    stats.pids = number(cgroup, "pids.current").unwrap_or(0);
    stats.pids_limit = number(cgroup, "pids.max").unwrap_or(UNLIMITED);
    stats.oom_kills = cgroup.oom_kills();
    if let Some(writable) = writable {
        measure(&mut stats, writable);
    }
    stats
}

/// Reads the usage of the whole guest, including the kernel and the agent.
pub fn of_guest() -> Stats {
    let mut stats = of_group(&Cgroup::of_guest());
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = kilobytes(&meminfo, "MemTotal:");
    stats.memory_limit = total;
    stats.memory_usage = total.saturating_sub(kilobytes(&meminfo, "MemFree:"));
    stats.pids = number(&Cgroup::of_all(), "pids.current").unwrap_or(0);
    stats.pids_limit = UNLIMITED;
    stats.oom_kills = Cgroup::of_all().oom_kills();
    measure(&mut stats, Path::new("/"));
    stats
}

fn of_group(cgroup: &Cgroup) -> Stats {
    let cpu = cgroup.read("cpu.stat").unwrap_or_default();
    let memory = cgroup.read("memory.stat").unwrap_or_default();
    let value = |content: &str, key: &str| keyed(content, key).unwrap_or(0);
    Stats {
        cpu_usage_us: value(&cpu, "usage_usec"),
        cpu_user_us: value(&cpu, "user_usec"),
        cpu_system_us: value(&cpu, "system_usec"),
        cpu_periods: value(&cpu, "nr_periods"),
        cpu_throttled_periods: value(&cpu, "nr_throttled"),
        cpu_throttled_us: value(&cpu, "throttled_usec"),
        memory_anon: value(&memory, "anon"),
        memory_file: value(&memory, "file"),
        memory_inactive_file: value(&memory, "inactive_file"),
        memory_page_faults: value(&memory, "pgfault"),
        memory_major_page_faults: value(&memory, "pgmajfault"),
        ..Stats::default()
    }
}

/// Reads a file with a single number; "max" is [`UNLIMITED`].
fn number(cgroup: &Cgroup, name: &str) -> Option<u64> {
    let content = cgroup.read(name).ok()?;
    match content.trim() {
        "max" => Some(UNLIMITED),
        digits => digits.parse().ok(),
    }
}

fn kilobytes(meminfo: &str, key: &str) -> u64 {
    let value = meminfo
        .lines()
        .find_map(|line| line.strip_prefix(key)?.trim().strip_suffix("kB")?.trim().parse().ok());
    value.map_or(0, |kb: u64| kb.saturating_mul(1024))
}

fn measure(stats: &mut Stats, writable: &Path) {
    if let Ok(fs) = statvfs(writable) {
        stats.fs_used = fs.blocks().saturating_sub(fs.blocks_free()).saturating_mul(fs.fragment_size());
        stats.fs_inodes = fs.files().saturating_sub(fs.files_free());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read_in_bytes() {
        assert_eq!(kilobytes("MemTotal:  2048 kB\nMemFree: 1 kB\n", "MemFree:"), 1024);
        assert_eq!(kilobytes("", "MemFree:"), 0);
    }
}
