//! The front's one loop.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    io, mem,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    process::{ExitCode, ExitStatus},
    rc::Rc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use nix::{
    errno::Errno,
    fcntl::{OFlag, open},
    sys::{
        epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
        resource::{Resource, getrlimit, setrlimit},
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
        socket::{MsgFlags, SockFlag, accept4, getsockopt, sockopt::PeerCredentials},
        stat::Mode,
    },
    unistd::geteuid,
};
use sd_notify::NotifyState;

use crate::{
    connection::{Connection, Numbers, Side},
    control::{self, ANSWERS_PINGS, FOR_READING, Kind, Message, TASK_LISTENER},
    say::say,
    worker::{BackOff, Pulse, Worker},
};

/// Read at once from a connection, bytes.
const SCRATCH: usize = 16 << 10;
/// Events taken from the kernel at once.
const EVENTS: usize = 32;

/// A process that was killed is gone by then.
const RELINK: Duration = Duration::from_millis(200);
/// After so long it is seen whether there is a descriptor for one more connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(250);
/// A worker that lives for so long with a request that others ended under has not ended by it, most likely.
const TRIAL: Duration = Duration::from_secs(5);

/// A worker that answers nothing for so long is replaced. Generous: on a host with far more work than processors each of
/// its threads may wait for seconds.
pub const MAX_SILENCE: Duration = Duration::from_secs(30);

const SIGNALS: u64 = 0;
const CONTROL: u64 = 1;
const LISTENER: u64 = 2;
/// From here on: twice a connection's number, and one more for its link.
const CONNECTIONS: u64 = 16;

/// Why there is no front.
#[derive(Debug, thiserror::Error)]
pub enum FrontError {
    /// The system refuses something that it needs.
    #[error("cannot {action}")]
    System {
        /// What was attempted.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// There is nothing to run.
    #[error("cannot run the worker {program:?}")]
    Worker {
        /// The program.
        program: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

fn system<E: Into<io::Error>>(action: &'static str) -> impl FnOnce(E) -> FrontError {
    move |source| FrontError::System { action, source: source.into() }
}

/// Runs `program` as the worker for as long as nobody asks for an end. The answer is the process's own exit code.
///
/// SIGTERM and SIGINT end the worker and then the front; SIGHUP has the worker end and started again, from
/// what is at `program` by then. A first worker that refuses to run takes the front along. One that answers nothing for
/// about `silence` once it was ready is killed.
pub fn run(program: &Path, arguments: &[OsString], silence: Duration) -> Result<ExitCode, FrontError> {
    Front::new(program, arguments, silence)?.run()
}

struct Entry {
    note: Vec<u8>,
    fds: Vec<Rc<OwnedFd>>,
}

struct Front<'a> {
    program: &'a Path,
    arguments: &'a [OsString],
    silence: Duration,
    /// Tells this front from others, before and after it.
    identity: String,
    epoll: Epoll,
    signals: SignalFd,
    worker: Option<Worker>,
    /// When the next one is due.
    due: Option<Instant>,
    /// When connections that have lost their link get another one, should the worker be there still.
    relink: Option<Instant>,
    back_off: BackOff,
    was_ready: bool,
    ending: bool,
    replacing: bool,
    kept: BTreeMap<String, Entry>,
    listener: Option<Rc<OwnedFd>>,
    /// When connections are accepted again, for want of descriptors until then.
    accept_again: Option<Instant>,
    /// That there are no descriptors was said.
    starved: bool,
    /// Some requests are suspects: they are given one by one.
    suspects: bool,
    trial: Option<Trial>,
    connections: BTreeMap<u64, Linked>,
    next_connection: u64,
    numbers: Numbers,
    scratch: Box<[u8]>,
}

/// A suspect that the worker has.
struct Trial {
    connection: u64,
    request: u32,
    until: Instant,
}

/// A connection, and what the kernel watches of it.
struct Linked {
    connection: Connection,
    watched: (EpollFlags, EpollFlags),
}

impl<'a> Front<'a> {
    fn new(program: &'a Path, arguments: &'a [OsString], silence: Duration) -> Result<Self, FrontError> {
        let mut mask = SigSet::empty();
        for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGCHLD] {
            mask.add(signal);
        }
        mask.thread_block().map_err(system("block signals"))?;
        let signals = SignalFd::with_flags(&mask, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)
            .map_err(system("watch signals"))?;
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(system("watch files"))?;
        epoll
            .add(&signals, EpollEvent::new(EpollFlags::EPOLLIN, SIGNALS))
            .map_err(system("watch signals"))?;
        // A container's streams are up to six files, a connection two.
        if let Ok((_, most)) = getrlimit(Resource::RLIMIT_NOFILE) {
            let _ = setrlimit(Resource::RLIMIT_NOFILE, most, most);
        }
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Ok(Self {
            program,
            arguments,
            silence,
            identity: format!("{}-{}", std::process::id(), since.as_nanos()),
            epoll,
            signals,
            worker: None,
            due: None,
            relink: None,
            back_off: BackOff::default(),
            was_ready: false,
            ending: false,
            replacing: false,
            kept: BTreeMap::new(),
            listener: None,
            accept_again: None,
            starved: false,
            suspects: false,
            trial: None,
            connections: BTreeMap::new(),
            next_connection: CONNECTIONS / 2,
            numbers: Numbers::default(),
            scratch: vec![0; SCRATCH].into(),
        })
    }

    fn run(&mut self) -> Result<ExitCode, FrontError> {
        self.start_worker()
            .map_err(|source| FrontError::Worker { program: self.program.to_owned(), source })?;
        let mut events = [EpollEvent::empty(); EVENTS];
        loop {
            let count = match self.epoll.wait(&mut events, self.patience()) {
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
                    CONTROL => self.hear_worker(),
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
            let now = Instant::now();
            if self.due.is_some_and(|due| due <= now) {
                self.due = None;
                if let Err(error) = self.start_worker() {
                    say!("cannot run the worker {:?}: {error}", self.program);
                    self.due =
                        Some(Instant::now() + self.back_off.after(None).max(Duration::from_millis(100)));
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
            // What the worker has said so far is heard: whoever answered is not silent.
            if self.pulse().is_some_and(|pulse| pulse.due <= now) {
                self.ask_worker();
            }
            if self.suspects {
                self.give_suspect();
            }
            if self.ending && self.worker.is_none() {
                return Ok(ExitCode::SUCCESS);
            }
        }
    }

    fn patience(&self) -> EpollTimeout {
        let pulse = self.worker.as_ref().and_then(|worker| worker.pulse.as_ref()).map(|pulse| pulse.due);
        let trial = self.trial.as_ref().map(|trial| trial.until);
        let dues = [self.due, self.relink, self.accept_again, pulse, trial];
        let Some(due) = dues.into_iter().flatten().min() else { return EpollTimeout::NONE };
        // Rounded up, or it would spin for the last millisecond.
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

    // ── the worker ──────────────────────────────────────────────────────────────────────────────

    fn start_worker(&mut self) -> io::Result<()> {
        let mut worker = Worker::start(self.program, self.arguments)?;
        for (key, entry) in &self.kept {
            worker.tell(Kind::Kept, key, &entry.note, entry.fds.clone());
        }
        worker.tell(Kind::AllKept, "", self.identity.as_bytes(), Vec::new());
        self.epoll
            .add(worker.control(), EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT, CONTROL))?;
        self.worker = Some(worker);
        Ok(())
    }

    fn pulse(&mut self) -> Option<&mut Pulse> {
        self.worker.as_mut()?.pulse.as_mut()
    }

    /// Asks the worker whether it is there; one that has not answered for long enough is killed, and replaced as any
    /// other that ended.
    fn ask_worker(&mut self) {
        let silence = self.silence;
        let Some(worker) = &mut self.worker else { return };
        let Some(pulse) = &mut worker.pulse else { return };
        if pulse.asks() {
            worker.tell(Kind::Ping, "", &[], Vec::new());
            worker.flush();
            return self.watch_worker();
        }
        say!("the worker has not answered for {silence:?}: it is killed, and another one started");
        worker.pulse = None;
        worker.signal(Signal::SIGKILL);
    }

    fn hear_worker(&mut self) {
        loop {
            let Some(worker) = &mut self.worker else { return };
            worker.flush();
            match control::receive(worker.control(), MsgFlags::MSG_DONTWAIT) {
                Ok(Some(message)) => self.heard(message),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return self.watch_worker(),
                Ok(None) => {
                    // It ends, or has lost its way: either way there will be another.
                    let _ = self.epoll.delete(worker.control());
                    return worker.signal(Signal::SIGKILL);
                }
                // It has ended without hearing us out; what it said itself follows.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
                Err(error) => {
                    say!("the worker says what cannot be understood: {error}");
                }
            }
        }
    }

    fn watch_worker(&mut self) {
        if let Some(worker) = &self.worker {
            let mut flags = EpollFlags::EPOLLIN;
            flags.set(EpollFlags::EPOLLOUT, worker.has_outgoing());
            let _ = self.epoll.modify(worker.control(), &mut EpollEvent::new(flags, CONTROL));
        }
    }

    fn heard(&mut self, Message { kind, key, note, fds }: Message) {
        match kind {
            Kind::Keep => {
                let fds: Vec<_> = fds.into_iter().map(Rc::new).collect();
                if let Some(listener) = fds.first().filter(|_| key.starts_with(TASK_LISTENER)) {
                    self.listen(listener.clone());
                }
                self.kept.insert(key, Entry { note, fds });
            }
            Kind::Forget => drop(self.kept.remove(&key)),
            Kind::Open => self.open(key, note, fds),
            Kind::Ready => {
                if let Some(worker) = &mut self.worker {
                    worker.ready = Some(Instant::now());
                    worker.pulse = (note == ANSWERS_PINGS).then(|| Pulse::new(self.silence));
                }
                if !mem::replace(&mut self.was_ready, true) {
                    let _ = sd_notify::notify(&[NotifyState::Ready]);
                }
                let all: Vec<_> = self.connections.keys().copied().collect();
                all.into_iter().for_each(|number| self.link(number));
            }
            Kind::Pong => {
                if let Some(pulse) = self.pulse() {
                    pulse.answered();
                }
            }
            Kind::Kept | Kind::AllKept | Kind::Connection | Kind::Ping => {}
        }
    }

    /// Opens a FIFO, keeps it, and answers with it.
    fn open(&mut self, key: String, note: Vec<u8>, fds: Vec<OwnedFd>) {
        let Ok([named, answer]) = <[OwnedFd; 2]>::try_from(fds) else { return };
        let mut flags = OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        flags.insert(if note == FOR_READING { OFlag::O_RDONLY } else { OFlag::O_RDWR });
        let told = match open(format!("/proc/self/fd/{}", named.as_raw_fd()).as_str(), flags, Mode::empty()) {
            Ok(opened) => {
                let opened = Rc::new(opened);
                self.kept.insert(key, Entry { note, fds: vec![opened.clone()] });
                control::send(answer.as_fd(), Kind::Kept, "", &[], &[opened.as_fd()])
            }
            Err(error) => {
                let number = (error as i32).to_string();
                control::send(answer.as_fd(), Kind::Kept, "", number.as_bytes(), &[])
            }
        };
        if let Err(error) = told {
            say!("the worker cannot be answered: {error}");
        }
    }

    /// Takes leave of the worker. An exit code: of the front, too.
    fn worker_ended(&mut self, status: ExitStatus) -> Option<ExitCode> {
        // What it said last still counts.
        while let Some(worker) = &self.worker {
            match control::receive(worker.control(), MsgFlags::MSG_DONTWAIT) {
                Ok(Some(message)) => self.heard(message),
                Ok(None) => break,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => {}
            }
        }
        let worker = self.worker.take()?;
        self.relink = None;
        self.trial = None;
        self.suspects = true;
        let died = !self.ending && !self.replacing;
        let numbers: Vec<_> = self.connections.keys().copied().collect();
        for number in numbers {
            if let Some(linked) = self.connections.get_mut(&number) {
                linked.connection.worker_gone(&mut self.scratch, died);
            }
            self.settle(number, Side::Open);
        }
        if self.ending {
            return Some(ExitCode::SUCCESS);
        }
        if let Some(code) = status.code().filter(|code| *code != 0 && !self.was_ready) {
            return Some(ExitCode::from(u8::try_from(code).unwrap_or(1)));
        }
        let pause = match mem::take(&mut self.replacing) {
            true => Duration::ZERO,
            false => {
                let pause = self.back_off.after(worker.ready.map(|since| since.elapsed()));
                say!("the worker ended ({status}); the next one starts in {pause:?}");
                pause
            }
        };
        self.due = Some(Instant::now() + pause);
        None
    }

    // ── connections ─────────────────────────────────────────────────────────────────────────────

    fn listen(&mut self, listener: Rc<OwnedFd>) {
        if let Some(before) = self.listener.take() {
            let _ = self.epoll.delete(&before);
        }
        if let Err(error) = self.epoll.add(&listener, EpollEvent::new(EpollFlags::EPOLLIN, LISTENER)) {
            say!("cannot watch the task socket: {error}");
        }
        self.listener = Some(listener);
    }

    fn watch_listener(&self, events: EpollFlags) {
        if let Some(listener) = &self.listener {
            let _ = self.epoll.modify(listener, &mut EpollEvent::new(events, LISTENER));
        }
    }

    fn pause_accepting(&mut self) {
        self.watch_listener(EpollFlags::empty());
        self.accept_again = Some(Instant::now() + ACCEPT_PAUSE);
    }

    fn accept(&mut self) {
        use std::os::fd::{AsRawFd, FromRawFd};
        let Some(listener) = &self.listener else { return };
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let client = match accept4(listener.as_raw_fd(), flags) {
            // SAFETY: the kernel has just made the descriptor for us; nobody else has it.
            Ok(fd) => unsafe { UnixStream::from_raw_fd(fd) },
            Err(error @ (Errno::EMFILE | Errno::ENFILE | Errno::ENOBUFS | Errno::ENOMEM)) => {
                // Whoever knocks is still there, and the kernel would say so without end.
                self.pause_accepting();
                if !mem::replace(&mut self.starved, true) {
                    say!(
                        "task connections have to wait: {error}; raise the limit of open files \
                         (LimitNOFILE= of the service)"
                    );
                }
                return;
            }
            // Whoever knocked has gone again.
            Err(_) => return,
        };
        self.starved = false;
        // The socket is 0600 in a directory of 0700; this holds where somebody loosened that.
        let trusted = |uid: u32| uid == 0 || uid == geteuid().as_raw();
        if !getsockopt(&client, PeerCredentials).is_ok_and(|peer| trusted(peer.uid())) {
            return say!("rejected a task connection of a user other than root");
        }
        let number = self.next_connection;
        self.next_connection += 1;
        let watched = (EpollFlags::empty(), EpollFlags::empty());
        if let Err(error) = self.epoll.add(&client, EpollEvent::new(watched.0, number * 2)) {
            return say!("a task connection cannot be watched: {error}");
        }
        self.connections.insert(number, Linked { connection: Connection::new(client), watched });
        self.link(number);
    }

    /// Links a connection to the worker, if that takes requests.
    fn link(&mut self, number: u64) {
        let Some(worker) = self.worker.as_mut().filter(|worker| worker.ready.is_some()) else { return };
        let Some(linked) = self.connections.get_mut(&number) else { return };
        let mut linking = || -> io::Result<()> {
            let (ours, theirs) = UnixStream::pair()?;
            ours.set_nonblocking(true)?;
            self.epoll.add(&ours, EpollEvent::new(EpollFlags::empty(), number * 2 + 1))?;
            worker.tell(Kind::Connection, "", &[], vec![Rc::new(theirs.into())]);
            worker.flush();
            linked.connection.set_link(ours);
            linked.watched.1 = EpollFlags::empty();
            Ok(())
        };
        if let Err(error) = linking() {
            // It keeps what it has been asked until it can be linked: closed, its container would be taken for dead.
            if !mem::replace(&mut self.starved, true) {
                say!("task connections have to wait for their link to the worker: {error}");
            }
            self.relink = Some(Instant::now() + RELINK);
            // Others that come in would take what it needs.
            self.pause_accepting();
        }
        self.watch_worker();
        self.settle(number, Side::Open);
    }

    /// Gives the worker one of the requests that too many workers have ended under, if it has none: should this one end,
    /// too, it is known by which.
    fn give_suspect(&mut self) {
        if self.worker.as_ref().is_none_or(|worker| worker.ready.is_none()) {
            return;
        }
        let open = |trial: &Trial| {
            let linked = self.connections.get(&trial.connection);
            trial.until > Instant::now()
                && linked.is_some_and(|linked| linked.connection.awaits(trial.request))
        };
        if self.trial.as_ref().is_some_and(open) {
            return;
        }
        let suspects = self.connections.iter();
        let suspects = suspects.filter_map(|(number, linked)| Some((linked.connection.suspect()?, *number)));
        let Some((request, connection)) = suspects.min() else {
            self.trial = None;
            // One without a link for now shows up again with it.
            self.suspects = self.relink.is_some();
            return;
        };
        self.trial = Some(Trial { connection, request, until: Instant::now() + TRIAL });
        if let Some(linked) = self.connections.get_mut(&connection) {
            linked.connection.give(request);
            // The socket may be full, or gone, which its next event says.
            let _ = linked.connection.flush_link();
        }
        self.settle(connection, Side::Open);
    }

    /// Links what has lost its link, though the worker lives; what keeps losing it is closed.
    fn link_again(&mut self) {
        let unlinked: Vec<_> = (self.connections.iter())
            .filter(|(_, linked)| linked.connection.link().is_none())
            .map(|(number, linked)| (*number, linked.connection.may_link()))
            .collect();
        for (number, may_link) in unlinked {
            if may_link { self.link(number) } else { self.settle(number, Side::Gone) }
        }
    }

    fn serve(&mut self, number: u64, link: bool, events: EpollFlags) {
        let Some(Linked { connection, .. }) = self.connections.get_mut(&number) else { return };
        let gone = EpollFlags::EPOLLERR | EpollFlags::EPOLLHUP;
        let side = if link {
            let mut side = Side::Open;
            if events.intersects(EpollFlags::EPOLLIN | gone) {
                side = connection.read_link(&mut self.scratch);
            }
            if side != Side::Gone {
                side = connection.flush_link();
            }
            if side == Side::Gone {
                return self.link_gone(number);
            }
            connection.flush_client()
        } else {
            let mut side = Side::Open;
            if connection.link().is_none() && events.intersects(gone) {
                side = Side::Gone;
            } else if events.intersects(EpollFlags::EPOLLIN | gone) {
                side = connection.read_client(&mut self.scratch, &mut self.numbers);
            }
            match side {
                Side::Gone => side,
                _ if connection.flush_link() == Side::Gone => return self.link_gone(number),
                _ => connection.flush_client(),
            }
        };
        self.settle(number, side);
    }

    /// The worker has closed a link: it has ended, most likely, which is about to be seen.
    fn link_gone(&mut self, number: u64) {
        let Some(Linked { connection, .. }) = self.connections.get_mut(&number) else { return };
        connection.cut_link();
        let side = connection.flush_client();
        self.settle(number, side);
        if !self.ending && !self.replacing {
            self.relink.get_or_insert(Instant::now() + RELINK);
        }
    }

    /// Watches what a connection waits for now; one that is gone is closed, and its link with it.
    fn settle(&mut self, number: u64, side: Side) {
        let Some(Linked { connection, watched }) = self.connections.get_mut(&number) else { return };
        if side == Side::Gone {
            self.connections.remove(&number);
            return;
        }
        let wanted = connection.interest();
        let watch = |fd: BorrowedFd<'_>, wanted: EpollFlags, watched: &mut EpollFlags, token: u64| {
            if wanted != *watched {
                let _ = self.epoll.modify(fd, &mut EpollEvent::new(wanted, token));
                *watched = wanted;
            }
        };
        watch(connection.client(), wanted.0, &mut watched.0, number * 2);
        if let Some(link) = connection.link() {
            watch(link, wanted.1, &mut watched.1, number * 2 + 1);
        }
    }
}
