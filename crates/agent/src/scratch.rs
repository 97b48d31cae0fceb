//! Scratch disks: the writable part of a container's root file system, on a disk of the host that is discarded with the
//! container.
//!
//! ```text
//! /run/sandboxer/prepared/<serial>    mounted before its container is created
//! /run/sandboxer/containers/<id>/s    mounted for its container
//! ```
//!
//! Unlike with a file system in memory, the kernel can drop a disk's cached pages when memory is short, so a container
//! may write more than its memory limit. Such a disk is never read after its container is removed, so it needs no
//! durability: it has no journal and no barriers, and it is shut down before it is unmounted or the guest powers off.

use std::{
    fs, io,
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
};

use nix::mount::{MsFlags, mount};

use crate::{
    disk,
    failure::{Failure, internal},
    log,
    rootfs::{Dir, Disk},
};

const PREPARED: &str = "/run/sandboxer/prepared";

/// The mount options. The kernel does not zero inode tables, which are zero on a new sparse disk; it discards deleted
/// blocks on the host, and does not flush the disk's cache.
const OPTIONS: &str = "noinit_itable,discard,nobarrier";

/// A scratch disk with its device node.
pub struct Located {
    node: PathBuf,
    fstype: String,
    prepared: PathBuf,
}

/// Waits for a disk.
pub async fn locate(disk: &Disk) -> Result<Located, Failure> {
    let node = disk::find(&disk.serial).await?;
    Ok(Located { node, fstype: disk.fstype.clone(), prepared: Path::new(PREPARED).join(&disk.serial) })
}

impl Located {
    /// Mounts the disk before its container is created. A mounted disk is no error. Blocks on the disk, so only workers
    /// call it.
    pub fn prepare(&self) -> Result<(), Failure> {
        if self.prepared.exists() {
            return Ok(());
        }
        let path = &self.prepared;
        fs::create_dir_all(path).map_err(internal(format!("cannot create {}", path.display())))?;
        let mounted = self.mount(path);
        if mounted.is_err() {
            // The mount's error is reported.
            let _ = fs::remove_dir(path);
        }
        mounted
    }

    /// Mounts the disk at `path`, or moves its mount there. Blocks on the disk, so only workers call it.
    pub fn place(&self, path: &Path) -> Result<(), Failure> {
        if !self.prepared.exists() {
            return self.mount(path);
        }
        mount(Some(&self.prepared), path, None::<&str>, MsFlags::MS_MOVE, None::<&str>)
            .map_err(internal(format!("cannot move {} to {}", self.prepared.display(), path.display())))?;
        fs::remove_dir(&self.prepared).map_err(internal(format!("cannot remove {}", self.prepared.display())))
    }

    fn mount(&self, path: &Path) -> Result<(), Failure> {
        let Self { node, fstype, .. } = self;
        mount(Some(node), path, Some(fstype.as_str()), MsFlags::empty(), Some(OPTIONS))
            .map_err(internal(format!("cannot mount {} as {fstype} on {}", node.display(), path.display())))
    }
}

/// Returns the mount points of all scratch disks.
pub fn all() -> Vec<PathBuf> {
    let prepared = fs::read_dir(PREPARED).into_iter().flatten().flatten().map(|entry| entry.path());
    prepared.chain(Dir::scratches()).collect()
}

// From linux/ext4.h; libc does not define it.
nix::ioctl_read!(ext4_shutdown, b'X', 125, u32);
/// The mode of [`ext4_shutdown`] that drops the data not written to the disk.
const WITHOUT_FLUSH: u32 = 2;

/// Shuts the file systems down: the kernel drops unwritten data, and they can no longer be used. A file system that
/// cannot be shut down is written out, which takes time.
pub fn shut_down(paths: impl IntoIterator<Item = PathBuf>) {
    for path in paths {
        if let Err(error) = shut_one_down(&path) {
            log::print(&format!("cannot shut down {}: {error}", path.display()));
        }
    }
}

fn shut_one_down(path: &Path) -> io::Result<()> {
    let directory = fs::File::open(path)?;
    let mut how = WITHOUT_FLUSH;
    // The kernel logs the shutdown as an alert, which would be among the last lines of a guest that ends for another
    // reason.
    set_console(CONSOLE_OFF);
    // SAFETY: the request reads one u32, which outlives the call.
    let result = unsafe { ext4_shutdown(directory.as_raw_fd(), &raw mut how) };
    set_console(CONSOLE_ON);
    result.map(drop).map_err(io::Error::from)
}

// From syslog(2); libc does not name them. A kernel panic is printed anyway.
const CONSOLE_OFF: libc::c_int = 6;
const CONSOLE_ON: libc::c_int = 7;

/// Turns the printing of kernel messages on the console on or off.
fn set_console(action: libc::c_int) {
    // SAFETY: both actions take no buffer. They fail only without privilege, and then nothing changes.
    unsafe { libc::klogctl(action, std::ptr::null_mut(), 0) };
}
