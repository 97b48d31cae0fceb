//! The worker's process, and the delay before the next one.

use std::{
    collections::VecDeque,
    env,
    ffi::OsString,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::process::{CommandExt, ExitStatusExt},
    },
    path::Path,
    process::{Child, Command, ExitStatus},
    rc::Rc,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, FdFlag, fcntl},
    sys::signal::{SigSet, SigmaskHow, Signal, kill, sigprocmask},
    unistd::{Pid, getpid},
};

use crate::{
    control::{self, Kind},
    holder::dies_with,
    log::log,
};

/// The worker's option with its end of the control socket.
pub const OPTION: &str = "--front-fd";

/// Setting of the worker's allocator, unless it is already set: two heaps for all threads, since a heap per
/// thread would keep the memory of the thread's peak; and no per-thread caches, whose small pieces keep pages
/// from being released. Measured after a burst of 50 pods, with the worker idle: 10.3 MB of PSS with caches,
/// 8.2 without (n = 1).
const HEAP: (&str, &str) = ("GLIBC_TUNABLES", "glibc.malloc.arena_max=2:glibc.malloc.tcache_count=0");

/// A worker that was ready for so long resets the back-off.
pub const LASTING: Duration = Duration::from_secs(1);
/// So many short-lived workers are replaced at once, later ones after a delay.
const AT_ONCE: u32 = 3;
/// The first delay; each is twice the previous one.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The longest delay.
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// A running worker.
#[derive(Debug)]
pub struct Worker {
    child: Child,
    control: OwnedFd,
    outgoing: VecDeque<Outgoing>,
    /// When it became ready.
    pub ready: Option<Instant>,
    /// Pings it, if it supports that.
    pub pulse: Option<Pulse>,
}

/// Detects a worker that does not respond.
///
/// It counts pings instead of time: if the whole host was suspended, the worker still gets as many pings.
#[derive(Debug)]
pub struct Pulse {
    every: Duration,
    /// When to send the next ping.
    pub due: Instant,
    /// Pings without a response.
    unanswered: u32,
}

/// A worker is killed after so many pings without a response.
const PINGS: u32 = 6;

impl Pulse {
    /// Creates a pulse for a silence of about `limit`.
    pub fn new(limit: Duration) -> Self {
        let every = limit / PINGS;
        Self { every, due: Instant::now() + every, unanswered: 0 }
    }

    /// Records a response.
    pub fn answered(&mut self) {
        self.unanswered = 0;
    }

    /// Returns whether to send another ping now; `false` means that the worker is to be killed.
    pub fn ping(&mut self) -> bool {
        self.due = Instant::now() + self.every;
        self.unanswered += 1;
        self.unanswered <= PINGS
    }
}

#[derive(Debug)]
struct Outgoing {
    kind: Kind,
    key: String,
    note: Vec<u8>,
    fds: Vec<Rc<OwnedFd>>,
}

impl Worker {
    /// Starts the process, with `theirs` as its end of the control socket. Its environment is the front's, with [`HEAP`] and without the
    /// service manager's socket, which only the front uses. It is killed when the front dies.
    pub fn start(program: &Path, arguments: &[OsString], theirs: &OwnedFd) -> io::Result<Child> {
        // This process has no other thread that could start a program and leak the descriptor.
        fcntl(theirs, FcntlArg::F_SETFD(FdFlag::empty()))?;
        let mut command = Command::new(program);
        command.args(arguments).arg(OPTION).arg(theirs.as_raw_fd().to_string()).env_remove("NOTIFY_SOCKET");
        let (variable, value) = HEAP;
        if env::var_os(variable).is_none() {
            command.env(variable, value);
        }
        let front = getpid();
        // SAFETY: between fork and exec system calls are made, which are async-signal-safe.
        unsafe {
            command.pre_exec(move || {
                dies_with(front);
                // The front blocks signals to read them from a descriptor; the worker and its VMMs must not
                // inherit that.
                Ok(sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None)?)
            });
        }
        command.spawn()
    }

    /// Makes a worker of its process and the front's end of the control socket.
    pub fn new(child: Child, control: OwnedFd) -> Self {
        Self { child, control, outgoing: VecDeque::new(), ready: None, pulse: None }
    }

    /// Returns the front's end of the control socket.
    pub fn control(&self) -> BorrowedFd<'_> {
        self.control.as_fd()
    }

    /// Returns its exit status, if it has exited.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap_or_else(|_| Some(ExitStatus::from_raw(0)))
    }

    /// Sends it a signal. It is a child that is not reaped, so its pid is valid.
    pub fn signal(&self, signal: Signal) {
        if let Ok(pid) = i32::try_from(self.child.id()) {
            let _ = kill(Pid::from_raw(pid), signal);
        }
    }

    /// Queues a message.
    pub fn queue(&mut self, kind: Kind, key: &str, note: &[u8], fds: Vec<Rc<OwnedFd>>) {
        self.outgoing.push_back(Outgoing { kind, key: key.to_owned(), note: note.to_vec(), fds });
    }

    /// Returns whether messages are queued.
    pub fn has_outgoing(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// Sends as many queued messages as possible now. An error means its exit, which is handled elsewhere.
    pub fn flush(&mut self) {
        while let Some(Outgoing { kind, key, note, fds }) = self.outgoing.front() {
            let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
            match control::send(self.control.as_fd(), *kind, key, note, &fds) {
                Err(error) if error.raw_os_error() == Some(Errno::EAGAIN as i32) => return,
                Err(error) if error.raw_os_error() == Some(Errno::EPIPE as i32) => self.outgoing.clear(),
                Err(error) => {
                    log!("cannot send {key:?} to the worker: {error}");
                    self.outgoing.pop_front();
                }
                Ok(()) => drop(self.outgoing.pop_front()),
            }
        }
    }
}

/// Delay before the next worker is started.
#[derive(Debug, Default)]
pub struct BackOff {
    /// Number of consecutive short-lived workers.
    short: u32,
}

impl BackOff {
    /// Returns the number of consecutive short-lived processes.
    pub fn short_lived(&self) -> u32 {
        self.short
    }

    /// Returns the delay after a worker that was ready for so long, or `None` if never.
    pub fn after(&mut self, ready: Option<Duration>) -> Duration {
        if ready.is_some_and(|ready| ready >= LASTING) {
            self.short = 0;
            return Duration::ZERO;
        }
        self.short += 1;
        match self.short.checked_sub(AT_ONCE + 1) {
            None => Duration::ZERO,
            Some(doublings) => (FIRST_PAUSE * 2_u32.pow(doublings.min(8))).min(MAX_PAUSE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_worker_that_leaves_every_question_open_is_given_up() {
        let mut pulse = Pulse::new(Duration::from_secs(60));
        assert!(pulse.due > Instant::now(), "it is asked as soon as it is there");
        assert!((0..PINGS).all(|_| pulse.ping()));
        pulse.answered();
        assert!((0..PINGS).all(|_| pulse.ping()));
        assert!(!pulse.ping());
    }

    #[test]
    fn workers_that_keep_dying_are_replaced_ever_later_and_one_that_lasted_ends_that() {
        let mut back_off = BackOff::default();
        let pauses: Vec<_> = (0..12).map(|_| back_off.after(None).as_millis()).collect();
        assert_eq!(pauses, [0, 0, 0, 100, 200, 400, 800, 1600, 3200, 5000, 5000, 5000]);
        assert_eq!(back_off.after(Some(LASTING)), Duration::ZERO);
        assert_eq!(back_off.after(Some(Duration::ZERO)), Duration::ZERO);
    }
}
