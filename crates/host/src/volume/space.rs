//! Disks for emptyDirs: sparse files with an empty ext4 file system.
//!
//! A disk is in the emptyDir's own directory, so kubelet manages it: what the pod writes counts for its
//! limits, outlives the pod's VM, and is deleted when the pod is removed from the node.
//!
//! An empty file system of the default size is created once and then copied, which needs no program: some 230
//! KiB of data in a sparse file.

use std::{
    io,
    path::{Path, PathBuf},
};

use nix::sys::statfs::{FUSE_SUPER_MAGIC, FsType, NFS_SUPER_MAGIC, SMB_SUPER_MAGIC, statfs};
use sandboxer_protocol::id::SandboxId;

use super::VolumeError;
use crate::{
    helper::{Helpers, Request},
    rootfs::{
        self, BuildError,
        ext4::{self, Use},
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

/// Creates disks.
#[derive(Debug)]
pub struct Spaces {
    /// Contains the empty disk that is copied.
    dir: PathBuf,
    /// Size of a disk without a size limit.
    usual_bytes: u64,
    // Held while the empty disk is created, by the first request that needs it.
    making: tokio::sync::Mutex<()>,
}

impl Spaces {
    /// Creates a maker of disks that keeps the empty disk in `dir`, which exists.
    pub fn new(dir: PathBuf, usual_bytes: u64) -> Self {
        Self { dir, usual_bytes, making: tokio::sync::Mutex::default() }
    }

    /// Returns the disk of the emptyDir of `pod` at `dir`: the existing one, or a new one of `bytes`.
    pub async fn disk(
        &self,
        helpers: &Helpers,
        pod: &SandboxId,
        dir: &Path,
        bytes: Option<u64>,
    ) -> Result<PathBuf, VolumeError> {
        let bytes = bytes.unwrap_or(self.usual_bytes);
        let empty = if bytes == self.usual_bytes { Some(self.empty().await?) } else { None };
        let request = Request::Disk { dir: dir.to_owned(), bytes, empty };
        let ((), _) = helpers.ask(pod, request).await?;
        Ok(dir.join(DISK))
    }

    /// Returns the empty disk of the default size.
    async fn empty(&self) -> Result<PathBuf, VolumeError> {
        let _one_at_a_time = self.making.lock().await;
        let (path, bytes) = (self.dir.join(format!("empty-{}.ext4", self.usual_bytes)), self.usual_bytes);
        Ok(rootfs::blocking(move || ext4::ensure(&path, bytes, Use::Kept).map(|()| path)).await?)
    }
}

/// Creates the disk of the emptyDir at `dir` unless it exists: a copy of `empty`, or a new one of `bytes`.
/// Blocks as long as the directory's file system does: for helpers.
pub fn make_disk(dir: &Path, bytes: u64, empty: Option<&Path>) -> Result<(), VolumeError> {
    let host = |source: io::Error| BuildError::Path { action: "stat", path: dir.to_owned(), source };
    let found = statfs(dir).map_err(|errno| host(errno.into()))?;
    if NOT_LOCAL.contains(&found.filesystem_type()) {
        return Err(VolumeError::NotLocal { dir: dir.to_owned() });
    }
    let disk = dir.join(DISK);
    match empty {
        Some(empty) if !disk.symlink_metadata().is_ok_and(|there| there.is_file()) => {
            ext4::copy(empty, &disk)?
        }
        _ => ext4::ensure(&disk, bytes, Use::Kept)?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File},
        os::unix::fs::{FileExt, MetadataExt},
        time::Duration,
    };

    use super::*;

    const SIZE: u64 = 256 << 20;

    #[tokio::test]
    async fn a_disk_is_made_once_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let [store, one, other] = ["store", "one", "other"].map(|name| dir.path().join(name));
        for dir in [&store, &one, &other] {
            fs::create_dir(dir).unwrap();
        }
        let spaces = Spaces::new(store.clone(), SIZE);
        let (helpers, pod) = (Helpers::new(None, Duration::from_secs(60)), "pod".parse().unwrap());
        let disk = spaces.disk(&helpers, &pod, &one, None).await.unwrap();
        let meta = fs::metadata(&disk).unwrap();
        assert_eq!((meta.len(), meta.mode() & 0o777), (SIZE, 0o600));
        assert!(meta.blocks() * 512 < SIZE / 8, "{} blocks of 512 bytes are no holes", meta.blocks());
        let empty = fs::read(store.join(format!("empty-{SIZE}.ext4"))).unwrap();
        assert!(fs::read(&disk).unwrap() == empty, "a copy is the same");

        let file = File::options().write(true).open(&disk).unwrap();
        file.write_all_at(b"of the pod", SIZE - 10).unwrap();
        assert_eq!(spaces.disk(&helpers, &pod, &one, Some(2 * SIZE)).await.unwrap(), disk);
        assert_eq!(fs::metadata(&disk).unwrap().len(), SIZE, "it stays as it was made");

        let disk = spaces.disk(&helpers, &pod, &other, Some(SIZE / 2)).await.unwrap();
        assert_eq!(fs::metadata(&disk).unwrap().len(), SIZE / 2);
        let left: Vec<_> = fs::read_dir(&other).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, [DISK]);
    }

    #[tokio::test]
    async fn what_is_no_disk_is_refused_and_a_link_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let spaces = Spaces::new(dir.path().to_owned(), SIZE);
        let (helpers, pod) = (Helpers::new(None, Duration::from_secs(60)), "pod".parse().unwrap());
        fs::write(dir.path().join(DISK), "text").unwrap();
        let error = spaces.disk(&helpers, &pod, dir.path(), None).await.unwrap_err();
        assert!(error.to_string().contains(DISK), "{error}");

        fs::remove_file(dir.path().join(DISK)).unwrap();
        let elsewhere = dir.path().join("elsewhere");
        fs::write(&elsewhere, "text").unwrap();
        std::os::unix::fs::symlink(&elsewhere, dir.path().join(DISK)).unwrap();
        spaces.disk(&helpers, &pod, dir.path(), None).await.unwrap();
        assert_eq!(fs::read_to_string(&elsewhere).unwrap(), "text");
    }
}
