//! Properties of a pod's paths that must be looked up on the host.

use std::{
    ffi::{OsStr, OsString},
    fs, io,
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
};

use rustix::fs::fstatfs;

use super::{Medium, kubelet::Plugin};
use crate::beneath::{Dir, Found, OnMount, path_of};

/// The most volumes of a pod, and the most plugins that provide them: as many as a pod's spec can name.
const MAX_VOLUMES: usize = 4096;
/// `TMPFS_MAGIC` of `linux/magic.h`.
const TMPFS: u64 = 0x0102_1994;
/// `HUGETLBFS_MAGIC` of `linux/magic.h`.
const HUGETLBFS: u64 = 0x9584_58f6;

/// Returns the medium of the emptyDir at `root`, below the pod's directory; `None` for huge pages.
///
/// kubelet mounts a file system on the directory unless the medium is the default one.
pub fn medium(pod: &Dir, root: &Path) -> io::Result<Option<Medium>> {
    let above = pod.find(root.parent().unwrap_or(root))?;
    let dir = pod.find(root)?;
    if dir.inode().0 == above.inode().0 {
        return Ok(Some(Medium::Disk));
    }
    let stat = fstatfs(&dir)?;
    Ok(match u64::try_from(stat.f_type).unwrap_or_default() {
        TMPFS => {
            let block = u64::try_from(stat.f_bsize).unwrap_or_default();
            Some(Medium::Memory { bytes: stat.f_blocks.saturating_mul(block) })
        }
        HUGETLBFS => None,
        _ => Some(Medium::Disk),
    })
}

/// The source from which kubelet has bound a subPath.
#[derive(Debug, PartialEq, Eq)]
pub enum Origin {
    /// A volume below the pod's directory.
    Volume {
        /// The volume's plugin.
        plugin: Plugin,
        /// The volume's directory, below the pod's.
        root: PathBuf,
        /// The part of the volume. It is arbitrary data.
        sub_path: PathBuf,
    },
    /// A volume of a plugin that mounts elsewhere: a hostPath, or storage of other plugins.
    Elsewhere,
    /// No known source: the pod has an emptyDir or files of this name, and the subPath is from none of them; or nothing
    /// is bound there.
    Unclear,
}

/// Returns the origin of `bound`, a subPath of the volume `name`.
pub fn origin(pod: &Dir, bound: &Found, name: &OsStr) -> io::Result<Origin> {
    let table = Table::read()?;
    let mut candidates = Vec::new();
    for plugin in
        or_none(pod.dir("volumes"))?.map(|dir| dir.names(MAX_VOLUMES)).transpose()?.unwrap_or_default()
    {
        let root = Path::new("volumes").join(&plugin).join(name);
        if let Some(dir) = or_none(pod.dir(&root))? {
            candidates.push((
                Plugin::from_dir_name(&plugin),
                root,
                table.position(dir.mount()?.id, &path_of(&dir)?),
            ));
        }
    }
    let Some(source) = table.bound(&bound.mount()?) else { return Ok(Origin::Unclear) };
    let found = candidates
        .iter()
        .filter_map(|(plugin, root, at)| {
            let at = at.as_ref().filter(|at| at.device == source.device)?;
            let sub_path = source.path.strip_prefix(&at.path).ok()?;
            Some((at.path.components().count(), *plugin, root, sub_path))
        })
        .max_by_key(|found| found.0);
    match found {
        Some((_, plugin, root, sub_path)) => {
            let (root, sub_path) = (root.clone(), sub_path.to_owned());
            // A mount's root is shown with its current name. Only kubelet has written to an emptyDir on the host, so
            // nothing there was renamed.
            let is_there =
                || pod.find(root.join(&sub_path)).is_ok_and(|there| there.inode() == bound.inode());
            match plugin {
                Plugin::EmptyDir if !is_there() => Ok(Origin::Unclear),
                plugin => Ok(Origin::Volume { plugin, root, sub_path }),
            }
        }
        None if candidates.iter().all(|(plugin, ..)| *plugin == Plugin::Other) => Ok(Origin::Elsewhere),
        None => Ok(Origin::Unclear),
    }
}

/// Returns a directory; `None` if there is none of that name.
fn or_none(dir: io::Result<Dir>) -> io::Result<Option<Dir>> {
    match dir {
        Ok(dir) => Ok(Some(dir)),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Returns whether a pod's directory belongs to root and only root can write to it, as kubelet creates it.
pub fn is_of_root(pod: &Dir) -> io::Result<bool> {
    let stat = *pod.find("")?.stat();
    Ok(stat.st_uid == 0 && stat.st_mode & 0o022 == 0)
}

/// Returns whether other mounts are below a directory, or on it.
pub fn has_mounts_below(dir: &Found) -> io::Result<bool> {
    let (path, own) = (path_of(dir)?, dir.mount()?.id);
    let is_other = |mount: &Mount| mount.point.starts_with(&path) && mount.id != own;
    Ok(Table::read()?.0.iter().any(is_other))
}

/// The mounts of this thread's namespace.
struct Table(Vec<Mount>);

/// A line of `/proc/PID/mountinfo`.
struct Mount {
    id: u64,
    device: Vec<u8>,
    root: PathBuf,
    point: PathBuf,
}

/// The place of a file in its file system.
struct Position {
    device: Vec<u8>,
    path: PathBuf,
}

impl Table {
    fn read() -> io::Result<Self> {
        Ok(Self::parse(&fs::read("/proc/thread-self/mountinfo")?))
    }

    fn parse(text: &[u8]) -> Self {
        let lines = text.split(|byte| *byte == b'\n');
        Self(lines.filter_map(Mount::parse).collect())
    }

    /// Returns the position of `path`, which is on the mount `id`.
    fn position(&self, id: u64, path: &Path) -> Option<Position> {
        let mount = self.0.iter().find(|mount| mount.id == id)?;
        let path = mount.root.join(path.strip_prefix(&mount.point).ok()?);
        Some(Position { device: mount.device.clone(), path: path.components().collect() })
    }

    /// Returns the position of a mount's root; `None` if `on` is not one.
    fn bound(&self, on: &OnMount) -> Option<Position> {
        let mount = self.0.iter().find(|mount| on.is_root && mount.id == on.id)?;
        Some(Position { device: mount.device.clone(), path: mount.root.components().collect() })
    }
}

impl Mount {
    fn parse(line: &[u8]) -> Option<Self> {
        let mut fields = line.split(|byte| *byte == b' ');
        let id = str::from_utf8(fields.next()?).ok()?.parse().ok()?;
        let device = fields.nth(1)?.to_owned();
        let (root, point) = (unescaped(fields.next()?), unescaped(fields.next()?));
        Some(Self { id, device, root: root.into(), point: point.into() })
    }
}

/// Undoes the kernel's escapes of spaces, tabs, newlines and backslashes: `\040`.
fn unescaped(field: &[u8]) -> OsString {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        let octal = after.get(..3).filter(|_| *first == b'\\').and_then(|digits| {
            let value = digits.iter().try_fold(0_u32, |value, digit| {
                digit.is_ascii_digit().then(|| value * 8 + u32::from(digit - b'0'))
            });
            value.and_then(|value| u8::try_from(value).ok())
        });
        match octal {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[3..];
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    OsString::from_vec(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_are_in_file_systems_whatever_the_names() {
        let table = Table::parse(
            b"20 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
              21 20 8:2 /kubelet /var/lib/kubelet rw shared:1 - ext4 /dev/sda2 rw\n\
              22 21 8:2 /kubelet/a\\040b\\134040/c /sub\\011path rw - ext4 /dev/sda2 rw\n",
        );
        let at = |id: u64, path: &str| {
            let found = table.position(id, Path::new(path))?;
            assert_eq!(found.device, b"8:2");
            Some(found.path)
        };
        assert_eq!(at(21, "/var/lib/kubelet/pods"), Some("/kubelet/pods".into()));
        assert_eq!(at(22, "/sub\tpath"), Some("/kubelet/a b\\040/c".into()));
        assert_eq!(at(22, "/elsewhere"), None);
        assert_eq!(at(7, "/"), None);
        let bound = |id, is_root| table.bound(&OnMount { id, is_root }).map(|found| found.path);
        assert_eq!(bound(22, true), Some("/kubelet/a b\\040/c".into()));
        assert_eq!((bound(22, false), bound(7, true)), (None, None));
    }
}
