//! The state of a node that a package may leave a trace in: files, accounts, packages, mounts, control groups, interfaces, processes.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result};

use crate::node::run;

/// Directories that others write, and which are looked through for our name alone.
const OTHERS: [&str; 13] = [
    "/var/lib/containerd",
    "/run/containerd",
    "/var/lib/cni",
    "/run/systemd",
    "/run/netns",
    "/var/lib/systemd",
    "/var/lib/dpkg",
    "/var/lib/apt",
    "/var/cache",
    "/var/log",
    "/etc/mtab",
    "/etc/ld.so.cache",
    "/run/lock",
];
/// What is no part of the node's own root: the kernel's file systems, and what the test brought.
const SKIPPED: [&str; 6] = ["/proc", "/sys", "/dev", "/tmp", "/node", "/payload"];
/// containerd's bridge stays after the first pod.
const BRIDGE: &str = "cni0";

/// Everything, one entry per line.
pub struct Trace(BTreeSet<String>);

impl Trace {
    /// Looks at the node.
    pub fn take() -> Result<Self> {
        let mut entries = BTreeSet::new();
        files(Path::new("/"), &clone()?, &mut entries)?;
        entries.extend(run("dpkg-query", &["-W"])?.lines().map(|line| format!("package {line}")));
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        entries
            .extend(mounts.lines().filter_map(|line| line.split(' ').nth(4)).map(|at| format!("mount {at}")));
        for entry in fs::read_dir("/sys/class/net")?.flatten() {
            entries.insert(format!("interface {}", entry.file_name().display()));
        }
        entries.remove(&format!("interface {BRIDGE}"));
        groups(Path::new("/sys/fs/cgroup"), &mut entries)?;
        processes(&mut entries)?;
        Ok(Self(entries))
    }

    /// Returns what is not as before: `+` for what is new or changed, `-` for what is gone or was different.
    pub fn beyond(&self, before: &Self) -> Vec<String> {
        let more = self.0.difference(&before.0).map(|entry| format!("+ {entry}"));
        let less = before.0.difference(&self.0).map(|entry| format!("- {entry}"));
        more.chain(less).collect()
    }
}

/// The clone has our name everywhere.
fn clone() -> Result<String> {
    fs::read_to_string("/node/ctl/root").context("where the clone is")
}

fn is_below(path: &Path, dirs: &[&str]) -> bool {
    dirs.iter().any(|dir| path.starts_with(dir))
}

fn files(dir: &Path, clone: &str, entries: &mut BTreeSet<String>) -> Result<()> {
    let Ok(listed) = fs::read_dir(dir) else { return Ok(()) };
    for entry in listed.flatten() {
        let path = entry.path();
        if is_below(&path, &SKIPPED) || path.starts_with(clone) {
            continue;
        }
        let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
        let is_ours = path.to_string_lossy().contains("sandboxer");
        if is_ours || !is_below(&path, &OTHERS) {
            entries.insert(described(&path, &metadata));
        }
        if metadata.is_dir() {
            files(&path, clone, entries)?;
        }
    }
    Ok(())
}

/// Below /etc with its content: accounts are there, and links of units.
fn described(path: &Path, metadata: &fs::Metadata) -> String {
    let content = match path.starts_with("/etc") && metadata.is_file() {
        true => fs::read_to_string(path).unwrap_or_default(),
        false => fs::read_link(path).map(|to| to.display().to_string()).unwrap_or_default(),
    };
    let size = if metadata.is_file() { metadata.len() } else { 0 };
    let (mode, uid, gid) = (metadata.mode(), metadata.uid(), metadata.gid());
    format!("file {} {mode:o} {uid}:{gid} {size} {content:?}", path.display())
}

fn groups(dir: &Path, entries: &mut BTreeSet<String>) -> Result<()> {
    for entry in fs::read_dir(dir)?.flatten() {
        let Ok(kind) = entry.file_type() else { continue };
        if kind.is_dir() {
            if entry.path().to_string_lossy().contains("sandboxer") {
                entries.insert(format!("control group {}", entry.path().display()));
            }
            groups(&entry.path(), entries)?;
        }
    }
    Ok(())
}

/// Programs of ours, and VMMs, which the daemon marks.
fn processes(entries: &mut BTreeSet<String>) -> Result<()> {
    for entry in fs::read_dir("/proc")?.flatten() {
        let name = entry.file_name().display().to_string();
        if !name.bytes().all(|byte| byte.is_ascii_digit()) || name == std::process::id().to_string() {
            continue;
        }
        let program = fs::read_link(entry.path().join("exe")).unwrap_or_default().display().to_string();
        let marked = fs::read(entry.path().join("environ")).unwrap_or_default();
        let is_marked = marked.split(|&byte| byte == 0).any(|word| word.starts_with(b"SANDBOXER_RUN_DIR="));
        if is_marked || program.contains("/sandboxer") || program.contains("-sandboxer-") {
            entries.insert(format!("process {name} {program}"));
        }
    }
    Ok(())
}
