//! The user of the guest on whose behalf its kernel asks, and how this thread acts as that user for a moment.
//!
//! Some servers refuse the host's root what they allow the owner of a file: NFS with `root_squash`, and FUSE file
//! systems that serve one user. They see the thread's file system user and group, so these are what changes.

use std::{io, process};

use caps::{CapSet, Capability, CapsHashSet};
use sandboxer_protocol::share::u32_at;

use crate::confine;

/// Where user and group are in a request's head.
const USER: std::ops::Range<usize> = 24..32;

/// A user and a group, by number. FUSE tells no supplementary groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caller {
    uid: u32,
    gid: u32,
}

/// Capabilities that stay effective while a thread acts as somebody else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rights {
    /// All that the thread has.
    All,
    /// Those that change whom it acts as: what it does to files is what this user may do.
    OwnOnly,
    /// The same, and those of linkat(2) with a descriptor.
    OwnAndLink,
}

impl Caller {
    /// Returns who made `request`, and puts root in that place: nothing behind changes the thread's user again.
    pub fn take(request: &mut [u8]) -> Option<Self> {
        let caller = Self { uid: u32_at(request, USER.start)?, gid: u32_at(request, USER.start + 4)? };
        request.get_mut(USER)?.fill(0);
        Some(caller)
    }

    /// Returns whether this is a user other than the one whom the thread acts as in any case.
    pub fn is_another(self) -> bool {
        self != Self { uid: 0, gid: 0 }
    }

    /// Does `work` as this user, with these rights.
    ///
    /// # Errors
    ///
    /// The thread can't act as this user; nothing was done.
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

/// Ends with its life: the thread is itself again.
struct Acting {
    lowered: bool,
}

impl Drop for Acting {
    fn drop(&mut self) {
        let restored = !self.lowered || set_effective(confine::KEPT).is_ok();
        if !restored || !become_user(Caller { uid: 0, gid: 0 }) {
            // It would serve the next one as this one.
            process::abort();
        }
    }
}

fn set_effective(capabilities: impl IntoIterator<Item = Capability>) -> io::Result<()> {
    let capabilities: CapsHashSet = capabilities.into_iter().collect();
    caps::set(None, CapSet::Effective, &capabilities).map_err(io::Error::other)
}

/// Sets the thread's file system user and group; whether they are these.
fn become_user(Caller { uid, gid }: Caller) -> bool {
    // Neither call tells an error: each returns what was before, and a number that nobody has changes nothing.
    // SAFETY: they take and return numbers, and change this thread's credentials alone.
    unsafe {
        libc::setfsgid(gid);
        libc::setfsuid(uid);
        let now = |number: libc::c_int| number.cast_unsigned();
        (now(libc::setfsuid(u32::MAX)), now(libc::setfsgid(u32::MAX))) == (uid, gid)
    }
}
