//! The messages of `/dev/fuse` (Linux' `include/uapi/linux/fuse.h`): requests are parsed, responses written.
//!
//! Requests come from the guest, so nothing in them is trusted: every field is read within the message's bounds, and a
//! request whose name is not a [`Name`] is refused.

use std::{ffi::CStr, time::Duration};

use rustix::{
    fs::{Statx, StatxTimestamp},
    io::Errno,
};
use sandboxer_protocol::share::{ANSWER_HEAD, MAX_DATA, REQUEST_HEAD, opcode};

/// The result of a request.
pub type Result<T> = std::result::Result<T, Errno>;

/// The name of a file in its directory: one component, neither `.` nor `..`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Name<'a>(&'a CStr);

impl<'a> Name<'a> {
    /// Checks a name.
    ///
    /// # Errors
    ///
    /// `EINVAL`: the name is empty, `.` or `..`, or has a slash.
    pub fn new(name: &'a CStr) -> Result<Self> {
        match name.to_bytes() {
            b"" | b"." | b".." => Err(Errno::INVAL),
            bytes if bytes.contains(&b'/') => Err(Errno::INVAL),
            _ => Ok(Self(name)),
        }
    }

    /// Returns the name in the form that system calls take.
    pub fn as_c_str(self) -> &'a CStr {
        self.0
    }
}

/// The attributes to set; those that are `None` are not changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Changes {
    /// The handle of an open file.
    pub handle: Option<u64>,
    /// The permissions.
    pub mode: Option<u32>,
    /// The user ID of the owner.
    pub uid: Option<u32>,
    /// The group ID of the owner.
    pub gid: Option<u32>,
    /// The length, bytes.
    pub size: Option<u64>,
    /// The access time.
    pub accessed: Option<Time>,
    /// The modification time.
    pub modified: Option<Time>,
    /// Whether a new length clears the file's set-user-ID and set-group-ID bits.
    pub kill: bool,
}

/// A time to set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Time {
    /// The current time of the host.
    Now,
    /// A number of seconds and nanoseconds since 1970.
    At(i64, u32),
}

/// A request. The node that it is about is not part of it: see [`node`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is the system call of its name, with its arguments")]
pub enum Request<'a> {
    Init { major: u32, flags: u32 },
    Destroy,
    Interrupt,
    Lookup { name: Name<'a> },
    Forget { count: u64 },
    BatchForget { forgotten: Vec<(u64, u64)> },
    GetAttributes { handle: Option<u64> },
    SetAttributes(Changes),
    ReadLink,
    MakeLink { name: Name<'a>, target: &'a CStr },
    MakeNode { name: Name<'a>, mode: u32, device: u32, umask: u32 },
    MakeDirectory { name: Name<'a>, mode: u32, umask: u32 },
    Remove { name: Name<'a>, directory: bool },
    Rename { name: Name<'a>, to: u64, new: Name<'a>, flags: u32 },
    Link { file: u64, name: Name<'a> },
    Open { flags: u32, kill: bool },
    Create { name: Name<'a>, flags: u32, mode: u32, umask: u32, kill: bool },
    OpenDirectory,
    Read { handle: u64, offset: u64, size: usize },
    Write { handle: u64, offset: u64, flags: u32, data: &'a [u8], kill: bool },
    List { handle: u64, offset: u64, size: usize, plus: bool },
    Release { handle: u64 },
    Flush { handle: u64 },
    Sync { handle: u64, only_data: bool },
    Allocate { handle: u64, offset: u64, length: u64, mode: u32 },
    Seek { handle: u64, offset: u64, whence: u32 },
    Space,
    SetAttribute { name: &'a CStr, value: &'a [u8], flags: u32, kill: bool },
    GetAttribute { name: &'a CStr, size: usize },
    ListAttributes { size: usize },
    RemoveAttribute { name: &'a CStr },
}

/// Kinds of requests that only the server knows.
mod kind {
    pub const WRITE: u32 = 16;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const FLUSH: u32 = 25;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const LSEEK: u32 = 46;
}

/// Bits of a request's fields.
mod bit {
    pub const GETATTR_FH: u32 = 1;
    pub const OPEN_KILL: u32 = 1;
    pub const WRITE_KILL: u32 = 1 << 2;
    pub const SYNC_DATA: u32 = 1;
    pub const XATTR_KILL: u32 = 1;
}

/// Returns the node that a request is about.
pub fn node(request: &[u8]) -> Option<u64> {
    Fields(request.get(16..)?).u64().ok()
}

impl<'a> Request<'a> {
    /// Parses a whole message.
    ///
    /// # Errors
    ///
    /// `ENOSYS`: requests of this kind are not served here. `EINVAL`: no kernel sends such a request.
    pub fn parse(message: &'a [u8]) -> Result<Self> {
        let opcode = Fields(message.get(4..).ok_or(Errno::INVAL)?).u32()?;
        let mut body = Fields(message.get(REQUEST_HEAD..).ok_or(Errno::INVAL)?);
        Ok(match opcode {
            opcode::INIT => {
                let (major, _minor, _read_ahead) = (body.u32()?, body.u32()?, body.u32()?);
                Self::Init { major, flags: body.u32()? }
            }
            opcode::DESTROY => Self::Destroy,
            opcode::INTERRUPT => Self::Interrupt,
            opcode::LOOKUP => Self::Lookup { name: body.name()? },
            opcode::FORGET => Self::Forget { count: body.u64()? },
            opcode::BATCH_FORGET => {
                let (count, _) = (body.u32()?, body.u32()?);
                // Reads as many entries as the message has, whatever its count says.
                let forgotten = (0..count).map_while(|_| Some((body.u64().ok()?, body.u64().ok()?)));
                Self::BatchForget { forgotten: forgotten.collect() }
            }
            opcode::GETATTR => {
                let (flags, _, handle) = (body.u32()?, body.u32()?, body.u64()?);
                Self::GetAttributes { handle: (flags & bit::GETATTR_FH != 0).then_some(handle) }
            }
            opcode::SETATTR => Self::SetAttributes(changes(&mut body)?),
            opcode::READLINK => Self::ReadLink,
            opcode::SYMLINK => Self::MakeLink { name: body.name()?, target: body.string()? },
            opcode::MKNOD => {
                let (mode, device, umask, _) = (body.u32()?, body.u32()?, body.u32()?, body.u32()?);
                Self::MakeNode { name: body.name()?, mode, device, umask }
            }
            opcode::MKDIR => {
                let (mode, umask) = (body.u32()?, body.u32()?);
                Self::MakeDirectory { name: body.name()?, mode, umask }
            }
            opcode::UNLINK => Self::Remove { name: body.name()?, directory: false },
            opcode::RMDIR => Self::Remove { name: body.name()?, directory: true },
            opcode::RENAME => {
                let to = body.u64()?;
                Self::Rename { to, name: body.name()?, new: body.name()?, flags: 0 }
            }
            opcode::RENAME2 => {
                let (to, flags, _) = (body.u64()?, body.u32()?, body.u32()?);
                Self::Rename { to, name: body.name()?, new: body.name()?, flags }
            }
            opcode::LINK => Self::Link { file: body.u64()?, name: body.name()? },
            opcode::OPEN => {
                let (flags, more) = (body.open_flags()?, body.u32()?);
                Self::Open { flags, kill: more & bit::OPEN_KILL != 0 }
            }
            opcode::CREATE => {
                let (flags, mode, umask, more) = (body.open_flags()?, body.u32()?, body.u32()?, body.u32()?);
                Self::Create { name: body.name()?, flags, mode, umask, kill: more & bit::OPEN_KILL != 0 }
            }
            opcode::OPENDIR => {
                body.open_flags()?;
                Self::OpenDirectory
            }
            opcode::READ => {
                let (handle, offset) = (body.u64()?, body.u64()?);
                Self::Read { handle, offset, size: body.size()? }
            }
            kind::WRITE => {
                let (handle, offset, size, more) = (body.u64()?, body.u64()?, body.size()?, body.u32()?);
                let (_lock_owner, flags, _) = (body.u64()?, body.u32()?, body.u32()?);
                Self::Write {
                    handle,
                    offset,
                    flags,
                    data: body.take(size)?,
                    kill: more & bit::WRITE_KILL != 0,
                }
            }
            opcode::READDIR | opcode::READDIRPLUS => {
                let (handle, offset) = (body.u64()?, body.u64()?);
                Self::List { handle, offset, size: body.size()?, plus: opcode == opcode::READDIRPLUS }
            }
            kind::RELEASE | kind::RELEASEDIR => Self::Release { handle: body.u64()? },
            kind::FLUSH => Self::Flush { handle: body.u64()? },
            kind::FSYNC | kind::FSYNCDIR => {
                let (handle, flags) = (body.u64()?, body.u32()?);
                Self::Sync { handle, only_data: flags & bit::SYNC_DATA != 0 }
            }
            opcode::FALLOCATE => {
                let (handle, offset, length) = (body.u64()?, body.u64()?, body.u64()?);
                Self::Allocate { handle, offset, length, mode: body.u32()? }
            }
            kind::LSEEK => {
                let (handle, offset) = (body.u64()?, body.u64()?);
                Self::Seek { handle, offset, whence: body.u32()? }
            }
            opcode::STATFS => Self::Space,
            opcode::SETXATTR => {
                let (size, flags, more, _) = (body.size()?, body.u32()?, body.u32()?, body.u32()?);
                let name = body.string()?;
                Self::SetAttribute { name, value: body.take(size)?, flags, kill: more & bit::XATTR_KILL != 0 }
            }
            opcode::GETXATTR => {
                let (size, _) = (body.size()?, body.u32()?);
                Self::GetAttribute { size, name: body.string()? }
            }
            opcode::LISTXATTR => Self::ListAttributes { size: body.size()? },
            opcode::REMOVEXATTR => Self::RemoveAttribute { name: body.string()? },
            _ => return Err(Errno::NOSYS),
        })
    }
}

fn changes(body: &mut Fields<'_>) -> Result<Changes> {
    let (valid, _, handle, size) = (body.u32()?, body.u32()?, body.u64()?, body.u64()?);
    let (_lock_owner, accessed, modified, _changed) = (body.u64()?, body.u64()?, body.u64()?, body.u64()?);
    let (accessed_ns, modified_ns, _changed_ns) = (body.u32()?, body.u32()?, body.u32()?);
    let (mode, _, uid, gid) = (body.u32()?, body.u32()?, body.u32()?, body.u32()?);
    let has = |bit: u32| valid & 1 << bit != 0;
    let time = |set: u32, now: u32, seconds: u64, nanoseconds| match (has(now), has(set)) {
        (true, _) => Some(Time::Now),
        (false, true) => Some(Time::At(seconds.cast_signed(), nanoseconds)),
        (false, false) => None,
    };
    Ok(Changes {
        handle: has(6).then_some(handle),
        mode: has(0).then_some(mode),
        uid: has(1).then_some(uid),
        gid: has(2).then_some(gid),
        size: has(3).then_some(size),
        accessed: time(4, 7, accessed, accessed_ns),
        modified: time(5, 8, modified, modified_ns),
        kill: has(11),
    })
}

/// The unread part of a message, which is read field by field.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(Errno::INVAL)?;
        self.0 = rest;
        Ok(taken)
    }

    fn u32(&mut self) -> Result<u32> {
        self.take(4).map(|bytes| bytes.iter().rev().fold(0, |number, byte| number << 8 | u32::from(*byte)))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from(self.u32()?) | u64::from(self.u32()?) << 32)
    }

    /// Reads a number of bytes to move. The kernel would reject more than a message holds, but memory would be
    /// allocated for it.
    fn size(&mut self) -> Result<usize> {
        let size = self.u32()? as usize;
        if size <= MAX_DATA { Ok(size) } else { Err(Errno::INVAL) }
    }

    /// Reads the flags of an open. Rejects flags that make it open nothing or create a file.
    fn open_flags(&mut self) -> Result<u32> {
        const ODD: i32 = libc::O_PATH | (libc::O_TMPFILE & !libc::O_DIRECTORY);
        let flags = self.u32()?;
        if flags & ODD.unsigned_abs() == 0 { Ok(flags) } else { Err(Errno::INVAL) }
    }

    /// Reads a string and the zero at its end.
    fn string(&mut self) -> Result<&'a CStr> {
        let string = CStr::from_bytes_until_nul(self.0).map_err(|_| Errno::INVAL)?;
        self.take(string.count_bytes() + 1)?;
        Ok(string)
    }

    fn name(&mut self) -> Result<Name<'a>> {
        self.string().and_then(Name::new)
    }
}

/// A response that is being written, without its header.
#[derive(Debug)]
pub struct Answer<'a> {
    buffer: &'a mut [u8],
    length: usize,
}

impl<'a> Answer<'a> {
    /// Begins a response in `buffer`.
    pub fn in_buffer(buffer: &'a mut [u8]) -> Self {
        Self { buffer, length: ANSWER_HEAD }
    }

    /// Writes the header; returns the length of the whole response.
    pub fn end(self, unique: u64) -> Result<usize> {
        let head = self.buffer.get_mut(..ANSWER_HEAD).ok_or(Errno::IO)?;
        head[..4].copy_from_slice(&(self.length as u32).to_le_bytes());
        head[4..8].fill(0);
        head[8..].copy_from_slice(&unique.to_le_bytes());
        Ok(self.length)
    }

    /// Discards the bytes written so far.
    pub fn clear(&mut self) {
        self.length = ANSWER_HEAD;
    }

    /// Makes `fill` write up to `size` bytes and return the number of bytes written.
    pub fn fill(&mut self, size: usize, fill: impl FnOnce(&mut [u8]) -> Result<usize>) -> Result<()> {
        let space = self.buffer.get_mut(self.length..self.length + size).ok_or(Errno::INVAL)?;
        self.length += fill(space)?.min(size);
        Ok(())
    }

    /// Writes bytes.
    pub fn bytes(&mut self, bytes: &[u8]) -> Result<()> {
        self.fill(bytes.len(), |space| {
            space.copy_from_slice(bytes);
            Ok(bytes.len())
        })
    }

    /// Writes 32-bit fields.
    pub fn words(&mut self, fields: &[u32]) -> Result<()> {
        fields.iter().try_for_each(|field| self.bytes(&field.to_le_bytes()))
    }

    /// Writes 64-bit fields.
    pub fn longs(&mut self, fields: &[u64]) -> Result<()> {
        fields.iter().try_for_each(|field| self.bytes(&field.to_le_bytes()))
    }

    /// Writes a file's attributes, `struct fuse_attr`.
    fn attributes(&mut self, stat: &Statx) -> Result<()> {
        let times = [stat.stx_atime, stat.stx_mtime, stat.stx_ctime];
        self.longs(&[stat.stx_ino, stat.stx_size, stat.stx_blocks])?;
        self.longs(&times.map(|time: StatxTimestamp| time.tv_sec.cast_unsigned()))?;
        self.words(&times.map(|time| time.tv_nsec))?;
        let (major, minor) = (stat.stx_rdev_major, stat.stx_rdev_minor);
        let device = minor & 0xff | major << 8 | (minor & !0xff) << 12;
        let (mode, links) = (u32::from(stat.stx_mode), stat.stx_nlink);
        self.words(&[mode, links, stat.stx_uid, stat.stx_gid, device, stat.stx_blksize, 0])
    }

    /// Writes `struct fuse_attr_out`.
    pub fn stat(&mut self, stat: &Statx, fresh: Duration) -> Result<()> {
        self.longs(&[fresh.as_secs()])?;
        self.words(&[fresh.subsec_nanos(), 0])?;
        self.attributes(stat)
    }

    /// Writes `struct fuse_entry_out`.
    pub fn entry(&mut self, node: u64, stat: &Statx, fresh: Duration) -> Result<()> {
        self.longs(&[node, 0, fresh.as_secs(), fresh.as_secs()])?;
        self.words(&[fresh.subsec_nanos(), fresh.subsec_nanos()])?;
        self.attributes(stat)
    }

    /// Writes `struct fuse_open_out`.
    pub fn opened(&mut self, handle: u64, flags: u32) -> Result<()> {
        self.longs(&[handle])?;
        self.words(&[flags, 0])
    }

    /// Returns the number of bytes that an entry of a directory takes.
    pub fn listed_length(name: &[u8], plus: bool) -> usize {
        let entry = if plus { 128 } else { 0 };
        entry + (24 + name.len()).next_multiple_of(8)
    }

    /// Writes `struct fuse_dirent`. In a `struct fuse_direntplus`, an entry precedes it.
    pub fn listed(&mut self, inode: u64, next: u64, kind: u32, name: &[u8]) -> Result<()> {
        self.longs(&[inode, next])?;
        self.words(&[name.len() as u32, kind])?;
        self.bytes(name)?;
        self.bytes(&[0; 7][..name.len().next_multiple_of(8) - name.len()])
    }

    /// Returns the number of bytes written after the header.
    pub fn written(&self) -> usize {
        self.length - ANSWER_HEAD
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(opcode: u32, body: &[u8]) -> Vec<u8> {
        let length = (REQUEST_HEAD + body.len()) as u32;
        [&length.to_le_bytes()[..], &opcode.to_le_bytes(), &[0; 32], body].concat()
    }

    #[test]
    fn a_name_is_what_is_before_its_end_and_leads_down() {
        for name in
            [&b"..\0"[..], b"..\0\0", b"..\0x\0", b".\0", b".\0\0\0", b"\0", b"a/b\0", b"/\0", b"..", b""]
        {
            let message = message(opcode::LOOKUP, name);
            assert_eq!(Request::parse(&message), Err(Errno::INVAL), "{name:?}");
        }
        for name in [&b"...\0"[..], b"..a\0", b".a\0", b"\xff\0"] {
            assert!(Request::parse(&message(opcode::LOOKUP, name)).is_ok(), "{name:?}");
        }
        let both = [&[0; 16][..], b"from\0..\0\0"].concat();
        assert_eq!(Request::parse(&message(opcode::RENAME2, &both)), Err(Errno::INVAL));
    }

    #[test]
    fn no_message_is_read_beyond_its_end_and_no_size_is_believed() {
        for opcode in 0..64 {
            for length in 0..120 {
                for fill in [0, 1, 0xff] {
                    let _ = Request::parse(&message(opcode, &vec![fill; length]));
                }
            }
        }
        let all = [&u32::MAX.to_le_bytes()[..], &[0; 4], &[7; 32]].concat();
        let Ok(Request::BatchForget { forgotten }) = Request::parse(&message(opcode::BATCH_FORGET, &all))
        else {
            panic!("refused")
        };
        assert_eq!(forgotten.len(), 2);
    }

    #[test]
    fn an_answer_never_exceeds_its_buffer() {
        let mut buffer = vec![0; ANSWER_HEAD + 8];
        let mut answer = Answer::in_buffer(&mut buffer);
        answer.longs(&[1]).unwrap();
        assert_eq!(answer.words(&[1]), Err(Errno::INVAL));
        assert_eq!(answer.end(7), Ok(ANSWER_HEAD + 8));
    }
}
