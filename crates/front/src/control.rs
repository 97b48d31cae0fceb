//! The protocol between front and worker: one packet per message, over a `SOCK_SEQPACKET` pair.
//!
//! ```text
//! kind u8 │ length of key u16 │ key │ note          and up to MAX_FDS descriptors
//! ```
//!
//! A packet that was sent is received even if its sender is killed at once. So an entry is safe as soon as the worker
//! has sent it, without a response.

use std::{
    io::{self, IoSlice, IoSliceMut},
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
};

use nix::{
    cmsg_space,
    errno::Errno,
    sys::socket::{
        AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, recv, recvmsg,
        sendmsg, socketpair,
    },
};

/// The longest message, bytes.
pub const MAX_MESSAGE_BYTES: usize = 32 << 10;
/// The most descriptors with one message.
pub const MAX_FDS: usize = 8;

/// The key prefix of the task socket's listener, on which the front accepts connections; a path may follow.
pub const TASK_LISTENER: &str = "listen task ";

/// The first word of the keys of entries without which no program may take over: their notes say what it must support.
/// The front shows them to [`Build::unfit`](crate::Build::unfit).
pub const NEEDS: &str = "needs";

/// The key of the entry that the front itself gives each worker: the number of reloads so far, a space, and why the
/// last of them did not replace the front; nothing if it did.
pub const RELOADS: &str = "front reloads";

/// The note of a [`Kind::Ready`] from a worker that supports [`Kind::Ping`]. A worker of an earlier build must not
/// receive a ping: it treats an unknown message as the front's end.
pub const ANSWERS_PINGS: &[u8] = b"answers pings";

/// The note of a [`Kind::Open`] for reading only.
pub const FOR_READING: &[u8] = b"r";

/// The kind of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Worker: keep the descriptors and the note under the key, replacing an existing entry.
    Keep = 1,
    /// Worker: remove the entry with the key.
    Forget = 2,
    /// Worker: all earlier pods are adopted, and requests may be sent. With the note [`ANSWERS_PINGS`] it supports
    /// [`Kind::Ping`].
    Ready = 3,
    /// Front: an entry from an earlier worker.
    Kept = 4,
    /// Front: all entries were sent. The note identifies this front.
    AllKept = 5,
    /// Front: the descriptor is the link of a task connection.
    Connection = 6,
    /// Worker: open the FIFO that the first descriptor refers to, for reading if the note is [`FOR_READING`], otherwise
    /// for reading and writing; keep it under the key; respond with [`Kind::Kept`] over the second descriptor, a socket
    /// like this one. A response without a descriptor has the system's error number as its note.
    ///
    /// If the worker opened a FIFO itself and died before sending it, the FIFO would be closed, and the process at the
    /// other end would read the end of the stream.
    Open = 7,
    /// Front: check whether the worker responds.
    Ping = 8,
    /// Worker: the response to [`Kind::Ping`], from the threads that do its work.
    Pong = 9,
}

/// A message with its descriptors.
#[derive(Debug)]
pub struct Message {
    /// The kind of the message.
    pub kind: Kind,
    /// The key of the message's entry; empty if there is none.
    pub key: String,
    /// The worker's data.
    pub note: Vec<u8>,
    /// The descriptors, in the order of sending.
    pub fds: Vec<OwnedFd>,
}

/// Creates a pair of blocking sockets, for one response.
pub fn answering() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?)
}

/// Creates a pair of sockets: the front's, which is non-blocking, and the worker's. Both are close-on-exec.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (front, worker) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
    nix::fcntl::fcntl(&front, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK))?;
    Ok((front, worker))
}

/// Sends one message. Blocks on a blocking socket while the peer's queue is full.
pub fn send(
    socket: BorrowedFd<'_>,
    kind: Kind,
    key: &str,
    note: &[u8],
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    send_with(socket, kind, key, note, fds, MsgFlags::empty())
}

/// Sends one message. With `MSG_DONTWAIT` in `flags` it does not block while the peer's queue is full.
pub fn send_with(
    socket: BorrowedFd<'_>,
    kind: Kind,
    key: &str,
    note: &[u8],
    fds: &[BorrowedFd<'_>],
    flags: MsgFlags,
) -> io::Result<()> {
    let length = u16::try_from(key.len()).map_err(|_| too_long())?;
    if 3 + key.len() + note.len() > MAX_MESSAGE_BYTES || fds.len() > MAX_FDS {
        return Err(too_long());
    }
    let head = [kind as u8, length.to_be_bytes()[0], length.to_be_bytes()[1]];
    let parts = [IoSlice::new(&head), IoSlice::new(key.as_bytes()), IoSlice::new(note)];
    let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let rights = if raw.is_empty() { &rights[..0] } else { &rights[..] };
    loop {
        match sendmsg::<()>(socket.as_raw_fd(), &parts, rights, flags | MsgFlags::MSG_NOSIGNAL, None) {
            Err(Errno::EINTR) => {}
            sent => return Ok(sent.map(drop)?),
        }
    }
}

/// Returns the next message and leaves it in the socket, for [`skip`]; `None` after the peer has closed. Does not
/// block.
pub fn peek(socket: BorrowedFd<'_>) -> io::Result<Option<Message>> {
    receive(socket, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_PEEK)
}

/// Removes the next message from the socket, and closes its descriptors.
pub fn skip(socket: BorrowedFd<'_>) -> io::Result<()> {
    Ok(recv(socket.as_raw_fd(), &mut [], MsgFlags::MSG_DONTWAIT).map(drop)?)
}

/// Receives one message; `None` after the peer has closed. With `MSG_DONTWAIT` in `flags` it does not block.
pub fn receive(socket: BorrowedFd<'_>, flags: MsgFlags) -> io::Result<Option<Message>> {
    let mut bytes = vec![0; MAX_MESSAGE_BYTES];
    let mut rights = cmsg_space!([RawFd; MAX_FDS]);
    let (count, truncated, fds) = loop {
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let flags = flags | MsgFlags::MSG_CMSG_CLOEXEC;
        match recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut rights), flags) {
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
            Ok(received) => {
                let mut fds = Vec::new();
                for message in received.cmsgs()? {
                    if let ControlMessageOwned::ScmRights(raw) = message {
                        // SAFETY: the kernel has just created these descriptors, and they have no other owner.
                        fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
                    }
                }
                let cut = MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC;
                break (received.bytes, received.flags.intersects(cut), fds);
            }
        }
    };
    if count == 0 {
        return Ok(None);
    }
    if truncated {
        return Err(malformed("truncated message; the limit of open files may be reached"));
    }
    bytes.truncate(count);
    parse(bytes, fds).map(Some)
}

fn parse(mut bytes: Vec<u8>, fds: Vec<OwnedFd>) -> io::Result<Message> {
    let &[kind, high, low] = bytes.first_chunk().ok_or_else(|| malformed("message without a header"))?;
    use Kind::{AllKept, Connection, Forget, Keep, Kept, Open, Ping, Pong, Ready};
    let kind = [Keep, Forget, Ready, Kept, AllKept, Connection, Open, Ping, Pong]
        .into_iter()
        .find(|known| *known as u8 == kind)
        .ok_or_else(|| malformed("message of an unknown kind"))?;
    let end = 3 + usize::from(u16::from_be_bytes([high, low]));
    if end > bytes.len() {
        return Err(malformed("message shorter than its key"));
    }
    let note = bytes.split_off(end);
    let key = String::from_utf8(bytes.split_off(3)).map_err(|_| malformed("key is not UTF-8"))?;
    Ok(Message { kind, key, note, fds })
}

fn malformed(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn too_long() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "message between front and worker is too long")
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        io::{Read as _, Write as _},
        os::fd::AsFd,
    };

    use super::*;

    #[test]
    fn what_a_peer_sent_before_it_went_is_received_with_its_descriptors() {
        let (front, worker) = pair().unwrap();
        let (read, write) = std::io::pipe().unwrap();
        send(worker.as_fd(), Kind::Keep, "a key", b"a note", &[write.as_fd()]).unwrap();
        send(worker.as_fd(), Kind::Ready, "", &[], &[]).unwrap();
        drop((worker, write));

        let mut message = receive(front.as_fd(), MsgFlags::empty()).unwrap().unwrap();
        assert_eq!((message.kind, message.key.as_str()), (Kind::Keep, "a key"));
        assert_eq!(message.note, b"a note");
        File::from(message.fds.remove(0)).write_all(b"through").unwrap();
        let mut text = String::new();
        { read }.read_to_string(&mut text).unwrap();
        assert_eq!(text, "through");
        assert_eq!(receive(front.as_fd(), MsgFlags::empty()).unwrap().unwrap().kind, Kind::Ready);
        assert!(receive(front.as_fd(), MsgFlags::empty()).unwrap().is_none());
    }

    #[test]
    fn what_is_no_message_is_an_error() {
        for bytes in [&[1_u8][..], &[99, 0, 0], &[1, 0, 5, b'x'], &[1, 0, 1, 0xff]] {
            assert!(parse(bytes.to_vec(), Vec::new()).is_err(), "{bytes:?}");
        }
        let (front, _worker) = pair().unwrap();
        assert!(send(front.as_fd(), Kind::Keep, "", &vec![0; MAX_MESSAGE_BYTES], &[]).is_err());
    }
}
