//! The guest's end of live shares: mounts them, and runs the process that forwards the kernel's requests to the host.
//!
//! ```text
//!  kernel ─/dev/fuse─▶ carrier, a thread for each slot ─▶ disk or stream ─▶ host
//!    └─◀───────────────────────┘
//! ```
//!
//! The carrier is a separate process ([`carrier`]): a request takes as long as a file server of the host does, and
//! nothing else in the guest may wait for it. For the same reason the agent must not access a path below [`GUEST_DIR`],
//! or a pipe into which a container may copy from there (see [`crate::pipe_helper`]).

mod carrier;

use std::{
    fs::{self, OpenOptions},
    io,
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
};

use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use sandboxer_protocol::share::{GUEST_DIR, MAX_DATA, SLOTS, VSOCK_PORT};
use tokio::sync::Mutex;

use self::carrier::Transport;
use crate::{
    disk,
    failure::{Failure, internal},
    pipe_helper,
};

/// The read-ahead of the guest's kernel for sequential reads, KiB: several messages, so that one is in transit while
/// another is processed.
const READ_AHEAD_KIB: &str = "4096";

/// The shares of this guest.
#[derive(Default)]
pub struct Shares {
    /// The PID of the carrier, once the shares are mounted. The lock is held during the mount.
    carrier: Mutex<Option<Pid>>,
}

impl Shares {
    /// Returns whether the shares are mounted.
    pub async fn are_mounted(&self) -> bool {
        self.carrier.lock().await.is_some()
    }

    /// Mounts the shares, once. Requests use the disk with this serial or, if the serial is empty, streams that begin
    /// with `key`.
    pub async fn mount(&self, serial: &str, key: Vec<u8>) -> Result<(), Failure> {
        let mut carrier = self.carrier.lock().await;
        if carrier.is_some() {
            return Ok(());
        }
        pipe_helper::start().map_err(internal("cannot start a pipe I/O helper"))?;
        let transport = match serial {
            "" => Transport::streams(SLOTS, key)
                .map_err(internal(format!("cannot connect to the host's vsock port {VSOCK_PORT}")))?,
            serial => {
                let path = disk::find(serial).await?;
                Transport::disk(&path).map_err(internal(format!("cannot open {path:?}")))?
            }
        };
        let device = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_CLOEXEC)
            .open("/dev/fuse")
            .map_err(internal("cannot open /dev/fuse"))?;
        fs::create_dir_all(GUEST_DIR).map_err(internal(format!("cannot create {GUEST_DIR}")))?;
        // The kernel checks permissions by itself, with the attributes it receives.
        let options = format!(
            "fd={},rootmode=40755,user_id=0,group_id=0,allow_other,default_permissions,max_read={MAX_DATA}",
            device.as_raw_fd()
        );
        mount(Some("sandboxer"), GUEST_DIR, Some("fuse"), MsFlags::MS_NODEV, Some(options.as_str()))
            .map_err(internal(format!("cannot mount shares on {GUEST_DIR}")))?;
        match carrier::start(device, transport) {
            Ok(pid) => *carrier = Some(pid),
            Err(error) => {
                abandon();
                return Err(internal("cannot start the process that forwards requests")(error));
            }
        }
        if let Err(error) = read_ahead() {
            tracing::warn!("cannot set the read-ahead of shares, which are slower now: {error}");
        }
        Ok(())
    }

    /// Fails all current and future requests. Must be called before the power-off: otherwise syncing the disks would
    /// wait for responses that may never come.
    pub async fn end(&self) {
        if let Some(carrier) = self.carrier.lock().await.take() {
            abandon();
            // The carrier may be blocked on the host, so its exit is not awaited.
            let _ = kill(carrier, Signal::SIGKILL);
        }
    }
}

/// Unmounts the shares even if they are in use.
fn abandon() {
    if let Err(error) = umount2(GUEST_DIR, MntFlags::MNT_FORCE | MntFlags::MNT_DETACH) {
        tracing::warn!("cannot unmount {GUEST_DIR}: {error}");
    }
}

/// Sets the kernel's read-ahead. Does not access the mount by path, which would be a request.
fn read_ahead() -> io::Result<()> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let device = device_of(&mounts, GUEST_DIR).ok_or(io::ErrorKind::NotFound)?;
    fs::write(format!("/sys/class/bdi/{device}/read_ahead_kb"), READ_AHEAD_KIB)
}

/// Returns the device number, such as `0:45`, of the mount at `path`.
fn device_of<'a>(mounts: &'a str, path: &str) -> Option<&'a str> {
    let mount = mounts.lines().rev().find(|line| line.split(' ').nth(4) == Some(path));
    mount?.split(' ').nth(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_mount_at_a_path_is_what_is_there() {
        let mounts = "20 1 0:5 / / rw - tmpfs tmpfs rw\n\
                      31 20 0:44 / /run/sandboxer/shares rw - fuse sandboxer rw\n\
                      32 20 0:45 / /run/sandboxer/shares rw - fuse sandboxer rw\n";
        assert_eq!(device_of(mounts, GUEST_DIR), Some("0:45"));
        assert_eq!(device_of(mounts, "/run"), None);
    }
}
