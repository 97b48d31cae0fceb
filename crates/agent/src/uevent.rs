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

/// Returns the result of `scan`, now or after a uevent of one of `subsystems`; `None` if `deadline` passes first.
pub async fn wait_for<T>(
    subsystems: &[&str],
    deadline: Option<Duration>,
    mut scan: impl FnMut() -> Option<T>,
) -> io::Result<Option<T>> {
    // The subscription comes first: a device that appeared between a scan and the subscription would be missed.
    let announcements = watched(subscribe()?, Interest::READABLE)?;
    let wait = async {
        loop {
            if let Some(result) = scan() {
                return Ok(result);
            }
            // A disk has up to eight uevents, for its target, its generic device and so on. A scan for each cost more
            // than the mounts.
            while !drain(&announcements, subsystems).await? {}
        }
    };
    match deadline {
        None => wait.await.map(Some),
        Some(deadline) => timeout(deadline, wait).await.ok().transpose(),
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

/// Waits for at least one uevent and drops all pending ones; returns whether one was of `subsystems`, or was lost.
async fn drain(announcements: &AsyncFd<OwnedFd>, subsystems: &[&str]) -> io::Result<bool> {
    let mut guard = announcements.readable().await?;
    let mut message = [0; 4096];
    let mut of_interest = false;
    loop {
        let read = guard.try_io(|fd| Ok(recv(fd.as_raw_fd(), &mut message, MsgFlags::empty())?));
        match read {
            Ok(Ok(length)) => of_interest |= is_of(&message[..length], subsystems),
            // ENOBUFS means that uevents were lost, so something has changed.
            Ok(Err(error)) if error.raw_os_error() == Some(libc::ENOBUFS) => of_interest = true,
            Ok(Err(error)) => return Err(error),
            Err(_would_block) => return Ok(of_interest),
        }
    }
}

/// Returns whether a uevent, which consists of zero-terminated strings, is of one of `subsystems`.
fn is_of(message: &[u8], subsystems: &[&str]) -> bool {
    let subsystem = message.split(|byte| *byte == 0).find_map(|word| word.strip_prefix(b"SUBSYSTEM="));
    subsystem.is_some_and(|subsystem| subsystems.iter().any(|wanted| wanted.as_bytes() == subsystem))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uevent_is_told_by_its_subsystem() {
        let disk = b"add@/devices/platform/host0/block/sda\0ACTION=add\0SUBSYSTEM=block\0DEVNAME=sda\0";
        assert!(is_of(disk, &["net", "block"]));
        assert!(!is_of(disk, &["net"]));
        let target = b"add@/devices/block\0ACTION=add\0SUBSYSTEM=scsi\0";
        assert!(!is_of(target, &["block"]), "only the word counts");
        assert!(!is_of(b"", &["block"]));
    }
}
