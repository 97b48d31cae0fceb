//! A tap, in a network namespace that nobody else sees.

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, OwnedFd},
    thread,
};

/// Opens a tap. It is gone with its last descriptor.
pub fn open() -> io::Result<OwnedFd> {
    let made = thread::spawn(|| {
        // This thread's alone.
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)?;
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
    });
    made.join().expect("a thread that panics not")
}
