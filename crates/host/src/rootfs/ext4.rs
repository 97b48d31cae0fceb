//! Writable file systems, each in a sparse file: created at the first use, never over an existing one.

use std::{
    ffi::OsString,
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

use nix::{
    errno::Errno,
    unistd::{Whence, lseek},
};

use super::{
    BuildError, FsType,
    program::{Confined, run},
    superblock,
};

/// Program that creates the file system.
const MKFS: &str = "mkfs.ext4";
/// Time limit, long enough for an empty file system on any disk.
const LIMIT: Duration = Duration::from_secs(120);

/// The purpose of a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// It may be mounted again, also after its VM was killed.
    Kept,
    /// It is mounted once.
    Scratch,
}

impl Use {
    /// Returns the options that turn features off. No file system grows, so none reserves space for that: an empty one of 10 GiB
    /// then has 230 KiB instead of 4.3 MiB. A kubelet counts what an emptyDir takes, also when it is empty, and evicts the pod if
    /// that is more than the volume's limit. A file system that is mounted once needs no journal.
    fn features(self) -> &'static [&'static str] {
        match self {
            Self::Kept => &["-O", "^resize_inode"],
            Self::Scratch => &["-O", "^has_journal,^resize_inode"],
        }
    }
}

/// Creates a sparse ext4 file system of `size` bytes at `path`, unless one exists.
///
/// The file gets its name last, so a VM never sees an incomplete one. Blocks on the file system and the
/// program.
pub fn ensure(path: &Path, size: u64, purpose: Use) -> Result<(), BuildError> {
    match path.try_exists() {
        Ok(true) => superblock::check(path, FsType::Ext4),
        Ok(false) => make(path, size, purpose),
        Err(source) => Err(BuildError::Path { action: "stat", path: path.to_owned(), source }),
    }
}

fn make(path: &Path, size: u64, purpose: Use) -> Result<(), BuildError> {
    let unfinished = unfinished(path);
    let made = try_make(path, &unfinished, size, purpose);
    if made.is_err() {
        // Missing if the last step had succeeded; the first error is reported.
        let _ = fs::remove_file(&unfinished);
    }
    made
}

fn try_make(path: &Path, unfinished: &Path, size: u64, purpose: Use) -> Result<(), BuildError> {
    let host = |action| move |source: io::Error| BuildError::Path { action, path: path.to_owned(), source };
    let file = File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(unfinished)
        .map_err(host("create"))?;
    file.set_len(size).map_err(host("resize"))?;
    // Inode tables are zeros in a new sparse file; a container's layer needs no space reserved for root.
    let options = ["-q", "-F", "-m", "0", "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard", "--"];
    let options = purpose.features().iter().chain(&options);
    let args = options.map(OsString::from).chain([unfinished.into()]);
    // It reads no file of a tenant.
    run(Path::new(MKFS), args, path, "", Confined { jail: None, limit: LIMIT })?;
    file.sync_all().map_err(host("write"))?;
    name(unfinished, path).map_err(host("rename"))
}

/// Returns the temporary name of the file for `path` in this process. Another process may create the same
/// file: a helper that outlives its worker continues.
pub fn unfinished(path: &Path) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(format!(".unfinished-{}", std::process::id()));
    name.into()
}

/// Gives a finished file its name. If the name exists, keeps that file: a VM may already use it.
pub fn name(unfinished: &Path, path: &Path) -> io::Result<()> {
    match fs::hard_link(unfinished, path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.symlink_metadata()?.is_file() => {}
        named => named?,
    }
    fs::remove_file(unfinished)
}

/// Copies a sparse file; the copy gets its name when it is complete, unless the name exists by then. Replaces
/// anything but a regular file.
pub fn copy(from: &Path, to: &Path) -> Result<(), BuildError> {
    let unfinished = unfinished(to);
    let link = if to.symlink_metadata().is_ok_and(|there| !there.is_file()) { Some(to) } else { None };
    let copied = [Some(unfinished.as_path()), link]
        .into_iter()
        .flatten()
        .try_for_each(remove_if_there)
        .and_then(|()| copy_data(from, &unfinished))
        .and_then(|()| name(&unfinished, to));
    copied.map_err(|source| {
        // The first error is reported.
        let _ = fs::remove_file(&unfinished);
        BuildError::Path { action: "create disk", path: to.to_owned(), source }
    })
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

fn copy_data(from: &Path, to: &Path) -> io::Result<()> {
    let mut source = File::open(from)?;
    let mut target = File::options().write(true).create_new(true).mode(0o600).open(to)?;
    target.set_len(source.metadata()?.len())?;
    let mut at = 0;
    loop {
        at = match lseek(&source, at, Whence::SeekData) {
            Ok(data) => data,
            // Only a hole follows.
            Err(Errno::ENXIO) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        };
        let end = lseek(&source, at, Whence::SeekHole)?;
        let offset = SeekFrom::Start(at.unsigned_abs());
        source.seek(offset)?;
        target.seek(offset)?;
        io::copy(&mut Read::by_ref(&mut source).take((end - at).unsigned_abs()), &mut target)?;
        target.flush()?;
        at = end;
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn an_empty_file_system_takes_little_of_the_host() {
        let dir = tempfile::tempdir().unwrap();
        for (name, purpose) in [("kept", Use::Kept), ("scratch", Use::Scratch)] {
            let disk = dir.path().join(name);
            ensure(&disk, 10 << 30, purpose).unwrap();
            let taken = disk.metadata().unwrap().blocks() * 512;
            assert!(taken < 512 << 10, "{name}: {taken} bytes");
        }
    }

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
