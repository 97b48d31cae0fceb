//! The directory that a jailed VMM can write to, as the daemon accesses it.
//!
//! The directory is a file system in memory, visible to no other process, and disappears with its VMM. A hostile VMM may
//! have written what the daemon finds there, so no link is followed and no file is read beyond a bound. The VMM can
//! neither remove nor replace what the daemon creates there, because the directory is root's and sticky.

use std::{
    fs::{self, File, Permissions},
    io::{self, Read},
    os::{
        fd::AsFd,
        unix::{
            fs::{FileExt, MetadataExt, PermissionsExt},
            net::UnixListener,
        },
    },
    path::{Path, PathBuf},
    thread,
};

use nix::sched::{CloneFlags, setns, unshare};
use rustix::fs::{AtFlags, Mode, OFlags, openat, unlinkat};
use tokio::net::UnixStream;

use sandboxer_process::{
    Process,
    jail::{SHOWN as DISKS, WRITABLE_DIR},
    socket,
};

/// Path of the directory in the jail.
pub const PATH: &str = WRITABLE_DIR;

/// The writable directory in the jail of one VMM.
#[derive(Debug)]
pub struct JailDir(File);

impl JailDir {
    /// Opens the jail directory of `process`, which is jailed.
    pub fn open(process: &Process) -> io::Result<Self> {
        let proc = PathBuf::from(format!("/proc/{}", process.pid()));
        let theirs = fs::metadata(proc.join("ns/mnt"))?;
        let jail_dir = socket::open(&proc.join("root").join(PATH.trim_start_matches('/')))?;
        if theirs.ino() == fs::metadata("/proc/self/ns/mnt")?.ino() {
            return Err(io::Error::other(
                "the VMM is in the host's mount namespace: it was started without a jail",
            ));
        }
        // Checked last: while the process lives, its PID is not reused.
        match process.is_alive() {
            true => Ok(Self(jail_dir)),
            false => Err(io::Error::from_raw_os_error(libc::ESRCH)),
        }
    }

    /// Uses `dir` as the jail directory.
    #[cfg(test)]
    pub fn at(dir: &Path) -> std::sync::Arc<Self> {
        std::sync::Arc::new(Self(socket::open(dir).unwrap()))
    }

    /// Listens on the socket `name`, to which the VMM can connect. Replaces a socket of an earlier daemon.
    pub fn listen(&self, name: &str) -> io::Result<UnixListener> {
        match unlinkat(&self.0, name, AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => {}
            Err(errno) => return Err(errno.into()),
        }
        let path = socket::within(&self.0, name);
        let listener = UnixListener::bind(&path)?;
        fs::set_permissions(&path, Permissions::from_mode(0o666))?;
        Ok(listener)
    }

    /// Connects to the socket `name`.
    pub fn connect(&self, name: &str) -> io::Result<UnixStream> {
        socket::connect_within(&self.0, name)
    }

    /// Creates a directory that the VMM can write to. Returns its path in the jail.
    pub fn make_dir(&self, name: &str) -> io::Result<PathBuf> {
        let path = socket::within(&self.0, name);
        fs::create_dir(&path)?;
        fs::set_permissions(&path, Permissions::from_mode(0o1777))?;
        Ok(Path::new(PATH).join(name))
    }

    /// Writes the file `name`, which the VMM can open as `mode` permits, but neither remove nor replace. If both the
    /// old and the new content fit into a page, a reader sees either of them whole.
    pub fn write(&self, name: &str, content: &[u8], mode: u32) -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = File::from(openat(&self.0, name, flags, Mode::RUSR | Mode::WUSR)?);
        file.set_permissions(Permissions::from_mode(mode))?;
        file.write_all_at(content, 0)
    }

    /// Reads the regular file `name` in the directory `dir`, which [`JailDir::make_dir`] created.
    pub fn read(&self, dir: &str, name: &str, max: u64) -> io::Result<Vec<u8>> {
        let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = openat(&self.0, dir, flags | OFlags::PATH | OFlags::DIRECTORY, Mode::empty())?;
        let flags = flags | OFlags::RDONLY | OFlags::NONBLOCK;
        let file = File::from(openat(&dir, name, flags, Mode::empty())?);
        let meta = file.metadata()?;
        if !meta.is_file() || meta.len() > max {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("not a regular file of at most {max} bytes"),
            ));
        }
        let mut content = Vec::new();
        file.take(max).read_to_end(&mut content)?;
        Ok(content)
    }
}

/// Returns the path in a jail at which the disk `name` is mounted.
pub fn disk_path(name: &str) -> PathBuf {
    Path::new(PATH).join(DISKS).join(name)
}

/// Runs `work` in the mount namespace of `process`, with the jail's root, on a thread that ends afterwards.
pub fn within<T: Send>(process: &Process, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    let pidfd = process.pidfd();
    let there = move || {
        unshare(CloneFlags::CLONE_FS)?;
        setns(pidfd.as_fd(), CloneFlags::CLONE_NEWNS)?;
        work()
    };
    thread::scope(|scope| {
        scope.spawn(there).join().unwrap_or_else(|_| Err(io::Error::other("the thread in a jail panicked")))
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[tokio::test]
    async fn nothing_in_a_jail_directory_leads_out_of_it() {
        let (outside, inside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let jail_dir = JailDir::at(inside.path());
        let foreign = socket::listen(outside.path(), "foreign.sock").unwrap();
        fs::write(outside.path().join("file"), "foreign").unwrap();
        let links = [("foreign.sock", "way"), ("file", "read")];
        for (to, name) in links {
            symlink(outside.path().join(to), inside.path().join(name)).unwrap();
        }
        jail_dir.connect("way").unwrap_err();
        jail_dir.listen("way").expect("a link is replaced, not followed");
        drop(foreign);

        let frozen = jail_dir.make_dir("frozen").unwrap();
        assert_eq!(frozen, Path::new("/run/frozen"));
        jail_dir.make_dir("frozen").unwrap_err();
        let at = |name: &str| inside.path().join("frozen").join(name);
        symlink(outside.path().join("file"), at("link")).unwrap();
        fs::write(at("large"), [0; 11]).unwrap();
        fs::write(at("own"), "content").unwrap();
        for name in ["link", "large", "missing", "."] {
            jail_dir.read("frozen", name, 10).unwrap_err();
        }
        assert_eq!(jail_dir.read("frozen", "own", 10).unwrap(), b"content");
        symlink(outside.path(), inside.path().join("dir")).unwrap();
        jail_dir.read("dir", "file", 10).unwrap_err();
    }
}
