//! The front's replacement by another build, in the holder's process: the journal and all other descriptors stay open.

use std::{
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::process::CommandExt,
    },
    process::{Command, ExitStatus},
    time::Duration,
};

use nix::{
    fcntl::{FcntlArg, FdFlag, fcntl},
    libc,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signal::{SigSet, SigmaskHow, sigprocmask},
};
use sandboxer_base::failpoint::pass;

use super::Front;
use crate::{
    holder::dies_with,
    journal::{Held, Record},
    log::log,
};

/// Most time for a new build to read the journal. Requests wait meanwhile.
const CHECK_TIMEOUT: Duration = Duration::from_secs(5);

/// Why the front stays as it is.
#[derive(Debug, thiserror::Error)]
enum UpgradeError {
    #[error("cannot {0}: {1}")]
    System(&'static str, io::Error),
    #[error("it refuses the state ({0}); its reason is in the log")]
    Refused(ExitStatus),
    #[error("it did not read the state within {CHECK_TIMEOUT:?}")]
    Hung,
}

impl Front<'_> {
    /// Prepares for the build that is installed now, which the holder executes when this process exits. Returns whether that build takes
    /// the state; if not, it has cost nothing. To be called while there is no worker.
    pub(super) fn can_upgrade(&mut self) -> bool {
        let Err(error) = self.prepare() else { return true };
        let program = &self.work.build.program;
        log!("the front stays as it is, {program:?} cannot take its place: {error}");
        self.reloaded(format!("{program:?} cannot take the place of the front: {error}"));
        false
    }

    /// Records how a reload has ended; empty: the front was replaced.
    pub(super) fn reloaded(&mut self, stayed: String) {
        self.journal.add(&Record::Reloaded(stayed.clone()));
        self.reloads = (self.reloads.0 + 1, stayed);
    }

    fn prepare(&mut self) -> Result<(), UpgradeError> {
        let failed = |action| move |error: io::Error| UpgradeError::System(action, error);
        self.journal.shorten().map_err(failed("write the journal"))?;
        pass(format_args!("the front has shortened its journal"));
        self.check()?;
        let bytes = self.journal.file().content().map_err(failed("read the journal"))?;
        let held = Held::of(&bytes).map_err(|error| failed("read the journal")(io::Error::other(error)))?;
        for fd in held.descriptors().chain([self.journal.file().as_raw_fd()]) {
            // SAFETY: it is open: the journal names no descriptor that is not.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            fcntl(fd, FcntlArg::F_SETFD(FdFlag::empty()))
                .map_err(|error| failed("pass a descriptor on")(error.into()))?;
        }
        pass(format_args!("the front is about to be replaced"));
        Ok(())
    }

    /// Makes the new build read the journal, in another process.
    fn check(&self) -> Result<(), UpgradeError> {
        let failed = |error| UpgradeError::System("run it", error);
        let (fd, front) = (self.journal.file().as_raw_fd(), nix::unistd::getpid());
        let mut command = Command::new(&self.work.build.program);
        command.arg(&self.work.build.check).arg(fd.to_string());
        // SAFETY: between fork and exec system calls are made, which are async-signal-safe; the descriptor is open.
        unsafe {
            command.pre_exec(move || {
                dies_with(front);
                sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None)?;
                fcntl(BorrowedFd::borrow_raw(fd), FcntlArg::F_SETFD(FdFlag::empty()))?;
                Ok(())
            });
        }
        let mut child = command.spawn().map_err(failed)?;
        if !ends_within(child.id(), CHECK_TIMEOUT).map_err(failed)? {
            let _ = child.kill();
            let _ = child.wait();
            return Err(UpgradeError::Hung);
        }
        let status = child.wait().map_err(failed)?;
        if status.success() { Ok(()) } else { Err(UpgradeError::Refused(status)) }
    }
}

/// Waits for the end of a child that is not reaped yet. Returns whether it has ended in time.
fn ends_within(child: u32, limit: Duration) -> io::Result<bool> {
    // SAFETY: the call takes two numbers; the kernel returns a new descriptor or -1.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, child, 0) };
    let fd = RawFd::try_from(fd).ok().filter(|fd| *fd >= 0).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the kernel has just created it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let limit = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
    Ok(poll(&mut [PollFd::new(fd.as_fd(), PollFlags::POLLIN)], limit)? > 0)
}
