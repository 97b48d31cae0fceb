//! Disk space for images of root file systems and for pods' logs.

use std::path::{Path, PathBuf};

use nix::sys::statvfs::{FsFlags, statvfs};
use sandboxer_config::Config;

use super::{
    host::Host,
    verdict::{Check, Fix, Subject},
};

/// Number of logs per pod: the guest's console and the VMM's output, each with its older half.
const LOGS: u64 = 4;
/// Minimum space for images, MiB; with less, large ones fail.
const MIN_MIB: u64 = 512;

const DISK: Subject = Subject {
    name: "disk",
    why: "images of root file systems are kept in state_dir, logs of pods in run_dir",
};

/// A directory and the free space of its file system.
#[derive(Debug, Clone)]
pub struct Space {
    /// The directory.
    pub dir: PathBuf,
    /// Free space, MiB; `None` if unknown.
    pub free_mib: Option<u64>,
    /// Whether the file system is mounted read-only, perhaps by the kernel after an error.
    pub read_only: bool,
}

/// Reads the free space at a directory, or at its nearest existing parent.
pub fn read(host: &Host, dir: &Path) -> Space {
    let found = dir.ancestors().map(|dir| host.path(dir)).find(|dir| dir.exists());
    let free = found.and_then(|dir| statvfs(&dir).ok());
    let read_only = free.is_some_and(|free| free.flags().contains(FsFlags::ST_RDONLY));
    let free_mib = free.map(|free| (free.blocks_available() * free.fragment_size()) >> 20);
    Space { dir: dir.to_owned(), free_mib, read_only }
}

/// Checks the space for images and templates in `state`, and for logs of `pods` in `run`.
pub fn judge(state: &Space, run: &Space, config: &Config, pods: u32) -> Check {
    let templates = if config.templates.enabled { config.templates.most_bytes } else { 0 };
    let caches_mib = config.rootfs.cache_bytes.saturating_add(templates) >> 20;
    let logs_mib = (config.vm.console_log_bytes.saturating_mul(LOGS * u64::from(pods))) >> 20;
    if let Some(space) = [state, run].into_iter().find(|space| space.read_only) {
        return DISK.failure(
            format!("{} is on a file system that is read-only", space.dir.display()),
            Fix::words(
                "see `dmesg` for errors of the disk; pods run on, but none starts and nothing is recorded",
            ),
        );
    }
    let (Some(images), Some(logs)) = (state.free_mib, run.free_mib) else {
        return DISK.warning("free space is unknown", Fix::words("see `df`"));
    };
    let seen = format!("{images} MiB free in {}, {logs} MiB in {}", state.dir.display(), run.dir.display());
    let fix =
        || Fix::words("free disk space, or change state_dir, run_dir, rootfs.cache_mib or templates.max_mib");
    if images < MIN_MIB {
        return DISK.failure(seen, fix());
    }
    if images < caches_mib {
        return DISK.warning(format!("{seen}; images and templates may take {caches_mib} MiB"), fix());
    }
    if logs < logs_mib {
        return DISK.warning(format!("{seen}; logs of {pods} pods may take {logs_mib} MiB"), fix());
    }
    DISK.ok(seen)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Verdict;

    #[test]
    fn images_and_logs_must_find_place() {
        // 10 GiB of images, 2 GiB of templates, 4 MiB of logs per pod.
        let config = Config::default();
        for (images, logs, pods, verdict) in [
            (Some(20_000), Some(100), 10, Verdict::Ok),
            (Some(20_000), Some(100), 100, Verdict::Warning),
            (Some(12_287), Some(100), 10, Verdict::Warning),
            (Some(100), Some(100), 10, Verdict::Failure),
            (None, Some(100), 10, Verdict::Warning),
        ] {
            let space = |dir: &str, free_mib| Space { dir: dir.into(), free_mib, read_only: false };
            let check = judge(&space("/state", images), &space("/run", logs), &config, pods);
            assert_eq!(check.verdict, verdict, "{check}");
        }
    }

    #[test]
    fn a_disk_that_is_read_only_is_told() {
        let space = |read_only| Space { dir: "/state".into(), free_mib: Some(20_000), read_only };
        let check = judge(&space(true), &space(false), &Config::default(), 1);
        assert_eq!(check.verdict, Verdict::Failure);
        assert!(check.to_string().contains("/state is on a file system that is read-only"), "{check}");
    }

    #[test]
    fn a_directory_that_is_not_made_yet_is_looked_at_from_above() {
        let root = tempfile::tempdir().unwrap();
        let space = read(&Host::below(root.path()), "/var/lib/sandboxer".as_ref());
        assert!(space.free_mib.is_some(), "{space:?}");
        assert_eq!(space.dir, Path::new("/var/lib/sandboxer"));
    }
}
