//! Unix sockets of a VM, created before its VMM runs.
//!
//! The VMM inherits them listening, so a connection can be made at once and waits there until the VMM accepts it: no
//! polling for a socket file. Paths go through a handle of the directory, because a path may be longer than the 107
//! bytes of a socket address.

use std::{
    fs::{self, File, Permissions},
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::{
            fs::{OpenOptionsExt, PermissionsExt},
            net::UnixListener,
        },
    },
    path::{Path, PathBuf},
};

use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use tokio::net::UnixStream;

/// Creates `dir/name` and listens on it; only this user can connect.
pub fn listen(dir: &Path, name: &str) -> io::Result<UnixListener> {
    let handle = open(dir)?;
    let path = within(&handle, name);
    let listener = UnixListener::bind(&path)?;
    fs::set_permissions(&path, Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Creates a socket like [`listen`], but replaces an existing one.
pub fn listen_anew(dir: &Path, name: &str) -> io::Result<UnixListener> {
    match fs::remove_file(within(&open(dir)?, name)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => listen(dir, name),
    }
}

/// Returns a handle of the socket `dir/name`, by which its holder can connect through `/proc/self/fd` if the socket's
/// mode permits.
pub fn handle(dir: &Path, name: &str) -> io::Result<OwnedFd> {
    handle_within(&open(dir)?, name)
}

fn handle_within(dir: &File, name: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(dir, name, flags, Mode::empty())?)
}

/// Connects to `dir/name`. Does not wait, but fails if the listener's queue is full.
pub fn connect(dir: &Path, name: &str) -> io::Result<UnixStream> {
    connect_within(&open(dir)?, name)
}

/// Connects like [`connect`], but does not follow a symbolic link.
pub fn connect_within(dir: &File, name: &str) -> io::Result<UnixStream> {
    let file = handle_within(dir, name)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    UnixStream::from_std(socket.into())
}

/// Returns a handle of a directory, which stays valid when it is moved.
pub fn open(dir: &Path) -> io::Result<File> {
    File::options().read(true).custom_flags(libc::O_DIRECTORY | libc::O_PATH).open(dir)
}

/// Returns a path of `dir/name` that is valid in this process while the handle is open.
pub fn within(dir: &File, name: &str) -> PathBuf {
    format!("/proc/self/fd/{}/{name}", dir.as_raw_fd()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_socket_deep_in_the_tree_is_reached_and_private() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("d".repeat(100)).join("e".repeat(100));
        fs::create_dir_all(&deep).unwrap();
        let listener = listen(&deep, "control.sock").unwrap();
        connect(&deep, "control.sock").unwrap();
        assert!(listener.accept().is_ok());
        let mode = deep.join("control.sock").metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        // Closing is not enough: a process that another test starts just now may hold a copy until it executes its
        // program.
        rustix::net::shutdown(&listener, rustix::net::Shutdown::Both).unwrap();
        assert_eq!(connect(&deep, "control.sock").unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    }
}
