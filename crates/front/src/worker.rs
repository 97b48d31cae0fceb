//! The worker's process, and when there is to be another one.

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
    unistd::Pid,
};

use crate::{
    control::{self, Kind},
    say::say,
};

/// The worker's option that names its end of the control socket.
pub const OPTION: &str = "--front-fd";

/// What the worker's allocator is told where nobody has told it something else: two heaps for all threads, each of which
/// would have one that keeps what its busiest moment took, and no small pieces kept by each thread, which hold pages that
/// could be given back. Measured after a burst of 50 pods, the worker at rest: 10.3 MB of PSS with such pieces, 8.2
/// without (n = 1).
const HEAP: (&str, &str) = ("GLIBC_TUNABLES", "glibc.malloc.arena_max=2:glibc.malloc.tcache_count=0");

/// A worker that was ready for so long died of something new.
const LASTING: Duration = Duration::from_secs(1);
/// So many that died sooner are replaced at once, later ones after a pause.
const AT_ONCE: u32 = 3;
/// The first pause; each is twice the one before it.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The longest pause.
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// A worker that runs.
#[derive(Debug)]
pub struct Worker {
    child: Child,
    control: OwnedFd,
    outgoing: VecDeque<Outgoing>,
    /// Since when it takes requests.
    pub ready: Option<Instant>,
    /// Asks it whether it is there, if it answers to that.
    pub pulse: Option<Pulse>,
}

/// Finds a worker that has stopped to answer.
///
/// Silence is counted in questions, not read off the clock: when the whole host has stood still, the worker gets as
/// many as ever.
#[derive(Debug)]
pub struct Pulse {
    every: Duration,
    /// When to ask next.
    pub due: Instant,
    /// Questions without an answer.
    asked: u32,
}

/// So many questions go without an answer before a worker is given up.
const QUESTIONS: u32 = 6;

impl Pulse {
    /// Gives up a worker that is silent for `limit`, about.
    pub fn new(limit: Duration) -> Self {
        let every = limit / QUESTIONS;
        Self { every, due: Instant::now() + every, asked: 0 }
    }

    /// Takes note of an answer.
    pub fn answered(&mut self) {
        self.asked = 0;
    }

    /// Returns whether to ask once more, now that it is due; else the worker is to be given up.
    pub fn asks(&mut self) -> bool {
        self.due = Instant::now() + self.every;
        self.asked += 1;
        self.asked <= QUESTIONS
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
    /// Starts one. Its environment is ours, with [`HEAP`] and without the service manager's socket: it is us who talk to
    /// that.
    pub fn start(program: &Path, arguments: &[OsString]) -> io::Result<Self> {
        let (control, theirs) = control::pair()?;
        // No other thread could start a program meanwhile, which would get it too.
        fcntl(&theirs, FcntlArg::F_SETFD(FdFlag::empty()))?;
        let mut command = Command::new(program);
        command.args(arguments).arg(OPTION).arg(theirs.as_raw_fd().to_string()).env_remove("NOTIFY_SOCKET");
        let (variable, value) = HEAP;
        if env::var_os(variable).is_none() {
            command.env(variable, value);
        }
        // SAFETY: between fork and exec one system call is made, which is async-signal-safe.
        unsafe {
            // What is blocked here, to be read from a descriptor, would be blocked there and in all VMMs.
            command.pre_exec(|| Ok(sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None)?));
        }
        let child = command.spawn()?;
        Ok(Self { child, control, outgoing: VecDeque::new(), ready: None, pulse: None })
    }

    /// Our end of the control socket.
    pub fn control(&self) -> BorrowedFd<'_> {
        self.control.as_fd()
    }

    /// Returns how it ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap_or_else(|_| Some(ExitStatus::from_raw(0)))
    }

    /// Sends it a signal. It is our child and not reaped, so the pid is its own.
    pub fn signal(&self, signal: Signal) {
        if let Ok(pid) = i32::try_from(self.child.id()) {
            let _ = kill(Pid::from_raw(pid), signal);
        }
    }

    /// Has it told something, when it takes it.
    pub fn tell(&mut self, kind: Kind, key: &str, note: &[u8], fds: Vec<Rc<OwnedFd>>) {
        self.outgoing.push_back(Outgoing { kind, key: key.to_owned(), note: note.to_vec(), fds });
    }

    /// Returns whether something waits to be told.
    pub fn has_outgoing(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// Tells it as much as it takes now. An error is its end, which is seen elsewhere.
    pub fn flush(&mut self) {
        while let Some(Outgoing { kind, key, note, fds }) = self.outgoing.front() {
            let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
            match control::send(self.control.as_fd(), *kind, key, note, &fds) {
                Err(error) if error.raw_os_error() == Some(Errno::EAGAIN as i32) => return,
                Err(error) if error.raw_os_error() == Some(Errno::EPIPE as i32) => self.outgoing.clear(),
                Err(error) => {
                    say!("the worker cannot be told of {key:?}: {error}");
                    self.outgoing.pop_front();
                }
                Ok(()) => drop(self.outgoing.pop_front()),
            }
        }
    }
}

/// Says when the next worker is to be started.
#[derive(Debug, Default)]
pub struct BackOff {
    /// Workers in a row that did not last.
    short: u32,
}

impl BackOff {
    /// Returns the pause after a worker that was ready for so long, or never.
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
        assert!((0..QUESTIONS).all(|_| pulse.asks()));
        pulse.answered();
        assert!((0..QUESTIONS).all(|_| pulse.asks()));
        assert!(!pulse.asks());
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
