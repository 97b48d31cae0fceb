//! Gives a running program a share: mounts a directory, or a file, in its mount namespace.
//!
//! The program itself can't: it sees nothing of the host and has no right to mount. So a thread of the daemon
//! takes the directory on the host, as a mount that is nowhere yet, and goes into the namespace to put it
//! there. The host's own namespace never has a mount more.

use std::{
    ffi::CString,
    fs, io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    thread,
};

use nix::sched::{CloneFlags, setns, unshare};
use rustix::{
    fs::{AtFlags, Mode, OFlags, StatxFlags},
    io::Errno,
    mount::{MoveMountFlags, OpenTreeFlags},
};

use crate::ROOT;

/// What a share is of.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    /// A directory or a regular file of the host.
    pub path: &'a Path,
    /// Whether the program can write to it, whatever the guest asks.
    pub access: Access,
    /// What is mounted below it on the host from now on appears in it, too.
    pub follows_mounts: bool,
}

/// What can be written of a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// All of it.
    ReadWrite,
    /// Nothing but what is mounted below it, as a read-only bind mount has it.
    ReadOnly,
    /// Nothing.
    RecursivelyReadOnly,
}

/// Why there is no share.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The host doesn't give it.
    #[error("cannot {action} {path:?}")]
    Source {
        /// What was attempted.
        action: &'static str,
        /// On the host.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Neither a directory nor a file.
    #[error("{0:?} is neither a directory nor a regular file: nothing else can be shared")]
    Kind(PathBuf),
    /// The program's namespace doesn't take it.
    #[error("cannot {action} in the mount namespace of the share's server")]
    Target {
        /// What was attempted.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

/// Makes `source` the share `name`, a plain file name, of the program `process`, a pidfd. One that is there
/// already stays as it is. Blocks for some system calls.
pub fn attach(process: BorrowedFd<'_>, name: &str, source: Source<'_>) -> Result<(), AttachError> {
    put(process, name, &take(source)?)
}

/// A mount of a source and all that is mounted below it, attached nowhere.
#[derive(Debug)]
pub struct Tree {
    /// The mount.
    pub mount: OwnedFd,
    /// It is one of a directory, not of a file.
    pub is_dir: bool,
}

/// Puts `tree` where [`attach`] does. Touches nothing of the source's file system.
pub fn put(process: BorrowedFd<'_>, name: &str, tree: &Tree) -> Result<(), AttachError> {
    // A thread of its own, since it doesn't come back from where it goes.
    thread::scope(|scope| match scope.spawn(|| enter_and_put(process, name, tree)).join() {
        Ok(put) => put,
        Err(_) => Err(target("go on")(io::Error::other("the thread panicked"))),
    })
}

/// Takes a mount of a source. Waits as long as the source's file system does.
pub fn take(source: Source<'_>) -> Result<Tree, AttachError> {
    let failed = |action| {
        let path = source.path.to_owned();
        move |source| AttachError::Source { action, path, source }
    };
    let open = OFlags::PATH | OFlags::CLOEXEC;
    let found = rustix::fs::open(source.path, open, Mode::empty())
        .map_err(|errno| failed("find")(errno.into()))
        .map(fs::File::from)?;
    let kind = found.metadata().map_err(failed("look at"))?.file_type();
    if !kind.is_dir() && !kind.is_file() {
        return Err(AttachError::Kind(source.path.to_owned()));
    }
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH
        | OpenTreeFlags::AT_RECURSIVE;
    let mount = rustix::mount::open_tree(&found, "", flags)
        .map_err(|errno| failed("take a mount of")(errno.into()))?;
    // No device of the host, no program of it with another one's rights: the guest has its own opinion on
    // what it runs, this is about the program that serves it.
    let wanted = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOEXEC;
    let propagation = if source.follows_mounts { libc::MS_SLAVE } else { libc::MS_PRIVATE };
    let all = libc::AT_RECURSIVE;
    set_attributes(mount.as_fd(), wanted, 0, propagation, all).map_err(failed("restrict a mount of"))?;
    let depth = match source.access {
        Access::ReadWrite => None,
        Access::ReadOnly => Some(0),
        Access::RecursivelyReadOnly => Some(all),
    };
    if let Some(depth) = depth {
        let read_only = set_attributes(mount.as_fd(), libc::MOUNT_ATTR_RDONLY, 0, 0, depth);
        read_only.map_err(failed("make read-only a mount of"))?;
    }
    Ok(Tree { mount, is_dir: kind.is_dir() })
}

fn enter_and_put(process: BorrowedFd<'_>, name: &str, tree: &Tree) -> Result<(), AttachError> {
    unshare(CloneFlags::CLONE_FS)
        .map_err(|errno| target("leave this process's directories")(errno.into()))?;
    setns(process, CloneFlags::CLONE_NEWNS).map_err(|errno| target("be")(errno.into()))?;
    // Its root is read-only where the program sees it, and writable through a second look at it.
    let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let root = rustix::mount::open_tree(rustix::fs::CWD, ROOT, clone)
        .map_err(|errno| target("open the root")(errno.into()))?;
    set_attributes(root.as_fd(), 0, libc::MOUNT_ATTR_RDONLY, 0, libc::AT_RECURSIVE)
        .map_err(target("write to the root"))?;
    let made = if tree.is_dir {
        rustix::fs::mkdirat(&root, name, Mode::from_raw_mode(0o755))
    } else {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        rustix::fs::openat(&root, name, flags, Mode::from_raw_mode(0o644)).map(drop)
    };
    let at = format!("{ROOT}/{name}");
    match made {
        // By an attempt that got no further, or by one that did.
        Err(Errno::EXIST) if is_mounted(&at).map_err(target("look at a mount point"))? => return Ok(()),
        Err(Errno::EXIST) => {}
        made => made.map_err(|errno| target("make a mount point")(errno.into()))?,
    }
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    rustix::mount::move_mount(tree.mount.as_fd(), "", rustix::fs::CWD, at, flags)
        .map_err(|errno| target("mount the share")(errno.into()))
}

/// Returns whether another mount begins at `path` than at [`ROOT`].
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

/// mount_setattr(2) on a mount, and with a `depth` of `AT_RECURSIVE` on all below it; of Linux 5.12.
fn set_attributes(
    mount: BorrowedFd<'_>,
    set: u64,
    clear: u64,
    propagation: u64,
    depth: libc::c_int,
) -> io::Result<()> {
    let attributes = libc::mount_attr { attr_set: set, attr_clr: clear, propagation, userns_fd: 0 };
    let path = CString::default();
    // SAFETY: the path is a C string and the attributes are a struct of the size told; both outlive the call.
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
