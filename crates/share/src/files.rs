//! One request and its response: the user for whom it is carried out, and the features agreed with the guest's kernel.

use std::path::Path;

use rustix::io::Errno;
use sandboxer_protocol::share::{ANSWER_HEAD, Head, MAX_DATA};
use sandboxer_share::{
    ROOT,
    wire::{self, Answer, Request, Result},
};

use crate::{caller::Caller, tree::Tree};

/// The most background requests of a kernel at once, such as read-ahead.
const BACKGROUND: u32 = 12;

/// The limit of a guest kernel's read-ahead, bytes; the agent sets the actual size.
const READ_AHEAD: u32 = 16 << 20;

/// The page size of the guest, bytes.
const PAGE: u32 = 4096;

/// The protocol's version.
const VERSION: [u32; 2] = [7, 36];

/// The features (`FUSE_…` of INIT) that are enabled if the kernel has them.
const FEATURES: u32 = ASYNC_READ
    | ATOMIC_TRUNCATION
    | BIG_WRITES
    | OWN_UMASK
    | DATA_INVALIDATED_BY_ATTRIBUTES
    | LIST_WITH_ATTRIBUTES
    | ASYNC_DIRECT
    | PARALLEL_DIRECTORIES
    | ACLS
    | MANY_PAGES
    | KILL_PRIVILEGES
    | LONG_SETXATTR;

const ASYNC_READ: u32 = 1;
const ATOMIC_TRUNCATION: u32 = 1 << 3;
const BIG_WRITES: u32 = 1 << 5;
/// The server applies the mask of permissions, because it knows the directory's default ACL.
const OWN_UMASK: u32 = 1 << 6;
const DATA_INVALIDATED_BY_ATTRIBUTES: u32 = 1 << 12;
/// The kernel requests attributes with a listing when that seems useful to it.
const LIST_WITH_ATTRIBUTES: u32 = 1 << 13 | 1 << 14;
const ASYNC_DIRECT: u32 = 1 << 15;
const PARALLEL_DIRECTORIES: u32 = 1 << 18;
/// The guest's kernel checks permissions with ACLs.
const ACLS: u32 = 1 << 20;
const MANY_PAGES: u32 = 1 << 22;
/// Otherwise the guest's kernel would request a file's capabilities before each write.
const KILL_PRIVILEGES: u32 = 1 << 28;
/// A longer SETXATTR has a flag that clears the set-group-ID bit when an ACL changes.
const LONG_SETXATTR: u32 = 1 << 29;

/// The files of the shares.
pub struct Files(Tree);

impl Files {
    /// Opens the root. A guest may know up to `most` files.
    pub fn open(most: usize) -> anyhow::Result<Self> {
        Tree::open(Path::new(ROOT), most).map(Self)
    }

    /// Carries out `request`; returns the response, which is in `buffer`. The buffer must be as long as one from
    /// [`buffer`].
    pub fn answer<'a>(&self, head: Head, request: &[u8], buffer: &'a mut [u8]) -> &'a [u8] {
        let done = self.carry_out(head, request, buffer);
        if !head.is_answered() {
            return &[];
        }
        let length = done.unwrap_or_else(|errno| {
            let failed = head.failed(errno.raw_os_error());
            buffer[..failed.len()].copy_from_slice(&failed);
            failed.len()
        });
        &buffer[..length]
    }

    /// Carries out a request; returns the length of the response.
    fn carry_out(&self, head: Head, message: &[u8], buffer: &mut [u8]) -> Result<usize> {
        let mut answer = Answer::in_buffer(buffer);
        let request = Request::parse(message)?;
        if let Request::Init { major, flags } = request {
            agree(major, flags, &mut answer)?;
            return answer.end(head.unique);
        }
        let (node, caller) = wire::node(message).zip(Caller::parse(message)).ok_or(Errno::INVAL)?;
        match request {
            // A new file belongs to its creator.
            Request::MakeDirectory { .. }
            | Request::MakeNode { .. }
            | Request::MakeLink { .. }
            | Request::Create { .. } => {
                caller.act(|| self.0.carry_out(node, &request, &mut answer)).map_err(|_| Errno::PERM)??;
            }
            _ => match self.0.carry_out(node, &request, &mut answer) {
                Err(Errno::ACCESS | Errno::PERM) if caller.is_another() && is_repeated(&request) => {
                    answer.clear();
                    let repeat = || self.0.carry_out(node, &request, &mut answer);
                    caller.act_alone(repeat).map_err(|_| Errno::PERM)??;
                }
                done => done?,
            },
        }
        answer.end(head.unique)
    }
}

/// Returns whether a denied request is repeated as its caller. Each of these may be carried out twice.
fn is_repeated(request: &Request<'_>) -> bool {
    matches!(
        request,
        Request::Lookup { .. }
            | Request::GetAttributes { .. }
            | Request::SetAttributes(_)
            | Request::ReadLink
            | Request::Remove { .. }
            | Request::Rename { .. }
            | Request::Link { .. }
            | Request::Open { .. }
            | Request::OpenDirectory
            | Request::List { .. }
            | Request::Space
            | Request::SetAttribute { .. }
            | Request::GetAttribute { .. }
            | Request::ListAttributes { .. }
            | Request::RemoveAttribute { .. }
            | Request::Allocate { .. }
    )
}

/// Responds to a kernel's first request, with features and limits: `struct fuse_init_out`.
fn agree(major: u32, offered: u32, answer: &mut Answer<'_>) -> Result<()> {
    if major < VERSION[0] {
        return Err(Errno::PROTO);
    }
    answer.words(&VERSION)?;
    let congested = BACKGROUND * 3 / 4;
    answer.words(&[READ_AHEAD, offered & FEATURES, BACKGROUND | congested << 16])?;
    // The bytes of a write; the precision of times, nanoseconds; the pages of a message.
    answer.words(&[MAX_DATA as u32, 1, MAX_DATA as u32 / PAGE])?;
    answer.words(&[0; 8])
}

/// Allocates a buffer for a response.
pub fn buffer() -> Vec<u8> {
    vec![0; ANSWER_HEAD + MAX_DATA]
}
