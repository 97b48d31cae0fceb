//! The store of descriptors on a host without systemd: a process that starts the front, keeps the descriptors that it
//! sends, and hands them to the next front.
//!
//! The keeper speaks systemd's protocol, as far as the front uses it, and is as strict: see sd_notify(3) and
//! sd_listen_fds(3).
//! The keeper must not be killed: front and worker end with it.

use std::{
    env,
    ffi::{CString, OsString},
    io::{self, IoSliceMut},
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
        unix::ffi::OsStringExt,
    },
    process::ExitCode,
    time::{Duration, Instant},
};

use nix::{
    cmsg_space,
    errno::Errno,
    fcntl::{FcntlArg, FdFlag, fcntl},
    libc,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{Signal, kill},
        signalfd::{SfdFlags, SignalFd},
        socket::{
            AddressFamily, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr, bind, getsockname,
            recvmsg, sendto, setsockopt, socket, sockopt::PassCred,
        },
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::{ForkResult, Pid, execve, fork, geteuid, getpid},
};

use crate::{
    log::log,
    store::{self, STORE},
    worker::{BackOff, dies_with, raise_limit, signals},
};

/// The variable with which the front gets the process ID of its keeper.
pub const KEEPER: &str = "SANDBOXER_KEEPER";
/// The most descriptors: their names must fit in one variable of 128 KiB.
const MAX_DESCRIPTORS: usize = 16384;
/// The pause after a front that was killed, in which the operations that it began finish.
const KILLED_PAUSE: Duration = Duration::from_millis(50);

/// Runs this program, with these arguments, as the front, repeatedly until one exits. Returns its exit code.
pub fn keep(arguments: &[OsString]) -> io::Result<ExitCode> {
    let program = env::current_exe()?;
    raise_limit();
    let mask = signals();
    mask.thread_block()?;
    let signals = SignalFd::with_flags(&mask, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(AddressFamily::Unix, SockType::Datagram, flags, None)?;
    setsockopt(&socket, PassCred, &true)?;
    // A socket that is bound without an address gets an abstract one.
    bind(socket.as_raw_fd(), &UnixAddr::new_unnamed())?;
    let address = getsockname::<UnixAddr>(socket.as_raw_fd())?;
    let address = [b"@", address.as_abstract().unwrap_or_default()].concat();
    let words = [program.into()].into_iter().chain(arguments.iter().cloned());
    let mut keeper = Keeper {
        words: strings(words)?,
        address: OsString::from_vec(address),
        outer: env::var_os("NOTIFY_SOCKET"),
        socket,
        signals,
        is_ending: false,
        descriptors: Vec::new(),
    };
    let mut back_off = BackOff::default();
    while !keeper.is_ending {
        let since = Instant::now();
        let ended = match keeper.start() {
            Ok(front) => keeper.wait(Some(front), None),
            Err(error) => {
                log!("cannot start the front: {error}");
                WaitStatus::StillAlive
            }
        };
        let pause = match ended {
            WaitStatus::Exited(_, code) => return Ok(ExitCode::from(u8::try_from(code).unwrap_or(1))),
            _ if keeper.is_ending => break,
            WaitStatus::Signaled(_, Signal::SIGKILL, _) => KILLED_PAUSE,
            _ => back_off.after(Some(since.elapsed())).max(KILLED_PAUSE),
        };
        log!("the front has died ({ended:?}); another takes its place in {pause:?}");
        keeper.wait(None, Some(Instant::now() + pause));
    }
    Ok(ExitCode::SUCCESS)
}

struct Keeper {
    words: Vec<CString>,
    address: OsString,
    /// The socket of a service manager that has no store, such as a container's.
    outer: Option<OsString>,
    socket: OwnedFd,
    signals: SignalFd,
    is_ending: bool,
    descriptors: Vec<(String, OwnedFd)>,
}

impl Keeper {
    /// Starts a front with all descriptors in the store.
    #[expect(clippy::disallowed_methods, reason = "this process has one thread")]
    fn start(&self) -> io::Result<Pid> {
        let keeper = getpid();
        // SAFETY: this process has one thread, so its child may make any calls.
        match unsafe { fork() }? {
            ForkResult::Parent { child } => Ok(child),
            ForkResult::Child => {
                dies_with(keeper);
                let Err(error) = self.become_front(keeper);
                log!("cannot run the front {:?}: {error}", self.words[0]);
                // An exit code would be the front's. After an abort, the next front tries again.
                std::process::abort()
            }
        }
    }

    /// Executes the front, as systemd does with a service that has descriptors in its store.
    fn become_front(&self, keeper: Pid) -> io::Result<std::convert::Infallible> {
        let mut moves: Vec<_> =
            self.descriptors.iter().zip(3..).map(|((_, fd), to)| (fd.as_raw_fd(), Some(to))).collect();
        store::place(&mut moves)?;
        for (fd, _) in &moves {
            // SAFETY: the descriptor was just put at this number.
            fcntl(unsafe { std::os::fd::BorrowedFd::borrow_raw(*fd) }, FcntlArg::F_SETFD(FdFlag::empty()))?;
        }
        let names: Vec<_> = self.descriptors.iter().map(|(name, _)| name.as_str()).collect();
        let variables = [
            ("NOTIFY_SOCKET", self.address.clone()),
            (STORE, MAX_DESCRIPTORS.to_string().into()),
            (KEEPER, keeper.to_string().into()),
            ("LISTEN_PID", getpid().to_string().into()),
            ("LISTEN_FDS", names.len().to_string().into()),
            ("LISTEN_FDNAMES", names.join(":").into()),
        ];
        let others = env::vars_os().filter(|(name, _)| variables.iter().all(|(known, _)| name != known));
        let all = others.chain(variables.iter().map(|(name, value)| (OsString::from(name), value.clone())));
        let environment = all.map(|(name, value)| [name, value].join("=".as_ref()));
        Ok(execve(&self.words[0], &self.words, &strings(environment)?)?)
    }

    /// Receives messages and passes signals on until the front has ended or, without a front, until this time.
    fn wait(&mut self, front: Option<Pid>, until: Option<Instant>) -> WaitStatus {
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) || front.is_none() && self.is_ending {
                return WaitStatus::StillAlive;
            }
            let readable = |fd| PollFd::new(fd, PollFlags::POLLIN);
            let left = left.map_or(PollTimeout::NONE, |left| left.try_into().unwrap_or(PollTimeout::MAX));
            let _ = poll(&mut [readable(self.socket.as_fd()), readable(self.signals.as_fd())], left);
            while let Ok(Some(signal)) = self.signals.read_signal() {
                let signal = Signal::try_from(signal.ssi_signo.cast_signed());
                self.is_ending |= matches!(signal, Ok(Signal::SIGTERM | Signal::SIGINT));
                if let (Some(front), Ok(signal)) = (front, signal)
                    && signal != Signal::SIGCHLD
                {
                    let _ = kill(front, signal);
                }
            }
            let mut of_front = None;
            let reaped =
                || waitpid(None, Some(WaitPidFlag::WNOHANG)).ok().filter(|ended| ended.pid().is_some());
            while let Some(ended) = reaped() {
                of_front = of_front.or((ended.pid() == front).then_some(ended));
            }
            // All that the front has sent is in the socket.
            self.read();
            if let Some(ended) = of_front {
                return ended;
            }
        }
    }

    /// Receives all pending messages.
    fn read(&mut self) {
        let mut bytes = [0; 4096];
        let mut space = cmsg_space!([i32; 16], libc::ucred);
        loop {
            let mut parts = [IoSliceMut::new(&mut bytes)];
            let flags = MsgFlags::MSG_CMSG_CLOEXEC;
            let received = match recvmsg::<()>(self.socket.as_raw_fd(), &mut parts, Some(&mut space), flags) {
                Ok(received) => received,
                Err(Errno::EINTR) => continue,
                Err(Errno::EAGAIN) => return,
                Err(error) => return log!("cannot receive what the front sends: {error}"),
            };
            let (mut fds, mut trusted) = (Vec::new(), false);
            for message in received.cmsgs().into_iter().flatten() {
                match message {
                    ControlMessageOwned::ScmRights(raw) => {
                        // SAFETY: the kernel has just created these descriptors, and they have no other owner.
                        fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
                    }
                    ControlMessageOwned::ScmCredentials(sender) => {
                        trusted = sender.uid() == geteuid().as_raw()
                    }
                    _ => {}
                }
            }
            let length = received.bytes;
            if trusted && let Ok(text) = str::from_utf8(&bytes[..length]) {
                self.handle(text, fds);
            }
        }
    }

    fn handle(&mut self, text: &str, fds: Vec<OwnedFd>) {
        let name = text.lines().find_map(|line| line.strip_prefix("FDNAME=")).unwrap_or("stored");
        let says = |word: &str| text.lines().any(|line| line == word);
        if says("FDSTOREREMOVE=1") {
            self.descriptors.retain(|(known, _)| known != name);
        } else if says("FDSTORE=1") {
            for fd in fds {
                let same = |(_, known): &(String, OwnedFd)| store::is_same(known.as_raw_fd(), fd.as_raw_fd());
                if self.descriptors.len() < MAX_DESCRIPTORS && !self.descriptors.iter().any(same) {
                    self.descriptors.push((name.to_owned(), fd));
                }
            }
        } else if let Some(outer) = &self.outer {
            let sent = store::address(outer)
                .and_then(|to| sendto(self.socket.as_raw_fd(), text.as_bytes(), &to, MsgFlags::empty()));
            if let Err(error) = sent {
                log!("cannot pass {text:?} on to the service manager: {error}");
            }
        }
    }
}

/// Returns words or variables in the form that the kernel takes.
pub fn strings(words: impl IntoIterator<Item = OsString>) -> io::Result<Vec<CString>> {
    Ok(words.into_iter().map(|word| CString::new(word.into_vec())).collect::<Result<_, _>>()?)
}
