//! The transport of a guest's file requests to its share server, and of the responses.
//!
//! The messages are those of `/dev/fuse` (Linux' `include/uapi/linux/fuse.h`):
//!
//! ```text
//! request   length:u32 opcode:u32 unique:u64 …
//! answer    length:u32 error:i32 unique:u64 …
//! ```
//!
//! There are two transports, depending on the VM; neither passes through the daemon:
//!
//! - **A disk** that the server serves to the VMM ([`disk`]). A block request moves a megabyte at once, directly
//!   between the server's socket and the guest's memory; a virtio-serial port moves 4 KiB.
//! - **Streams**, [`SLOTS`] of them, each carrying one request and then its response. Each begins with a key
//!   ([`crate::link::LinkKey`]) that the agent gets from the daemon: any process in a guest can connect to its host.
//!
//! All integers are little-endian, as on the only supported architecture.

/// Maximum concurrent requests of one guest.
pub const SLOTS: usize = 4;

/// Maximum bytes of a file in one message: the kernel moves 256 pages at once.
pub const MAX_DATA: usize = 1 << 20;

/// Maximum length of a message: a file's bytes and the headers.
pub const MAX_MESSAGE: usize = MAX_DATA + 4096;

/// Serial of the disk that carries requests.
pub const DISK_SERIAL: &str = "shares";

/// The host's vsock port of the streams.
pub const VSOCK_PORT: u32 = 1025;

/// The layout of a disk that serves as a mailbox. Each slot is a part of it: a request is written at its beginning, and
/// the response is read at [`disk::ANSWER`]. Reading a response makes the server execute the request, which is
/// completely written by then.
///
/// ```text
/// slot     0 request …                 ANSWER … state head data …
///                                               └───┴────┴─ at a page's beginning
/// ```
pub mod disk {
    use super::{MAX_DATA, MAX_MESSAGE, REQUEST_HEAD, SLOTS, opcode, u32_at};

    /// Bytes of a slot.
    pub const SLOT: usize = 4 << 20;
    /// Bytes of the disk.
    pub const SIZE: usize = SLOTS * SLOT;
    /// Bytes of a sector: requests and responses are moved in whole sectors.
    pub const SECTOR: usize = 512;
    /// Maximum bytes of a request.
    pub const REQUEST: usize = MAX_MESSAGE;
    /// Offset of a slot's response.
    pub const ANSWER: usize = 2 << 20;
    /// Offset of the first used sector of a response, from [`ANSWER`] on.
    pub const FIRST: usize = DATA - SECTOR;
    /// Offset of the message, likewise: the file's bytes after its head are page-aligned.
    pub const MESSAGE: usize = DATA - super::ANSWER_HEAD;
    /// Offset of the state: [`DONE`] or [`LATER`].
    pub const STATE: usize = MESSAGE - 4;
    /// Maximum bytes of a response, from [`ANSWER`] on.
    pub const ANSWER_LENGTH: usize = DATA + MAX_DATA;
    /// The response is complete. With length 0 there is no response.
    pub const DONE: u32 = 1;
    /// There is no response yet; read again.
    pub const LATER: u32 = 2;
    /// Offset of the bytes after a response's head.
    const DATA: usize = 4096;
    /// Maximum bytes after the head of responses to most requests.
    const PLAIN: usize = 4096;

    /// Returns the number of bytes of the response to `request` that must be read, from [`FIRST`] on.
    pub fn to_read(request: &[u8]) -> usize {
        let size = match u32_at(request, 4) {
            Some(opcode::READ | opcode::READDIR | opcode::READDIRPLUS) => u32_at(request, REQUEST_HEAD + 16),
            Some(opcode::GETXATTR | opcode::LISTXATTR) => u32_at(request, REQUEST_HEAD),
            _ => None,
        };
        let size = size.and_then(|size| usize::try_from(size).ok()).unwrap_or(0);
        SECTOR + size.clamp(PLAIN, MAX_DATA).next_multiple_of(SECTOR)
    }
}

/// Directory of shares in the guest, each under its name.
pub const GUEST_DIR: &str = "/run/sandboxer/shares";

/// Length of a request's head, bytes.
pub const REQUEST_HEAD: usize = 40;

/// Length of a response's head, bytes: the whole of a response that is an error.
pub const ANSWER_HEAD: usize = 16;

/// Opcodes of requests.
pub mod opcode {
    /// Looks up a name in a directory.
    pub const LOOKUP: u32 = 1;
    /// The kernel has dropped an inode. Without a response.
    pub const FORGET: u32 = 2;
    /// Returns a file's attributes.
    pub const GETATTR: u32 = 3;
    /// Changes a file's attributes.
    pub const SETATTR: u32 = 4;
    /// Reads a symbolic link.
    pub const READLINK: u32 = 5;
    /// Creates a symbolic link.
    pub const SYMLINK: u32 = 6;
    /// Creates a file, a pipe or a socket.
    pub const MKNOD: u32 = 8;
    /// Creates a directory.
    pub const MKDIR: u32 = 9;
    /// Removes a name.
    pub const UNLINK: u32 = 10;
    /// Removes a directory.
    pub const RMDIR: u32 = 11;
    /// Moves a name.
    pub const RENAME: u32 = 12;
    /// Gives a file another name.
    pub const LINK: u32 = 13;
    /// Opens a file.
    pub const OPEN: u32 = 14;
    /// Reads from a file.
    pub const READ: u32 = 15;
    /// Returns file system statistics.
    pub const STATFS: u32 = 17;
    /// Sets an extended attribute.
    pub const SETXATTR: u32 = 21;
    /// Returns an extended attribute.
    pub const GETXATTR: u32 = 22;
    /// Returns the names of extended attributes.
    pub const LISTXATTR: u32 = 23;
    /// Removes an extended attribute.
    pub const REMOVEXATTR: u32 = 24;
    /// Negotiates the protocol; the first request.
    pub const INIT: u32 = 26;
    /// Opens a directory.
    pub const OPENDIR: u32 = 27;
    /// Returns the names in a directory.
    pub const READDIR: u32 = 28;
    /// Checks access rights.
    pub const ACCESS: u32 = 34;
    /// Creates a file and opens it.
    pub const CREATE: u32 = 35;
    /// Interrupts a request. Without a response.
    pub const INTERRUPT: u32 = 36;
    /// Ends the session; the last request. Without a response here.
    pub const DESTROY: u32 = 38;
    /// The kernel has dropped inodes. Without a response.
    pub const BATCH_FORGET: u32 = 42;
    /// Allocates space for a file.
    pub const FALLOCATE: u32 = 43;
    /// Returns the names in a directory, each with the attributes of its file.
    pub const READDIRPLUS: u32 = 44;
    /// Renames, with flags.
    pub const RENAME2: u32 = 45;
}

/// A request's head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// The kind of the request; see [`opcode`].
    pub opcode: u32,
    /// The number that identifies the request among those of the same guest.
    pub unique: u64,
}

impl Head {
    /// Returns the head of `request`; `None` if it is not one whole request of an accepted length.
    pub fn parse(request: &[u8]) -> Option<Self> {
        if Self::begins(request)? != request.len() {
            return None;
        }
        Some(Self { opcode: u32_at(request, 4)?, unique: u64_at(request, 8)? })
    }

    /// Returns the length of the request that starts with `beginning`; `None` if it is not accepted.
    pub fn begins(beginning: &[u8]) -> Option<usize> {
        let length = usize::try_from(u32_at(beginning, 0)?).ok()?;
        (REQUEST_HEAD..=MAX_MESSAGE).contains(&length).then_some(length)
    }

    /// Returns whether the guest's kernel waits for a response.
    pub fn is_answered(&self) -> bool {
        !matches!(self.opcode, opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT | opcode::DESTROY)
    }

    /// Returns a response with an error number as in errno(3).
    pub fn failed(&self, errno: i32) -> Vec<u8> {
        if !self.is_answered() {
            return Vec::new();
        }
        let length = ANSWER_HEAD as u32;
        [&length.to_le_bytes()[..], &(-errno).to_le_bytes(), &self.unique.to_le_bytes()].concat()
    }

    /// Returns whether `answer` belongs to this request.
    pub fn is_answered_by(&self, answer: &[u8]) -> bool {
        if !self.is_answered() {
            return answer.is_empty();
        }
        let length = u32_at(answer, 0).and_then(|length| usize::try_from(length).ok());
        length == Some(answer.len()) && u64_at(answer, 8) == Some(self.unique)
    }
}

/// Returns the integer at `at`.
pub fn u32_at(message: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(message.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(message: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(message.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(opcode: u32, unique: u64, body: &[u8]) -> Vec<u8> {
        let length = (REQUEST_HEAD + body.len()) as u32;
        [&length.to_le_bytes()[..], &opcode.to_le_bytes(), &unique.to_le_bytes(), &[0; 24], body].concat()
    }

    #[test]
    fn only_whole_requests_have_a_head() {
        let whole = request(opcode::READ, 7, b"body");
        assert_eq!(Head::parse(&whole), Some(Head { opcode: opcode::READ, unique: 7 }));
        assert_eq!(Head::parse(&whole[..whole.len() - 1]), None);
        assert_eq!(Head::parse(&[&whole[..], b"x"].concat()), None);
        assert_eq!(Head::parse(&whole[..REQUEST_HEAD]), None);
        assert_eq!(Head::parse(&[]), None);
        assert_eq!(Head::parse(&request(opcode::READ, 7, &vec![0; MAX_MESSAGE])), None);
        assert_eq!(Head::begins(&whole), Some(whole.len()));
        assert_eq!(Head::begins(&request(opcode::READ, 7, &vec![0; MAX_MESSAGE])), None);
    }

    #[test]
    fn an_answer_belongs_to_one_request() {
        let read = Head { opcode: opcode::READ, unique: 7 };
        assert!(read.is_answered_by(&read.failed(5)));
        assert!(!read.is_answered_by(&Head { unique: 8, ..read }.failed(5)));
        assert!(!read.is_answered_by(&[]));
        let forget = Head { opcode: opcode::FORGET, unique: 9 };
        assert!(forget.is_answered_by(&forget.failed(5)), "there is none");
    }

    #[test]
    fn an_answer_is_read_whole_and_no_further_than_there_is() {
        let read = |size: u32| {
            let body = [&[0; 16][..], &size.to_le_bytes(), &[0; 20]].concat();
            disk::to_read(&request(opcode::READ, 7, &body))
        };
        assert_eq!(read(0), disk::SECTOR + 4096);
        assert_eq!(read(10_000), disk::SECTOR + 10_240);
        assert_eq!(disk::FIRST + read(u32::MAX), disk::ANSWER_LENGTH, "a liar gets what there is");
        assert_eq!(disk::to_read(&request(opcode::LOOKUP, 7, b"name")), disk::SECTOR + 4096);
        assert_eq!(disk::to_read(&[]), disk::SECTOR + 4096);
    }
}
