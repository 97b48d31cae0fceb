//! Waits for a device by the kernel's uevents instead of polling.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
    time::Duration,
};

use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket,
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    time::timeout,
};

use crate::sync::watched;

/// The multicast group of the kernel's uevents (the other one is udev's).
const KERNEL_GROUP: u32 = 1;

/// Returns what `scan` finds, now or after a uevent; `None` if `deadline` passes first.
pub async fn wait_for<T>(
    deadline: Option<Duration>,
    mut scan: impl FnMut() -> Option<T>,
) -> io::Result<Option<T>> {
    // Subscribed first: a device that appears between a scan and the subscription would be missed.
    let announcements = watched(subscribe()?, Interest::READABLE)?;
    let found = async {
        loop {
            if let Some(found) = scan() {
                return Ok(found);
            }
            drain(&announcements).await?;
        }
    };
    match deadline {
        None => found.await.map(Some),
        Some(deadline) => timeout(deadline, found).await.ok().transpose(),
    }
}

fn subscribe() -> nix::Result<OwnedFd> {
    let fd = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
        SockProtocol::NetlinkKObjectUEvent,
    )?;
    bind(fd.as_raw_fd(), &NetlinkAddr::new(0, KERNEL_GROUP))?;
    Ok(fd)
}

/// Waits for at least one uevent and drops all pending ones: the scan reads sysfs anyway.
async fn drain(announcements: &AsyncFd<OwnedFd>) -> io::Result<()> {
    let mut guard = announcements.readable().await?;
    let mut message = [0; 4096];
    loop {
        let read = guard.try_io(|fd| Ok(recv(fd.as_raw_fd(), &mut message, MsgFlags::empty())?));
        match read {
            // ENOBUFS: uevents were lost, so something has changed.
            Ok(Ok(_)) => {}
            Ok(Err(error)) if error.raw_os_error() == Some(libc::ENOBUFS) => {}
            Ok(Err(error)) => return Err(error),
            Err(_would_block) => return Ok(()),
        }
    }
}
