//! One request, one response: operations on the files below [`ROOT`].
//!
//! `fuse-backend-rs` parses and carries requests out. Its file system uses descriptors: a name is one
//! component, opened without following symlinks, so symlinks are resolved in the guest only. This module
//! filters requests, sets the caller, and completes the response to INIT.

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

/// How long the guest's kernel may cache names and attributes: the time by which it may miss a change on the
/// host. Contents are revalidated whenever a file is opened or its attributes have changed.
const FRESH: Duration = Duration::from_millis(100);

/// Most background requests of a kernel at once, such as read-ahead.
const BACKGROUND: u16 = 12;

/// Limit of a guest kernel's read-ahead, bytes; the agent sets the actual size.
const READ_AHEAD: u32 = 16 << 20;

/// Page size of the guest, bytes.
const PAGE: u32 = 4096;

/// The files.
pub struct Files {
    server: Server<PassthroughFs>,
    null: OwnedFd,
}

impl Files {
    /// Opens the root. `null` is /dev/null.
    pub fn open(null: File) -> anyhow::Result<Self> {
        let config = Config {
            root_dir: ROOT.to_owned(),
            attr_timeout: FRESH,
            entry_timeout: FRESH,
            cache_policy: CachePolicy::Auto,
            xattr: true,
            // Otherwise the guest's kernel would request a file's capabilities before each write.
            killpriv_v2: true,
            // Otherwise a table would grow with each file that was ever used.
            use_host_ino: true,
            ..Config::default()
        };
        let files = PassthroughFs::new(config).context("cannot open the shares")?;
        files.import().context("cannot open the shares' root")?;
        Ok(Self { server: Server::new(files), null: null.into() })
    }

    /// Carries `request` out; returns the response, which is in `buffer`. The buffer is as long as
    /// [`buffer`]'s.
    pub fn answer<'a>(&self, head: Head, request: &mut [u8], buffer: &'a mut [u8]) -> &'a [u8] {
        let length = match refused(head, request) {
            Some(errno) => Err(errno),
            None => self.carry_out(head, request, buffer),
        };
        let length = match length {
            Ok(length) if buffer.get(..length).is_some_and(|answer| head.is_answered_by(answer)) => length,
            other => {
                let failed = head.failed(other.err().unwrap_or(libc::EIO));
                buffer[..failed.len()].copy_from_slice(&failed);
                failed.len()
            }
        };
        let answer = &mut buffer[..length];
        if head.opcode == opcode::INIT {
            agree(request, answer);
        }
        answer
    }

    /// Returns the length of the response, or an error number.
    fn carry_out(&self, head: Head, request: &mut [u8], buffer: &mut [u8]) -> Result<usize, i32> {
        if head.opcode == opcode::ACCESS {
            // The one request with a response that depends on the caller.
            return self.handle(request, buffer);
        }
        let caller = Caller::take(request).ok_or(libc::EIO)?;
        if let opcode::MKDIR | opcode::MKNOD | opcode::SYMLINK | opcode::CREATE = head.opcode {
            // A new file belongs to its creator, and is then looked up as that user.
            return caller.act(Rights::All, || self.handle(request, buffer)).map_err(|_| libc::EPERM)?;
        }
        let length = self.handle(request, buffer)?;
        match as_caller(head) {
            Some(rights) if caller.is_another() && is_denied(&buffer[..length]) => {
                caller.act(rights, || self.handle(request, buffer)).map_err(|_| libc::EPERM)?
            }
            _ => Ok(length),
        }
    }

    fn handle(&self, request: &mut [u8], buffer: &mut [u8]) -> Result<usize, i32> {
        let reader = Reader::<()>::from_fuse_buffer(FuseBuf::new(request)).map_err(|_| libc::EIO)?;
        // A split writer collects its output in the buffer and writes it to the descriptor only at the end:
        // so the response stays in `buffer`.
        let mut whole = FuseDevWriter::new(self.null.as_raw_fd(), buffer).map_err(|_| libc::EIO)?;
        let part = whole.split_at(0).map_err(|_| libc::EIO)?;
        self.server.handle_message(reader, Writer::FuseDev(part), None, None).map_err(|_| libc::EIO)
    }
}

/// Returns the rights with which a denied request is repeated as its caller; `None`: it is not. Each of these
/// requests may be carried out twice.
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

/// Returns whether `response` is a permission error.
fn is_denied(response: &[u8]) -> bool {
    let error = u32_at(response, 4).and_then(|error| error.cast_signed().checked_neg());
    matches!(error, Some(libc::EACCES | libc::EPERM))
}

/// Returns an error number for requests that no guest kernel sends.
fn refused(head: Head, request: &[u8]) -> Option<i32> {
    // With either of these flags an open has other effects: it may follow a symlink, or create a file.
    const ODD: i32 = libc::O_PATH | (libc::O_TMPFILE & !libc::O_DIRECTORY);
    match head.opcode {
        opcode::OPEN | opcode::OPENDIR | opcode::CREATE => {
            let flags = u32_at(request, REQUEST_HEAD)?;
            (flags & ODD.unsigned_abs() != 0).then_some(libc::EINVAL)
        }
        // A response of that size would be rejected, but memory would be allocated for it.
        opcode::GETXATTR | opcode::LISTXATTR => too_large(u32_at(request, REQUEST_HEAD)?),
        opcode::READ | opcode::READDIR | opcode::READDIRPLUS => {
            too_large(u32_at(request, REQUEST_HEAD + 16)?)
        }
        // A kernel sends these names only if INIT allows it.
        opcode::LOOKUP => {
            matches!(request.get(REQUEST_HEAD..), Some(b".\0" | b"..\0")).then_some(libc::EINVAL)
        }
        _ => None,
    }
}

fn too_large(size: u32) -> Option<i32> {
    (size > MAX_DATA as u32).then_some(libc::EINVAL)
}

/// Completes the response to a kernel's INIT request: features and limits.
fn agree(request: &[u8], answer: &mut [u8]) {
    // Offsets in `fuse_init_in` and `fuse_init_out`, after the headers.
    let offered = u32_at(request, REQUEST_HEAD + 12).unwrap_or(0);
    let flags = FsOptions::ASYNC_READ
        | FsOptions::ATOMIC_O_TRUNC
        | FsOptions::BIG_WRITES
        | FsOptions::AUTO_INVAL_DATA
        | FsOptions::ASYNC_DIO
        | FsOptions::PARALLEL_DIROPS
        | FsOptions::MAX_PAGES;
    let Some(agreed) = u32_at(answer, 28) else { return };
    // All of them are in the low 32 bits.
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

/// Allocates a buffer for a response.
pub fn buffer() -> Vec<u8> {
    vec![0; ANSWER_HEAD + MAX_DATA]
}
