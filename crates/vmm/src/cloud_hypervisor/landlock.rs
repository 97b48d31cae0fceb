//! Landlock, by which a VMM confines itself further once it knows its VM.
//!
//! In its jail a VMM can still read and execute the host's programs, which it needs to start. Landlock removes that
//! access. The copy of a frozen VM runs without Landlock, which has no rule for the copy's kind of memory. A rule set
//! from outside would have to permit executing programs, so it would remove nothing.

use std::io;

/// The Landlock ABI that Cloud Hypervisor requires (Linux 6.2); with an older one it refuses VMs.
const ABI: i64 = 3;

/// Returns `Ok` if VMMs can confine themselves on this host, else the reason.
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
