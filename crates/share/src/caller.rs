//! The guest's user that a request is from, and how a thread acts as that user for one request.
//!
//! Some file servers deny the host's root what they allow the owner of a file: NFS with `root_squash`, and
//! FUSE file systems of one user. They see the thread's file system user and group, so these are changed.

use std::{io, process};

use caps::{CapSet, Capability, CapsHashSet};
use sandboxer_protocol::share::u32_at;

use crate::confine;

/// Offsets of user and group in a request's header.
const USER: std::ops::Range<usize> = 24..32;

/// A user and a group. FUSE has no supplementary groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caller {
    uid: u32,
    gid: u32,
}

/// Capabilities that stay effective while a thread acts as another user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rights {
    /// All that the thread has.
    All,
    /// Only those that change the user: files are accessed with this user's permissions.
    OwnOnly,
    /// The same, and the capability for linkat(2) with a descriptor.
    OwnAndLink,
}

impl Caller {
    /// Returns the caller of `request`, and replaces it by root: later code must not change the thread's user
    /// again.
    pub fn take(request: &mut [u8]) -> Option<Self> {
        let caller = Self { uid: u32_at(request, USER.start)?, gid: u32_at(request, USER.start + 4)? };
        request.get_mut(USER)?.fill(0);
        Some(caller)
    }

    /// Returns whether this is not root, which the thread acts as by default.
    pub fn is_another(self) -> bool {
        self != Self { uid: 0, gid: 0 }
    }

    /// Runs `work` as this user, with these rights.
    ///
    /// # Errors
    ///
    /// The thread cannot act as this user; `work` was not run.
    pub fn act<T>(self, rights: Rights, work: impl FnOnce() -> T) -> io::Result<T> {
        let acting = Acting { lowered: rights != Rights::All };
        if !become_user(self) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let mut kept = vec![Capability::CAP_SETUID, Capability::CAP_SETGID];
        match rights {
            Rights::All => {}
            Rights::OwnOnly => set_effective(kept)?,
            Rights::OwnAndLink => {
                kept.push(Capability::CAP_DAC_READ_SEARCH);
                set_effective(kept)?;
            }
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
        let restored = !self.lowered || set_effective(confine::KEPT).is_ok();
        if !restored || !become_user(Caller { uid: 0, gid: 0 }) {
            // It would serve the next request as this user.
            process::abort();
        }
    }
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
