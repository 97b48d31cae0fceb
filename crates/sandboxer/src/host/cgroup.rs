//! A pod's control group on the host: what its VMM takes is counted, and bounded, where the node's manager says.
//!
//! CRI names a parent that the manager made and gave limits to. Below it each pod gets a group of its own in every
//! hierarchy that counts something, v1 and v2 alike. systemd's slices are directories by another name.

use std::{
    fs, io,
    path::{Component, Path, PathBuf},
    time::Duration,
};

use procfs::process::Process;
use sandboxer_protocol::id::SandboxId;

/// Controllers of v1 whose hierarchies are entered. `cpuset` is not: it takes no process before it was given
/// CPUs, which is the manager's business.
const V1_CONTROLLERS: [&str; 6] = ["cpu", "cpuacct", "memory", "pids", "blkio", "freezer"];

/// How often, and how many times, a group is tried to be removed: the kernel lets a group go a moment after its
/// last process.
const RETRY: Duration = Duration::from_millis(10);
const TRIES: u32 = 100;

/// Where control groups are mounted.
#[derive(Debug, Default, Clone)]
pub struct Hierarchies {
    roots: Vec<PathBuf>,
}

/// A pod's control group. It may not exist yet, or any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodCgroup {
    dirs: Vec<PathBuf>,
}

impl Hierarchies {
    /// Those of this host that count something.
    pub fn detect() -> io::Result<Self> {
        let mounts = Process::myself().and_then(|myself| myself.mountinfo()).map_err(io::Error::other)?;
        let mut roots: Vec<PathBuf> = Vec::new();
        for mount in mounts {
            let counts = match mount.fs_type.as_str() {
                "cgroup" => V1_CONTROLLERS.iter().any(|name| mount.super_options.contains_key(*name)),
                // In a hybrid set-up it is there, and controls nothing.
                "cgroup2" => fs::read_to_string(mount.mount_point.join("cgroup.controllers"))
                    .is_ok_and(|controllers| !controllers.trim().is_empty()),
                _ => false,
            };
            if counts && !roots.contains(&mount.mount_point) {
                roots.push(mount.mount_point);
            }
        }
        Ok(Self { roots })
    }

    /// The group of `pod` below `parent`; none when no parent was named.
    pub fn of(&self, parent: &str, pod: &SandboxId) -> Option<PodCgroup> {
        let parent = relative(parent)?;
        let dirs = self.roots.iter().map(|root| root.join(&parent).join(format!("sandboxer-{pod}")));
        Some(PodCgroup { dirs: dirs.collect() })
    }
}

/// `parent` as a path below a hierarchy's root, which it never leaves; none if it names the root itself.
///
/// A slice says in its name below which others it lies (systemd.slice(5)): `a-b.slice` is `a.slice/a-b.slice`.
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

impl PodCgroup {
    /// Makes it.
    pub fn make(&self) -> Result<(), (PathBuf, io::Error)> {
        self.dirs.iter().try_for_each(|dir| fs::create_dir_all(dir).map_err(|error| (dir.clone(), error)))
    }

    /// Moves process `pid` into it, with all its threads. Blocks for as long as the kernel takes to see all its
    /// processors pass by, some ms.
    pub fn enter(&self, pid: u32) -> Result<(), (PathBuf, io::Error)> {
        self.dirs.iter().try_for_each(|dir| {
            let processes = dir.join("cgroup.procs");
            fs::write(&processes, pid.to_string()).map_err(|error| (processes, error))
        })
    }

    /// Whether process `pid` is in it.
    pub fn holds(&self, pid: u32) -> bool {
        let pid = pid.to_string();
        self.dirs.iter().all(|dir| {
            let processes = fs::read_to_string(dir.join("cgroup.procs"));
            processes.is_ok_and(|processes| processes.lines().any(|line| line == pid))
        })
    }

    /// Removes it, once its last process has ended.
    pub async fn remove(&self) -> Result<(), (PathBuf, io::Error)> {
        for dir in &self.dirs {
            let mut tries = TRIES;
            loop {
                match fs::remove_dir(dir) {
                    Err(error) if error.kind() == io::ErrorKind::ResourceBusy && tries > 0 => tries -= 1,
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

#[cfg(test)]
mod tests {
    use super::*;

    fn hierarchies(dir: &Path) -> Hierarchies {
        Hierarchies { roots: vec![dir.join("cpu"), dir.join("memory")] }
    }

    #[test]
    fn parents_are_paths_or_slices_and_never_leave_the_hierarchy() {
        for (parent, path) in [
            ("", None),
            ("/", None),
            ("/kubepods/burstable/pod1", Some("kubepods/burstable/pod1")),
            ("a-b-c.slice", Some("a.slice/a-b.slice/a-b-c.slice")),
            ("/x/a-b.slice", Some("x/a-b.slice")),
            ("../../etc", Some("etc")),
        ] {
            assert_eq!(relative(parent), path.map(PathBuf::from), "{parent:?}");
        }
    }

    #[tokio::test]
    async fn a_group_is_made_entered_and_removed_in_each_hierarchy() {
        let root = tempfile::tempdir().unwrap();
        let group = hierarchies(root.path()).of("/pods", &"p".parse().unwrap()).unwrap();
        group.make().unwrap();
        group.make().unwrap();
        group.enter(42).unwrap();
        for hierarchy in ["cpu", "memory"] {
            let processes = root.path().join(hierarchy).join("pods/sandboxer-p/cgroup.procs");
            assert_eq!(fs::read_to_string(&processes).unwrap(), "42");
            // The kernel's own files don't keep a group from being removed.
            fs::remove_file(processes).unwrap();
        }
        group.remove().await.unwrap();
        group.remove().await.unwrap();
        assert!(root.path().join("cpu/pods").exists(), "the parent is the manager's");
        assert!(!root.path().join("cpu/pods/sandboxer-p").exists());
    }
}
