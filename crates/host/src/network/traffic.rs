//! Counters of a pod's interfaces, and offloads of its VM's network cards.

use std::{
    ffi::CString,
    fs, io,
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
    path::Path,
};

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use sandboxer_netlink::{
    Netlink,
    packet::{
        RouteNetlinkMessage,
        link::{LinkAttribute, LinkMessage, Stats64},
    },
};
use sandboxer_protocol::id::SandboxId;

use super::{Interface, NetworkError, RTNETLINK, error::At, namespace, within};

/// Counters of one direction since the interface was created.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Counters {
    /// Bytes, including Ethernet headers.
    pub bytes: u64,
    /// Packets; one with segmentation offload counts once.
    pub packets: u64,
    /// Packets dropped for lack of space.
    pub dropped: u64,
    /// Packets with errors.
    pub errors: u64,
}

/// Counters of an interface, as seen by the pod.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Traffic {
    /// To the pod.
    pub received: Counters,
    /// From the pod.
    pub sent: Counters,
}

impl From<&Stats64> for Traffic {
    fn from(stats: &Stats64) -> Self {
        let received = Counters {
            bytes: stats.rx_bytes,
            packets: stats.rx_packets,
            dropped: stats.rx_dropped,
            errors: stats.rx_errors,
        };
        let sent = Counters {
            bytes: stats.tx_bytes,
            packets: stats.tx_packets,
            dropped: stats.tx_dropped,
            errors: stats.tx_errors,
        };
        Self { received, sent }
    }
}

/// Reads the counters of each of `interfaces`.
pub async fn read(
    pod: &SandboxId,
    netns: &Path,
    interfaces: &[Interface],
) -> Result<Vec<Traffic>, NetworkError> {
    let wanted: Vec<u32> = interfaces.iter().map(|interface| interface.index).collect();
    within(pod, netns, move || {
        let links = RouteNetlinkMessage::GetLink(LinkMessage::default());
        let links = Netlink::open().at_step(RTNETLINK)?.dump(links).at_step("read counters of interfaces")?;
        let traffic = |index: u32| {
            let link = links.iter().find_map(|message| match message {
                RouteNetlinkMessage::NewLink(link) if link.header.index == index => Some(link),
                _ => None,
            });
            link?.attributes.iter().find_map(|attribute| match attribute {
                LinkAttribute::Stats64(stats) => Some(Traffic::from(stats)),
                _ => None,
            })
        };
        Ok(wanted.into_iter().map(|index| traffic(index).unwrap_or_default()).collect())
    })
    .await
}

/// Returns the offloads of each tap that process `vmm` holds, in the order of the network cards. An offload is work
/// that the guest's card does instead of the host.
///
/// Identifies the taps by the process that uses them: they may have been created long before the pod, by another
/// daemon. Blocks.
pub fn offloads(vmm: u32) -> io::Result<Vec<Vec<&'static str>>> {
    let pid = i32::try_from(vmm).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
    let process = pidfd_open(pid, PidfdFlags::empty())?;
    let mut numbers = Vec::new();
    for entry in fs::read_dir(format!("/proc/{vmm}/fd"))? {
        let entry = entry?;
        // A descriptor that was closed in the meantime is not a card's tap.
        if fs::read_link(entry.path()).is_ok_and(|to| to == Path::new(TUN)) {
            numbers.extend(entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()));
        }
    }
    numbers.sort_unstable();
    let taps = numbers.into_iter().map(|number| {
        let tap = pidfd_getfd(&process, number, PidfdGetfdFlags::empty())?;
        let name = name_of(&tap)?;
        namespace::within(namespace_of(&tap)?, || offloads_of(&name))
    });
    taps.collect()
}

const TUN: &str = "/dev/net/tun";
/// `SIOCGSKNS` of linux/sockios.h: gets the network namespace of a socket or a tap.
const GET_NAMESPACE: libc::Ioctl = 0x894c;
/// `SIOCETHTOOL` of linux/sockios.h.
const ETHTOOL: libc::Ioctl = 0x8946;

/// Boolean queries of linux/ethtool.h. They concern the host's side, which sends to the guest.
const QUESTIONS: [(u32, &str); 4] =
    [(0x16, "checksums"), (0x18, "scatter-gather"), (0x1e, "tcp-segmentation"), (0x23, "segmentation")];

fn name_of(tap: &OwnedFd) -> io::Result<CString> {
    // SAFETY: all zeroes is a valid request.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // SAFETY: the request has the type that this call writes.
    if unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNGETIFF, &mut request) } == -1 {
        return Err(io::Error::last_os_error());
    }
    let name: Vec<u8> =
        request.ifr_name.iter().flat_map(|byte| byte.to_ne_bytes()).take_while(|byte| *byte != 0).collect();
    CString::new(name).map_err(io::Error::other)
}

fn namespace_of(tap: &impl AsFd) -> io::Result<OwnedFd> {
    // SAFETY: the call takes no argument.
    match unsafe { libc::ioctl(tap.as_fd().as_raw_fd(), GET_NAMESPACE) } {
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: the kernel has just opened the descriptor, which has no other owner.
        fd => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
    }
}

/// Returns the offloads of a device of the calling thread's network namespace.
fn offloads_of(name: &CString) -> io::Result<Vec<&'static str>> {
    #[repr(C)]
    struct Question {
        command: u32,
        answer: u32,
    }
    let socket = std::net::UdpSocket::bind("0.0.0.0:0")?;
    let mut done = Vec::new();
    for (command, what) in QUESTIONS {
        let mut question = Question { command, answer: 0 };
        // SAFETY: all zeroes is a valid request without a name.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (into, byte) in request.ifr_name.iter_mut().zip(name.to_bytes_with_nul()) {
            *into = libc::c_char::from_ne_bytes([*byte]);
        }
        request.ifr_ifru.ifru_data = std::ptr::from_mut(&mut question).cast();
        // SAFETY: the request points to a query that the call reads and writes, and that outlives the call.
        if unsafe { libc::ioctl(socket.as_raw_fd(), ETHTOOL, &mut request) } == -1 {
            return Err(io::Error::last_os_error());
        }
        if question.answer != 0 {
            done.push(what);
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::tap;

    #[test]
    fn a_tap_is_found_by_who_holds_it_with_what_its_card_does() {
        const CHECKSUMS_AND_TCP4: libc::c_int = 1 | 2;
        const SET_OFFLOAD: libc::Ioctl = 0x4004_54d0;
        let before = offloads(std::process::id()).unwrap().len();
        let namespace = namespace::fresh().expect("only root makes network namespaces");
        let tap = namespace::within(&namespace, || tap::open(c"tap%d")).unwrap();
        // SAFETY: the call takes a number.
        assert_eq!(unsafe { libc::ioctl(tap.as_raw_fd(), SET_OFFLOAD, CHECKSUMS_AND_TCP4) }, 0);
        let found = offloads(std::process::id()).unwrap();
        let found = found.iter().find(|offloads| offloads.contains(&"tcp-segmentation"));
        assert!(found.is_some_and(|offloads| offloads.contains(&"checksums")), "{found:?}, {before} before");
    }
}
