//! The front's event loop.

mod connections;
mod recovery;
mod supervision;
mod upgrade;

use std::{
    collections::BTreeMap,
    ffi::OsString,
    io, mem,
    os::fd::{AsRawFd, IntoRawFd, OwnedFd, RawFd},
    path::{Path, PathBuf},
    process::ExitCode,
    rc::Rc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use nix::{
    errno::Errno,
    sys::{
        epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
        resource::{Resource, getrlimit, setrlimit},
        signal::{Signal, raise},
        signalfd::{SfdFlags, SignalFd},
    },
};
use sd_notify::NotifyState;

use crate::{
    connection::{Connection, Numbers},
    holder::{self, Build},
    journal::{Held, Journal, JournalError},
    log::log,
    memory_file::MemoryFile,
    worker::{BackOff, Worker},
};
use recovery::Loose;

/// Most bytes per read.
const SCRATCH: usize = 16 << 10;
/// Most events per wait.
const EVENTS: usize = 32;

/// Delay before a connection is linked again: a killed worker has exited by then.
const RELINK: Duration = Duration::from_millis(200);
/// Delay before the next attempt to accept when there are no descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(250);
/// If a worker lives for so long with a suspect request, the request is most likely harmless.
const TRIAL: Duration = Duration::from_secs(5);

/// A worker that does not respond for so long is replaced. Generous: on an overloaded host each of its
/// threads may wait for seconds.
pub const MAX_SILENCE: Duration = Duration::from_secs(30);

const SIGNALS: u64 = 0;
const CONTROL: u64 = 1;
const LISTENER: u64 = 2;
/// First token of connections: twice a connection's number, plus one for its link.
const CONNECTIONS: u64 = 16;

/// Why the front cannot run.
#[derive(Debug, thiserror::Error)]
pub enum FrontError {
    /// A system call failed.
    #[error("cannot {action}")]
    System {
        /// The failed operation.
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// Another build has left a state that this one cannot read.
    #[error("cannot take the place of the running front")]
    Journal(#[from] JournalError),
    /// The worker cannot be started.
    #[error("cannot run the worker {program:?}")]
    Worker {
        /// The program.
        program: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

fn system<E: Into<io::Error>>(action: &'static str) -> impl FnOnce(E) -> FrontError {
    move |source| FrontError::System { action, source: source.into() }
}

/// Runs `program` as the worker until the front is stopped. Returns the process's exit code.
///
/// This process is the holder: it makes the front from itself, and another one whenever the front is killed. SIGTERM and SIGINT stop
/// the worker and then the front. SIGHUP stops the worker, executes `build` in this process, which goes on in [`resume`], and starts
/// `program` again. If the first worker exits with an error, so does the front. A worker that was ready and does not respond for about
/// `silence` is killed.
pub fn run(
    program: &Path,
    arguments: &[OsString],
    silence: Duration,
    build: &Build,
) -> Result<ExitCode, FrontError> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let journal = Journal::create(format!("{}-{}", std::process::id(), since.as_nanos()));
    // The front owns its descriptors, whichever process that is.
    let journal = mem::ManuallyDrop::new(journal.map_err(system("make the journal"))?);
    hold(Work { program, arguments, silence, build }, journal.file().as_raw_fd(), None)
}

/// Same as [`run`], in the place of another build, which has left its journal in this descriptor. No failure to start a worker ends it.
pub fn resume(
    program: &Path,
    arguments: &[OsString],
    silence: Duration,
    build: &Build,
    journal: OwnedFd,
) -> Result<ExitCode, FrontError> {
    hold(Work { program, arguments, silence, build }, journal.into_raw_fd(), Some(String::new()))
}

/// Checks that [`resume`] would understand this journal.
pub fn check(journal: OwnedFd) -> Result<(), FrontError> {
    let bytes = MemoryFile::from(journal).content().map_err(system("read the journal"))?;
    Held::of(&bytes)?;
    Ok(())
}

fn hold(work: Work<'_>, journal: RawFd, reload: Option<String>) -> Result<ExitCode, FrontError> {
    // Its descriptors are its successor's, too: they stay open when it returns.
    let front = |reload: Option<&str>| Front::recover(work, journal, reload).map(mem::ManuallyDrop::new);
    let front = |reload: Option<&str>| match front(reload).and_then(|mut front| front.run()) {
        Ok(code) => code,
        Err(error) => {
            match std::error::Error::source(&error) {
                Some(source) => log!("{error}: {source}"),
                None => log!("{error}"),
            }
            if !matches!(error, FrontError::Worker { .. }) {
                // Perhaps only now: the next one tries again.
                let _ = raise(Signal::SIGABRT);
            }
            1
        }
    };
    holder::hold(work.build, &journal, reload, front).map_err(system("hold the front"))
}

/// What the front does.
#[derive(Debug, Clone, Copy)]
struct Work<'a> {
    build: &'a Build,
    program: &'a Path,
    arguments: &'a [OsString],
    silence: Duration,
}

struct Entry {
    note: Vec<u8>,
    fds: Vec<Rc<OwnedFd>>,
}

struct Front<'a> {
    work: Work<'a>,
    /// What the next front must know.
    journal: Journal,
    /// Identifies this front, and those that take its place after a kill or a reload, among earlier and later ones.
    identity: String,
    /// Number of reloads, and why the last one changed nothing, if so.
    reloads: (u32, String),
    epoll: Epoll,
    signals: SignalFd,
    worker: Option<Worker>,
    /// When the next worker is to be started.
    due: Option<Instant>,
    /// When connections without a link are linked again, if the worker is still running.
    relink: Option<Instant>,
    back_off: BackOff,
    was_ready: bool,
    ending: bool,
    replacing: bool,
    kept: BTreeMap<String, Entry>,
    /// FIFOs that the front before has opened and not recorded.
    loose: Loose,
    listener: Option<Rc<OwnedFd>>,
    /// When accepting is resumed after a lack of descriptors.
    accept_again: Option<Instant>,
    /// The lack of descriptors was logged.
    starved: bool,
    /// Some requests are suspects: they are sent one by one.
    suspects: bool,
    trial: Option<Trial>,
    connections: BTreeMap<u64, Linked>,
    next_connection: u64,
    numbers: Numbers,
    scratch: Box<[u8]>,
}

/// A suspect that was sent to the worker.
struct Trial {
    connection: u64,
    request: u32,
    until: Instant,
}

/// A connection, and its registered events.
struct Linked {
    connection: Connection,
    watched: (EpollFlags, EpollFlags),
}

impl<'a> Front<'a> {
    /// Makes a front without connections, entries and worker.
    fn new(work: Work<'a>, journal: Journal) -> Result<Self, FrontError> {
        let mask = holder::signals();
        let signals = SignalFd::with_flags(&mask, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)
            .map_err(system("watch signals"))?;
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(system("watch files"))?;
        epoll
            .add(&signals, EpollEvent::new(EpollFlags::EPOLLIN, SIGNALS))
            .map_err(system("watch signals"))?;
        // A container's streams need up to six files, a connection four.
        if let Ok((_, most)) = getrlimit(Resource::RLIMIT_NOFILE) {
            let _ = setrlimit(Resource::RLIMIT_NOFILE, most, most);
        }
        Ok(Self {
            work,
            journal,
            identity: String::new(),
            reloads: (0, String::new()),
            epoll,
            signals,
            worker: None,
            due: Some(Instant::now()),
            relink: None,
            back_off: BackOff::default(),
            was_ready: false,
            ending: false,
            replacing: false,
            kept: BTreeMap::new(),
            loose: Loose::default(),
            listener: None,
            accept_again: None,
            starved: false,
            // Requests that workers have died with are sent one by one.
            suspects: true,
            trial: None,
            connections: BTreeMap::new(),
            next_connection: CONNECTIONS / 2,
            numbers: Numbers::default(),
            scratch: vec![0; SCRATCH].into(),
        })
    }

    /// Returns the exit code.
    fn run(&mut self) -> Result<u8, FrontError> {
        let mut events = [EpollEvent::empty(); EVENTS];
        loop {
            let count = match self.epoll.wait(&mut events, self.timeout()) {
                Ok(count) => count,
                Err(Errno::EINTR) => 0,
                Err(error) => return Err(system("wait for events")(error)),
            };
            let mut signalled = false;
            for event in &events[..count] {
                match event.data() {
                    SIGNALS => {
                        signalled = true;
                        self.take_signals();
                    }
                    CONTROL => self.read_worker(),
                    LISTENER => self.accept(),
                    connection => self.serve(connection / 2, connection % 2 == 1, event.events()),
                }
            }
            if signalled
                && let Some(status) = self.worker.as_mut().and_then(Worker::ended)
                && let Some(code) = self.worker_ended(status)
            {
                return Ok(code);
            }
            self.do_what_is_due()?;
            if self.suspects {
                self.send_suspect();
            }
            if self.ending && self.worker.is_none() {
                return Ok(0);
            }
            if self.journal.is_long()
                && let Err(error) = self.journal.shorten()
            {
                log!("cannot shorten the journal in memory: {error}");
            }
        }
    }

    fn do_what_is_due(&mut self) -> Result<(), FrontError> {
        let now = Instant::now();
        if !self.ending && self.due.is_some_and(|due| due <= now) {
            self.due = None;
            if let Err(source) = self.start_worker() {
                let program = self.work.program;
                if !self.was_ready {
                    return Err(FrontError::Worker { program: program.to_owned(), source });
                }
                log!("cannot start the worker {program:?}: {source}");
                let pause = self.back_off.after(None).max(Duration::from_millis(100));
                self.due = Some(Instant::now() + pause);
            }
        }
        if self.relink.is_some_and(|due| due <= now) {
            self.relink = None;
            self.link_again();
        }
        if self.accept_again.is_some_and(|due| due <= now) {
            self.accept_again = None;
            self.watch_listener(EpollFlags::EPOLLIN);
        }
        // All received messages have been handled: a worker that responded is not silent.
        if self.pulse().is_some_and(|pulse| pulse.due <= now) {
            self.ping_worker();
        }
        self.loose.drop_at(now);
        Ok(())
    }

    fn timeout(&self) -> EpollTimeout {
        let pulse = self.worker.as_ref().and_then(|worker| worker.pulse.as_ref()).map(|pulse| pulse.due);
        let trial = self.trial.as_ref().map(|trial| trial.until);
        let dues = [self.due, self.relink, self.accept_again, self.loose.until(), pulse, trial];
        let Some(due) = dues.into_iter().flatten().min() else { return EpollTimeout::NONE };
        // Rounded up, to avoid spinning during the last millisecond.
        let millis = due.saturating_duration_since(Instant::now()).as_millis() + 1;
        u16::try_from(millis).unwrap_or(u16::MAX).into()
    }

    fn take_signals(&mut self) {
        while let Ok(Some(signal)) = self.signals.read_signal() {
            match i32::try_from(signal.ssi_signo).map(Signal::try_from) {
                Ok(Ok(Signal::SIGTERM | Signal::SIGINT)) => {
                    let _ = sd_notify::notify(&[NotifyState::Stopping]);
                    self.ending = true;
                }
                Ok(Ok(Signal::SIGHUP)) => self.replacing = true,
                _ => continue,
            }
            if let Some(worker) = &self.worker {
                worker.signal(Signal::SIGTERM);
            }
        }
    }
}
