//! The front's event loop.

mod connections;
mod recovery;
mod supervision;
mod upgrade;

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    ffi::OsString,
    io, mem,
    os::fd::{IntoRawFd, OwnedFd},
    path::{Path, PathBuf},
    process::{Child, ExitCode},
    rc::Rc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use nix::{
    errno::Errno,
    sys::{
        epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
        signal::{Signal, raise},
        signalfd::{SfdFlags, SignalFd},
    },
};

use sandboxer_base::failpoint::{fail, pass};

use crate::{
    connection::{Connection, Numbers},
    journal::{Journal, JournalError, RecordedState},
    keeper,
    log::log,
    memory_file::MemoryFile,
    store::{self, Files, Left, Stored},
    worker::{BackOff, Worker, raise_limit, reserve, signals},
};

/// The most bytes per read.
const SCRATCH: usize = 16 << 10;
/// The most events per wait.
const EVENTS: usize = 32;

/// The delay before a connection is linked again: a killed worker has exited by then.
const RELINK: Duration = Duration::from_millis(200);
/// The delay before the next attempt to accept when there are no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(250);
/// How long a worker must live with a suspect request until the request counts as harmless.
const TRIAL: Duration = Duration::from_secs(5);

/// How long a worker may not respond before it is replaced. Long, since on an overloaded host each of its threads may
/// wait for seconds.
pub const MAX_SILENCE: Duration = Duration::from_secs(30);

const SIGNALS: u64 = 0;
const CONTROL: u64 = 1;
const LISTENER: u64 = 2;
/// The first token of connections. A token is twice a connection's number, plus one for its link.
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

/// Passes a point at which a test makes a system call fail.
fn at(point: &str, action: &'static str) -> Result<(), FrontError> {
    pass(format_args!("{point}"));
    fail(format_args!("{point}")).map_err(system(action))
}

fn system<E: Into<io::Error>>(action: &'static str) -> impl FnOnce(E) -> FrontError {
    move |source| FrontError::System { action, source: source.into() }
}

/// The program and arguments of another build of the front.
#[derive(Debug, Clone)]
pub struct Build {
    /// The program. Another build may replace the file at any time.
    pub program: PathBuf,
    /// The argument, before a descriptor's number, with which the program calls [`check`].
    pub check: OsString,
    /// The argument, before a descriptor's number and [`Build::arguments`], with which the program calls [`resume`].
    pub resume: OsString,
    /// The further arguments of [`Build::resume`].
    pub arguments: Vec<OsString>,
    /// The argument with which the worker's program writes what it supports to its standard output, and exits.
    pub tell: OsString,
    /// The decision whether the worker's program may take over.
    pub unfit: Unfit,
}

/// A function that returns why the worker's program must not take over, by what it has told (`None`: it exited with an
/// error) and by the notes of all entries that say what it must support. The front then does not reload.
pub type Unfit = fn(Option<&[u8]>, &[&[u8]]) -> Option<String>;

/// Runs `program` as the worker until the front is stopped. Returns the process's exit code. Must be called first in a
/// process.
///
/// Continues where an earlier front was killed, if the service manager has kept its descriptors. Without such a
/// manager, this process keeps them, and starts itself again, with the same arguments, as the front.
///
/// SIGTERM and SIGINT stop the worker and then the front. SIGHUP stops the worker, executes `build` in this process,
/// which continues in [`resume`], and starts `program` again; it changes nothing if `program` is
/// [unfit](Build::unfit). If the first worker exits with an error, so does the front. A worker that was ready and does
/// not respond for about `silence` is killed.
pub fn run(
    program: &Path,
    arguments: &[OsString],
    silence: Duration,
    build: &Build,
) -> Result<ExitCode, FrontError> {
    raise_limit();
    if env::var_os(store::STORE).is_none() {
        let all: Vec<_> = env::args_os().skip(1).collect();
        return keeper::keep(&all).map_err(system("keep the front's descriptors"));
    }
    signals().thread_block().map_err(system("block signals"))?;
    let work = Work { program, arguments, silence, build };
    let left = Left::take().map_err(system("take the descriptors that are kept")).map_err(again)?;
    store::connect().map_err(system("reach the service manager")).map_err(again)?;
    left.remove_halves();
    let front = match Front::recover_from(work, &left) {
        Ok(Some(front)) => front,
        Ok(None) => new(work)?,
        // A journal that cannot be read now can never be read.
        Err(FrontError::Journal(error)) => {
            log!(
                "the state of the front before cannot be read, so containerd's connections are closed; pods go on: {error}"
            );
            left.close_but(&BTreeSet::new(), None);
            new(work)?
        }
        Err(error) => return Err(again(error)),
    };
    goes_on(front)
}

fn new(work: Work<'_>) -> Result<Front<'_>, FrontError> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let identity = format!("{}-{}", std::process::id(), since.as_nanos());
    let journal = Journal::create(identity.clone()).map_err(system("make the journal"))?;
    Front::new(work, journal, identity)
}

/// Same as [`run`], in the place of another build, which has left its journal in this descriptor. A worker that cannot
/// be started does not end the front.
pub fn resume(
    program: &Path,
    arguments: &[OsString],
    silence: Duration,
    build: &Build,
    journal: OwnedFd,
) -> Result<ExitCode, FrontError> {
    raise_limit();
    signals().thread_block().map_err(system("block signals"))?;
    store::connect()
        .and_then(|()| store::take_passed_on())
        .map_err(system("reach the store"))
        .map_err(again)?;
    let work = Work { program, arguments, silence, build };
    let (mut front, _) = Front::recover(work, journal.into_raw_fd()).map_err(again)?;
    front.reloaded(String::new());
    goes_on(front)
}

/// Checks that [`resume`] would understand this journal.
pub fn check(journal: OwnedFd) -> Result<(), FrontError> {
    let journal = MemoryFile::from(Stored::not_yet(journal));
    RecordedState::parse(&journal.content().map_err(system("read the journal"))?)?;
    Ok(())
}

/// Runs a front. Its descriptors are not closed at its end, since the next front needs them: the service manager
/// decides about them.
fn goes_on(front: Front<'_>) -> Result<ExitCode, FrontError> {
    store::removes();
    reserve();
    let mut front = mem::ManuallyDrop::new(front);
    match front.run() {
        Ok(code) => Ok(ExitCode::from(code)),
        Err(error @ FrontError::Worker { .. }) => Err(error),
        Err(error) => Err(again(error)),
    }
}

/// Ends this process so that another one replaces it, which may have more memory, or a free descriptor.
fn again(error: FrontError) -> FrontError {
    match std::error::Error::source(&error) {
        Some(source) => log!("{error}: {source}; another front takes this one's place"),
        None => log!("{error}; another front takes this one's place"),
    }
    let _ = raise(Signal::SIGABRT);
    error
}

/// The task of the front.
#[derive(Debug, Clone, Copy)]
struct Work<'a> {
    build: &'a Build,
    program: &'a Path,
    arguments: &'a [OsString],
    silence: Duration,
}

struct Entry {
    note: Vec<u8>,
    fds: Vec<Rc<Stored>>,
}

struct Front<'a> {
    work: Work<'a>,
    /// The journal of the state that the next front needs.
    journal: Journal,
    /// The identity of this front, and of those that continue it after a kill or a reload. Others have another one.
    identity: String,
    /// The number of reloads, and why the last one did not replace the front; empty: it did.
    reloads: (u32, String),
    epoll: Epoll,
    signals: SignalFd,
    worker: Option<Worker>,
    /// Killed workers that have not ended, and have been replaced.
    stuck: Vec<Child>,
    /// The time at which the next worker is started.
    due: Option<Instant>,
    /// The time at which connections without a link are linked again, if the worker is still running.
    relink: Option<Instant>,
    back_off: BackOff,
    was_ready: bool,
    is_ending: bool,
    is_replacing: bool,
    entries: BTreeMap<String, Entry>,
    files: Files,
    listener: Option<Rc<Stored>>,
    /// The time at which accepting is resumed after a lack of descriptors.
    accept_again: Option<Instant>,
    /// Whether the lack of descriptors was logged.
    has_logged_exhaustion: bool,
    /// Whether some requests are suspects, which are sent one by one.
    has_suspects: bool,
    trial: Option<Trial>,
    connections: BTreeMap<u64, Linked>,
    next_connection: u64,
    numbers: Numbers,
    scratch: Box<[u8]>,
}

/// A suspect request that was sent to the worker.
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
    /// Creates a front without connections, entries and worker.
    fn new(work: Work<'a>, journal: Journal, identity: String) -> Result<Self, FrontError> {
        let (epoll, signals) = Self::events()?;
        Ok(Self {
            work,
            journal,
            identity,
            reloads: (0, String::new()),
            epoll,
            signals,
            worker: None,
            stuck: Vec::new(),
            due: Some(Instant::now()),
            relink: None,
            back_off: BackOff::default(),
            was_ready: false,
            is_ending: false,
            is_replacing: false,
            entries: BTreeMap::new(),
            files: Files::default(),
            listener: None,
            accept_again: None,
            has_logged_exhaustion: false,
            // Requests with which workers have died are sent one by one.
            has_suspects: true,
            trial: None,
            connections: BTreeMap::new(),
            next_connection: CONNECTIONS / 2,
            numbers: Numbers::default(),
            scratch: vec![0; SCRATCH].into(),
        })
    }

    fn events() -> Result<(Epoll, SignalFd), FrontError> {
        at("the front watches signals", "watch signals")?;
        let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
        let signals = SignalFd::with_flags(&signals(), flags).map_err(system("watch signals"))?;
        at("the front watches files", "watch files")?;
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(system("watch files"))?;
        epoll
            .add(&signals, EpollEvent::new(EpollFlags::EPOLLIN, SIGNALS))
            .map_err(system("watch signals"))?;
        Ok((epoll, signals))
    }

    /// Runs the loop; returns the exit code.
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
            if signalled {
                self.stuck.retain_mut(|worker| matches!(worker.try_wait(), Ok(None)));
            }
            if signalled
                && let Some(status) = self.worker.as_mut().and_then(Worker::ended)
                && let Some(code) = self.worker_ended(Some(status))
            {
                return Ok(code);
            }
            if let Some(code) = self.do_what_is_due()? {
                return Ok(code);
            }
            if self.has_suspects {
                self.send_suspect();
            }
            // The worker of an earlier front was killed with that front.
            if self.is_ending && self.worker.as_ref().is_none_or(Worker::is_orphan) {
                return Ok(0);
            }
            if self.journal.is_long() {
                self.files.tidy();
                if let Err(error) = self.journal.shorten() {
                    log!("cannot shorten the journal in memory: {error}");
                }
            }
        }
    }

    /// Does the work that is due; returns an exit code if the front must exit.
    fn do_what_is_due(&mut self) -> Result<Option<u8>, FrontError> {
        let now = Instant::now();
        if !self.is_ending && self.due.is_some_and(|due| due <= now) {
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
        if let Some(worker) =
            self.worker.as_mut().filter(|worker| worker.look().is_some_and(|look| look <= now))
            && worker.is_stuck()
        {
            log!("another worker takes its place beside it");
            return Ok(self.worker_ended(None));
        }
        Ok(None)
    }

    fn timeout(&self) -> EpollTimeout {
        let pulse = self.worker.as_ref().and_then(|worker| worker.pulse.as_ref()).map(|pulse| pulse.due);
        let trial = self.trial.as_ref().map(|trial| trial.until);
        let look = self.worker.as_ref().and_then(Worker::look);
        let dues = [self.due, self.relink, self.accept_again, pulse, trial, look];
        let Some(due) = dues.into_iter().flatten().min() else { return EpollTimeout::NONE };
        // Rounded up, to avoid spinning during the last millisecond.
        let millis = due.saturating_duration_since(Instant::now()).as_millis() + 1;
        u16::try_from(millis).unwrap_or(u16::MAX).into()
    }

    fn take_signals(&mut self) {
        while let Ok(Some(signal)) = self.signals.read_signal() {
            match i32::try_from(signal.ssi_signo).map(Signal::try_from) {
                Ok(Ok(Signal::SIGTERM | Signal::SIGINT)) => {
                    store::tell("STOPPING=1");
                    self.is_ending = true;
                }
                Ok(Ok(Signal::SIGHUP)) => {
                    if let Some(why) = self.unfit() {
                        log!("nothing is reloaded: {why}");
                        self.reloaded(format!("nothing was reloaded: {why}"));
                        continue;
                    }
                    self.is_replacing = true;
                }
                _ => continue,
            }
            if let Some(worker) = &mut self.worker {
                worker.signal(Signal::SIGTERM);
            }
        }
    }
}
