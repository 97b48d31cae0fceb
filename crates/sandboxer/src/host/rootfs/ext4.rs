//! A container's writable layer on a file: made at its first use, never over an existing one.

use std::{
    ffi::OsString,
    fs::{self, File},
    io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{BuildError, FsType, blocking, build::run, superblock};

/// Program that makes the file system.
const MKFS: &str = "mkfs.ext4";
/// Beside the file while it is being made; the name is replaced by the finished file's.
const UNFINISHED: &str = ".unfinished";

/// Makes an ext4 file system of `size` bytes at `path`, sparse, unless one is there.
///
/// A machine sees the file only once it is complete: it gets its name last.
pub async fn ensure(path: PathBuf, size: u64) -> Result<PathBuf, Arc<BuildError>> {
    blocking(move || {
        match path.try_exists() {
            Ok(true) => superblock::check(&path, FsType::Ext4)?,
            Ok(false) => make(&path, size)?,
            Err(source) => return Err(BuildError::Host { action: "look at", path, source }),
        }
        Ok(path)
    })
    .await
}

fn make(path: &Path, size: u64) -> Result<(), BuildError> {
    let mut unfinished = OsString::from(path);
    unfinished.push(UNFINISHED);
    let unfinished = PathBuf::from(unfinished);
    let made = try_make(path, &unfinished, size);
    if made.is_err() {
        // Gone already when the last step had succeeded; what failed is what is told.
        let _ = fs::remove_file(&unfinished);
    }
    made
}

fn try_make(path: &Path, unfinished: &Path, size: u64) -> Result<(), BuildError> {
    let host = |action| move |source: io::Error| BuildError::Host { action, path: path.to_owned(), source };
    let file = File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(unfinished)
        .map_err(host("make"))?;
    file.set_len(size).map_err(host("size"))?;
    // Inode tables are zeros in a fresh sparse file; a container's layer needs no reserve for root.
    let options = ["-q", "-F", "-m", "0", "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard", "--"];
    let args = options.iter().map(OsString::from).chain([unfinished.into()]);
    run(Path::new(MKFS), args, path, "")?;
    file.sync_all().map_err(host("write"))?;
    fs::rename(unfinished, path).map_err(host("name"))
}
