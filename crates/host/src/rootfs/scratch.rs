//! Scratch disks: the writable part of a container's root file system, in a sparse file that is deleted with
//! the container.
//!
//! ```text
//! <store>/scratch/empty-1-<bytes>.ext4      created once, copied for each container
//! <store>/scratch/<name>-<nonce>.ext4       exists until its VMM has opened it
//! ```
//!
//! A file is unlinked as soon as its VMM has opened it. Then only the VMM holds it, and the node gets the space back
//! when the disk is unplugged or the VMM exits, even if the daemon was killed before. Files that exist when a daemon
//! starts are unused.

use std::{
    fs::{self, DirBuilder, File},
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use sandboxer_vmm::DiskFile;

use super::{
    BuildError, blocking,
    cache::nonce,
    ext4::{Disk, Made, Use},
    superblock,
};
use crate::beneath::Dir;

/// The prefix of the empty file system that is copied. The number is incremented when it is created differently.
const EMPTY: &str = "empty-1-";

/// The empty file system of the default size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmptyScratch {
    /// The path of its file.
    pub path: PathBuf,
    /// The file system's UUID, hex. A guest that has mounted one copy can be given another one, if neither was written
    /// to.
    pub uuid: String,
}

/// A maker of scratch disks.
#[derive(Debug)]
pub struct Scratches {
    dir: PathBuf,
    /// The size of a disk without a size limit, bytes.
    usual_bytes: u64,
    // The lock is held while the empty file system is created, by the first request that needs it.
    making: tokio::sync::Mutex<()>,
}

/// A scratch disk that its VMM has not opened yet. Dropping it unlinks the file; a VMM that has opened it keeps it.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    file: DiskFile,
}

impl Scratch {
    /// Returns the open file.
    pub fn file(&self) -> DiskFile {
        self.file.clone()
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
    /// Opens the store in `dir`, with a default size, bytes. Removes the files of an earlier daemon.
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
        let (dir, name) = (self.dir.clone(), format!("{name}-{}.ext4", nonce()));
        blocking(move || {
            let made = match empty {
                Some(empty) => {
                    let from = File::open(&empty);
                    let from =
                        from.map_err(|source| BuildError::Path { action: "open", path: empty, source })?;
                    make(&dir, &name, &Made::Copied(&from))?
                }
                None => make(&dir, &name, &Made::New { bytes, purpose: Use::Scratch })?,
            };
            // The guard is created here, so that the file is removed if the caller was dropped.
            let path = dir.join(name);
            let file = DiskFile::new(made, path.clone());
            let file =
                file.map_err(|source| BuildError::Path { action: "stat", path: path.clone(), source })?;
            Ok(Scratch { path, file })
        })
        .await
    }

    /// Creates a disk for the pod `name` as a copy of `from`.
    pub async fn copy(&self, name: &str, from: File) -> Result<Scratch, BuildError> {
        let (dir, name) = (self.dir.clone(), format!("{name}-{}.ext4", nonce()));
        blocking(move || {
            let made = make(&dir, &name, &Made::Copied(&from))?;
            let path = dir.join(name);
            let file = DiskFile::new(made, path.clone());
            let file =
                file.map_err(|source| BuildError::Path { action: "stat", path: path.clone(), source })?;
            Ok(Scratch { path, file })
        })
        .await
    }

    /// Returns the empty file system of the default size; creates it at the first call.
    pub async fn empty(&self) -> Result<EmptyScratch, BuildError> {
        let _one_at_a_time = self.making.lock().await;
        let (dir, bytes) = (self.dir.clone(), self.usual_bytes);
        blocking(move || {
            let name = empty_name(bytes);
            let file = make(&dir, &name, &Made::New { bytes, purpose: Use::Scratch })?;
            let path = dir.join(name);
            match superblock::ext4_uuid(&file) {
                Ok(uuid) => Ok(EmptyScratch { uuid, path }),
                Err(source) => Err(BuildError::Path { action: "read image", path, source }),
            }
        })
        .await
    }
}

/// Opens the file system `name` in the store; creates it unless it exists.
fn make(dir: &Path, name: &str, made: &Made<'_>) -> Result<File, BuildError> {
    let root =
        Dir::host(dir).map_err(|source| BuildError::Path { action: "open", path: dir.to_owned(), source })?;
    Disk { dir: &root, name: name.as_ref(), mark: None }.ensure(made)
}

fn empty_name(bytes: u64) -> String {
    format!("{EMPTY}{bytes}.ext4")
}

fn clear(dir: &Path, usual_bytes: u64) -> io::Result<()> {
    let usual_name = empty_name(usual_bytes);
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_name() != usual_name.as_str()
            && let Err(error) = fs::remove_file(entry.path())
        {
            tracing::warn!(path = ?entry.path(), %error, "cannot remove an unused scratch disk; the next daemon does");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};

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
        let meta = fs::metadata(&one.path).unwrap();
        assert_eq!((meta.len(), meta.mode() & 0o777), (SIZE, 0o600));
        assert!(meta.blocks() * 512 < 1 << 20, "{} blocks of 512 bytes are to be copied", meta.blocks());
        let vmm = File::options().read(true).write(true).open(&one.path).unwrap();
        drop((one, other));
        assert_eq!(names(&at), [empty_name(SIZE)], "what has been made has a name still");
        vmm.write_all_at(b"goes on", 1 << 30).unwrap();
        assert_eq!(vmm.metadata().unwrap().nlink(), 0);

        let small = scratches.make("small", Some(8 << 20)).await.unwrap();
        assert_eq!(fs::metadata(&small.path).unwrap().len(), 8 << 20);
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
