//! A disk that a VMM opens, and a directory to which it writes.
//!
//! The VMM opens disks by path, but cannot see the host's files. So while it opens a disk, this one file is mounted in
//! its jail, and its user may open it. Afterwards the VMM has the file open, and mount and permission are removed. The
//! host's own namespace gets no mount. A directory is mounted in the same way, for one call.

use std::{
    fs::{self, File},
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use rustix::{
    fs::{CWD, Gid, Uid},
    mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree},
};
use sandboxer_process::Process;

use crate::{
    DiskSpec,
    jail_dir::{disk_path, within},
    permit::Permit,
};

/// A disk that is in its VM's jail until this is dropped.
#[derive(Debug)]
pub struct MountedDisk {
    process: Arc<Process>,
    path: PathBuf,
    // Held for its effect when it is dropped.
    _permit: Option<Permit>,
}

impl MountedDisk {
    /// Mounts `disk` in the jail of `process` and lets `user` open it. Blocks for a few system calls.
    pub fn new(process: Arc<Process>, user: u32, disk: &DiskSpec) -> io::Result<Self> {
        let file = File::from(disk.file.descriptor()?);
        let tree = tree(&file)?;
        let path = disk_path(&disk.serial);
        within(&process, || put(&tree, &path, disk.read_only, |path| File::create_new(path).map(drop)))?;
        // From here on, the disk is unmounted on every path.
        let mut mounted = Self { process, path, _permit: None };
        mounted._permit = Permit::grant(file, user, !disk.read_only)?;
        Ok(mounted)
    }
}

impl Drop for MountedDisk {
    fn drop(&mut self) {
        take_away(&self.process, &self.path);
    }
}

/// A directory of the host that is in a VM's jail until this is dropped. Until then it is the VMM's, afterwards root's.
#[derive(Debug)]
pub struct MountedDir {
    process: Arc<Process>,
    path: PathBuf,
    dir: File,
}

impl MountedDir {
    /// Mounts the empty directory `dir` as `name` in the jail of `process`, whose `user` may write to it. Blocks for a few system
    /// calls.
    pub fn new(process: Arc<Process>, user: u32, dir: File, name: &str) -> io::Result<Self> {
        let tree = tree(&dir)?;
        let path = disk_path(name);
        within(&process, || put(&tree, &path, false, |path| fs::create_dir(path)))?;
        // From here on, the directory is unmounted and taken back on every path.
        let mounted = Self { process, path, dir };
        own(&mounted.dir, user)?;
        Ok(mounted)
    }

    /// Returns the directory's path in the jail.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for MountedDir {
    fn drop(&mut self) {
        take_away(&self.process, &self.path);
        if let Err(error) = own(&self.dir, 0) {
            tracing::error!(pid = self.process.pid(), %error, "cannot take a directory back from a VMM's user");
        }
    }
}

fn own(dir: &File, user: u32) -> io::Result<()> {
    Ok(rustix::fs::fchown(dir, Some(Uid::from_raw(user)), Some(Gid::from_raw(user)))?)
}

/// Duplicates the mount of `file`, and nothing below it.
fn tree(file: &File) -> io::Result<OwnedFd> {
    let flags =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    Ok(open_tree(file, "", flags)?)
}

/// Unmounts what is at `path` in the jail of `process`.
fn take_away(process: &Process, path: &Path) {
    match within(process, || hide(path)) {
        // The jail is gone, with all its mounts.
        Err(error) if !process.is_alive() => tracing::debug!(%error, "the jail is gone"),
        Err(error) => {
            tracing::error!(pid = process.pid(), path = %path.display(), %error,
                "cannot remove a disk or directory from its VM's jail");
        }
        Ok(()) => {}
    }
}

/// Mounts `tree` at `path`, in the jail, where `make` makes the mount point.
fn put(
    tree: &OwnedFd,
    path: &Path,
    read_only: bool,
    make: impl Fn(&Path) -> io::Result<()>,
) -> io::Result<()> {
    make(path)?;
    let mounted = move_mount(tree, "", CWD, path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
        .map_err(io::Error::from)
        .and_then(|()| {
            let mut flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
            flags.set(MsFlags::MS_RDONLY, read_only);
            Ok(mount(None::<&str>, path, None::<&str>, flags, None::<&str>)?)
        });
    if mounted.is_err() {
        hide(path)?;
    }
    mounted
}

/// Unmounts what is at `path`, in the jail.
fn hide(path: &Path) -> io::Result<()> {
    match umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
        // Nothing is mounted: the daemon died just before, or the mount failed.
        Ok(()) | Err(nix::errno::Errno::EINVAL) => {}
        Err(errno) => return Err(errno.into()),
    }
    match fs::symlink_metadata(path)?.is_dir() {
        true => fs::remove_dir(path),
        false => fs::remove_file(path),
    }
}

/// Unmounts what an earlier daemon left in the jail of `process`, and revokes the permits of `user` for it. Blocks for
/// a few system calls.
pub fn clear(process: &Process, user: u32) -> io::Result<()> {
    let dir = disk_path("");
    within(process, || {
        fs::read_dir(dir)?.try_for_each(|entry| {
            let path = entry?.path();
            if let Err(error) = Permit::take_back(&path, user) {
                tracing::warn!(path = %path.display(), user, %error,
                    "cannot remove a VMM's entry from a disk's access control list");
            }
            hide(&path)
        })
    })
}
