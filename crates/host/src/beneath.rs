//! Opens what lies below a directory that a pod can write to. Nothing else in the daemon and its helpers opens files
//! there.
//!
//! A pod's author chooses the names there, and its processes may exchange a file for a link at any moment. So nothing
//! there is opened by its path, and no link is followed:
//!
//! ```text
//! Dir (pods/<uid>) ──openat2: beneath, no links──▶ Found (O_PATH: nothing happens yet)
//!                                                    ├─ checked: kind, owner, names
//!                                                    └─ the same inode, opened ──▶ File
//! ```

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::ffi::{OsStrExt, OsStringExt},
    },
    path::{Component, Path, PathBuf},
};

use rustix::{
    fs::{
        AtFlags, CWD, FileType, Mode, OFlags, RawDir, ResolveFlags, Stat, StatxAttributes, StatxFlags, fstat,
        linkat, openat, openat2, readlinkat, statat, statx, unlinkat,
    },
    io::Errno,
};

/// The rules of every look-up: no links, nothing above the directory, no `/proc/PID/fd`.
const BENEATH: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);
/// Bytes of directory entries that are read at once.
const ENTRIES: usize = 16 << 10;

/// A directory that paths are relative to.
#[derive(Debug)]
pub struct Dir {
    /// The `O_PATH` descriptor.
    fd: OwnedFd,
    /// The path, for messages.
    path: PathBuf,
}

/// A file that was found, and is not opened yet. Here and below, a file may have any [`Kind`].
#[derive(Debug)]
pub struct Found {
    /// The `O_PATH` descriptor.
    fd: OwnedFd,
    stat: Stat,
}

/// The kind of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symlink.
    Link,
    /// A block or character device.
    Device,
    /// A socket or a pipe.
    Other,
}

/// The access for which a file is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Read-only access.
    Read,
    /// Write-only access.
    Write,
    /// Access for reading and writing.
    ReadWrite,
}

impl Access {
    /// Returns the access that a disk needs.
    pub fn for_disk(read_only: bool) -> Self {
        if read_only { Self::Read } else { Self::ReadWrite }
    }
}

/// Finds the file at a path of the host whose directories no pod can write to, or that an administrator allows pods to
/// name: links are followed.
pub fn host(path: &Path) -> io::Result<Found> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    Found::new(openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_MAGICLINKS)?)
}

impl Dir {
    /// Opens a directory of the host, as [`host`] does.
    pub fn host(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_MAGICLINKS)?;
        Ok(Self { fd, path: path.to_owned() })
    }

    /// Returns the path of the directory, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the directory `below`; an empty path is this directory.
    pub fn dir(&self, below: impl AsRef<Path>) -> io::Result<Self> {
        let below = below.as_ref();
        let fd = self.open(below, OFlags::PATH | OFlags::DIRECTORY)?;
        Ok(Self { fd, path: self.path.join(below) })
    }

    /// Returns the mount that the directory is on.
    pub fn mount(&self) -> io::Result<OnMount> {
        on_mount(&self.fd)
    }

    /// Finds the file at `below`; an empty path is this directory.
    pub fn find(&self, below: impl AsRef<Path>) -> io::Result<Found> {
        Found::new(self.open(below.as_ref(), OFlags::PATH)?)
    }

    fn open(&self, below: &Path, flags: OFlags) -> io::Result<OwnedFd> {
        if !below.components().all(|part| matches!(part, Component::Normal(_))) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the path climbs, or is absolute"));
        }
        let below = if below.as_os_str().is_empty() { Path::new(".") } else { below };
        openat2(&self.fd, below, flags | OFlags::CLOEXEC, Mode::empty(), BENEATH).map_err(|errno| match errno
        {
            Errno::LOOP => io::Error::other("a symbolic link is in the way, and none is followed there"),
            errno => errno.into(),
        })
    }

    /// Returns the names in the directory, sorted; an error if there are more than `most`.
    pub fn names(&self, most: usize) -> io::Result<Vec<OsString>> {
        let readable = self.open(Path::new(""), OFlags::RDONLY | OFlags::DIRECTORY)?;
        let (mut buffer, mut names) = (Vec::with_capacity(ENTRIES), Vec::new());
        let mut entries = RawDir::new(readable, buffer.spare_capacity_mut());
        while let Some(entry) = entries.next() {
            let name = entry?.file_name().to_bytes().to_owned();
            if name == b"." || name == b".." {
                continue;
            }
            if names.len() == most {
                return Err(io::Error::new(
                    io::ErrorKind::FileTooLarge,
                    format!("the directory has more than {most} entries"),
                ));
            }
            names.push(OsString::from_vec(name));
        }
        names.sort();
        Ok(names)
    }

    /// Returns the target of the symlink `name`.
    pub fn link(&self, name: impl AsRef<OsStr>) -> io::Result<PathBuf> {
        let target = readlinkat(&self.fd, plain(name.as_ref())?, Vec::new())?;
        Ok(OsString::from_vec(target.into_bytes()).into())
    }

    /// Returns the properties of `name`, even if that is a symlink.
    pub fn stat(&self, name: impl AsRef<OsStr>) -> io::Result<Stat> {
        Ok(statat(&self.fd, plain(name.as_ref())?, AtFlags::SYMLINK_NOFOLLOW)?)
    }

    /// Creates a file without a name or with a random one. The file is removed when it is dropped.
    pub fn temporary(&self) -> io::Result<Temporary<'_>> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        match openat(&self.fd, ".", flags | OFlags::TMPFILE, mode) {
            Ok(fd) => Ok(Temporary { dir: self, file: fd.into(), name: None }),
            // The file system does not support files without a name.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {
                let name = OsString::from(format!(".sandboxer-{:032x}", rand::random::<u128>()));
                let flags = flags | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
                let file = openat(&self.fd, &name, flags, mode)?.into();
                Ok(Temporary { dir: self, file, name: Some(name) })
            }
            Err(errno) => Err(errno.into()),
        }
    }
}

impl AsFd for Dir {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Returns `name` if it is a single path component.
fn plain(name: &OsStr) -> io::Result<&OsStr> {
    let mut parts = Path::new(name).components();
    match (parts.next(), parts.next()) {
        (Some(Component::Normal(part)), None) if part == name => Ok(name),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "not a plain name")),
    }
}

/// A file without its final name.
#[derive(Debug)]
pub struct Temporary<'a> {
    dir: &'a Dir,
    file: File,
    name: Option<OsString>,
}

impl Temporary<'_> {
    /// Returns the file, open for reading and writing.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Gives the file its name. An existing file stays: [`io::ErrorKind::AlreadyExists`].
    pub fn keep(self, name: impl AsRef<OsStr>) -> io::Result<File> {
        // Uses the descriptor: a name could be another file's by now.
        linkat(CWD, itself(&self.file), &self.dir.fd, plain(name.as_ref())?, AtFlags::SYMLINK_FOLLOW)?;
        self.file.try_clone()
    }
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            // Nothing can be done about a failure.
            let _ = unlinkat(&self.dir.fd, name, AtFlags::empty());
        }
    }
}

/// Returns a path of this process to an open file, for calls that take a path.
pub fn itself(fd: &impl AsFd) -> PathBuf {
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd()).into()
}

/// Returns a path to an open file of this process that its child processes can open, too.
pub fn for_child(fd: &impl AsFd) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), fd.as_fd().as_raw_fd()).into()
}

impl Found {
    fn new(fd: OwnedFd) -> io::Result<Self> {
        let stat = fstat(&fd)?;
        Ok(Self { fd, stat })
    }

    /// Returns the file that `fd` refers to.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        Self::new(fd)
    }

    /// Returns the file's kind.
    pub fn kind(&self) -> Kind {
        kind(&self.stat)
    }

    /// Returns the file's properties.
    pub fn stat(&self) -> &Stat {
        &self.stat
    }

    /// Returns the file's device and inode.
    pub fn inode(&self) -> (u64, u64) {
        (self.stat.st_dev, self.stat.st_ino)
    }

    /// Returns the file's permissions.
    pub fn mode(&self) -> u32 {
        self.stat.st_mode & 0o7777
    }

    /// Returns the mount that the file is on.
    pub fn mount(&self) -> io::Result<OnMount> {
        on_mount(&self.fd)
    }

    /// Opens a regular file or a block device. Nothing else is opened: that could block or have side effects.
    pub fn open(&self, access: Access) -> io::Result<File> {
        let is_block = FileType::from_raw_mode(self.stat.st_mode) == FileType::BlockDevice;
        if self.kind() != Kind::File && !is_block {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "neither a file nor a block device"));
        }
        let flags = match access {
            Access::Read => OFlags::RDONLY,
            Access::Write => OFlags::WRONLY,
            Access::ReadWrite => OFlags::RDWR,
        };
        // Opens the inode that was checked, whatever its name leads to by now.
        let opened = rustix::fs::open(itself(&self.fd), flags | OFlags::CLOEXEC, Mode::empty())?;
        Ok(opened.into())
    }

    /// Returns the descriptor, which is not open for reading.
    pub fn into_fd(self) -> OwnedFd {
        self.fd
    }
}

impl AsFd for Found {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Returns the kind of a file with these properties.
pub fn kind(stat: &Stat) -> Kind {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Kind::File,
        FileType::Directory => Kind::Directory,
        FileType::Symlink => Kind::Link,
        FileType::BlockDevice | FileType::CharacterDevice => Kind::Device,
        _ => Kind::Other,
    }
}

/// The mount that a file is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OnMount {
    /// The mount's ID in `/proc/PID/mountinfo`.
    pub id: u64,
    /// Whether the file is the mount's root.
    pub is_root: bool,
}

fn on_mount(fd: &OwnedFd) -> io::Result<OnMount> {
    let found = statx(fd, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)?;
    if found.stx_mask & StatxFlags::MNT_ID.bits() == 0 {
        return Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "this kernel does not report mounts: 5.8 does",
        ));
    }
    Ok(OnMount { id: found.stx_mnt_id, is_root: found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) })
}

/// Returns the current path of an open file, according to the kernel.
pub fn path_of(fd: &impl AsFd) -> io::Result<PathBuf> {
    let target = readlinkat(CWD, itself(fd), Vec::new())?;
    Ok(OsStr::from_bytes(target.as_bytes()).into())
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        io::{Read, Write},
        os::unix::fs::{MetadataExt, symlink},
    };

    use super::*;

    #[test]
    fn no_link_is_followed_and_nothing_above_is_reached() {
        let dir = tempfile::tempdir().unwrap();
        let inside = dir.path().join("inside");
        fs::create_dir_all(inside.join("d")).unwrap();
        fs::write(dir.path().join("secret"), "secret").unwrap();
        fs::write(inside.join("d/file"), "own").unwrap();
        symlink(dir.path(), inside.join("up")).unwrap();
        symlink("../secret", inside.join("leaf")).unwrap();
        symlink("d/file", inside.join("own")).unwrap();
        // The host may use links outside the pod's directory.
        symlink(&inside, dir.path().join("root")).unwrap();
        let root = Dir::host(&dir.path().join("root")).unwrap();
        for path in ["up/secret", "leaf", "own", "../secret", "/etc/passwd", "d/../d/file"] {
            let error = root.find(path).unwrap_err();
            assert!(root.dir(path).is_err(), "{path}");
            assert_ne!(error.kind(), io::ErrorKind::NotFound, "{path}");
        }
        let mut text = String::new();
        root.find("d/file").unwrap().open(Access::Read).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "own");
        assert_eq!(root.names(4).unwrap(), ["d", "leaf", "own", "up"]);
        assert!(root.names(3).unwrap_err().to_string().contains("more than 3"));
        assert_eq!(root.link("leaf").unwrap(), Path::new("../secret"));
        assert!(root.link("d/leaf").is_err() && root.stat("../secret").is_err());
    }

    #[test]
    fn what_is_opened_is_what_was_checked() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("file"), "checked").unwrap();
        let root = Dir::host(dir.path()).unwrap();
        let found = root.find("file").unwrap();
        fs::rename(dir.path().join("file"), dir.path().join("moved")).unwrap();
        symlink("/etc/passwd", dir.path().join("file")).unwrap();
        let mut text = String::new();
        found.open(Access::Read).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "checked");
        nix::unistd::mkfifo(&dir.path().join("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let pipe = root.find("pipe").unwrap();
        assert_eq!(pipe.kind(), Kind::Other);
        assert!(pipe.open(Access::Read).is_err(), "it would wait");
        assert!(root.find("").unwrap().open(Access::Read).is_err());
    }

    #[test]
    fn a_temporary_file_takes_the_place_of_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let root = Dir::host(dir.path()).unwrap();
        let temporary = root.temporary().unwrap();
        temporary.file().write_all(b"first").unwrap();
        let first = temporary.keep("disk").unwrap();
        assert_eq!(first.metadata().unwrap().nlink(), 1);
        symlink("/etc/passwd", dir.path().join("link")).unwrap();
        for name in ["disk", "link"] {
            let error = root.temporary().unwrap().keep(name).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        }
        assert!(root.temporary().unwrap().keep("../disk").is_err());
        drop(root.temporary().unwrap());
        assert_eq!(root.names(9).unwrap(), ["disk", "link"]);
        assert_eq!(fs::read(dir.path().join("disk")).unwrap(), b"first");
    }
}
