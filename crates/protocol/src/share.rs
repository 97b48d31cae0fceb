//! A guest's file requests on their way to the process that serves its shares, and the answers back.
//!
//! The messages are the kernel's own, those of `/dev/fuse` (Linux' `include/uapi/linux/fuse.h`), and nobody
//! on the way reads more of them than the head:
//!
//! ```text
//! request   length:u32 opcode:u32 unique:u64 …
//! answer    length:u32 error:i32 unique:u64 …
//! ```
//!
//! Each request has a slot that is not given to another one before the agent has the answer. So whoever has
//! served a slot knows by the next request in it that the answer before arrived, and one that comes again,
//! after a daemon's death, by its `unique`: it is answered again, not carried out again.
//!
//! Between daemon and server each message is preceded by its slot and its length, both `u32`. All integers are
//! little-endian, as on the one architecture there is.

/// Requests that may be under way at once in one guest.
pub const SLOTS: usize = 16;

/// Most bytes of a file in one message: what a kernel moves at once that isn't told otherwise, 32 pages.
pub const MAX_DATA: usize = 128 << 10;

/// Longest message: a file's bytes and what stands before them.
pub const MAX_MESSAGE: usize = MAX_DATA + 4096;

/// Most bytes of messages that daemon and agent hand each other at once, beside what is around them: the
/// longest message always fits.
pub const MAX_BATCH: usize = MAX_MESSAGE;

/// Most bytes in which a message is wrapped when it is handed over.
pub const AROUND_MESSAGE: usize = 64;

/// Where the guest has its shares mounted, each under its name.
pub const GUEST_DIR: &str = "/run/sandboxer/shares";

/// Length of a request's head, bytes.
pub const REQUEST_HEAD: usize = 40;

/// Length of an answer's head, bytes: the whole of an answer that is an error.
pub const ANSWER_HEAD: usize = 16;

/// Length of what precedes a message on the way between daemon and server, bytes.
pub const FRAME_HEAD: usize = 8;

/// Kinds of requests that are told apart here.
pub mod opcode {
    /// A name in a directory.
    pub const LOOKUP: u32 = 1;
    /// The kernel has dropped an inode. Never answered.
    pub const FORGET: u32 = 2;
    /// A file's attributes.
    pub const GETATTR: u32 = 3;
    /// Changes a file's attributes.
    pub const SETATTR: u32 = 4;
    /// Where a link leads.
    pub const READLINK: u32 = 5;
    /// Makes a link.
    pub const SYMLINK: u32 = 6;
    /// Makes a file, or a pipe or a socket.
    pub const MKNOD: u32 = 8;
    /// Makes a directory.
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
    /// How much room there is.
    pub const STATFS: u32 = 17;
    /// Sets an extended attribute.
    pub const SETXATTR: u32 = 21;
    /// An extended attribute.
    pub const GETXATTR: u32 = 22;
    /// Names of extended attributes.
    pub const LISTXATTR: u32 = 23;
    /// Removes an extended attribute.
    pub const REMOVEXATTR: u32 = 24;
    /// The first request.
    pub const INIT: u32 = 26;
    /// Opens a directory.
    pub const OPENDIR: u32 = 27;
    /// Names in a directory.
    pub const READDIR: u32 = 28;
    /// Whether somebody may do something.
    pub const ACCESS: u32 = 34;
    /// Makes a file and opens it.
    pub const CREATE: u32 = 35;
    /// Whoever made a request would rather not wait. Never answered.
    pub const INTERRUPT: u32 = 36;
    /// The last request. Never answered here.
    pub const DESTROY: u32 = 38;
    /// The kernel has dropped inodes. Never answered.
    pub const BATCH_FORGET: u32 = 42;
    /// Reserves room for a file.
    pub const FALLOCATE: u32 = 43;
    /// Names in a directory, and what they name.
    pub const READDIRPLUS: u32 = 44;
    /// Moves a name, or two.
    pub const RENAME2: u32 = 45;
}

/// A request's head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// What is asked; see [`opcode`].
    pub opcode: u32,
    /// Tells it from all other requests of the same guest.
    pub unique: u64,
}

impl Head {
    /// The head of `request`; none if that isn't one whole request of a length that is taken.
    pub fn of(request: &[u8]) -> Option<Self> {
        if !(REQUEST_HEAD..=MAX_MESSAGE).contains(&request.len())
            || usize::try_from(u32_at(request, 0)?).ok()? != request.len()
        {
            return None;
        }
        Some(Self { opcode: u32_at(request, 4)?, unique: u64_at(request, 8)? })
    }

    /// Whether the guest's kernel waits for an answer. An empty one is given where it doesn't, to free the slot.
    pub fn is_answered(&self) -> bool {
        !matches!(self.opcode, opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT | opcode::DESTROY)
    }

    /// An answer that only says that the request failed, with an error number as in errno(3).
    pub fn failed(&self, errno: i32) -> Vec<u8> {
        if !self.is_answered() {
            return Vec::new();
        }
        let length = ANSWER_HEAD as u32;
        [&length.to_le_bytes()[..], &(-errno).to_le_bytes(), &self.unique.to_le_bytes()].concat()
    }

    /// Whether `answer` is one to this request.
    pub fn is_answered_by(&self, answer: &[u8]) -> bool {
        if !self.is_answered() {
            return answer.is_empty();
        }
        let length = u32_at(answer, 0).and_then(|length| usize::try_from(length).ok());
        length == Some(answer.len()) && u64_at(answer, 8) == Some(self.unique)
    }
}

/// What precedes `message` of `slot` between daemon and server.
pub fn frame_head(slot: u32, message: &[u8]) -> [u8; FRAME_HEAD] {
    let mut head = [0; FRAME_HEAD];
    head[..4].copy_from_slice(&slot.to_le_bytes());
    head[4..].copy_from_slice(&(message.len() as u32).to_le_bytes());
    head
}

/// Slot and length that precede a message; none if either is not taken.
pub fn read_frame_head(head: [u8; FRAME_HEAD]) -> Option<(u32, usize)> {
    let (slot, length) = (u32_at(&head, 0)?, usize::try_from(u32_at(&head, 4)?).ok()?);
    (usize::try_from(slot).ok()? < SLOTS && length <= MAX_MESSAGE).then_some((slot, length))
}

/// The integer at `at`.
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
        assert_eq!(Head::of(&whole), Some(Head { opcode: opcode::READ, unique: 7 }));
        assert_eq!(Head::of(&whole[..whole.len() - 1]), None);
        assert_eq!(Head::of(&[&whole[..], b"x"].concat()), None);
        assert_eq!(Head::of(&whole[..REQUEST_HEAD]), None);
        assert_eq!(Head::of(&[]), None);
        assert_eq!(Head::of(&request(opcode::READ, 7, &vec![0; MAX_MESSAGE])), None);
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
    fn a_frame_has_a_slot_that_there_is_and_a_length_that_is_taken() {
        assert_eq!(read_frame_head(frame_head(3, b"four")), Some((3, 4)));
        assert_eq!(read_frame_head(frame_head(SLOTS as u32, b"")), None);
        assert_eq!(read_frame_head(frame_head(0, &vec![0; MAX_MESSAGE + 1])), None);
    }
}
