//! Adds a share to a running server: mounts a directory or a file in its mount namespace.
//!
//! The server cannot do this: it sees nothing of the host and may not mount. So a thread of the daemon clones the
//! directory's mount on the host, detached, and enters the server's namespace to attach it there. The host's own
//! namespace never gets another mount.

use std::{
    ffi::CString,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    thread,
};

use nix::sched::{CloneFlags, setns, unshare};
use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags, StatxFlags},
    io::Errno,
    mount::{MoveMountFlags, OpenTreeFlags},
};

use crate::ROOT;

/// The source of a share.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    /// The path on the host, for messages: another file may be there by now.
    pub path: &'a Path,
    /// The access of the server, whatever the guest requests.
    pub access: Access,
    /// Whether later mounts of the host below the source appear in the share.
    pub follows_mounts: bool,
}

/// The writable part of a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// The share and all mounts below it are writable.
    ReadWrite,
    /// Only mounts below the share are writable, as with a read-only bind mount.
    ReadOnly,
    /// Nothing is writable.
    RecursivelyReadOnly,
}

/// Why a share cannot be attached.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The source cannot be mounted.
    #[error("cannot {action} {path:?}")]
    Source {
        /// The failed operation.
        action: &'static str,
        /// The path on the host.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The source is neither a directory nor a file.
    #[error("{0:?} is neither a directory nor a regular file, which is all that can be shared")]
    Kind(PathBuf),
    /// The mount cannot be attached in the server's namespace.
    #[error("cannot {action} in the mount namespace of the share server")]
    Target {
        /// The failed operation.
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// A detached mount of a source, with everything mounted below it.
#[derive(Debug)]
pub struct Tree {
    /// The descriptor of the mount.
    pub mount: OwnedFd,
    /// Whether the mount's root is a directory, not a file.
    pub is_dir: bool,
}

/// Attaches `tree` as the share `name`, a plain file name, of the server with the pidfd `process`. An existing share is
/// unchanged. Blocks for a few system calls, and does not access the source's file system.
pub fn put(process: BorrowedFd<'_>, name: &str, tree: &Tree) -> Result<(), AttachError> {
    // A separate thread does this, since a thread cannot leave the namespace again.
    thread::scope(|scope| match scope.spawn(|| enter_and_put(process, name, tree)).join() {
        Ok(put) => put,
        Err(_) => Err(target("run")(io::Error::other("the thread panicked"))),
    })
}

/// Clones the mount of `found`, a directory or a regular file that is open at least as `O_PATH`. Blocks as long as its
/// file system does.
pub fn take(found: BorrowedFd<'_>, source: Source<'_>) -> Result<Tree, AttachError> {
    let failed = |action| {
        let path = source.path.to_owned();
        move |source| AttachError::Source { action, path, source }
    };
    let stat = rustix::fs::fstat(found).map_err(|errno| failed("stat")(errno.into()))?;
    let kind = FileType::from_raw_mode(stat.st_mode);
    if !kind.is_dir() && !kind.is_file() {
        return Err(AttachError::Kind(source.path.to_owned()));
    }
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH
        | OpenTreeFlags::AT_RECURSIVE;
    let mount = rustix::mount::open_tree(found, "", flags)
        .map_err(|errno| failed("clone the mount of")(errno.into()))?;
    // No host device may be opened and no setuid program executed through the mount. The guest mounts shares with its
    // own options; these restrict the server.
    let wanted = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOEXEC;
    let propagation = if source.follows_mounts { libc::MS_SLAVE } else { libc::MS_PRIVATE };
    let all = libc::AT_RECURSIVE;
    set_attributes(mount.as_fd(), wanted, 0, propagation, all).map_err(failed("restrict the mount of"))?;
    let depth = match source.access {
        Access::ReadWrite => None,
        Access::ReadOnly => Some(0),
        Access::RecursivelyReadOnly => Some(all),
    };
    if let Some(depth) = depth {
        let read_only = set_attributes(mount.as_fd(), libc::MOUNT_ATTR_RDONLY, 0, 0, depth);
        read_only.map_err(failed("make read-only the mount of"))?;
    }
    Ok(Tree { mount, is_dir: kind.is_dir() })
}

fn enter_and_put(process: BorrowedFd<'_>, name: &str, tree: &Tree) -> Result<(), AttachError> {
    unshare(CloneFlags::CLONE_FS).map_err(|errno| target("unshare file system attributes")(errno.into()))?;
    setns(process, CloneFlags::CLONE_NEWNS).map_err(|errno| target("run")(errno.into()))?;
    // The mount's root is read-only for the server, and writable through a clone of the mount.
    let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let root = rustix::mount::open_tree(rustix::fs::CWD, ROOT, clone)
        .map_err(|errno| target("open the root")(errno.into()))?;
    set_attributes(root.as_fd(), 0, libc::MOUNT_ATTR_RDONLY, 0, libc::AT_RECURSIVE)
        .map_err(target("make the root writable"))?;
    let made = if tree.is_dir {
        rustix::fs::mkdirat(&root, name, Mode::from_raw_mode(0o755))
    } else {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        rustix::fs::openat(&root, name, flags, Mode::from_raw_mode(0o644)).map(drop)
    };
    let at = format!("{ROOT}/{name}");
    match made {
        // An attempt that failed later, or one that succeeded, created it.
        Err(Errno::EXIST) if is_mounted(&at).map_err(target("check a mount point"))? => return Ok(()),
        Err(Errno::EXIST) => {}
        made => made.map_err(|errno| target("create a mount point")(errno.into()))?,
    }
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    rustix::mount::move_mount(tree.mount.as_fd(), "", rustix::fs::CWD, at, flags)
        .map_err(|errno| target("mount the share")(errno.into()))
}

/// Returns whether `path` is on another mount than [`ROOT`].
fn is_mounted(path: &str) -> io::Result<bool> {
    let mount_of = |path: &str| {
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        rustix::fs::statx(rustix::fs::CWD, path, flags, StatxFlags::MNT_ID).map(|found| found.stx_mnt_id)
    };
    Ok(mount_of(path)? != mount_of(ROOT)?)
}

fn target(action: &'static str) -> impl FnOnce(io::Error) -> AttachError {
    move |source| AttachError::Target { action, source }
}

/// Calls mount_setattr(2) on a mount; with a `depth` of `AT_RECURSIVE`, on all mounts below it as well. Needs Linux
/// 5.12.
fn set_attributes(
    mount: BorrowedFd<'_>,
    set: u64,
    clear: u64,
    propagation: u64,
    depth: libc::c_int,
) -> io::Result<()> {
    let attributes = libc::mount_attr { attr_set: set, attr_clr: clear, propagation, userns_fd: 0 };
    let path = CString::default();
    // SAFETY: the path is a C string and the size is the attributes' size; both outlive the call.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            path.as_ptr(),
            libc::AT_EMPTY_PATH | depth,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
