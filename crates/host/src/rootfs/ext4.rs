//! Writable file systems, each in a sparse file: created at the first use, never over an existing one.

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::Duration,
};

use nix::{
    errno::Errno,
    unistd::{Whence, lseek},
};
use rustix::{
    fs::{XattrFlags, fgetxattr, fsetxattr, ioctl_ficlone},
    process::geteuid,
};

use super::{
    BuildError, FsType,
    program::{Confined, run},
    superblock,
};
use crate::beneath::{Access, Dir, Found, Kind, for_child};

/// Program that creates the file system.
const MKFS: &str = "mkfs.ext4";
/// The time limit of [`MKFS`], enough for an empty file system on any disk.
const LIMIT: Duration = Duration::from_secs(120);

/// How often a file system is mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// A file system that may be mounted again, even after its VM was killed.
    Kept,
    /// A file system that is mounted once.
    Scratch,
}

impl Use {
    /// Returns the options that turn features off. No file system grows, so none reserves space for growth: an empty
    /// one of 10 GiB then takes 230 KiB instead of 4.3 MiB. A kubelet counts the bytes of an emptyDir even when it is
    /// empty, and evicts the pod if they exceed the volume's limit. A file system that is mounted once needs no
    /// journal.
    fn features(self) -> &'static [&'static str] {
        match self {
            Self::Kept => &["-O", "^resize_inode"],
            Self::Scratch => &["-O", "^has_journal,^resize_inode"],
        }
    }
}

/// The extended attribute of a disk's file that says where the file belongs.
const MARK: &str = "trusted.sandboxer";
/// The longest mark, bytes.
const MAX_MARK: usize = 1024;
/// The number of bytes copied at once.
const PIECE: usize = 64 << 10;
/// How often a file is looked up again while another process creates it.
const ATTEMPTS: usize = 3;

/// A file with a file system.
#[derive(Debug, Clone, Copy)]
pub struct Disk<'a> {
    /// The file's directory. A pod may be able to write to it.
    pub dir: &'a Dir,
    /// The file's name.
    pub name: &'a OsStr,
    /// The mark that says where the file belongs. `None`: no pod can write to its directory.
    pub mark: Option<&'a [u8]>,
}

/// How a file system is created.
#[derive(Debug)]
pub enum Made<'a> {
    /// A copy of this sparse file.
    Copied(&'a File),
    /// A new file system.
    New {
        /// The size of the file system, bytes.
        bytes: u64,
        /// How often it is mounted.
        purpose: Use,
    },
}

impl Disk<'_> {
    /// Opens the file system for reading and writing; creates it unless it exists.
    ///
    /// The file gets its name last, so no reader sees an incomplete one. Blocks on the file system and the program.
    pub fn ensure(&self, made: &Made<'_>) -> Result<File, BuildError> {
        for _ in 1..ATTEMPTS {
            match self.dir.find(self.name) {
                Ok(found) => return self.open(&found),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(source) => return Err(self.failed("open")(source)),
            }
            match self.make(made) {
                // Another process may create the same file: a helper that outlives its worker goes on.
                Err(BuildError::Path { source, .. }) if source.kind() == io::ErrorKind::AlreadyExists => {}
                made => return made,
            }
        }
        Err(self.failed("create")(io::ErrorKind::ResourceBusy.into()))
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join(self.name)
    }

    fn failed(&self, action: &'static str) -> impl Fn(io::Error) -> BuildError + use<> {
        let path = self.path();
        move |source| BuildError::Path { action, path: path.clone(), source }
    }

    /// Opens an existing file, if the daemon created it.
    fn open(&self, found: &Found) -> Result<File, BuildError> {
        let stat = found.stat();
        let strange = if found.kind() != Kind::File {
            "it is no regular file"
        } else if stat.st_uid != geteuid().as_raw() {
            "it is another user's"
        } else if stat.st_nlink != 1 {
            "it has several names"
        } else {
            ""
        };
        if !strange.is_empty() {
            return Err(self.foreign(strange));
        }
        let file = found.open(Access::ReadWrite).map_err(self.failed("open"))?;
        if let Some(mark) = self.mark {
            let mut there = [0; MAX_MARK];
            match fgetxattr(&file, MARK, &mut there[..]) {
                Ok(length) if there.get(..length) != Some(mark) => {
                    return Err(self.foreign("it was made for another volume"));
                }
                // An earlier daemon created the file, or its file system has no attributes.
                _ => {}
            }
        }
        superblock::check(&file, &self.path(), FsType::Ext4)?;
        Ok(file)
    }

    fn foreign(&self, what: &'static str) -> BuildError {
        BuildError::Foreign { path: self.path(), what }
    }

    fn make(&self, made: &Made<'_>) -> Result<File, BuildError> {
        let temporary = self.dir.temporary().map_err(self.failed("create"))?;
        let file = temporary.file();
        match made {
            Made::Copied(from) => copy_data(from, file).map_err(self.failed("create disk"))?,
            Made::New { bytes, purpose } => {
                file.set_len(*bytes).map_err(self.failed("resize"))?;
                // Inode tables are zeros in a new sparse file; a container's layer needs no space reserved for root.
                let options =
                    ["-q", "-F", "-m", "0", "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard", "--"];
                let options = purpose.features().iter().chain(&options);
                let args = options.map(OsString::from).chain([for_child(file).into()]);
                // The program reads no file of a tenant.
                run(Path::new(MKFS), args, &self.path(), "", Confined { jail: None, limit: LIMIT })?;
                file.sync_all().map_err(self.failed("write"))?;
            }
        }
        if let Some(mark) = self.mark {
            match fsetxattr(file, MARK, mark, XattrFlags::empty()) {
                // The file system has no attributes, or none for this user namespace.
                Ok(()) | Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::PERM) => {}
                Err(errno) => return Err(self.failed("mark")(errno.into())),
            }
        }
        temporary.keep(self.name).map_err(self.failed("name"))
    }
}

/// Copies a sparse file to an empty one. Where the file system can (XFS, Btrfs), both have the same blocks until one is written to.
pub fn copy_data(from: &File, to: &File) -> io::Result<()> {
    to.set_len(from.metadata()?.len())?;
    // Fails on other file systems, and between two of them.
    if ioctl_ficlone(to, from).is_ok() {
        return Ok(());
    }
    let (mut at, mut piece) = (0, vec![0; PIECE]);
    loop {
        // Others copy the same file, so its position is not used.
        at = match lseek(from, at, Whence::SeekData) {
            Ok(data) => data,
            // Only a hole follows.
            Err(Errno::ENXIO) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        };
        let end = lseek(from, at, Whence::SeekHole)?;
        while at < end {
            let length = usize::try_from(end - at).unwrap_or(PIECE).min(PIECE);
            from.read_exact_at(&mut piece[..length], at.unsigned_abs())?;
            to.write_all_at(&piece[..length], at.unsigned_abs())?;
            at += i64::try_from(length).unwrap_or(i64::MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt, symlink},
    };

    use super::*;

    #[test]
    fn an_empty_file_system_takes_little_of_the_host() {
        let dir = tempfile::tempdir().unwrap();
        let root = Dir::host(dir.path()).unwrap();
        for (name, purpose) in [("kept", Use::Kept), ("scratch", Use::Scratch)] {
            let disk = Disk { dir: &root, name: name.as_ref(), mark: None };
            let file = disk.ensure(&Made::New { bytes: 10 << 30, purpose }).unwrap();
            let taken = file.metadata().unwrap().blocks() * 512;
            assert!(taken < 512 << 10, "{name}: {taken} bytes");
        }
    }

    #[test]
    fn nothing_that_is_there_is_written_to() {
        let dir = tempfile::tempdir().unwrap();
        let root = Dir::host(dir.path()).unwrap();
        let victim = dir.path().join("victim");
        fs::write(&victim, "of the host").unwrap();
        // Earlier versions wrote to a file whose name can be guessed.
        for pid in [1, std::process::id()] {
            symlink(&victim, dir.path().join(format!("disk.unfinished-{pid}"))).unwrap();
        }
        let disk = |name: &'static str| Disk { dir: &root, name: name.as_ref(), mark: Some(b"u/v") };
        let made = || Made::New { bytes: 16 << 20, purpose: Use::Kept };
        let file = disk("disk").ensure(&made()).unwrap();
        assert_eq!(fs::read(&victim).unwrap(), b"of the host");
        let again = disk("disk").ensure(&Made::Copied(&file)).unwrap();
        assert_eq!(again.metadata().unwrap().ino(), file.metadata().unwrap().ino(), "it is there");
        let copy = disk("copy").ensure(&Made::Copied(&file)).unwrap();
        let read = |file: &File| {
            let mut bytes = vec![0; 16 << 20];
            file.read_exact_at(&mut bytes, 0).unwrap();
            bytes
        };
        assert!(read(&file) == read(&copy));
        symlink(&victim, dir.path().join("link")).unwrap();
        for made in [made(), Made::Copied(&file)] {
            assert!(matches!(disk("link").ensure(&made).unwrap_err(), BuildError::Path { .. }));
        }
        assert_eq!(fs::read(&victim).unwrap(), b"of the host");
        let left: Vec<_> = root.names(9).unwrap().into_iter().filter(|name| name != "victim").collect();
        assert_eq!(left.len(), 5, "{left:?}");
    }

    /// Has a file system of its own, if this host can make it, in which files can have blocks in common.
    #[test]
    fn a_copy_has_the_blocks_of_the_original_where_it_can() {
        let dir = tempfile::tempdir().unwrap();
        let (image, at) = (dir.path().join("image"), dir.path().join("at"));
        File::create(&image).unwrap().set_len(512 << 20).unwrap();
        fs::create_dir(&at).unwrap();
        let run = |program: &str, args: &[&OsStr]| {
            let status = std::process::Command::new(program).args(args).status();
            status.is_ok_and(|status| status.success())
        };
        if !run("mkfs.xfs", &["-q".as_ref(), image.as_ref()]) {
            return println!("not tested: there is no mkfs.xfs here");
        }
        // The mount ends with this test's own namespace.
        std::thread::spawn(move || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
            let private = nix::mount::MsFlags::MS_REC | nix::mount::MsFlags::MS_PRIVATE;
            nix::mount::mount(None::<&str>, "/", None::<&str>, private, None::<&str>).unwrap();
            if !run("mount", &["-o".as_ref(), "loop".as_ref(), image.as_ref(), at.as_ref()]) {
                return println!("not tested: XFS cannot be mounted here");
            }
            let path = |name: &str| at.join(name);
            fs::write(path("disk"), vec![7; 64 << 20]).unwrap();
            let (from, to) = (File::open(path("disk")).unwrap(), File::create(path("copy")).unwrap());
            from.sync_all().unwrap();
            let free =
                || rustix::fs::statvfs(&at).unwrap().f_bavail * rustix::fs::statvfs(&at).unwrap().f_bsize;
            let before = free();
            copy_data(&from, &to).unwrap();
            to.sync_all().unwrap();
            let taken = before - free();
            assert!(taken < 8 << 20, "the copy takes {taken} bytes");
            assert!(fs::read(path("copy")).unwrap() == fs::read(path("disk")).unwrap());
            File::options().write(true).open(path("copy")).unwrap().write_all_at(b"x", 0).unwrap();
            assert_eq!(fs::read(path("disk")).unwrap()[0], 7);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_disk_of_another_volume_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let root = Dir::host(dir.path()).unwrap();
        let disk =
            |mark: &'static str| Disk { dir: &root, name: "disk".as_ref(), mark: Some(mark.as_bytes()) };
        let made = Made::New { bytes: 16 << 20, purpose: Use::Kept };
        disk("u/v").ensure(&made).unwrap();
        let error = disk("u/w").ensure(&made).unwrap_err();
        if fgetxattr(root.find("disk").unwrap().open(Access::Read).unwrap(), MARK, &mut [0; 9][..]).is_err() {
            return println!("not tested: no attributes here");
        }
        assert!(error.to_string().contains("another volume"), "{error}");
        disk("u/v").ensure(&made).unwrap();
    }
}
