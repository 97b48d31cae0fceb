//! The front's replacement by another build, in the same process: the state goes through a file in memory, descriptors stay open.

use std::{
    ffi::{CString, NulError, OsStr, OsString},
    fs::File,
    io::{self, Read, Seek, Write},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::{ffi::OsStrExt, net::UnixStream, process::CommandExt},
    },
    path::PathBuf,
    process::Command,
    rc::Rc,
    time::{Duration, Instant},
};

use nix::{
    fcntl::{FcntlArg, FdFlag, fcntl},
    libc,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        epoll::{EpollEvent, EpollFlags},
        memfd::{MFdFlags, memfd_create},
        signal::{SigSet, SigmaskHow, sigprocmask},
    },
    unistd::execv,
};

use super::{Entry, Front, FrontError, Linked, system};
use crate::{
    connection::{Connection, Numbers},
    log::log,
    saved::{Saved, SavedEntry},
};

/// Most time for a new build to read the state. Requests wait meanwhile.
const CHECK_TIMEOUT: Duration = Duration::from_secs(5);

/// How a build of the front is executed.
#[derive(Debug, Clone)]
pub struct Build {
    /// Its program. The file may be replaced by another build's at any time.
    pub program: PathBuf,
    /// Its argument, before a descriptor's number, with which it calls [`super::check`].
    pub check: OsString,
    /// Its argument, before a descriptor's number and [`Build::arguments`], with which it calls [`super::resume`].
    pub resume: OsString,
    /// The further arguments of [`Build::resume`].
    pub arguments: Vec<OsString>,
}

/// Why the front stays as it is.
#[derive(Debug, thiserror::Error)]
enum UpgradeError {
    #[error("cannot {0}: {1}")]
    System(&'static str, io::Error),
    #[error("it refuses the state ({0}); its reason is above")]
    Refused(std::process::ExitStatus),
    #[error("it did not read the state within {CHECK_TIMEOUT:?}")]
    Hung,
}

impl Front<'_> {
    /// Replaces this program by the build that is installed now. Returns if that is impossible, which costs nothing. To be called
    /// while there is no worker.
    pub(super) fn upgrade(&mut self) {
        let Err(error) = self.try_upgrade();
        log!("the front stays as it is, {:?} cannot take its place: {error}", self.build.program);
    }

    fn try_upgrade(&mut self) -> Result<std::convert::Infallible, UpgradeError> {
        let failed = |action| move |error: io::Error| UpgradeError::System(action, error);
        let saved = self.saved();
        let file = memfd_create(c"sandboxer-front", MFdFlags::MFD_CLOEXEC)
            .map_err(|error| failed("make a file in memory")(error.into()))?;
        let mut file = File::from(file);
        file.write_all(&saved.to_bytes()).map_err(failed("write the state"))?;
        self.check(file.as_fd())?;
        let descriptors: Vec<_> = saved.descriptors().chain([file.as_raw_fd()]).collect();
        let inherited = |flags| {
            descriptors.iter().try_for_each(|fd| {
                // SAFETY: they are open; their owners are in `self` and `file`.
                let fd = unsafe { BorrowedFd::borrow_raw(*fd) };
                fcntl(fd, FcntlArg::F_SETFD(flags)).map(drop)
            })
        };
        let executed = inherited(FdFlag::empty()).map_err(io::Error::from).and_then(|()| self.execute(&file));
        // It has failed. This never does: the descriptors are valid.
        let _ = inherited(FdFlag::FD_CLOEXEC);
        executed.map_err(failed("execute it"))
    }

    /// Makes the new build read the state, in another process.
    fn check(&self, state: BorrowedFd<'_>) -> Result<(), UpgradeError> {
        let failed = |error| UpgradeError::System("run it", error);
        let mut command = Command::new(&self.build.program);
        command.arg(&self.build.check).arg(state.as_raw_fd().to_string());
        let fd = state.as_raw_fd();
        // SAFETY: between fork and exec, two system calls are made, which are async-signal-safe; the descriptor is open.
        unsafe {
            command.pre_exec(move || {
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

    /// Returns only if it fails. Blocked signals stay blocked, and pending ones pending.
    fn execute(&self, state: &File) -> io::Result<std::convert::Infallible> {
        let fd = OsString::from(state.as_raw_fd().to_string());
        let words: [&OsStr; 3] = [self.build.program.as_os_str(), &self.build.resume, &fd];
        let words = words.into_iter().chain(self.build.arguments.iter().map(OsString::as_os_str));
        let words: Vec<CString> =
            words.map(|word| CString::new(word.as_bytes())).collect::<Result<_, NulError>>()?;
        Ok(execv(&words[0], &words)?)
    }

    fn saved(&self) -> Saved {
        let raw = |fds: &[Rc<OwnedFd>]| fds.iter().map(AsRawFd::as_raw_fd).collect();
        let is_listener = |entry: &Entry| match (&self.listener, entry.fds.first()) {
            (Some(listener), Some(first)) => Rc::ptr_eq(listener, first),
            _ => false,
        };
        let listener = self.kept.iter().find(|(_, entry)| is_listener(entry));
        Saved {
            identity: self.identity.clone(),
            was_ready: self.was_ready,
            next_request: self.numbers.upcoming(),
            listener: listener.map(|(key, _)| key.clone()).unwrap_or_default(),
            entries: (self.kept.iter())
                .map(|(key, entry)| SavedEntry {
                    key: key.clone(),
                    note: entry.note.clone(),
                    fds: raw(&entry.fds),
                })
                .collect(),
            connections: self.connections.values().map(|linked| linked.connection.saved()).collect(),
        }
    }

    /// Goes on with the state that another build has left in `state`. The descriptors that it names are this front's from now on.
    pub(super) fn restore(&mut self, state: OwnedFd) -> Result<(), FrontError> {
        let saved = read(state)?;
        for fd in saved.descriptors() {
            // SAFETY: the caller has left it open; see `owned`.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            fcntl(fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).map_err(system("take over a descriptor"))?;
        }
        self.identity = saved.identity;
        self.was_ready = saved.was_ready;
        self.numbers = Numbers::starting_at(saved.next_request);
        for SavedEntry { key, note, fds } in saved.entries {
            let fds: Vec<_> = fds.into_iter().map(|fd| Rc::new(owned(fd))).collect();
            if let Some(listener) = fds.first().filter(|_| key == saved.listener) {
                self.listen(listener.clone());
            }
            self.kept.insert(key, Entry { note, fds });
        }
        for connection in saved.connections {
            let client = UnixStream::from(owned(connection.client));
            let number = self.next_connection;
            self.next_connection += 1;
            let watched = (EpollFlags::empty(), EpollFlags::empty());
            let added = self.epoll.add(&client, EpollEvent::new(watched.0, number * 2));
            added.map_err(system("watch a task connection"))?;
            let connection = Connection::restored(client, connection);
            self.connections.insert(number, Linked { connection, watched });
            self.settle(number, crate::connection::Side::Open);
        }
        // Requests that workers have died with are sent one by one.
        self.suspects = true;
        self.due = Some(Instant::now());
        Ok(())
    }
}

/// Waits for the end of a child that is not reaped yet. Returns whether it has ended in time.
fn ends_within(child: u32, limit: Duration) -> io::Result<bool> {
    // SAFETY: the call takes two numbers; the kernel returns a new descriptor or -1.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, child, 0) };
    let fd = RawFd::try_from(fd).ok().filter(|fd| *fd >= 0).ok_or_else(io::Error::last_os_error)?;
    let fd = owned(fd);
    let limit = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
    Ok(poll(&mut [PollFd::new(fd.as_fd(), PollFlags::POLLIN)], limit)? > 0)
}

/// Takes over a descriptor from the kernel, or from the program that executed this one.
fn owned(fd: RawFd) -> OwnedFd {
    // SAFETY: it is open, and nothing else owns it: the kernel has just opened it, or the state names it once and this program is new.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// Reads a state.
pub(super) fn read(state: OwnedFd) -> Result<Saved, FrontError> {
    let mut file = File::from(state);
    let mut bytes = Vec::new();
    file.rewind().and_then(|()| file.read_to_end(&mut bytes)).map_err(system("read the state"))?;
    Ok(Saved::of(&bytes)?)
}
