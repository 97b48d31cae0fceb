//! A container's control group (v2), read and written as files.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use sandboxer_protocol::id::ContainerId;
use tokio::time::{Instant, interval};

const ROOT: &str = "/sys/fs/cgroup";
/// The group that contains one group per container.
const PARENT: &str = "sandboxer";

/// Returns the path of a container's group relative to the mount, as in the runtime spec.
pub fn spec_path(id: &ContainerId) -> PathBuf {
    Path::new("/").join(PARENT).join(id)
}

/// Returns the path below the group of container `id` in the text of a process's `/proc/PID/cgroup`; `None` if the
/// process is in that group itself, or not below it.
pub fn below(id: &ContainerId, text: &str) -> Option<String> {
    let path = Path::new(text.lines().find_map(|line| line.strip_prefix("0::"))?);
    let below = path.strip_prefix(spec_path(id)).ok()?.to_str()?;
    (!below.is_empty()).then(|| below.to_owned())
}

/// Enables every controller for the containers' groups.
pub fn prepare() -> Result<(), (PathBuf, io::Error)> {
    let named = |path: &Path| {
        let path = path.to_owned();
        move |error| (path, error)
    };
    let root = Path::new(ROOT);
    let available = root.join("cgroup.controllers");
    let controllers = fs::read_to_string(&available).map_err(named(&available))?;
    let all: Vec<String> = controllers.split_ascii_whitespace().map(|name| format!("+{name}")).collect();
    let parent = root.join(PARENT);
    fs::create_dir_all(&parent).map_err(named(&parent))?;
    for group in [root, &parent] {
        let control = group.join("cgroup.subtree_control");
        fs::write(&control, all.join(" ")).map_err(named(&control))?;
    }
    Ok(())
}

/// A container's control group, or the group of all containers.
#[derive(Debug, Clone)]
pub struct Cgroup {
    path: PathBuf,
}

impl Cgroup {
    /// Returns the group of container `id`; it may not exist.
    pub fn of_container(id: &ContainerId) -> Self {
        Self { path: Path::new(ROOT).join(PARENT).join(id) }
    }

    /// Creates the group, with the controllers that [`prepare`] enabled. An existing group is no error.
    pub fn create(&self) -> io::Result<()> {
        fs::create_dir_all(&self.path)
    }

    /// Returns the group that contains all containers.
    pub fn of_all() -> Self {
        Self { path: Path::new(ROOT).join(PARENT) }
    }

    /// Returns the group of the whole guest. It has fewer files than other groups.
    pub fn of_guest() -> Self {
        Self { path: PathBuf::from(ROOT) }
    }

    /// Returns any directory with the files of a group.
    #[cfg(test)]
    pub fn at(path: PathBuf) -> Self {
        Self { path }
    }

    /// Returns the path of one of the group's files.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Reads one of the group's files.
    pub fn read(&self, name: &str) -> io::Result<String> {
        fs::read_to_string(self.file(name))
    }

    /// Returns the value of `key` in a flat keyed file, such as `memory.events`.
    pub fn keyed(&self, name: &str, key: &str) -> Option<u64> {
        keyed(&self.read(name).ok()?, key)
    }

    /// Kills every process in the group, including those that are forked in the meantime.
    pub fn kill(&self) -> io::Result<()> {
        match fs::write(self.file("cgroup.kill"), "1") {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done,
        }
    }

    /// Freezes or thaws every process in the group; returns when the kernel has done so.
    pub async fn freeze(&self, frozen: bool, deadline: Duration) -> io::Result<bool> {
        fs::write(self.file("cgroup.freeze"), if frozen { "1" } else { "0" })?;
        self.wait_for("frozen", u64::from(frozen), deadline).await
    }

    /// Returns whether the group or one below it contains a process. A removed group is empty.
    pub fn is_populated(&self) -> bool {
        self.keyed("cgroup.events", "populated") == Some(1)
    }

    /// Returns whether the group has enabled controllers for groups below it: then no process can enter it.
    pub fn is_divided(&self) -> bool {
        self.read("cgroup.subtree_control").is_ok_and(|controllers| !controllers.trim().is_empty())
    }

    /// Returns whether the group is frozen.
    pub fn is_frozen(&self) -> bool {
        self.keyed("cgroup.events", "frozen") == Some(1)
    }

    /// Waits until the group has no process.
    pub async fn wait_empty(&self, deadline: Duration) -> bool {
        !self.path.exists() || self.wait_for("populated", 0, deadline).await.unwrap_or(true)
    }

    /// Waits until `key` of `cgroup.events` is `value`; returns `false` if `deadline` passes first.
    async fn wait_for(&self, key: &str, value: u64, deadline: Duration) -> io::Result<bool> {
        let until = Instant::now() + deadline;
        // The state changes within a few scheduler ticks, so a watch would cost more than it saves.
        let mut ticks = interval(Duration::from_millis(1));
        loop {
            if keyed(&self.read("cgroup.events")?, key) == Some(value) {
                return Ok(true);
            }
            if Instant::now() >= until {
                return Ok(false);
            }
            ticks.tick().await;
        }
    }

    /// Returns the PIDs of all processes in the group and the groups below it.
    pub fn pids(&self) -> io::Result<Vec<u32>> {
        let mut pids = Vec::new();
        let mut groups = vec![self.path.clone()];
        while let Some(group) = groups.pop() {
            let content = fs::read_to_string(group.join("cgroup.procs"))?;
            pids.extend(content.lines().filter_map(|line| line.parse::<u32>().ok()));
            groups.extend(subgroups(&group));
        }
        Ok(pids)
    }

    /// Returns the number of processes that the OOM killer has killed in the group.
    pub fn oom_kills(&self) -> u64 {
        self.keyed("memory.events", "oom_kill").unwrap_or(0)
    }

    /// Removes the group and the groups that the container created below it. A missing group is no error.
    pub fn remove(&self) -> io::Result<()> {
        let mut groups = vec![self.path.clone()];
        let mut next = 0;
        while let Some(group) = groups.get(next) {
            let below = subgroups(group);
            groups.extend(below);
            next += 1;
        }
        for group in groups.iter().rev() {
            match fs::remove_dir(group) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}

fn subgroups(group: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(group) else {
        return Vec::new();
    };
    entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}

/// Returns the number after `key` in lines of `key value`.
pub fn keyed(content: &str, key: &str) -> Option<u64> {
    content.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processs_group_is_found_below_its_containers() {
        let below = |text: &str| below(&"web".parse().unwrap(), text);
        assert_eq!(below("0::/sandboxer/web/init.scope\n").as_deref(), Some("init.scope"));
        assert_eq!(below("1:name=x:/sandboxer/web/x\n0::/sandboxer/web/a/b\n").as_deref(), Some("a/b"));
        for elsewhere in ["0::/sandboxer/web\n", "0::/sandboxer/web2/a\n", "0::/\n", ""] {
            assert_eq!(below(elsewhere), None, "{elsewhere:?}");
        }
    }

    #[test]
    fn a_key_is_not_mistaken_for_one_that_begins_alike() {
        let events = "low 0\nhigh 1\nmax 2\noom 3\noom_kill 4\noom_group_kill 5\n";
        assert_eq!(keyed(events, "oom"), Some(3));
        assert_eq!(keyed(events, "oom_kill"), Some(4));
        assert_eq!(keyed(events, "nothing"), None);
    }
}
