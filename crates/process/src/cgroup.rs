//! A pod's control group on the host. The pod's VMM is charged and limited below the parent that the node's manager
//! chose.
//!
//! CRI names a parent that the manager created and gave limits to. Below it each pod gets its own group in every
//! hierarchy with controllers, of v1 and v2 alike. systemd's slices are such directories.

mod beside;
mod short_moves;

use std::{
    fs::{self, File, OpenOptions},
    io,
    path::{Component, Path, PathBuf},
    time::Duration,
};

use procfs::process::Process;
use sandboxer_base::Cpus;
use sandboxer_protocol::id::SandboxId;

pub use self::{beside::beside, short_moves::keep_moves_short};

/// Controllers of v1 whose hierarchies are entered. `cpuset` is one of them only if a group there was given CPUs,
/// because it accepts no process before.
const V1_CONTROLLERS: [&str; 6] = ["cpu", "cpuacct", "memory", "pids", "blkio", "freezer"];

/// Part of the path of kubelet's groups for pods that may have containers without a limit.
const BURSTABLE: &str = "burstable";

/// Files of the cpuset controller.
const CPUS: &str = "cpuset.cpus";
const NODES: &str = "cpuset.mems";
/// File of version 1 that makes pages follow a change of the nodes. In version 2 they always do.
const MIGRATE: &str = "cpuset.memory_migrate";

/// File that lists a group's processes and adds new ones.
const PROCESSES: &str = "cgroup.procs";

/// A file that only groups of version 2 have.
const CONTROLLERS: &str = "cgroup.controllers";

/// Interval and number of attempts to remove a group: the kernel permits it a moment after the end of the last
/// process.
const RETRY: Duration = Duration::from_millis(10);
const TRIES: u32 = 100;

/// Maximum number of processes in an error.
const LISTED: usize = 5;

/// The mounted hierarchies of the host.
#[derive(Debug, Default, Clone)]
pub struct Hierarchies {
    roots: Vec<PathBuf>,
    /// The hierarchy with the cpuset controller.
    cpuset: Option<Cpuset>,
}

/// A hierarchy with the cpuset controller, or a group in it.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Cpuset {
    /// Version 1, a separate hierarchy: a group accepts processes once it has CPUs and memory nodes.
    Own(PathBuf),
    /// Version 2, the unified hierarchy.
    Unified(PathBuf),
}

/// Resources of which a pod has no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Unlimited {
    /// Whether CPU time is unlimited.
    pub cpu: bool,
    /// Whether memory is unlimited.
    pub memory: bool,
}

/// CPUs and memory nodes that the processes of a group may use; `None`: all of its parent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Bounds {
    /// CPUs of the host.
    pub cpus: Option<Cpus>,
    /// Memory nodes of the host, from which alone pages are taken. Pages on other nodes follow.
    pub nodes: Option<Cpus>,
}

/// A control group in every hierarchy, which may not exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cgroup {
    dirs: Vec<PathBuf>,
    cpuset: Option<Cpuset>,
}

impl Hierarchies {
    /// Returns this host's hierarchies with controllers.
    pub fn detect() -> io::Result<Self> {
        let mounts = Process::myself().and_then(|myself| myself.mountinfo()).map_err(io::Error::other)?;
        let mut roots: Vec<PathBuf> = Vec::new();
        let mut cpuset = None;
        for mount in mounts {
            if mount.fs_type == "cgroup" && mount.super_options.contains_key("cpuset") {
                cpuset = Some(Cpuset::Own(mount.mount_point.clone()));
            } else if mount.fs_type == "cgroup2"
                && fs::read_to_string(mount.mount_point.join("cgroup.controllers"))
                    .is_ok_and(|controllers| controllers.split_whitespace().any(|name| name == "cpuset"))
            {
                cpuset = Some(Cpuset::Unified(mount.mount_point.clone()));
            }
            let counts = match mount.fs_type.as_str() {
                "cgroup" => V1_CONTROLLERS.iter().any(|name| mount.super_options.contains_key(*name)),
                // In a hybrid set-up this hierarchy has no controllers.
                "cgroup2" => fs::read_to_string(mount.mount_point.join("cgroup.controllers"))
                    .is_ok_and(|controllers| !controllers.trim().is_empty()),
                _ => false,
            };
            if counts && !roots.contains(&mount.mount_point) {
                roots.push(mount.mount_point);
            }
        }
        Ok(Self { roots, cpuset })
    }

    /// Returns the unified hierarchy (version 2) at `root` as the only one.
    pub fn unified(root: &Path) -> Self {
        Self { roots: vec![root.to_owned()], cpuset: Some(Cpuset::Unified(root.to_owned())) }
    }

    /// Returns the resources of which the pods in the manager's group `parent` have no limit.
    ///
    /// In CRI, kubelet sends the sum of the containers' limits and leaves out containers without one. But only a pod
    /// with limits for all containers gets a limit in its group. Groups of other managers do not show this.
    pub fn unlimited(&self, parent: &str) -> Unlimited {
        let Some(parent) = relative(parent).filter(|path| path.to_string_lossy().contains(BURSTABLE)) else {
            return Unlimited::default();
        };
        let says = |file: &str, unlimited: fn(&str) -> bool| {
            self.roots.iter().any(|root| {
                fs::read_to_string(root.join(&parent).join(file)).is_ok_and(|text| unlimited(text.trim()))
            })
        };
        // Version 1 rounds its value for "no limit" down to a whole page.
        let vast = |text: &str| text.parse().is_ok_and(|bytes: u64| bytes >= 1 << 62);
        Unlimited {
            cpu: says("cpu.max", |text| text.starts_with("max"))
                || says("cpu.cfs_quota_us", |text| text == "-1"),
            memory: says("memory.max", |text| text == "max") || says("memory.limit_in_bytes", vast),
        }
    }

    /// Returns the maximum number of processes and threads in the manager's group `parent`; `None` without a limit.
    pub fn max_processes(&self, parent: &str) -> Option<u64> {
        let file = relative(parent)?.join("pids.max");
        self.roots.iter().find_map(|root| fs::read_to_string(root.join(&file)).ok()?.trim().parse().ok())
    }

    /// Returns the group of `pod` below `parent`; `None` without a parent.
    pub fn for_pod(&self, parent: &str, pod: &SandboxId) -> Option<Cgroup> {
        Some(self.at(&relative(parent)?.join(format!("sandboxer-{pod}"))))
    }

    /// Returns the group `name`, or `None` if the name is empty.
    pub fn named(&self, name: &str) -> Option<Cgroup> {
        Some(self.at(&relative(name)?))
    }

    fn at(&self, path: &Path) -> Cgroup {
        let below = |root: &PathBuf| root.join(path);
        let cpuset = self.cpuset.as_ref().map(|cpuset| match cpuset {
            Cpuset::Own(root) => Cpuset::Own(below(root)),
            Cpuset::Unified(root) => Cpuset::Unified(below(root)),
        });
        Cgroup { dirs: self.roots.iter().map(below).collect(), cpuset }
    }
}

/// Returns `parent` as a path below a hierarchy's root, or `None` if it is the root itself. Never leaves the root.
///
/// The name of a slice contains its parents (systemd.slice(5)): `a-b.slice` is `a.slice/a-b.slice`.
fn relative(parent: &str) -> Option<PathBuf> {
    let plain = Path::new(parent).components().filter_map(|part| match part {
        Component::Normal(name) => name.to_str(),
        _ => None,
    });
    let mut path = PathBuf::new();
    for name in plain {
        if let Some(slice) = name.strip_suffix(".slice").filter(|_| path.as_os_str().is_empty()) {
            for (at, _) in slice.match_indices('-') {
                path.push(format!("{}.slice", &slice[..at]));
            }
        }
        path.push(name);
    }
    (!path.as_os_str().is_empty()).then_some(path)
}

/// Open files of a control group, to start a process in the group or move one into it.
#[derive(Debug, Default)]
pub struct CgroupEntries {
    /// The group's directory if the only hierarchy is of version 2, so that a child can be started in it.
    pub dir: Option<File>,
    /// The `cgroup.procs` file of each hierarchy, to which a running process is written.
    pub procs: Vec<File>,
}

impl Cgroup {
    /// Opens the files of the group.
    pub fn entries(&self) -> Result<CgroupEntries, (PathBuf, io::Error)> {
        let open = |dir: &PathBuf| {
            let processes = dir.join(PROCESSES);
            OpenOptions::new().write(true).open(&processes).map_err(|error| (processes, error))
        };
        let dir = match &self.dirs[..] {
            [dir] if dir.join(CONTROLLERS).exists() => {
                Some(File::open(dir).map_err(|error| (dir.clone(), error))?)
            }
            _ => None,
        };
        Ok(CgroupEntries { dir, procs: self.entered().map(open).collect::<Result<_, _>>()? })
    }

    /// Creates the group.
    pub fn make(&self) -> Result<(), (PathBuf, io::Error)> {
        self.dirs.iter().try_for_each(|dir| fs::create_dir_all(dir).map_err(|error| (dir.clone(), error)))
    }

    /// Gives the group's processes a low CPU weight, because a niceness only counts within a group.
    pub fn yield_to_others(&self) -> Result<(), (PathBuf, io::Error)> {
        // v2 and v1: a tenth of the default, like a niceness of 10. With less, a process that waits for one of these
        // would never finish on a busy node.
        let tenth = [("cpu.weight", "10"), ("cpu.shares", "102")];
        let files = self.dirs.iter().flat_map(|dir| tenth.map(|(file, weight)| (dir.join(file), weight)));
        for (file, weight) in files.filter(|(file, _)| file.exists()) {
            fs::write(&file, weight).map_err(|error| (file, error))?;
        }
        Ok(())
    }

    /// Moves process `pid` into the group, with all its threads. Blocks for an RCU grace period, a few ms.
    pub fn enter(&self, pid: u32) -> Result<(), (PathBuf, io::Error)> {
        self.entered().try_for_each(|dir| {
            let processes = dir.join(PROCESSES);
            fs::write(&processes, pid.to_string()).map_err(|error| (processes, error))
        })
    }

    /// Restricts the group's present and future processes to `bounds`.
    pub fn restrict(&self, bounds: &Bounds) -> Result<(), (PathBuf, io::Error)> {
        match &self.cpuset {
            None => {
                let error = io::Error::new(io::ErrorKind::Unsupported, "no cpuset controller is mounted");
                Err((PathBuf::from("/sys/fs/cgroup"), error))
            }
            Some(Cpuset::Unified(dir)) => restrict_unified(dir, bounds),
            Some(Cpuset::Own(dir)) => restrict_own(dir, bounds),
        }
    }

    /// Returns the restrictions of the group's processes.
    pub fn bounds(&self) -> Bounds {
        let read =
            |dir: &Path, name| fs::read_to_string(dir.join(name)).ok().and_then(|text| Cpus::parse(&text));
        let own = |name| match &self.cpuset {
            None => None,
            Some(Cpuset::Unified(dir)) => read(dir, name),
            // A group without its own values has its parent's.
            Some(Cpuset::Own(dir)) => {
                let all = dir.parent().and_then(|parent| read(parent, name));
                read(dir, name).filter(|own| Some(own) != all.as_ref())
            }
        };
        Bounds { cpus: own(CPUS), nodes: own(NODES) }
    }

    /// Restricts processes, with all their threads, to `bounds`. Blocks like [`Cgroup::enter`].
    pub fn confine(&self, pids: &[u32], bounds: &Bounds) -> Result<(), (PathBuf, io::Error)> {
        self.restrict(bounds)?;
        match &self.cpuset {
            Some(Cpuset::Own(dir)) => {
                pids.iter().try_for_each(|pid| write(&dir.join(PROCESSES), &pid.to_string()))
            }
            _ => Ok(()),
        }
    }

    /// Returns the directories that a process enters: the cpuset of version 1 only after [`Cgroup::restrict`].
    fn entered(&self) -> impl Iterator<Item = &PathBuf> {
        let own = match &self.cpuset {
            Some(Cpuset::Own(dir)) if dir.join(PROCESSES).exists() => Some(dir),
            _ => None,
        };
        self.dirs.iter().chain(own)
    }

    /// Returns whether process `pid` is in the group.
    pub fn contains(&self, pid: u32) -> bool {
        let pid = pid.to_string();
        self.dirs.iter().all(|dir| {
            let processes = fs::read_to_string(dir.join(PROCESSES));
            processes.is_ok_and(|processes| processes.lines().any(|line| line == pid))
        })
    }

    /// Returns the strictest limit of huge pages of 2 MiB, of this group or of one above: the file, and the bytes that
    /// it still allows. `None`: there is no limit.
    pub fn huge_pages_allowed(&self) -> Option<(PathBuf, u64)> {
        // A limit may be "max". In version 1 no VMM is in a group of that hierarchy.
        let bytes = |path: &Path| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
        let groups = self.dirs.iter().flat_map(|dir| dir.ancestors());
        let limits = groups.filter_map(|dir| {
            let path = dir.join("hugetlb.2MB.max");
            let allowed = bytes(&path)?.saturating_sub(bytes(&dir.join("hugetlb.2MB.current"))?);
            Some((path, allowed))
        });
        limits.min_by_key(|(_, allowed)| *allowed)
    }

    /// Removes the group after its last process has ended. The error of a group that stays busy names its processes.
    pub async fn remove(&self) -> Result<(), (PathBuf, io::Error)> {
        let own = match &self.cpuset {
            Some(Cpuset::Own(dir)) => Some(dir),
            _ => None,
        };
        for dir in self.dirs.iter().chain(own) {
            let mut tries = TRIES;
            loop {
                match fs::remove_dir(dir) {
                    Err(error) if error.kind() == io::ErrorKind::ResourceBusy && tries > 0 => tries -= 1,
                    Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                        return Err((dir.clone(), io::Error::new(error.kind(), still_in(dir))));
                    }
                    Err(error) if error.kind() != io::ErrorKind::NotFound => {
                        return Err((dir.clone(), error));
                    }
                    _ => break,
                }
                tokio::time::sleep(RETRY).await;
            }
        }
        Ok(())
    }
}

/// Returns the processes in the group at `dir`, with their names, for operators.
fn still_in(dir: &Path) -> String {
    let listed = fs::read_to_string(dir.join(PROCESSES)).unwrap_or_default();
    let named = |pid: &str| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        format!("{pid} ({})", name.trim_end())
    };
    let processes: Vec<_> = listed.lines().take(LISTED).map(named).collect();
    if processes.is_empty() {
        return "it has groups below it, or processes of another PID namespace".into();
    }
    format!("processes have not ended: {}", processes.join(", "))
}

fn write(path: &Path, text: &str) -> Result<(), (PathBuf, io::Error)> {
    fs::write(path, text).map_err(|error| (path.to_owned(), error))
}

/// Applies `bounds` to the version 2 group at `dir`.
fn restrict_unified(dir: &Path, bounds: &Bounds) -> Result<(), (PathBuf, io::Error)> {
    let has_controller = dir.join(CPUS).exists();
    if !has_controller && *bounds == Bounds::default() {
        return Ok(());
    }
    if let Some(parent) = dir.parent().filter(|_| !has_controller) {
        write(&parent.join("cgroup.subtree_control"), "+cpuset")?;
    }
    let list = |set: &Option<Cpus>| set.as_ref().map_or_else(String::new, Cpus::to_string);
    write(&dir.join(CPUS), &list(&bounds.cpus))?;
    // Most pods never had nodes.
    let had = fs::read_to_string(dir.join(NODES)).is_ok_and(|nodes| !nodes.trim().is_empty());
    if had || bounds.nodes.is_some() { write(&dir.join(NODES), &list(&bounds.nodes)) } else { Ok(()) }
}

/// Applies `bounds` to the version 1 group at `dir`, which is created if necessary.
fn restrict_own(dir: &Path, bounds: &Bounds) -> Result<(), (PathBuf, io::Error)> {
    fs::create_dir_all(dir).map_err(|error| (dir.to_owned(), error))?;
    let parent = dir.parent().unwrap_or(dir);
    for (name, set) in [(NODES, &bounds.nodes), (CPUS, &bounds.cpus)] {
        let all = inherited(parent, name)?;
        if name == NODES && set.is_some() {
            write(&dir.join(MIGRATE), "1")?;
        }
        write(&dir.join(name), &set.as_ref().map_or(all, Cpus::to_string))?;
    }
    Ok(())
}

/// Returns the content of the file `name` of v1's `cpuset` in the group at `dir`. A new group has no content and
/// accepts no process: it gets the content of its parent.
fn inherited(dir: &Path, name: &str) -> Result<String, (PathBuf, io::Error)> {
    let path = dir.join(name);
    // Groups in a test's directory have no such file, which counts as empty.
    let own = match fs::read_to_string(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound || dir.parent().is_none() => {
            return Err((path, error));
        }
        own => own.unwrap_or_default(),
    };
    if !own.trim().is_empty() {
        return Ok(own.trim().to_owned());
    }
    let above = inherited(dir.parent().unwrap_or(dir), name)?;
    fs::write(&path, &above).map_err(|error| (path, error))?;
    Ok(above)
}

#[cfg(test)]
mod tests;
