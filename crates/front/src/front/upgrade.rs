//! The front's replacement by another build, in the same process: the journal and all other descriptors stay open.

use std::{
    convert::Infallible,
    env,
    ffi::OsString,
    fs::File,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::{fs::FileExt, process::CommandExt},
    },
    process::{Command, ExitStatus, Stdio},
    time::Duration,
};

use nix::{
    fcntl::{FcntlArg, FdFlag, fcntl},
    libc,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        memfd::{MFdFlags, memfd_create},
        signal::{SigSet, SigmaskHow, sigprocmask},
    },
    unistd::execve,
};
use sandboxer_base::failpoint::pass;

use super::Front;
use crate::{
    control::NEEDS,
    journal::{Record, RecordedState},
    keeper::strings,
    log::log,
    store::{self, LOTS},
    worker::dies_with,
};

/// The most time for a new build to read the journal, and for its worker to tell what it supports. Requests wait
/// meanwhile.
const CHECK_TIMEOUT: Duration = Duration::from_secs(5);

/// The most bytes that the worker's program tells.
const MAX_SUPPORTED_BYTES: usize = 256;

/// The reason why the front was not replaced.
#[derive(Debug, thiserror::Error)]
enum UpgradeError {
    #[error("cannot {0}: {1}")]
    System(&'static str, io::Error),
    #[error("it refuses the state ({0}); its reason is in the log")]
    Refused(ExitStatus),
    #[error("it did not exit within {CHECK_TIMEOUT:?}")]
    Hung,
}

impl Front<'_> {
    /// Executes the installed build, which continues with this process's state. If the build refuses that, nothing has
    /// changed, and this function returns. Must be called while there is no worker.
    pub(super) fn upgrade(&mut self) {
        let Err(error) = self.execute();
        let program = &self.work.build.program;
        log!("the front stays as it is, {program:?} cannot take its place: {error}");
        self.reloaded(format!("{program:?} cannot take the place of the front: {error}"));
    }

    /// Returns why the worker must not be replaced: what its entries need, the installed program does not support.
    pub(super) fn unfit(&self) -> Option<String> {
        let needs = self.entries.iter().filter(|(key, _)| key.split(' ').next() == Some(NEEDS));
        let notes: Vec<_> = needs.map(|(_, entry)| entry.note.as_slice()).collect();
        if notes.is_empty() {
            return None;
        }
        match self.supported() {
            Ok(supported) => (self.work.build.unfit)(supported.as_deref(), &notes),
            Err(error) => Some(format!("{:?} does not tell what it supports: {error}", self.work.program)),
        }
    }

    /// Returns what the installed program of the worker tells that it supports; `None`: it exited with an error.
    fn supported(&self) -> Result<Option<Vec<u8>>, UpgradeError> {
        let failed = |error: io::Error| UpgradeError::System("receive what it tells", error);
        // A file, not a pipe: a process that the program leaves behind may hold a pipe open.
        let file = memfd_create(c"sandboxer-told", MFdFlags::MFD_CLOEXEC).map(File::from);
        let file = file.map_err(|error| failed(error.into()))?;
        let mut command = Command::new(self.work.program);
        command.arg(&self.work.build.tell).stdin(Stdio::null()).stderr(Stdio::null());
        command.stdout(file.try_clone().map_err(failed)?);
        let status = run(command)?;
        let mut output = [0; MAX_SUPPORTED_BYTES];
        let length = file.read_at(&mut output, 0).map_err(failed)?;
        Ok(status.success().then(|| output[..length].to_vec()))
    }

    /// Records the result of a reload: why the front was not replaced; empty: it was.
    pub(super) fn reloaded(&mut self, stayed: String) {
        self.journal.add(&Record::Reloaded(stayed.clone()));
        self.reloads = (self.reloads.0 + 1, stayed);
    }

    fn execute(&mut self) -> Result<Infallible, UpgradeError> {
        let failed = |action| move |error: io::Error| UpgradeError::System(action, error);
        self.journal.shorten().map_err(failed("write the journal"))?;
        pass(format_args!("the front has shortened its journal"));
        self.check()?;
        let bytes = self.journal.file().content().map_err(failed("read the journal"))?;
        let recorded = RecordedState::parse(&bytes)
            .map_err(|error| failed("read the journal")(io::Error::other(error)))?;
        let journal = self.journal.file().as_raw_fd();
        let (lots, of_lots) = store::pass_on();
        let all: Vec<_> = recorded.descriptors().chain([journal]).chain(of_lots).collect();
        let inherit = |flags| {
            for fd in &all {
                // SAFETY: the descriptor is open: the journal names only open descriptors.
                let fd = unsafe { BorrowedFd::borrow_raw(*fd) };
                fcntl(fd, FcntlArg::F_SETFD(flags))
                    .map_err(|error| failed("pass a descriptor on")(error.into()))?;
            }
            Ok(())
        };
        inherit(FdFlag::empty())?;
        pass(format_args!("the front is about to be replaced"));
        let build = &self.work.build;
        let number = OsString::from(journal.to_string());
        let words = [build.program.clone().into(), build.resume.clone(), number].into_iter();
        let others = env::vars_os().filter(|(name, _)| name != LOTS).chain([(LOTS.into(), lots.into())]);
        let environment = others.map(|(name, value)| [name, value].join("=".as_ref()));
        let texts = strings(words.chain(build.arguments.iter().cloned()));
        let texts = texts.and_then(|words| Ok((words, strings(environment)?)));
        // Blocked signals stay blocked, and pending ones pending.
        let executed = texts.and_then(|(words, environment)| Ok(execve(&words[0], &words, &environment)?));
        inherit(FdFlag::FD_CLOEXEC)?;
        executed.map_err(failed("execute it"))
    }

    /// Makes the new build read the journal, in another process.
    fn check(&self) -> Result<(), UpgradeError> {
        let fd = self.journal.file().as_raw_fd();
        let mut command = Command::new(&self.work.build.program);
        command.arg(&self.work.build.check).arg(fd.to_string());
        // SAFETY: between fork and exec system calls are made, which are async-signal-safe; the descriptor is open.
        unsafe {
            command.pre_exec(move || {
                fcntl(BorrowedFd::borrow_raw(fd), FcntlArg::F_SETFD(FdFlag::empty()))?;
                Ok(())
            });
        }
        let status = run(command)?;
        if status.success() { Ok(()) } else { Err(UpgradeError::Refused(status)) }
    }
}

/// Runs a program, and kills it if it does not exit in time.
fn run(mut command: Command) -> Result<ExitStatus, UpgradeError> {
    let failed = |error| UpgradeError::System("run it", error);
    let front = nix::unistd::getpid();
    // SAFETY: between fork and exec system calls are made, which are async-signal-safe.
    unsafe {
        command.pre_exec(move || {
            dies_with(front);
            Ok(sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None)?)
        });
    }
    let mut child = command.spawn().map_err(failed)?;
    if !ends_within(child.id(), CHECK_TIMEOUT).map_err(failed)? {
        let _ = child.kill();
        let _ = child.wait();
        return Err(UpgradeError::Hung);
    }
    child.wait().map_err(failed)
}

/// Waits for the end of a child that is not reaped yet. Returns whether it has ended in time.
fn ends_within(child: u32, limit: Duration) -> io::Result<bool> {
    // SAFETY: the call takes two numbers; the kernel returns a new descriptor or -1.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, child, 0) };
    let fd = RawFd::try_from(fd).ok().filter(|fd| *fd >= 0).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the kernel has just created the descriptor.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let limit = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
    Ok(poll(&mut [PollFd::new(fd.as_fd(), PollFlags::POLLIN)], limit)? > 0)
}
