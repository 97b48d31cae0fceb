//! A user namespace in which each user and group is itself. A capability there is valid for the files of all owners,
//! but not on the host.

use std::{
    fs::{self, File},
    io::{self, Read},
    os::fd::{AsRawFd, OwnedFd},
};

use super::done;

/// The mapping of all users, or groups, each to itself.
const EACH: &str = "0 0 4294967295";

/// Creates the namespace, which lasts as long as the descriptor or a process in it.
pub fn user_namespace() -> io::Result<OwnedFd> {
    let (report, report_end) = io::pipe()?;
    let report_to = report_end.as_raw_fd();
    // SAFETY: the child only makes system calls, and never returns from here.
    let child = unsafe {
        match libc::fork() {
            0 => stand_in(report_to),
            child => child,
        }
    };
    done(child)?;
    drop(report_end);
    let made = given_by(child, report);
    // SAFETY: the child belongs to this process, no other code knows it, and its status is not needed.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
    }
    made
}

/// Maps all IDs in the namespace of `child`, once the child reports that it has one, and opens the namespace.
fn given_by(child: libc::pid_t, mut report: impl Read) -> io::Result<OwnedFd> {
    let mut errno = [0; 4];
    report.read_exact(&mut errno)?;
    match i32::from_ne_bytes(errno) {
        0 => {}
        errno => return Err(io::Error::from_raw_os_error(errno)),
    }
    // One write each, as the kernel requires.
    for map in ["uid_map", "gid_map"] {
        fs::write(format!("/proc/{child}/{map}"), EACH)?;
    }
    Ok(File::open(format!("/proc/{child}/ns/user"))?.into())
}

/// Runs in the child: creates the namespace, reports that, and waits to be killed.
fn stand_in(report_to: i32) -> ! {
    // SAFETY: only system calls are made, and the data that they point to outlives them.
    unsafe {
        // The child also ends if the daemon dies first.
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
        let made = done(libc::unshare(libc::CLONE_NEWUSER));
        let errno = made.err().and_then(|error| error.raw_os_error()).unwrap_or_default().to_ne_bytes();
        libc::write(report_to, errno.as_ptr().cast(), errno.len());
        loop {
            libc::pause();
        }
    }
}
