//! The confinement of a process as the kernel currently reports it: not cached, and independent of the code of the
//! jail.

use std::{fs, io, path::Path};

use crate::rlimits;

/// The kinds of namespaces.
const NAMESPACES: [&str; 7] = ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"];
/// Limits that are shown, by the kernel's names.
const LIMITS: [&str; 4] = ["Max core file size", "Max processes", "Max open files", "Max locked memory"];
/// Capability sets that a process can use or gain.
const SETS: [&str; 4] = ["CapInh", "CapPrm", "CapEff", "CapAmb"];

/// The confinement of a process, from its `/proc`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Confinement {
    /// ID of the process.
    pub pid: u32,
    /// Effective user of the process.
    pub uid: u32,
    /// Effective group of the process.
    pub gid: u32,
    /// Supplementary groups of the process.
    pub groups: Vec<u32>,
    /// Namespaces that differ from this process's.
    pub own_namespaces: Vec<String>,
    /// Namespaces shared with this process.
    pub shared_namespaces: Vec<String>,
    /// Union of the capability sets, without the bounding set.
    pub capabilities: u64,
    /// The bounding set of capabilities.
    pub capability_bounds: u64,
    /// Whether no_new_privs is set.
    pub no_new_privileges: bool,
    /// Mode of seccomp: "none", "strict" or "filter".
    pub seccomp: &'static str,
    /// Number of seccomp filters.
    pub seccomp_filters: u32,
    /// File system and options of the root.
    pub root: String,
    /// Number of visible mounts.
    pub mounts: u32,
    /// Number of writable mounts.
    pub writable_mounts: u32,
    /// Control group of the process: in the version 2 hierarchy, else in the first one.
    pub cgroup: String,
    /// Limits as name, soft and hard value.
    pub limits: Vec<(String, u64, u64)>,
}

impl Confinement {
    /// Reads the confinement of process `pid`.
    pub fn read(pid: u32) -> io::Result<Self> {
        let proc = Path::new("/proc").join(pid.to_string());
        let read = |name: &str| fs::read_to_string(proc.join(name));
        let status = read("status")?;
        let mounts = read("mountinfo")?;
        let (mut own_namespaces, mut shared_namespaces) = (Vec::new(), Vec::new());
        for name in NAMESPACES {
            let file = Path::new("ns").join(name);
            let ours = fs::read_link(Path::new("/proc/self").join(&file))?;
            let list = if fs::read_link(proc.join(file))? == ours {
                &mut shared_namespaces
            } else {
                &mut own_namespaces
            };
            list.push(name.to_owned());
        }
        let ids = |field: &str| -> Vec<u32> {
            let words = value(&status, field).split_ascii_whitespace();
            words.filter_map(|word| word.parse().ok()).collect()
        };
        let set = |field: &str| u64::from_str_radix(value(&status, field), 16).map_err(malformed);
        let number = |field: &str| value(&status, field).parse::<u32>().map_err(malformed);
        // The columns are real, effective, saved, and of the file system.
        let effective = |field: &str| ids(field).get(1).copied().ok_or_else(|| malformed(field));
        let (root, writable_mounts) = mounted(&mounts);
        Ok(Self {
            pid,
            uid: effective("Uid")?,
            gid: effective("Gid")?,
            groups: ids("Groups"),
            own_namespaces,
            shared_namespaces,
            capabilities: SETS.iter().try_fold(0, |all, name| set(name).map(|set| all | set))?,
            capability_bounds: set("CapBnd")?,
            no_new_privileges: number("NoNewPrivs")? == 1,
            seccomp: match number("Seccomp")? {
                0 => "none",
                1 => "strict",
                _ => "filter",
            },
            // Kernels before 5.9 do not report the number.
            seccomp_filters: number("Seccomp_filters").unwrap_or_default(),
            root,
            mounts: u32::try_from(mounts.lines().count()).unwrap_or(u32::MAX),
            writable_mounts,
            cgroup: cgroup(&read("cgroup")?),
            limits: limits(&read("limits").unwrap_or_default()),
        })
    }
}

fn limits(text: &str) -> Vec<(String, u64, u64)> {
    let named = |name: &&str| rlimits::limit(text, name).map(|[soft, hard]| ((*name).to_owned(), soft, hard));
    LIMITS.iter().filter_map(named).collect()
}

fn malformed(what: impl ToString) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("malformed /proc/PID/status: {}", what.to_string()))
}

/// Returns the value of `field:` in `/proc/PID/status`.
fn value<'a>(status: &'a str, field: &str) -> &'a str {
    let line = |line: &'a str| line.strip_prefix(field)?.strip_prefix(':');
    status.lines().find_map(line).unwrap_or_default().trim()
}

/// Returns the root's file system with its options, and the numbers of mounts and of writable mounts, from a
/// mountinfo.
fn mounted(mountinfo: &str) -> (String, u32) {
    let (mut root, mut writable) = (String::new(), 0);
    for line in mountinfo.lines() {
        let (mount, source) = line.split_once(" - ").unwrap_or((line, ""));
        let mut fields = mount.split(' ').skip(4);
        let (at, options) = (fields.next().unwrap_or_default(), fields.next().unwrap_or_default());
        if at == "/" {
            root = format!("{} {options}", source.split(' ').next().unwrap_or_default());
        }
        writable += u32::from(options.split(',').any(|option| option == "rw"));
    }
    (root, writable)
}

/// Returns the path in the unified hierarchy, or else in the first one that has groups: with version 1 in use, the unified
/// hierarchy and those that nobody uses show their roots.
fn cgroup(text: &str) -> String {
    let path = |line: &str| line.splitn(3, ':').nth(2).map(str::to_owned);
    let unified = text.lines().find(|line| line.starts_with("0::"));
    let mut paths = unified.into_iter().chain(text.lines()).filter_map(path);
    paths.find(|path| path != "/").unwrap_or_else(|| "/".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_shares_everything_with_itself() {
        let seen = Confinement::read(std::process::id()).unwrap();
        assert_eq!(seen.uid, rustix::process::geteuid().as_raw());
        assert!(seen.own_namespaces.is_empty() && seen.shared_namespaces.len() == NAMESPACES.len());
        assert!(seen.mounts > 0 && seen.limits.len() == LIMITS.len(), "{seen:?}");
        let files = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        assert!(seen.limits.contains(&(
            "Max open files".into(),
            files.current.unwrap_or(u64::MAX),
            files.maximum.unwrap_or(u64::MAX)
        )));
    }

    #[test]
    fn a_root_and_what_can_be_written_are_told() {
        let mountinfo = "600 599 0:50 / / ro,nosuid,nodev,noexec - tmpfs jail rw,size=1m\n\
            601 600 8:1 /usr /usr ro,nosuid,nodev - ext4 /dev/root rw\n\
            602 600 0:5 /null /dev/null rw,nosuid,noexec shared:2 - devtmpfs udev rw\n";
        assert_eq!(mounted(mountinfo), ("tmpfs ro,nosuid,nodev,noexec".into(), 1));
        assert_eq!(cgroup("21:hugetlb:/\n4:memory:/pod/x\n0::/\n"), "/pod/x");
        assert_eq!(cgroup("4:memory:/\n0::/\n"), "/");
        assert_eq!(cgroup("0::/kubepods/y\n"), "/kubepods/y");
    }
}
