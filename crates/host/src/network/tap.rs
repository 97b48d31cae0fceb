//! Taps: network devices with a file as their other side, which a VMM holds.

use std::{
    ffi::CStr,
    fs::File,
    io,
    os::fd::{AsRawFd, OwnedFd},
};

/// Creates a tap in the calling thread's network namespace. It is removed with its last descriptor.
///
/// A `%d` in `name` becomes the lowest free number. Packets carry a header for offloads: checksums and segmentation.
pub fn open(name: &CStr) -> io::Result<OwnedFd> {
    named(name).map(File::into)
}

/// Creates a tap in the calling thread's network namespace for a VMM in that namespace, which opens it by name. The tap
/// is removed with the namespace. Any process in the namespace can open it, one at a time.
pub fn leave(name: &CStr) -> io::Result<()> {
    let tap = named(name)?;
    // SAFETY: the request is a number.
    match unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETPERSIST, 1) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

fn named(name: &CStr) -> io::Result<File> {
    let tun = File::options().read(true).write(true).open("/dev/net/tun")?;
    // SAFETY: all zeroes is a valid request without a name.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let bytes = name.to_bytes_with_nul();
    if bytes.len() > request.ifr_name.len() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "tap name is too long"));
    }
    for (into, byte) in request.ifr_name.iter_mut().zip(bytes) {
        // A C char is signed on amd64, and not on arm64.
        *into = libc::c_char::from_ne_bytes([*byte]);
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = flags.try_into().map_err(io::Error::other)?;
    // SAFETY: the request has the type that this call reads and writes.
    match unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF, &mut request) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(tun),
    }
}
