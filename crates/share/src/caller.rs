//! The guest's user who sent a request, and how a thread acts as that user for one request.
//!
//! Some file servers deny the host's root access that they allow the owner of a file: NFS with `root_squash`, and FUSE
//! file systems of one user. They check the thread's file system user and group, so these are changed.

use std::{io, process};

use caps::{CapSet, Capability, CapsHashSet};
use sandboxer_protocol::share::u32_at;

use crate::confine;

/// The offset of the user in a request's header; the group follows.
const USER: usize = 24;

/// A user and a group. FUSE has no supplementary groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caller {
    uid: u32,
    gid: u32,
}

impl Caller {
    /// Returns the caller of `request`.
    pub fn parse(request: &[u8]) -> Option<Self> {
        Some(Self { uid: u32_at(request, USER)?, gid: u32_at(request, USER + 4)? })
    }

    /// Returns whether this user is not root, as which the thread acts by default.
    pub fn is_another(self) -> bool {
        self != Self { uid: 0, gid: 0 }
    }

    /// Runs `work` as this user, with the thread's capabilities: the files that it creates belong to this user.
    ///
    /// # Errors
    ///
    /// The thread cannot act as this user; `work` was not run.
    pub fn act<T>(self, work: impl FnOnce() -> T) -> io::Result<T> {
        self.run(false, work)
    }

    /// Runs `work` as this user, with only this user's permissions.
    ///
    /// # Errors
    ///
    /// The thread cannot act as this user; `work` was not run.
    pub fn act_alone<T>(self, work: impl FnOnce() -> T) -> io::Result<T> {
        self.run(true, work)
    }

    fn run<T>(self, lowered: bool, work: impl FnOnce() -> T) -> io::Result<T> {
        let acting = Acting { lowered };
        if !become_user(self) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        if lowered {
            // The thread needs these to become root again.
            set_effective([Capability::CAP_SETUID, Capability::CAP_SETGID])?;
        }
        let done = work();
        drop(acting);
        Ok(done)
    }
}

/// Restores the thread's own user and capabilities when dropped.
struct Acting {
    lowered: bool,
}

impl Drop for Acting {
    fn drop(&mut self) {
        let restored = !self.lowered || set_effective(confine::RETAINED).is_ok();
        if !restored || !become_user(Caller { uid: 0, gid: 0 }) {
            // The thread would serve the next request as this user.
            process::abort();
        }
    }
}

/// Runs `work` without the capability to keep the set-user-ID and similar bits of a file that it changes.
///
/// # Errors
///
/// The capability cannot be given up; `work` was not run.
pub fn without_fsetid<T>(work: impl FnOnce() -> T) -> io::Result<T> {
    const FSETID: Capability = Capability::CAP_FSETID;
    if !caps::has_cap(None, CapSet::Effective, FSETID).map_err(io::Error::other)? {
        return Ok(work());
    }
    caps::drop(None, CapSet::Effective, FSETID).map_err(io::Error::other)?;
    let done = work();
    if caps::raise(None, CapSet::Effective, FSETID).is_err() {
        // The thread would clear bits of the next request's file.
        process::abort();
    }
    Ok(done)
}

fn set_effective(capabilities: impl IntoIterator<Item = Capability>) -> io::Result<()> {
    let capabilities: CapsHashSet = capabilities.into_iter().collect();
    caps::set(None, CapSet::Effective, &capabilities).map_err(io::Error::other)
}

/// Sets the thread's file system user and group; returns whether that succeeded.
fn become_user(Caller { uid, gid }: Caller) -> bool {
    // The calls return no error: each returns the previous value, and an invalid number changes nothing.
    // SAFETY: they take and return numbers, and change this thread's credentials only.
    unsafe {
        libc::setfsgid(gid);
        libc::setfsuid(uid);
        let now = |number: libc::c_int| number.cast_unsigned();
        (now(libc::setfsuid(u32::MAX)), now(libc::setfsgid(u32::MAX))) == (uid, gid)
    }
}
