//! Taps, in a network namespace of the test's own.

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, OwnedFd},
    sync::OnceLock,
};

use nix::{
    errno::Errno,
    sched::{CloneFlags, unshare},
};

static ALONE: OnceLock<Result<(), Errno>> = OnceLock::new();

/// Gives this process, and the VMMs that it will start, a network namespace of its own. Call it before it has threads.
pub fn be_alone() {
    ALONE.get_or_init(|| unshare(CloneFlags::CLONE_NEWNET));
}

/// Opens a tap. It is removed with its last descriptor.
pub fn open() -> io::Result<OwnedFd> {
    (*ALONE.get().expect("be_alone was called"))?;
    let tun = File::options().read(true).write(true).open("/dev/net/tun")?;
    // SAFETY: all zeroes is a valid request without a name.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = flags.try_into().expect("the flags fit");
    // SAFETY: the request is of the type that this call reads and writes.
    match unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF, &mut request) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(tun.into()),
    }
}
