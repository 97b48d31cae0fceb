//! Landlock: a VMM confines itself further once it knows its VM.
//!
//! In its jail a VMM can still read and execute the host's programs, which it needs to start. Landlock removes that
//! access. The copy of a frozen VM runs without it: Landlock has no rule for its kind of memory, and a rule set from
//! outside would have to let it execute programs, so that it would remove nothing.

use std::io;

/// The ABI that Cloud Hypervisor requires; with an older one it refuses VMs. Linux 6.2.
const ABI: i64 = 3;

/// Returns `Ok` if VMMs can confine themselves on this host, else why not.
pub fn usable() -> Result<(), String> {
    /// `LANDLOCK_CREATE_RULESET_VERSION` of `linux/landlock.h`.
    const ASK_VERSION: u32 = 1;
    // SAFETY: without a ruleset, this system call only returns a number.
    let abi = unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<()>(), 0_usize, ASK_VERSION)
    };
    match abi {
        ABI.. => Ok(()),
        0.. => Err(format!("this kernel's Landlock has ABI {abi}, {ABI} is needed")),
        _ => Err(format!("this kernel has no Landlock: {}", io::Error::last_os_error())),
    }
}
