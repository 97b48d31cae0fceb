//! All processes of the host at one moment, with their ties to each other.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use procfs::ProcResult;
use procfs::process::{FDTarget, Process as Entry};

/// A process as `/proc` shows it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Process {
    /// Process id.
    pub pid: i32,
    /// Process id of the parent.
    pub parent: i32,
    /// Time of the process's start, clock ticks since boot.
    pub started: u64,
    /// File name of the process's program.
    pub name: String,
    /// Arguments, the program included, joined by spaces.
    pub command: String,
    /// Cgroups of the process, one path per hierarchy.
    pub cgroups: Vec<String>,
    /// Inode of the process's PID namespace; `None` without permission.
    pub pid_namespace: Option<u64>,
    /// Paths of the process's open files.
    pub files: Vec<String>,
    /// Processes that it watches by pidfd.
    pub watches: BTreeSet<i32>,
    /// Whether the process has a KVM VM open.
    pub has_vm: bool,
    /// Device and inode of the process's program; `None` without permission.
    pub program: Option<(u64, u64)>,
    /// Whether this is a kernel thread that works for one process, which is its parent here.
    pub is_kernel_thread: bool,
}

/// All processes by pid. Of the kernel threads, only those that work for one process.
pub type Table = BTreeMap<i32, Process>;

/// Flag of a kernel thread in `/proc/PID/stat` (PF_KTHREAD).
const KERNEL_THREAD: u32 = 0x0020_0000;

/// Reads `/proc`. Skips processes that end meanwhile.
pub fn table() -> ProcResult<Table> {
    let mut table = Table::new();
    for entry in procfs::process::all_processes()? {
        if let Ok(Some(process)) = entry.and_then(|entry| read(&entry)) {
            table.insert(process.pid, process);
        }
    }
    Ok(table)
}

/// Returns a process; `None` for other kernel threads and for ended processes, which have no command line.
fn read(entry: &Entry) -> ProcResult<Option<Process>> {
    let arguments = entry.cmdline()?;
    let Some(program) = arguments.first().filter(|program| !program.is_empty()) else {
        return vhost_worker(entry);
    };
    let stat = entry.stat()?;
    let mut process = Process {
        pid: stat.pid,
        parent: stat.ppid,
        started: stat.starttime,
        name: program.rsplit('/').next().unwrap_or_default().to_owned(),
        command: arguments.join(" "),
        cgroups: entry.cgroups()?.0.into_iter().map(|cgroup| cgroup.pathname).collect(),
        pid_namespace: std::fs::metadata(format!("/proc/{}/ns/pid", stat.pid)).ok().map(|inode| inode.ino()),
        program: std::fs::metadata(format!("/proc/{}/exe", stat.pid))
            .ok()
            .map(|file| (file.dev(), file.ino())),
        ..Process::default()
    };
    // This requires ptrace permission; without it only the other ties are used.
    for fd in entry.fd().into_iter().flatten().flatten() {
        match fd.target {
            FDTarget::Path(path) => process.files.push(path.display().to_string()),
            FDTarget::AnonInode(kind) if kind.contains("kvm-vm") => process.has_vm = true,
            FDTarget::AnonInode(kind) if kind.contains("pidfd") => {
                process.watches.extend(watched(stat.pid, fd.fd));
            }
            _ => {}
        }
    }
    Ok(Some(process))
}

/// Returns the kernel thread that carries a VM's packets. Before Linux 6.4, vhost has one per device, named after the
/// process that opened the device; later it is a thread of that process.
fn vhost_worker(entry: &Entry) -> ProcResult<Option<Process>> {
    let stat = entry.stat()?;
    let Some(owner) = vhost_owner(&stat.comm).filter(|_| stat.flags & KERNEL_THREAD != 0) else {
        return Ok(None);
    };
    Ok(Some(Process {
        pid: stat.pid,
        parent: owner,
        started: stat.starttime,
        name: stat.comm,
        cgroups: entry.cgroups()?.0.into_iter().map(|cgroup| cgroup.pathname).collect(),
        is_kernel_thread: true,
        ..Process::default()
    }))
}

fn vhost_owner(comm: &str) -> Option<i32> {
    comm.strip_prefix("vhost-")?.parse().ok().filter(|&pid| pid > 0)
}

/// Returns the CPU time of a process with all its threads, exact to a clock tick (10 ms); `None` if it has ended.
pub fn cpu_time(pid: i32) -> Option<Duration> {
    let stat = Entry::new(pid).and_then(|process| process.stat()).ok()?;
    Some(Duration::from_secs(stat.utime + stat.stime) / u32::try_from(procfs::ticks_per_second()).ok()?)
}

/// Returns the process of a pidfd, from line "Pid:" of its fdinfo; -1 there means that the process has ended.
fn watched(pid: i32, fd: i32) -> Option<i32> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pid:"))?;
    line.trim().parse().ok().filter(|&pid| pid > 0)
}

/// Returns the process that listens on a Unix socket.
pub fn listener(socket: &std::path::Path) -> Option<i32> {
    let stream = std::os::unix::net::UnixStream::connect(socket).ok()?;
    let peer = rustix::net::sockopt::socket_peercred(&stream).ok()?;
    Some(peer.pid.as_raw_pid()).filter(|&pid| pid > 0)
}

/// Returns `pid` and all its ancestors.
pub fn lineage(table: &Table, pid: i32) -> BTreeSet<i32> {
    std::iter::successors(Some(pid), |pid| table.get(pid).map(|process| process.parent))
        .take_while(|&pid| pid > 1)
        .take(table.len() + 1)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_found_with_its_parent_and_its_files() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let table = table().unwrap();
        let me = &table[&(std::process::id() as i32)];
        assert!(me.name.starts_with("sandboxer_probe"), "{}", me.name);
        assert!(me.files.contains(&file.path().display().to_string()));
        assert!(lineage(&table, me.pid).contains(&me.parent));
    }

    #[test]
    fn a_vhost_worker_names_its_owner() {
        assert_eq!(vhost_owner("vhost-393"), Some(393));
        for other in ["vhost-", "vhost-x", "vhost-0", "kworker/0:1", "vhost_task"] {
            assert_eq!(vhost_owner(other), None, "{other}");
        }
        // A program can take such a name, but is no kernel thread.
        assert!(
            table().unwrap().values().all(|process| !process.is_kernel_thread || process.command.is_empty())
        );
    }

    #[test]
    fn cpu_time_is_what_was_spun_away() {
        let me = std::process::id() as i32;
        let before = cpu_time(me).unwrap();
        let begun = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        let spun = || {
            let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
            (now.tv_sec - begun.tv_sec) * 1_000 + (now.tv_nsec - begun.tv_nsec) / 1_000_000
        };
        while spun() < 100 {}
        // At least this thread's; other tests run beside it.
        assert!(cpu_time(me).unwrap() - before >= Duration::from_millis(80));
        assert_eq!(cpu_time(i32::MAX), None);
    }

    #[test]
    fn a_listener_is_known_by_its_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.sock");
        let _listening = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert_eq!(listener(&path), Some(std::process::id() as i32));
        assert_eq!(listener(&dir.path().join("none.sock")), None);
    }
}
