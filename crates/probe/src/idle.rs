//! CPU time of idle pods, in µs: from `cpu.stat` of cgroups that hold only the pods' processes, and from the
//! scheduler's account of processes that share a cgroup with others.
//!
//! A clock tick of 10 ms would be as long as the CPU time of an idle pod in seconds.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::process::{self, Table};

/// The windows in which idle pods are measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Windows {
    /// Length of a window; zero if idle pods are not measured.
    pub length: Duration,
    /// Minimum number of windows in all repetitions together.
    pub count: u32,
}

impl Default for Windows {
    fn default() -> Self {
        Self { length: Duration::from_secs(60), count: 3 }
    }
}

impl Windows {
    /// Returns the number of windows in each of `repetitions` repetitions.
    pub fn in_each(&self, repetitions: u32) -> u32 {
        if self.length.is_zero() { 0 } else { self.count.div_ceil(repetitions.max(1)) }
    }
}

/// The accounts of a set of processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Accounts {
    root: PathBuf,
    /// Cgroups whose processes all count; none is below another.
    groups: BTreeSet<PathBuf>,
    /// Processes that are in none of the groups.
    processes: BTreeSet<i32>,
}

/// CPU time at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reading {
    groups: BTreeMap<PathBuf, Duration>,
    threads: BTreeMap<(i32, i32), Duration>,
}

impl Accounts {
    /// Returns the accounts of the processes `pids` of `table`.
    pub fn new(table: &Table, pids: &BTreeSet<i32>) -> Self {
        Self::below(Path::new("/sys/fs/cgroup"), table, pids)
    }

    fn below(root: &Path, table: &Table, pids: &BTreeSet<i32>) -> Self {
        // With cgroup v1, a process has several groups, so it is counted on its own.
        let group = |pid: &i32| match &table.get(pid)?.cgroups[..] {
            [path] if path.len() > 1 && !path.contains("/..") => Some(PathBuf::from(path)),
            _ => None,
        };
        let others: Vec<PathBuf> = table.keys().filter(|pid| !pids.contains(pid)).filter_map(group).collect();
        let all: BTreeSet<PathBuf> = pids.iter().filter_map(group).collect();
        let whole: BTreeSet<PathBuf> = all
            .into_iter()
            .filter(|path| !others.iter().any(|other| other.starts_with(path)))
            .filter(|path| usage(&root.join(path.strip_prefix("/").unwrap_or(path))).is_some())
            .collect();
        let is_below_another = |path: &PathBuf| path.ancestors().skip(1).any(|above| whole.contains(above));
        let groups: BTreeSet<PathBuf> =
            whole.iter().filter(|path| !is_below_another(path)).cloned().collect();
        let alone =
            |pid: &&i32| !group(pid).is_some_and(|path| path.ancestors().any(|above| groups.contains(above)));
        let processes = pids.iter().filter(alone).copied().collect();
        Self { root: root.to_owned(), groups, processes }
    }

    /// Reads the accounts. Skips groups and processes that have ended.
    pub fn read(&self) -> Reading {
        let of_group = |path: &PathBuf| {
            Some((path.clone(), usage(&self.root.join(path.strip_prefix("/").unwrap_or(path)))?))
        };
        let of_process = |pid: &i32| {
            let pid = *pid;
            threads(pid).into_iter().map(move |(thread, time)| ((pid, thread), time))
        };
        Reading {
            groups: self.groups.iter().filter_map(of_group).collect(),
            threads: self.processes.iter().flat_map(of_process).collect(),
        }
    }
}

impl Reading {
    /// Returns the time since an earlier reading. Everything that began later counts in full.
    pub fn since(&self, before: &Self) -> Duration {
        let groups = self.groups.iter().map(|(path, now)| now.saturating_sub(time_of(&before.groups, path)));
        let threads =
            self.threads.iter().map(|(thread, now)| now.saturating_sub(time_of(&before.threads, thread)));
        groups.chain(threads).sum()
    }
}

fn time_of<Key: Ord>(times: &BTreeMap<Key, Duration>, key: &Key) -> Duration {
    times.get(key).copied().unwrap_or_default()
}

/// Returns the CPU time of a cgroup and its descendants, guests included.
fn usage(group: &Path) -> Option<Duration> {
    let text = fs::read_to_string(group.join("cpu.stat")).ok()?;
    let micros = text.lines().find_map(|line| line.strip_prefix("usage_usec "))?;
    micros.trim().parse().ok().map(Duration::from_micros)
}

/// Returns the CPU time of each thread of a process. Without a fine account in the kernel: one entry for the whole
/// process, in ticks.
fn threads(pid: i32) -> Vec<(i32, Duration)> {
    let of_thread = |thread: i32| {
        let text = fs::read_to_string(format!("/proc/{pid}/task/{thread}/schedstat")).ok()?;
        text.split(' ').next()?.parse().ok().map(|nanos| (thread, Duration::from_nanos(nanos)))
    };
    let entries = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let threads: Vec<(i32, Duration)> =
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter_map(of_thread).collect();
    if threads.is_empty() {
        return process::cpu_time(pid).map(|time| (pid, time)).into_iter().collect();
    }
    threads
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::Process;

    fn node(groups: &[(&str, u64)], processes: &[(i32, &str)]) -> (tempfile::TempDir, Table) {
        let root = tempfile::tempdir().unwrap();
        for (path, micros) in groups {
            set(root.path(), path, *micros);
        }
        let process = |(pid, group): &(i32, &str)| {
            (*pid, Process { pid: *pid, cgroups: vec![(*group).into()], ..Process::default() })
        };
        (root, processes.iter().map(process).collect())
    }

    fn set(root: &Path, group: &str, micros: u64) {
        let dir = root.join(group.trim_start_matches('/'));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("cpu.stat"), format!("usage_usec {micros}\nuser_usec 1\n")).unwrap();
    }

    #[test]
    fn a_group_counts_whole_if_nothing_else_is_in_it() {
        let groups = [("/pods/a", 1_000), ("/pods/a/vmm", 900), ("/system", 5_000_000), ("/pods/b", 70)];
        // 30 is the container's own process, below pod b's group; 40 shares the host's group with a bystander.
        let processes = [
            (10, "/pods/a"),
            (11, "/pods/a/vmm"),
            (20, "/pods/b"),
            (30, "/pods/b/ctr"),
            (40, "/system"),
            (41, "/system"),
        ];
        let (root, table) = node(&groups, &processes);
        let accounts = Accounts::below(root.path(), &table, &[10, 11, 20, 40].into());
        assert_eq!(accounts.groups, [PathBuf::from("/pods/a")].into());
        assert_eq!(accounts.processes, [20, 40].into());
        let before = accounts.read();
        set(root.path(), "/pods/a", 1_750);
        set(root.path(), "/pods/b", 99_999);
        assert_eq!(accounts.read().since(&before), Duration::from_micros(750));
    }

    #[test]
    fn a_process_of_several_hierarchies_or_of_the_roots_group_is_counted_by_itself() {
        let (root, mut table) = node(&[("/", 9), ("/a", 9)], &[(10, "/"), (11, "/a")]);
        table.get_mut(&11).unwrap().cgroups.push("/b".into());
        let accounts = Accounts::below(root.path(), &table, &[10, 11].into());
        assert_eq!((accounts.groups.len(), accounts.processes), (0, [10, 11].into()));
    }

    #[test]
    fn this_test_is_seen_at_work_finer_than_by_ticks() {
        let me = std::process::id() as i32;
        let accounts = Accounts { root: PathBuf::new(), groups: BTreeSet::new(), processes: [me].into() };
        let before = accounts.read();
        let spun = || rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        let begun = spun();
        while (spun().tv_sec - begun.tv_sec) * 1_000_000_000 + spun().tv_nsec - begun.tv_nsec < 3_000_000 {}
        assert!(accounts.read().since(&before) >= Duration::from_millis(2));
    }

    #[test]
    fn windows_are_shared_out_over_the_repetitions() {
        let windows = Windows::default();
        assert_eq!([1, 2, 3, 5].map(|repetitions| windows.in_each(repetitions)), [3, 2, 1, 1]);
        assert_eq!(Windows { length: Duration::ZERO, ..windows }.in_each(1), 0);
    }
}
