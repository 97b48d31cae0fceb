//! One request to one answer, on the files below [`ROOT`].
//!
//! Parsing and carrying out is `fuse-backend-rs`' work, whose file system goes by descriptors: a name is one
//! component, opened without following a link, so no link leads anywhere but in the guest. Here is what is kept
//! from it, and what the guest's kernel is told at first.

use std::{
    fs::File,
    os::fd::{AsRawFd, OwnedFd},
    time::Duration,
};

use anyhow::Context;
use fuse_backend_rs::{
    api::{filesystem::FsOptions, server::Server},
    passthrough::{CachePolicy, Config, PassthroughFs},
    transport::{FuseBuf, FuseDevWriter, Reader, Writer},
};
use sandboxer_protocol::share::{ANSWER_HEAD, Head, MAX_DATA, REQUEST_HEAD, opcode, u32_at};
use sandboxer_share::ROOT;

use crate::caller::{Caller, Rights};

/// How long the guest's kernel may take a name and a file's attributes for what they were: the time by which
/// it may miss a change on the host. Contents are looked at anew whenever a file is opened or its attributes
/// have changed.
const FRESH: Duration = Duration::from_millis(100);

/// Requests of a kernel that nobody waits for, such as reading ahead, under way at once.
const BACKGROUND: u16 = 12;

/// Most that a guest's kernel may read ahead, bytes: how much it does, its agent says.
const READ_AHEAD: u32 = 16 << 20;

/// Bytes of a guest's page.
const PAGE: u32 = 4096;

/// The files.
pub struct Files {
    server: Server<PassthroughFs>,
    nowhere: OwnedFd,
}

impl Files {
    /// Opens the root. `nowhere` takes whatever is written to it.
    pub fn open(nowhere: File) -> anyhow::Result<Self> {
        let config = Config {
            root_dir: ROOT.to_owned(),
            attr_timeout: FRESH,
            entry_timeout: FRESH,
            cache_policy: CachePolicy::Auto,
            xattr: true,
            // Else the guest's kernel would ask for a file's capabilities before each write.
            killpriv_v2: true,
            // Else a table would grow by each file that ever was.
            use_host_ino: true,
            ..Config::default()
        };
        let files = PassthroughFs::new(config).context("cannot open the shares")?;
        files.import().context("cannot open the shares' root")?;
        Ok(Self { server: Server::new(files), nowhere: nowhere.into() })
    }

    /// Carries `request` out; its answer, in `room`, which is as long as [`room`]'s.
    pub fn answer<'a>(&self, head: Head, request: &mut [u8], room: &'a mut [u8]) -> &'a [u8] {
        let length = match refused(head, request) {
            Some(errno) => Err(errno),
            None => self.carry_out(head, request, room),
        };
        let length = match length {
            Ok(length) if room.get(..length).is_some_and(|answer| head.is_answered_by(answer)) => length,
            other => {
                let failed = head.failed(other.err().unwrap_or(libc::EIO));
                room[..failed.len()].copy_from_slice(&failed);
                failed.len()
            }
        };
        let answer = &mut room[..length];
        if head.opcode == opcode::INIT {
            agree(request, answer);
        }
        answer
    }

    /// Returns the length of the answer, or an error number.
    fn carry_out(&self, head: Head, request: &mut [u8], room: &mut [u8]) -> Result<usize, i32> {
        if head.opcode == opcode::ACCESS {
            // The one request whose answer is computed from who asks.
            return self.handle(request, room);
        }
        let caller = Caller::take(request).ok_or(libc::EIO)?;
        if let opcode::MKDIR | opcode::MKNOD | opcode::SYMLINK | opcode::CREATE = head.opcode {
            // What is made belongs to who makes it, who then looks at what was made.
            return caller.act(Rights::All, || self.handle(request, room)).map_err(|_| libc::EPERM)?;
        }
        let length = self.handle(request, room)?;
        match as_caller(head) {
            Some(rights) if caller.is_another() && is_denied(&room[..length]) => {
                caller.act(rights, || self.handle(request, room)).map_err(|_| libc::EPERM)?
            }
            _ => Ok(length),
        }
    }

    fn handle(&self, request: &mut [u8], room: &mut [u8]) -> Result<usize, i32> {
        let reader = Reader::<()>::from_fuse_buffer(FuseBuf::new(request)).map_err(|_| libc::EIO)?;
        // A part of a writer collects what it is given in the buffer, and writes it to the descriptor only at
        // the end: so the answer is left in `room`.
        let mut whole = FuseDevWriter::new(self.nowhere.as_raw_fd(), room).map_err(|_| libc::EIO)?;
        let part = whole.split_at(0).map_err(|_| libc::EIO)?;
        self.server.handle_message(reader, Writer::FuseDev(part), None, None).map_err(|_| libc::EIO)
    }
}

/// With which rights a request that was denied is made again as who made it; none: it is not. Each of these
/// comes to the same when it is made twice.
fn as_caller(head: Head) -> Option<Rights> {
    match head.opcode {
        opcode::LOOKUP
        | opcode::GETATTR
        | opcode::SETATTR
        | opcode::READLINK
        | opcode::UNLINK
        | opcode::RMDIR
        | opcode::RENAME
        | opcode::RENAME2
        | opcode::OPEN
        | opcode::OPENDIR
        | opcode::READDIR
        | opcode::READDIRPLUS
        | opcode::STATFS
        | opcode::SETXATTR
        | opcode::GETXATTR
        | opcode::LISTXATTR
        | opcode::REMOVEXATTR
        | opcode::FALLOCATE => Some(Rights::OwnOnly),
        opcode::LINK => Some(Rights::OwnAndLink),
        _ => None,
    }
}

/// Returns whether `answer` says that whoever acted may not.
fn is_denied(answer: &[u8]) -> bool {
    let error = u32_at(answer, 4).and_then(|error| error.cast_signed().checked_neg());
    matches!(error, Some(libc::EACCES | libc::EPERM))
}

/// Returns an error number for what no guest's kernel asks for.
fn refused(head: Head, request: &[u8]) -> Option<i32> {
    // With either of these an open has other effects than it seems: it may follow a link, or make a file.
    const ODD: i32 = libc::O_PATH | (libc::O_TMPFILE & !libc::O_DIRECTORY);
    match head.opcode {
        opcode::OPEN | opcode::OPENDIR | opcode::CREATE => {
            let flags = u32_at(request, REQUEST_HEAD)?;
            (flags & ODD.unsigned_abs() != 0).then_some(libc::EINVAL)
        }
        // An answer of that size is not taken: room for it would be made all the same.
        opcode::GETXATTR | opcode::LISTXATTR => too_large(u32_at(request, REQUEST_HEAD)?),
        opcode::READ | opcode::READDIR | opcode::READDIRPLUS => {
            too_large(u32_at(request, REQUEST_HEAD + 16)?)
        }
        // A kernel asks for these only if it was told that it may.
        opcode::LOOKUP => {
            matches!(request.get(REQUEST_HEAD..), Some(b".\0" | b"..\0")).then_some(libc::EINVAL)
        }
        _ => None,
    }
}

fn too_large(size: u32) -> Option<i32> {
    (size > MAX_DATA as u32).then_some(libc::EINVAL)
}

/// Completes the answer to a kernel's first request: what it may do, and how much at once.
fn agree(request: &[u8], answer: &mut [u8]) {
    // Offsets in `fuse_init_in` and `fuse_init_out`, behind the heads.
    let offered = u32_at(request, REQUEST_HEAD + 12).unwrap_or(0);
    let flags = FsOptions::ASYNC_READ
        | FsOptions::ATOMIC_O_TRUNC
        | FsOptions::BIG_WRITES
        | FsOptions::AUTO_INVAL_DATA
        | FsOptions::ASYNC_DIO
        | FsOptions::PARALLEL_DIROPS
        | FsOptions::MAX_PAGES;
    let Some(agreed) = u32_at(answer, 28) else { return };
    // All of them are among the first 32.
    let agreed = agreed | offered & flags.bits() as u32;
    let most = (MAX_DATA as u32).to_le_bytes();
    for (at, value) in [
        (24, &READ_AHEAD.to_le_bytes()[..]),
        (28, &agreed.to_le_bytes()),
        (32, &BACKGROUND.to_le_bytes()),
        (34, &(BACKGROUND * 3 / 4).to_le_bytes()),
        (36, &most),
        (44, &(MAX_DATA as u32 / PAGE).to_le_bytes()[..2]),
    ] {
        if let Some(field) = answer.get_mut(at..at + value.len()) {
            field.copy_from_slice(value);
        }
    }
}

/// Room for an answer.
pub fn room() -> Vec<u8> {
    vec![0; ANSWER_HEAD + MAX_DATA]
}
