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
    libc,
    sys::{
        resource::{Resource, getrlimit, setrlimit},
        signal::{SigSet, SigmaskHow, Signal, kill, raise, sigprocmask},
    },
    unistd::{Pid, getpid, getppid},
};

use crate::{
    control::{self, Kind},
    log::log,
    store::{LOTS, STORE, Stored},
};

/// The worker's option with its end of the control socket.
pub const OPTION: &str = "--front-fd";

/// The setting of the worker's allocator, unless it is already set: two heaps for all threads, since a heap per thread
/// would keep the memory of the thread's peak; and no per-thread caches, whose small pieces keep pages from being
/// released. Measured after a burst of 50 pods, with the worker idle: 10.3 MB of PSS with caches, 8.2 MB without (n =
/// 1).
const HEAP: (&str, &str) = ("GLIBC_TUNABLES", "glibc.malloc.arena_max=2:glibc.malloc.tcache_count=0");

/// How long a worker must have been ready to reset the back-off.
pub const LASTING: Duration = Duration::from_secs(1);
/// The number of short-lived workers that are replaced at once, later ones after a delay.
const AT_ONCE: u32 = 3;
/// The first delay; each is twice the previous one.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The longest delay.
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// How long all threads of a killed worker must be in the kernel until it counts as gone: they will not run user code
/// again, so the next worker need not wait.
const GONE: Duration = Duration::from_secs(10);
/// The interval at which the log mentions a worker that does not end.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// The number of descriptors that the front leaves free for its successor.
const RESERVE: u64 = 64;

/// Returns the signals that end the front, replace its worker, or report a child's end. The front blocks them.
pub fn signals() -> SigSet {
    [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGCHLD].into_iter().collect()
}

/// Makes the kernel kill this process when its parent dies.
pub fn dies_with(parent: Pid) {
    // SAFETY: the call takes two numbers.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    if getppid() != parent {
        // The parent has already died.
        let _ = raise(Signal::SIGKILL);
    }
}

/// Raises the limit of open files to its maximum. A container's streams need up to six files, a connection four.
pub fn raise_limit() {
    if let Ok((_, most)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, most, most);
    }
}

/// Leaves some of this process's permitted descriptors to its successor, which raises the limit again.
pub fn reserve() {
    if let Ok((_, most)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, most - RESERVE.min(most / 8), most);
    }
}

/// A running worker.
#[derive(Debug)]
pub struct Worker {
    process: Process,
    control: Stored,
    outgoing: VecDeque<Outgoing>,
    killed: Option<Killed>,
    /// The time at which the worker became ready.
    pub ready: Option<Instant>,
    /// The pulse that pings the worker, if it supports pings.
    pub pulse: Option<Pulse>,
}

#[derive(Debug)]
enum Process {
    Child(Child),
    /// A worker that the kernel killed together with the previous front, and its process ID if known.
    Orphan(Option<u32>),
}

/// The state of a worker that was killed and has not ended.
#[derive(Debug)]
struct Killed {
    since: Instant,
    /// The time of the next check.
    look: Instant,
    /// The time of the next log line.
    tell: Instant,
}

/// Detects a worker that does not respond.
///
/// Counts pings instead of time: if the whole host was suspended, the worker still gets as many pings.
#[derive(Debug)]
pub struct Pulse {
    every: Duration,
    /// The time at which to send the next ping.
    pub due: Instant,
    /// The number of pings without a response.
    unanswered: u32,
}

/// The number of pings without a response after which a worker is killed.
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
    fds: Vec<Rc<Stored>>,
}

impl Worker {
    /// Starts the process, with `theirs` as its end of the control socket. Its environment is the front's, with
    /// [`HEAP`] and without the service manager's socket, which only the front uses. The process is killed when the
    /// front dies.
    pub fn start(program: &Path, arguments: &[OsString], theirs: &OwnedFd) -> io::Result<Child> {
        // This process has no other thread that could start a program and leak the descriptor.
        fcntl(theirs, FcntlArg::F_SETFD(FdFlag::empty()))?;
        let mut command = Command::new(program);
        command.args(arguments).arg(OPTION).arg(theirs.as_raw_fd().to_string());
        for of_the_front in ["NOTIFY_SOCKET", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", STORE, LOTS] {
            command.env_remove(of_the_front);
        }
        let (variable, value) = HEAP;
        if env::var_os(variable).is_none() {
            command.env(variable, value);
        }
        let front = getpid();
        // SAFETY: between fork and exec only system calls are made, which are async-signal-safe.
        unsafe {
            command.pre_exec(move || {
                dies_with(front);
                raise_limit();
                // The front blocks signals to read them from a descriptor; the worker and its VMMs must not inherit
                // that.
                Ok(sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None)?)
            });
        }
        command.spawn()
    }

    /// Creates a worker from its process and the front's end of the control socket.
    pub fn new(child: Child, control: Stored) -> Self {
        Self::from_process(Process::Child(child), control)
    }

    /// Creates the record of a worker that was killed together with its front.
    pub fn orphan(process: Option<u32>, control: Stored) -> Self {
        let mut worker = Self::from_process(Process::Orphan(process), control);
        worker.mark_killed();
        worker
    }

    fn from_process(process: Process, control: Stored) -> Self {
        Self { process, control, outgoing: VecDeque::new(), killed: None, ready: None, pulse: None }
    }

    /// Returns the front's end of the control socket.
    pub fn control(&self) -> BorrowedFd<'_> {
        self.control.as_fd()
    }

    /// Returns whether the worker is one of a front that was killed.
    pub fn is_orphan(&self) -> bool {
        matches!(self.process, Process::Orphan(_))
    }

    /// Returns the worker's exit status, if it is a child that has exited.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        let Process::Child(child) = &mut self.process else { return None };
        child.try_wait().unwrap_or_else(|_| Some(ExitStatus::from_raw(0)))
    }

    /// Returns the worker's process, which has not ended, if it is a child.
    pub fn into_child(self) -> Option<Child> {
        if let Process::Child(child) = self.process { Some(child) } else { None }
    }

    fn pid(&self) -> Option<u32> {
        match &self.process {
            Process::Child(child) => Some(child.id()),
            Process::Orphan(pid) => *pid,
        }
    }

    /// Sends the worker a signal. A child is not reaped yet, so its PID is valid; a worker of another front was already
    /// killed.
    pub fn signal(&mut self, signal: Signal) {
        if let Process::Child(child) = &self.process
            && let Ok(pid) = i32::try_from(child.id())
        {
            let _ = kill(Pid::from_raw(pid), signal);
        }
        if signal == Signal::SIGKILL {
            self.mark_killed();
        }
    }

    fn mark_killed(&mut self) {
        self.pulse = None;
        let now = Instant::now();
        let look = now + Duration::from_secs(1);
        self.killed.get_or_insert(Killed { since: now, look, tell: look });
    }

    /// Returns the time of the next check whether a killed worker ends.
    pub fn look(&self) -> Option<Instant> {
        self.killed.as_ref().map(|killed| killed.look)
    }

    /// Examines why a killed worker does not end, and logs it. Returns whether it counts as gone: all its threads are
    /// in uninterruptible system calls, and none of them will return to user code.
    pub fn is_stuck(&mut self) -> bool {
        let pid = self.pid();
        let Some(killed) = &mut self.killed else { return false };
        let now = Instant::now();
        killed.look = now + Duration::from_secs(1);
        let waits = pid.and_then(waits_for);
        if now >= killed.tell {
            killed.tell = now + LOG_INTERVAL;
            let process = pid.map_or_else(|| "of the front before".to_owned(), |pid| pid.to_string());
            let there = pid.is_some_and(|pid| Path::new(&format!("/proc/{pid}")).exists());
            let why = waits.as_deref().unwrap_or(match there {
                true => "one of its threads can run, and has not ended yet",
                false => "its process has, but something else still has its socket",
            });
            log!("the killed worker {process} has not ended after {:?}: {why}", now - killed.since);
        }
        waits.is_some() && now - killed.since >= GONE
    }

    /// Queues a message.
    pub fn queue(&mut self, kind: Kind, key: &str, note: &[u8], fds: Vec<Rc<Stored>>) {
        self.outgoing.push_back(Outgoing { kind, key: key.to_owned(), note: note.to_vec(), fds });
    }

    /// Returns whether messages are queued.
    pub fn has_outgoing(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// Sends as many queued messages as possible now. An error means the worker's exit, which is handled elsewhere.
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

/// Returns what the threads of a killed process wait for, if all are in uninterruptible system calls and none can run.
fn waits_for(pid: u32) -> Option<String> {
    let mut waiting = Vec::new();
    for thread in std::fs::read_dir(format!("/proc/{pid}/task")).ok()? {
        let thread = thread.ok()?.path();
        let stat = std::fs::read_to_string(thread.join("stat")).ok()?;
        // The state follows the name, which may contain anything.
        match stat.rsplit(") ").next()?.chars().next()? {
            'Z' | 'X' => {}
            'D' => {
                let read = |file| std::fs::read_to_string(thread.join(file)).unwrap_or_default();
                let call = read("syscall");
                waiting.push(format!(
                    "thread {} ({}) is in system call {}, in {}",
                    thread.file_name()?.display(),
                    read("comm").trim(),
                    call.split(' ').next().unwrap_or_default(),
                    read("wchan"),
                ));
            }
            _ => return None,
        }
    }
    let waiting = waiting.join("; ");
    let cause = "a disk or a file system does not answer";
    (!waiting.is_empty()).then(|| format!("{waiting}, which cannot be interrupted: {cause}"))
}

/// The delay before the next worker is started.
#[derive(Debug, Default)]
pub struct BackOff {
    /// The number of consecutive short-lived workers.
    short: u32,
}

impl BackOff {
    /// Returns the delay after a worker that was ready for the time `ready`; `None`: it was never ready.
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
