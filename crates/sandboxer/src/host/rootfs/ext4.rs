//! A container's writable layer on a file: made at its first use, never over an existing one.

use std::{
    ffi::OsString,
    fs::{self, File},
    io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

use super::{
    BuildError, FsType,
    build::{Confined, run},
    superblock,
};

/// Program that makes the file system.
const MKFS: &str = "mkfs.ext4";
/// More than an empty file system takes on any disk.
const LIMIT: Duration = Duration::from_secs(120);

/// Makes an ext4 file system of `size` bytes at `path`, sparse, unless one is there.
///
/// A machine sees the file only once it is complete: it gets its name last. Waits for the file system and the program.
pub fn ensure(path: &Path, size: u64) -> Result<(), BuildError> {
    match path.try_exists() {
        Ok(true) => superblock::check(path, FsType::Ext4),
        Ok(false) => make(path, size),
        Err(source) => Err(BuildError::Host { action: "look at", path: path.to_owned(), source }),
    }
}

fn make(path: &Path, size: u64) -> Result<(), BuildError> {
    let unfinished = unfinished(path);
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
    // It reads nothing of a tenant's.
    run(Path::new(MKFS), args, path, "", Confined { jail: None, limit: LIMIT })?;
    file.sync_all().map_err(host("write"))?;
    name(unfinished, path).map_err(host("name"))
}

/// Where this process makes the file that is to be at `path`. Another one may be at the same: a helper that outlives its
/// worker goes on.
pub fn unfinished(path: &Path) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(format!(".unfinished-{}", std::process::id()));
    name.into()
}

/// Gives a finished file its name. Whoever comes second takes the first one's: a machine may use that by now.
pub fn name(unfinished: &Path, path: &Path) -> io::Result<()> {
    match fs::hard_link(unfinished, path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.symlink_metadata()?.is_file() => {}
        named => named?,
    }
    fs::remove_file(unfinished)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_has_its_name_is_not_replaced_by_one_that_comes_late() {
        let dir = tempfile::tempdir().unwrap();
        let [early, late, disk, link] = ["early", "late", "disk", "link"].map(|name| dir.path().join(name));
        fs::write(&early, "early").unwrap();
        name(&early, &disk).unwrap();
        let in_use = File::open(&disk).unwrap();
        fs::write(&late, "late").unwrap();
        name(&late, &disk).unwrap();
        assert_eq!(fs::read(&disk).unwrap(), b"early");
        assert_eq!(in_use.metadata().unwrap().len(), 5);
        assert!(!early.exists() && !late.exists(), "what is not needed stays");

        fs::write(&late, "late").unwrap();
        std::os::unix::fs::symlink(&disk, &link).unwrap();
        assert!(name(&late, &link).is_err(), "a link was taken for the disk");
    }
}
