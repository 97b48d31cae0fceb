//! Disks for emptyDirs: sparse files with an empty ext4 file system.
//!
//! A disk is in the emptyDir's own directory, so kubelet manages it: the pod's data counts for its limits, outlives its
//! VM, and is deleted when the pod is removed from the node.
//!
//! An empty file system of the default size is created once and then copied, which needs no program: a sparse file with
//! about 230 KiB of data.

use std::{
    ffi::OsStr,
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use nix::sys::statfs::{FUSE_SUPER_MAGIC, FsType, NFS_SUPER_MAGIC, SMB_SUPER_MAGIC, fstatfs};
use sandboxer_protocol::id::SandboxId;
use sandboxer_vmm::DiskFile;

use super::{
    VolumeError,
    kubelet::{Own, Place, Plugin},
};
use crate::{
    beneath::Dir,
    helper::Helpers,
    rootfs::{
        self, BuildError,
        ext4::{Disk, Made, Use},
    },
};

/// The disk's name in the emptyDir's directory.
pub const DISK: &str = ".sandboxer.ext4";

/// File systems on which a VMM that reads its disk may hang forever: FUSE, NFS, SMB 1 to 3, Ceph, 9P.
const NOT_LOCAL: [FsType; 7] = [
    FUSE_SUPER_MAGIC,
    NFS_SUPER_MAGIC,
    SMB_SUPER_MAGIC,
    FsType(0xff53_4d42),
    FsType(0xfe53_4d42),
    FsType(0x00c3_6400),
    FsType(0x0102_1997),
];

/// A maker of disks.
#[derive(Debug)]
pub struct Spaces {
    /// The directory with the empty disk that is copied.
    dir: PathBuf,
    /// The size of a disk without a size limit, bytes.
    usual_bytes: u64,
    /// The empty disk. The lock is held while the disk is created, by the first request that needs it.
    empty: tokio::sync::Mutex<Option<Arc<File>>>,
}

impl Spaces {
    /// Creates a maker of disks that keeps the empty disk in `dir`, which exists.
    pub fn new(dir: PathBuf, usual_bytes: u64) -> Self {
        Self { dir, usual_bytes, empty: tokio::sync::Mutex::default() }
    }

    /// Returns the disk of the emptyDir of `pod` at `dir`: the existing one, or a new one of `bytes`.
    pub async fn disk(
        &self,
        helpers: &Helpers,
        pod: &SandboxId,
        dir: &Path,
        bytes: Option<u64>,
    ) -> Result<DiskFile, VolumeError> {
        let bytes = bytes.unwrap_or(self.usual_bytes);
        let empty = if bytes == self.usual_bytes { Some(self.empty().await?) } else { None };
        Ok(helpers.disk(pod, dir, bytes, empty.as_deref()).await?)
    }

    /// Returns the empty disk of the default size.
    async fn empty(&self) -> Result<Arc<File>, VolumeError> {
        let mut empty = self.empty.lock().await;
        if let Some(empty) = &*empty {
            return Ok(empty.clone());
        }
        let (dir, bytes) = (self.dir.clone(), self.usual_bytes);
        let made = rootfs::blocking(move || {
            let failed = |source| BuildError::Path { action: "open", path: dir.clone(), source };
            let (dir, name) = (Dir::host(&dir).map_err(failed)?, format!("empty-{bytes}.ext4"));
            let disk = Disk { dir: &dir, name: name.as_ref(), mark: None };
            disk.ensure(&Made::New { bytes, purpose: Use::Kept })
        });
        Ok(empty.insert(Arc::new(made.await?)).clone())
    }
}

/// Opens the disk of an emptyDir, `own`; creates it unless it exists, as a copy of `empty` or a new one of `bytes`.
/// Blocks as long as the directory's file system does, so only helpers call it.
pub fn make_disk(own: &Own<'_>, bytes: u64, empty: Option<&File>) -> Result<File, VolumeError> {
    let path = own.pod.join(own.path());
    let host = |source: io::Error| BuildError::Path { action: "open", path: path.clone(), source };
    if !matches!(own.place(), Place::Volume { plugin: Plugin::EmptyDir, .. }) {
        let source = io::Error::new(io::ErrorKind::InvalidInput, "it is no emptyDir of the pod");
        return Err(host(source).into());
    }
    let dir = own.open().map_err(&host)?;
    let found = fstatfs(&dir).map_err(|errno| host(errno.into()))?;
    if NOT_LOCAL.contains(&found.filesystem_type()) {
        return Err(VolumeError::NotLocal { dir: path });
    }
    // A disk that came here from another volume is refused.
    let mark = [own.pod.file_name(), own.below.last().copied()].map(|name| name.unwrap_or(OsStr::new("")));
    let mark = mark.map(OsStr::as_encoded_bytes).join(&b'/');
    let disk = Disk { dir: &dir, name: DISK.as_ref(), mark: Some(&mark) };
    let made = match empty {
        Some(empty) => Made::Copied(empty),
        None => Made::New { bytes, purpose: Use::Kept },
    };
    Ok(disk.ensure(&made)?)
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{FileExt, MetadataExt, symlink},
        time::Duration,
    };

    use super::*;

    const SIZE: u64 = 256 << 20;

    /// A function that creates a file at a path.
    type Put<'a> = &'a dyn Fn(&Path);

    /// A pod's emptyDirs at a kubelet, and the daemon's own directory.
    struct Node {
        root: tempfile::TempDir,
        spaces: Spaces,
        helpers: Helpers,
    }

    impl Node {
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            let store = root.path().join("store");
            fs::create_dir(&store).unwrap();
            let helpers = Helpers::new(None, Duration::from_secs(60)).with_kubelet_root(root.path());
            Self { spaces: Spaces::new(store, SIZE), helpers, root }
        }

        fn dir(&self, uid: &str, name: &str) -> PathBuf {
            let dir =
                self.root.path().join("pods").join(uid).join("volumes/kubernetes.io~empty-dir").join(name);
            fs::create_dir_all(&dir).unwrap();
            dir
        }

        async fn disk(&self, dir: &Path, bytes: Option<u64>) -> Result<DiskFile, VolumeError> {
            let pod = "pod".parse().unwrap();
            self.spaces.disk(&self.helpers.on_behalf_of("u"), &pod, dir, bytes).await
        }
    }

    #[tokio::test]
    async fn a_disk_is_made_once_and_kept() {
        let node = Node::new();
        let (one, other) = (node.dir("u", "one"), node.dir("u", "other"));
        let disk = node.disk(&one, None).await.unwrap();
        let path = one.join(DISK);
        assert_eq!(disk.name(), path);
        let meta = fs::metadata(&path).unwrap();
        assert_eq!((meta.len(), meta.mode() & 0o777, disk.bytes().unwrap()), (SIZE, 0o600, SIZE));
        assert!(meta.blocks() * 512 < SIZE / 8, "{} blocks of 512 bytes are no holes", meta.blocks());
        let empty = fs::read(node.root.path().join("store").join(format!("empty-{SIZE}.ext4"))).unwrap();
        assert!(fs::read(&path).unwrap() == empty, "a copy is the same");

        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(b"of the pod", SIZE - 10).unwrap();
        let again = node.disk(&one, Some(2 * SIZE)).await.unwrap();
        assert_eq!(again.bytes().unwrap(), SIZE, "it stays as it was made");
        assert_eq!(again.inode().unwrap(), (meta.dev(), meta.ino()));

        node.disk(&other, Some(SIZE / 2)).await.unwrap();
        assert_eq!(fs::metadata(other.join(DISK)).unwrap().len(), SIZE / 2);
        let left: Vec<_> = fs::read_dir(&other).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, [DISK]);
        assert!(node.disk(&node.dir("another", "v"), None).await.is_err(), "another pod's");
    }

    #[tokio::test]
    async fn what_is_no_disk_of_the_volume_is_refused_by_name_and_untouched() {
        let node = Node::new();
        let victim = node.root.path().join("victim");
        node.disk(&node.dir("u", "good"), Some(SIZE)).await.unwrap();
        fs::copy(node.dir("u", "good").join(DISK), &victim).unwrap();
        let before = fs::metadata(&victim).unwrap();
        let text = |name: &str, path: &Path| fs::write(path, name).unwrap();
        let cases: [(&str, Put<'_>); 6] = [
            ("text", &|path| text("text", path)),
            ("link", &|path| symlink(&victim, path).unwrap()),
            ("hard-link", &|path| fs::hard_link(&victim, path).unwrap()),
            ("moved", &|path| fs::rename(node.dir("u", "good").join(DISK), path).unwrap()),
            ("pipe", &|path| nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).unwrap()),
            ("owned", &|path| {
                fs::copy(&victim, path).unwrap();
                std::os::unix::fs::chown(path, Some(1000), Some(1000)).unwrap();
            }),
        ];
        for (name, put) in cases {
            let dir = node.dir("u", name);
            put(&dir.join(DISK));
            // With a size of its own and with the default size, whose disk is a copy.
            for bytes in [Some(SIZE / 2), None] {
                let error = node.disk(&dir, bytes).await.unwrap_err().to_string();
                assert!(error.contains(DISK), "{name}: {error}");
            }
        }
        // The directory itself is a link.
        let (real, link) = (node.dir("u", "real"), node.dir("u", "real").with_file_name("leads"));
        symlink(&real, &link).unwrap();
        node.disk(&link, None).await.unwrap_err();
        let after = fs::metadata(&victim).unwrap();
        assert_eq!((after.len(), after.mtime_nsec()), (before.len(), before.mtime_nsec()));
    }
}
