//! Scratch disks: what containers write to their root file systems, on a disk of the host that goes with the container.
//!
//! ```text
//! /run/sandboxer/prepared/<serial>    mounted ahead of its container
//! /run/sandboxer/containers/<id>/s    mounted for its container
//! ```
//!
//! Beside a file system in memory, a disk has the kernel give up what is cached of it when memory is short: a container
//! may write more than its limit of memory. Nobody reads such a disk again once its container is removed. So nothing of
//! it is ever written out for safety's sake: it has no journal and no barriers, and it is shut down before it is
//! unmounted or the guest powers off.

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

/// The kernel fills no inode tables with zeros, which on a fresh sparse disk they are; gives the host back what is
/// deleted; and waits for no write to be safe.
const OPTIONS: &str = "noinit_itable,discard,nobarrier";

/// A disk that is there.
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
    /// Mounts it ahead of its container. One that is mounted is fine. Blocks on the disk: for workers.
    pub fn prepare(&self) -> Result<(), Failure> {
        if self.prepared.exists() {
            return Ok(());
        }
        let path = &self.prepared;
        fs::create_dir_all(path).map_err(internal(format!("cannot create {}", path.display())))?;
        let mounted = self.mount(path);
        if mounted.is_err() {
            // What failed is what is told.
            let _ = fs::remove_dir(path);
        }
        mounted
    }

    /// Mounts it at `path`, or moves it there. Blocks on the disk: for workers.
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

/// Returns where all of them are mounted.
pub fn all() -> Vec<PathBuf> {
    let prepared = fs::read_dir(PREPARED).into_iter().flatten().flatten().map(|entry| entry.path());
    prepared.chain(Dir::scratches()).collect()
}

// Of linux/ext4.h, which libc doesn't have.
nix::ioctl_read!(ext4_shutdown, b'X', 125, u32);
/// Forgets what is not on the disk yet.
const WITHOUT_FLUSH: u32 = 2;

/// Has the kernel forget what has been written and is not on the disks yet; nobody can use them any more. One that this
/// fails on is written out, and takes its time.
pub fn shut_down(paths: impl IntoIterator<Item = PathBuf>) {
    for path in paths {
        if let Err(error) = shut_one_down(&path) {
            log::say(&format!("cannot shut down {}: {error}", path.display()));
        }
    }
}

fn shut_one_down(path: &Path) -> io::Result<()> {
    let directory = fs::File::open(path)?;
    let mut how = WITHOUT_FLUSH;
    // The kernel tells it as an alert, which would be among the last words of a guest that ends for another reason.
    set_console(CONSOLE_OFF);
    // SAFETY: the request reads one u32, which outlives the call.
    let done = unsafe { ext4_shutdown(directory.as_raw_fd(), &raw mut how) };
    set_console(CONSOLE_ON);
    done.map(drop).map_err(io::Error::from)
}

// Of syslog(2), which libc doesn't name. A kernel that panics prints all the same.
const CONSOLE_OFF: libc::c_int = 6;
const CONSOLE_ON: libc::c_int = 7;

/// Has the kernel print what it tells, or keep it in its log alone.
fn set_console(action: libc::c_int) {
    // SAFETY: both actions take no buffer. They fail without privilege only, and then nothing changes.
    unsafe { libc::klogctl(action, std::ptr::null_mut(), 0) };
}
