//! Landlock, by which a VMM confines itself further once it knows its VM.
//!
//! In its jail it could still read and execute the host's programs, which are needed to start it. Landlock takes that
//! away. The copy of a frozen VM goes without: its memory is of a kind for which Landlock takes no rule, and a
//! rule set from outside would have to let it execute programs, which is all that there is to take.

use std::io;

/// The ABI that Cloud Hypervisor demands; it refuses VMs on less. Linux 6.2.
const ABI: i64 = 3;

/// Whether VMMs can confine themselves on this host; `Err`: why not.
pub fn usable() -> Result<(), String> {
    /// `LANDLOCK_CREATE_RULESET_VERSION` of `linux/landlock.h`.
    const ASK_VERSION: u32 = 1;
    // SAFETY: without a ruleset, this system call only tells a number.
    let abi = unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<()>(), 0_usize, ASK_VERSION)
    };
    match abi {
        ABI.. => Ok(()),
        0.. => Err(format!("this kernel's Landlock has ABI {abi}, {ABI} is needed")),
        _ => Err(format!("this kernel has no Landlock: {}", io::Error::last_os_error())),
    }
}
