//! Properties of a path that must be looked up on the host.

use std::{
    fs, io,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
};

use nix::sys::statfs::{HUGETLBFS_MAGIC, TMPFS_MAGIC, statfs};
use procfs::process::{MountInfo, Process};

use super::{
    Medium,
    kubelet::{self, InVolume, Place},
};

/// The type of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A block or character device.
    Device,
    /// A socket or a pipe.
    Other,
}

/// Returns the type of `path`, following symlinks.
pub fn look(path: &Path) -> io::Result<Found> {
    let kind = fs::metadata(path)?.file_type();
    Ok(if kind.is_file() {
        Found::File
    } else if kind.is_dir() {
        Found::Directory
    } else if kind.is_block_device() || kind.is_char_device() {
        Found::Device
    } else {
        Found::Other
    })
}

/// Returns the medium of the emptyDir at `root`; `None` for huge pages.
///
/// kubelet mounts a file system of its own on it unless the medium is the default one.
pub fn medium(root: &Path) -> io::Result<Option<Medium>> {
    let above = root.parent().unwrap_or(root);
    if fs::metadata(root)?.dev() == fs::metadata(above)?.dev() {
        return Ok(Some(Medium::Disk));
    }
    let stat = statfs(root)?;
    Ok(match stat.filesystem_type() {
        TMPFS_MAGIC => {
            let block = u64::try_from(stat.block_size()).unwrap_or_default();
            Some(Medium::Memory { bytes: stat.blocks().saturating_mul(block) })
        }
        HUGETLBFS_MAGIC => None,
        _ => Some(Medium::Disk),
    })
}

/// Returns the part of a volume that kubelet has bind-mounted at `source`; `None` if it is unknown, as for
/// volumes that are not in `volumes`.
pub fn origin(source: &Path, volumes: &Path, name: &str) -> io::Result<Option<InVolume>> {
    let table = Process::myself().and_then(|myself| myself.mountinfo()).map_err(io::Error::other)?;
    let mut candidates = Vec::new();
    for plugin in fs::read_dir(volumes)? {
        let root = plugin?.path().join(name);
        if root.is_dir() {
            candidates.push(root);
        }
    }
    Ok(origin_in(&table.0, source, &candidates))
}

fn origin_in(table: &[MountInfo], source: &Path, candidates: &[PathBuf]) -> Option<InVolume> {
    let (bound, rest) = position(table, source)?;
    if !rest.as_os_str().is_empty() {
        // Not a mount point.
        return None;
    }
    candidates.iter().find_map(|root| {
        let (mount, below) = position(table, root)?;
        let inside = Path::new(&mount.root).join(below);
        let sub_path = Path::new(&bound.root).strip_prefix(inside).ok()?;
        match kubelet::place(&root.join(sub_path)) {
            Some(Place::Volume(place)) if mount.majmin == bound.majmin => Some(place),
            _ => None,
        }
    })
}

/// Returns the mount that `path` is on, and its path in that mount. Of several mounts on one mount point the
/// last is on top.
fn position<'a>(table: &'a [MountInfo], path: &Path) -> Option<(&'a MountInfo, PathBuf)> {
    let on = table
        .iter()
        .filter(|mount| path.starts_with(&mount.mount_point))
        .max_by_key(|mount| mount.mount_point.components().count())?;
    let rest = path.strip_prefix(&on.mount_point).ok()?;
    Some((on, rest.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume::kubelet::Plugin;

    fn table(lines: &str) -> Vec<MountInfo> {
        use procfs::FromBufRead;
        procfs::process::MountInfos::from_buf_read(lines.as_bytes()).unwrap().0
    }

    const POD: &str = "/var/lib/kubelet/pods/u";

    #[test]
    fn a_sub_path_is_found_in_its_volume_on_disk_and_in_memory() {
        let table = table(
            "20 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
             21 20 8:2 /kubelet /var/lib/kubelet rw shared:1 - ext4 /dev/sda2 rw\n\
             22 21 0:40 / /var/lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/mem rw - tmpfs tmpfs rw\n\
             23 21 8:2 /kubelet/pods/u/volumes/kubernetes.io~empty-dir/disk/a/b \
                /var/lib/kubelet/pods/u/volume-subpaths/disk/web/0 rw - ext4 /dev/sda2 rw\n\
             24 21 0:40 /c /var/lib/kubelet/pods/u/volume-subpaths/mem/web/1 rw - tmpfs tmpfs rw\n\
             25 21 8:1 /srv /var/lib/kubelet/pods/u/volume-subpaths/host/web/2 rw - ext4 /dev/sda1 rw\n",
        );
        let origin = |bound: &str, volume: &str| {
            let candidate = format!("{POD}/volumes/kubernetes.io~empty-dir/{volume}");
            let source = format!("{POD}/volume-subpaths/{bound}");
            origin_in(&table, Path::new(&source), &[PathBuf::from(candidate)])
        };
        let found = origin("disk/web/0", "disk").unwrap();
        assert_eq!((found.plugin, found.sub_path), (Plugin::EmptyDir, "a/b".into()));
        assert_eq!(origin("mem/web/1", "mem").unwrap().sub_path, Path::new("c"));
        assert_eq!(origin("host/web/2", "host"), None, "from elsewhere");
        assert_eq!(origin("mem/web/9", "mem"), None, "nothing is bound there");
        assert_eq!(origin("disk/web/0", "mem"), None, "another volume");
    }
}
