//! Processes in the same control group as another process.

use std::{fs, io, path::PathBuf, sync::OnceLock};

use procfs::process::Process;

use super::PROCESSES;

/// A mounted hierarchy: the first of version 2, or else one of version 1 with this controller.
struct Hierarchy {
    root: PathBuf,
    controller: Option<&'static str>,
}

/// Returns the processes in the control group of process `pid`.
pub fn beside(pid: u32) -> io::Result<Vec<u32>> {
    let hierarchy = hierarchy()?;
    let groups = Process::new(pid.cast_signed()).and_then(|process| process.cgroups());
    let group = groups.map_err(io::Error::other)?.into_iter().find(|group| match hierarchy.controller {
        None => group.hierarchy == 0,
        Some(controller) => group.controllers.iter().any(|named| named == controller),
    });
    let group = group.ok_or_else(|| missing("the process is in no control group of that hierarchy"))?;
    let listed = hierarchy.root.join(group.pathname.trim_start_matches('/')).join(PROCESSES);
    Ok(fs::read_to_string(listed)?.lines().filter_map(|line| line.parse().ok()).collect())
}

/// Returns the hierarchy, which is searched for only once: a node may have thousands of mounts.
fn hierarchy() -> io::Result<&'static Hierarchy> {
    static FOUND: OnceLock<Option<Hierarchy>> = OnceLock::new();
    let found = match FOUND.get() {
        Some(found) => found,
        None => {
            let looked = look()?;
            FOUND.get_or_init(|| looked)
        }
    };
    found.as_ref().ok_or_else(|| missing("no hierarchy of control groups is mounted"))
}

fn look() -> io::Result<Option<Hierarchy>> {
    const CONTROLLER: &str = "cpu";
    let mounts = Process::myself().and_then(|myself| myself.mountinfo()).map_err(io::Error::other)?;
    let mut of_version_1 = None;
    for mount in mounts {
        match &*mount.fs_type {
            "cgroup2" => return Ok(Some(Hierarchy { root: mount.mount_point, controller: None })),
            "cgroup" if mount.super_options.contains_key(CONTROLLER) => {
                of_version_1 = Some(Hierarchy { root: mount.mount_point, controller: Some(CONTROLLER) });
            }
            _ => {}
        }
    }
    Ok(of_version_1)
}

fn missing(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_in_its_own_group() {
        let own = std::process::id();
        assert!(beside(own).unwrap().contains(&own));
        assert!(beside(u32::MAX).is_err());
    }
}
