//! Scratch disks: the writable part of a container's root file system, in a sparse file that is deleted with
//! the container.
//!
//! ```text
//! <store>/scratch/empty-1-<bytes>.ext4      created once, copied for each container
//! <store>/scratch/<name>-<nonce>.ext4       exists until its VMM has opened it
//! ```
//!
//! A file is unlinked as soon as its VMM has opened it. Then only the VMM holds it, and the node gets the
//! space back when the disk is unplugged or the VMM has exited, even if the daemon was killed before. Files
//! that exist when a daemon starts are unused.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use super::{
    BuildError, blocking,
    cache::nonce,
    ext4::{self, Use},
    superblock,
};

/// Prefix of the empty file system that is copied. The number is incremented when it is created differently.
const EMPTY: &str = "empty-1-";

/// The empty file system of the default size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmptyScratch {
    /// Its file.
    pub path: PathBuf,
    /// Its UUID, hex. A guest that has mounted one copy can be given another one, if neither was written to.
    pub uuid: String,
}

/// Creates scratch disks.
#[derive(Debug)]
pub struct Scratches {
    dir: PathBuf,
    /// Size of a disk without a size limit.
    usual_bytes: u64,
    // Held while the empty file system is created, by the first request that needs it.
    making: tokio::sync::Mutex<()>,
}

/// A scratch disk that its VMM has not opened yet. Dropping it unlinks the file, which an open VMM keeps.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
}

impl Scratch {
    /// Returns the file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = ?self.path, %error, "cannot remove a scratch disk's file; the next start of the daemon removes it");
        }
    }
}

impl Scratches {
    /// Opens the store in `dir`, with a default size. Removes files of an earlier daemon.
    pub fn open(dir: PathBuf, usual_bytes: u64) -> Result<Self, BuildError> {
        let cleared = DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&dir)
            .and_then(|()| clear(&dir, usual_bytes));
        cleared.map_err(|source| BuildError::Path { action: "clear", path: dir.clone(), source })?;
        Ok(Self { dir, usual_bytes, making: tokio::sync::Mutex::default() })
    }

    /// Creates a disk for the container `name`, of `bytes` or the default size.
    pub async fn make(&self, name: &str, bytes: Option<u64>) -> Result<Scratch, BuildError> {
        let bytes = bytes.unwrap_or(self.usual_bytes);
        let empty = if bytes == self.usual_bytes { Some(self.empty().await?.path) } else { None };
        let path = self.dir.join(format!("{name}-{}.ext4", nonce()));
        blocking(move || {
            match empty {
                Some(empty) => ext4::copy(&empty, &path)?,
                None => ext4::ensure(&path, bytes, Use::Scratch)?,
            }
            // Created here, so that it is removed if the caller was dropped.
            Ok(Scratch { path })
        })
        .await
    }

    /// Returns the empty file system of the default size; makes it at the first call.
    pub async fn empty(&self) -> Result<EmptyScratch, BuildError> {
        let _one_at_a_time = self.making.lock().await;
        let (path, bytes) = (self.dir.join(empty_name(self.usual_bytes)), self.usual_bytes);
        blocking(move || {
            ext4::ensure(&path, bytes, Use::Scratch)?;
            Ok(EmptyScratch { uuid: superblock::ext4_uuid(&path)?, path })
        })
        .await
    }
}

fn empty_name(bytes: u64) -> String {
    format!("{EMPTY}{bytes}.ext4")
}

fn clear(dir: &Path, usual_bytes: u64) -> io::Result<()> {
    let kept = empty_name(usual_bytes);
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_name() != kept.as_str() {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        os::unix::fs::{FileExt, MetadataExt},
    };

    use super::*;

    const SIZE: u64 = 10 << 30;

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[tokio::test]
    async fn a_scratch_disk_takes_little_and_nothing_once_its_vmm_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("scratch");
        let scratches = Scratches::open(at.clone(), SIZE).unwrap();
        let (one, other) = tokio::join!(scratches.make("one", None), scratches.make("other", None));
        let (one, other) = (one.unwrap(), other.unwrap());
        let meta = fs::metadata(one.path()).unwrap();
        assert_eq!((meta.len(), meta.mode() & 0o777), (SIZE, 0o600));
        assert!(meta.blocks() * 512 < 1 << 20, "{} blocks of 512 bytes are to be copied", meta.blocks());
        let vmm = File::options().read(true).write(true).open(one.path()).unwrap();
        drop((one, other));
        assert_eq!(names(&at), [empty_name(SIZE)], "what has been made has a name still");
        vmm.write_all_at(b"goes on", 1 << 30).unwrap();
        assert_eq!(vmm.metadata().unwrap().nlink(), 0);

        let small = scratches.make("small", Some(8 << 20)).await.unwrap();
        assert_eq!(fs::metadata(small.path()).unwrap().len(), 8 << 20);
    }

    #[tokio::test]
    async fn what_a_daemon_left_half_made_is_removed_by_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().to_owned();
        let scratch = Scratches::open(at.clone(), 16 << 20).unwrap().make("c", None).await.unwrap();
        // As if this process had been killed here.
        std::mem::forget(scratch);
        fs::write(at.join("c2.ext4.unfinished-7"), "half").unwrap();
        assert_eq!(names(&at).len(), 3);
        Scratches::open(at.clone(), 16 << 20).unwrap();
        assert_eq!(names(&at), [empty_name(16 << 20)]);
        // A file of another size is not used any more.
        Scratches::open(at.clone(), 32 << 20).unwrap();
        assert!(names(&at).is_empty());
    }
}
