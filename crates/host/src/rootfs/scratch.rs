//! Scratch disks: what a container writes to its root file system, in a sparse file that goes with the container.
//!
//! ```text
//! <store>/scratch/empty-1-<bytes>.ext4      made once, copied for each container
//! <store>/scratch/<name>-<nonce>.ext4       from its making until its VMM has it open
//! ```
//!
//! A file has a name only until its VMM has it open. From then on the VMM alone holds it, and the node has the room back
//! as soon as the disk is unplugged or the VMM has ended, whoever else has died before. What has a name when a daemon
//! starts is nobody's.

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
};

/// Of the file system that is copied. The number rises when it is made otherwise than before.
const EMPTY: &str = "empty-1-";

/// Makes scratch disks.
#[derive(Debug)]
pub struct Scratches {
    dir: PathBuf,
    /// Size of one that nobody asked for another size.
    usual_bytes: u64,
    // Held while the file system that is copied is made, by whoever needs it first.
    making: tokio::sync::Mutex<()>,
}

/// A scratch disk that no VMM has yet. Its file is gone when this is dropped, unless a VMM has it open by then.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
}

impl Scratch {
    /// Returns the file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = ?self.path, %error, "a scratch disk keeps its name until the daemon starts again");
        }
    }
}

impl Scratches {
    /// Makes them in `dir`, of `usual_bytes` each. What an earlier daemon left there is removed.
    pub fn open(dir: PathBuf, usual_bytes: u64) -> Result<Self, BuildError> {
        let cleared = DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&dir)
            .and_then(|()| clear(&dir, usual_bytes));
        cleared.map_err(|source| BuildError::Host { action: "clear", path: dir.clone(), source })?;
        Ok(Self { dir, usual_bytes, making: tokio::sync::Mutex::default() })
    }

    /// Returns a new one for the container `name`, of `bytes` or the usual size.
    pub async fn make(&self, name: &str, bytes: Option<u64>) -> Result<Scratch, BuildError> {
        let bytes = bytes.unwrap_or(self.usual_bytes);
        let empty = if bytes == self.usual_bytes { Some(self.empty().await?) } else { None };
        let path = self.dir.join(format!("{name}-{}.ext4", nonce()));
        blocking(move || {
            match empty {
                Some(empty) => ext4::copy(&empty, &path)?,
                None => ext4::ensure(&path, bytes, Use::Scratch)?,
            }
            // In here, so that it goes if nobody waits any more.
            Ok(Scratch { path })
        })
        .await
    }

    /// Returns the empty file system of the usual size.
    async fn empty(&self) -> Result<PathBuf, BuildError> {
        let _one_at_a_time = self.making.lock().await;
        let (path, bytes) = (self.dir.join(empty_name(self.usual_bytes)), self.usual_bytes);
        blocking(move || ext4::ensure(&path, bytes, Use::Scratch).map(|()| path)).await
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
        // Of another size nobody has any use for it.
        Scratches::open(at.clone(), 32 << 20).unwrap();
        assert!(names(&at).is_empty());
    }
}
