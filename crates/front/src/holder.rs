//! The process that is there when the front is killed.
//!
//! Both processes have **one table of descriptors** (`CLONE_FILES`): whatever the front opens, the holder has, at once and without a
//! message. When the front dies, everything is still open, and the holder makes the next front from itself. The holder reads nothing and
//! opens nothing. It waits for signals, passes them on, and executes another build when the front asks for that.

use std::{
    ffi::{CString, NulError, OsStr, OsString},
    io,
    os::{
        fd::{AsRawFd, RawFd},
        unix::ffi::OsStrExt,
    },
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    libc,
    poll::{PollTimeout, poll},
    sys::{
        signal::{SigSet, Signal, kill},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::{Pid, execv, getpid, getppid},
};

use crate::{
    log::log,
    worker::{BackOff, LASTING},
};

/// The front's exit code if another build is to take its place. A worker's exit code is never passed on as this one.
pub const UPGRADE: u8 = 199;
/// So many fronts that end by their own fault after less than a second, one after the other, are no accident.
const MAX_FAILURES: u32 = 12;
/// The pause after a front that was killed in its first second.
const KILLED_PAUSE: Duration = Duration::from_millis(20);

/// How a build of the front is executed.
#[derive(Debug, Clone)]
pub struct Build {
    /// Its program. The file may be replaced by another build's at any time.
    pub program: PathBuf,
    /// Its argument, before a descriptor's number, with which it calls [`crate::check`].
    pub check: OsString,
    /// Its argument, before a descriptor's number and [`Build::arguments`], with which it calls [`crate::resume`].
    pub resume: OsString,
    /// The further arguments of [`Build::resume`].
    pub arguments: Vec<OsString>,
}

/// Returns the signals that end the front, replace it, or tell of its worker. Holder and front block them.
pub fn signals() -> SigSet {
    [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGCHLD].into_iter().collect()
}

/// Runs fronts, one after the other, until one exits. `reload` is how the reload ended that this process is the result of; each front
/// gets that of the last reload, if none has got it before.
pub fn hold(
    build: &Build,
    journal: &impl AsRawFd,
    mut reload: Option<String>,
    mut front: impl FnMut(Option<&str>) -> u8,
) -> io::Result<ExitCode> {
    signals().thread_block()?;
    let (mut back_off, mut pause, mut request) = (BackOff::default(), Duration::ZERO, None);
    loop {
        let since = Instant::now();
        let process = start(|| {
            let _ = poll(&mut [], PollTimeout::try_from(pause).unwrap_or(PollTimeout::MAX));
            front(reload.as_deref())
        })?;
        // The front before may have died before it had this one.
        if let Some(signal) = request {
            let _ = kill(process, signal);
        }
        let ended = wait(process, &mut request)?;
        reload = None;
        match ended {
            WaitStatus::Exited(_, code) if code == i32::from(UPGRADE) => {
                let Err(error) = execute(build, journal.as_raw_fd());
                log!("cannot execute {:?}, so the front goes on as it was: {error}", build.program);
                reload = Some(format!("cannot execute {:?}: {error}", build.program));
                (request, pause) = (None, Duration::ZERO);
            }
            WaitStatus::Exited(_, code) => return Ok(ExitCode::from(u8::try_from(code).unwrap_or(1))),
            WaitStatus::Signaled(_, Signal::SIGKILL, _) => {
                let lived = since.elapsed().saturating_sub(pause);
                pause = if lived < LASTING { KILLED_PAUSE } else { Duration::ZERO };
                log!("the front was killed (SIGKILL); another takes its place");
            }
            ended => {
                pause = back_off.after(Some(since.elapsed().saturating_sub(pause)));
                if back_off.short_lived() > MAX_FAILURES {
                    return Err(io::Error::other("the front dies again and again"));
                }
                log!("the front has died ({ended:?}); another takes its place in {pause:?}");
            }
        }
    }
}

/// Starts a process with this one's memory, as it is now, and with this one's table of descriptors, from now on.
#[expect(clippy::disallowed_methods, reason = "what is on the stack belongs to the next front, too")]
fn start(run: impl FnOnce() -> u8) -> io::Result<Pid> {
    let holder = getpid();
    let (flags, none) = (libc::CLONE_FILES | libc::SIGCHLD, 0_usize);
    // SAFETY: without CLONE_VM this is a fork. This process has one thread, so the child finds no lock taken by another one.
    match unsafe { libc::syscall(libc::SYS_clone, flags, none, none, none, none) } {
        0 => {
            dies_with(holder);
            std::process::exit(run().into())
        }
        -1 => Err(io::Error::last_os_error()),
        child => Ok(Pid::from_raw(child as libc::pid_t)),
    }
}

/// Has the kernel kill this process when its parent dies.
pub fn dies_with(parent: Pid) {
    // SAFETY: the call takes two numbers.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    if getppid() != parent {
        // It has died before.
        let _ = nix::sys::signal::raise(Signal::SIGKILL);
    }
}

/// Passes signals on until the front has ended. Leaves the last one in `request`.
fn wait(front: Pid, request: &mut Option<Signal>) -> io::Result<WaitStatus> {
    loop {
        match signals().wait()? {
            Signal::SIGCHLD => match waitpid(front, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::StillAlive) | Err(Errno::EINTR) => {}
                ended => return Ok(ended?),
            },
            signal => {
                *request = Some(signal);
                kill(front, signal)?;
            }
        }
    }
}

/// Returns only if it fails. Blocked signals stay blocked, and pending ones pending.
fn execute(build: &Build, journal: RawFd) -> io::Result<std::convert::Infallible> {
    let fd = OsString::from(journal.to_string());
    let words: [&OsStr; 3] = [build.program.as_os_str(), &build.resume, &fd];
    let words = words.into_iter().chain(build.arguments.iter().map(OsString::as_os_str));
    let words: Vec<CString> =
        words.map(|word| CString::new(word.as_bytes())).collect::<Result<_, NulError>>()?;
    Ok(execv(&words[0], &words)?)
}
