//! Lots: the descriptors in the store that are no sockets.
//!
//! A lot is a socket pair whose two ends are in systemd's store, and which contains one message with up to [`LOT`]
//! descriptors. To add or remove one, the front sends another message and then removes the previous one. (With sockets
//! in messages, the kernel would look for cycles of them whenever any process of the host closes a socket.)

use std::{
    collections::{BTreeMap, BTreeSet},
    env, io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    sync::{Mutex, MutexGuard, PoisonError},
};

use nix::{
    cmsg_space,
    errno::Errno,
    fcntl::{FcntlArg, FdFlag, fcntl},
    libc,
    sys::socket::{
        AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, recv, recvmsg,
        sendmsg, socketpair,
    },
};

use super::{push_named, refused};

/// The variable that lists the lots for another build, which replaces this one in its process.
pub const LOTS: &str = "SANDBOXER_LOTS";
/// The most descriptors in a lot, which are those with the same number divided by this. A message has at most 253.
const LOT: RawFd = 64;
/// The prefixes of the names of a lot's ends; the quotient follows.
pub(super) const ENDS: [&str; 2] = ["r", "w"];

// All lots. There is one thread; a child has a copy.
static ALL: Mutex<BTreeMap<RawFd, Lot>> = Mutex::new(BTreeMap::new());

pub(super) fn lots() -> MutexGuard<'static, BTreeMap<RawFd, Lot>> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Changes the numbers of the lot for a descriptor.
pub(super) fn change_lot(fd: RawFd, change: impl FnOnce(&mut BTreeSet<RawFd>) -> bool) {
    let mut lots = lots();
    match lot_of(fd, &mut lots) {
        Ok(lot) => {
            change(&mut lot.numbers);
            lot.publish().unwrap_or_else(refused);
        }
        Err(error) => refused(error),
    }
}

/// Returns the lot for a number; creates it if necessary.
pub(super) fn lot_of(fd: RawFd, lots: &mut BTreeMap<RawFd, Lot>) -> Result<&mut Lot, Errno> {
    use std::collections::btree_map::Entry;
    Ok(match lots.entry(fd / LOT) {
        Entry::Occupied(lot) => lot.into_mut(),
        Entry::Vacant(place) => {
            let (read, write) =
                socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
            for (end, prefix) in [&read, &write].into_iter().zip(ENDS) {
                push_named(end.as_raw_fd(), &format!("{prefix}{}", fd / LOT));
            }
            place.insert(Lot { ends: [read, write], numbers: BTreeSet::new() })
        }
    })
}

/// A part of the store: a socket pair, whose last message has all of the lot's descriptors.
pub(super) struct Lot {
    pub(super) ends: [OwnedFd; 2],
    pub(super) numbers: BTreeSet<RawFd>,
}

impl Lot {
    /// Sends a message with all descriptors, and removes the messages before it.
    fn publish(&self) -> Result<(), Errno> {
        let [read, write] = &self.ends;
        // The message is never empty: an empty one looks like none.
        let bytes: Vec<u8> =
            [0].into_iter().chain(self.numbers.iter().flat_map(|fd| fd.to_be_bytes())).collect();
        let fds: Vec<_> = self.numbers.iter().copied().collect();
        let rights = [ControlMessage::ScmRights(&fds)];
        let rights = if fds.is_empty() { &rights[..0] } else { &rights[..] };
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        sendmsg::<()>(write.as_raw_fd(), &[io::IoSlice::new(&bytes)], rights, flags, None)?;
        while waiting(read.as_fd())? > bytes.len() {
            recv(read.as_raw_fd(), &mut [], MsgFlags::MSG_DONTWAIT)?;
        }
        Ok(())
    }
}

/// Descriptors with their former numbers.
pub(super) type Numbered = Vec<(RawFd, OwnedFd)>;

/// Returns the numbers and the descriptors in a lot, and leaves its last message there.
pub(super) fn read_lot(read: BorrowedFd<'_>) -> io::Result<(BTreeSet<RawFd>, Numbered)> {
    let end = read.as_raw_fd();
    loop {
        let mut bytes = [0; 1 + 4 * LOT as usize];
        let mut space = cmsg_space!([RawFd; LOT as usize]);
        let mut parts = [io::IoSliceMut::new(&mut bytes)];
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_PEEK | MsgFlags::MSG_CMSG_CLOEXEC;
        let (length, fds) = match recvmsg::<()>(end, &mut parts, Some(&mut space), flags) {
            // The lot has no message yet.
            Err(Errno::EAGAIN) => return Ok(Default::default()),
            Err(error) => return Err(error.into()),
            Ok(received) => {
                let mut fds = Vec::new();
                for message in received.cmsgs()? {
                    if let ControlMessageOwned::ScmRights(raw) = message {
                        // SAFETY: the kernel has just created these descriptors, and they have no other owner.
                        fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
                    }
                }
                (received.bytes, fds)
            }
        };
        if waiting(read)? > length {
            // A front was killed before it removed this message.
            recv(end, &mut [], MsgFlags::MSG_DONTWAIT)?;
            continue;
        }
        let numbers: Vec<_> =
            bytes[1..length].as_chunks().0.iter().map(|number| RawFd::from_be_bytes(*number)).collect();
        if numbers.len() != fds.len() {
            // The limit of open files was reached.
            return Err(Errno::EMFILE.into());
        }
        return Ok((numbers.iter().copied().collect(), numbers.into_iter().zip(fds).collect()));
    }
}

/// Returns the number of bytes that can be read.
fn waiting(fd: BorrowedFd<'_>) -> Result<usize, Errno> {
    let mut count: libc::c_int = 0;
    // SAFETY: the call writes one number.
    Errno::result(unsafe { libc::ioctl(fd.as_raw_fd(), libc::FIONREAD, &mut count) })?;
    Ok(usize::try_from(count).unwrap_or_default())
}

/// Returns the value of [`LOTS`], and the descriptors that it names.
pub fn pass_on() -> (String, Vec<RawFd>) {
    let (mut text, mut fds) = (String::new(), Vec::new());
    for (quotient, lot) in lots().iter() {
        let ends = lot.ends.each_ref().map(AsRawFd::as_raw_fd);
        text += &format!("{quotient}:{}:{} ", ends[0], ends[1]);
        fds.extend(ends);
    }
    (text, fds)
}

/// Receives the lots that the previous build has passed on.
pub fn take_passed_on() -> io::Result<()> {
    for lot in env::var(LOTS).unwrap_or_default().split_whitespace() {
        let numbers: Vec<RawFd> = lot.split(':').filter_map(|number| number.parse().ok()).collect();
        let [quotient, read, write] = numbers[..] else { continue };
        // SAFETY: the previous build has left these descriptors for this one.
        let ends = [read, write].map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
        for end in &ends {
            fcntl(end, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
        }
        let (numbers, _) = read_lot(ends[0].as_fd())?;
        lots().insert(quotient, Lot { ends, numbers });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::{is_same, tests::written};
    use super::*;

    #[test]
    fn a_lot_has_what_was_put_into_it_last_whatever_a_killed_front_has_left_behind() {
        let (read, write) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap();
        let mut lot = Lot { ends: [read, write], numbers: BTreeSet::new() };
        assert!(read_lot(lot.ends[0].as_fd()).unwrap().1.is_empty());
        let all: Vec<_> = (0..LOT).map(|n| written(&format!("file {n}"))).collect();
        for fd in &all {
            lot.numbers.insert(fd.as_raw_fd());
            lot.publish().unwrap();
        }
        let check = |lot: &Lot| {
            let (numbers, fds) = read_lot(lot.ends[0].as_fd()).unwrap();
            assert_eq!(numbers, lot.numbers);
            for (number, fd) in fds {
                assert!(is_same(number, fd.as_raw_fd()), "{number}");
            }
        };
        check(&lot);
        // A message was sent, and the previous one not removed.
        let [_, write] = &lot.ends;
        let removed = lot.numbers.pop_first().unwrap();
        sendmsg::<()>(write.as_raw_fd(), &[io::IoSlice::new(&[0])], &[], MsgFlags::empty(), None).unwrap();
        lot.numbers.clear();
        check(&lot);
        lot.numbers.insert(removed);
        lot.publish().unwrap();
        check(&lot);
    }
}
