//! A front under test, and its clients.

use std::{
    fs::File,
    io::{Read, Write},
    os::unix::{fs::OpenOptionsExt, net::UnixStream},
    path::{Path, PathBuf},
    process::{Child, Command},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use sandboxer_front::frame::{Assembler, Frame, HEADER, REQUEST};

/// Longer than anything here takes.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Returns the bytes of a frame.
pub fn wire(stream: u32, kind: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = u32::try_from(body.len()).unwrap().to_be_bytes().to_vec();
    bytes.extend_from_slice(&stream.to_be_bytes());
    bytes.extend_from_slice(&[kind, 0]);
    bytes.extend_from_slice(body);
    bytes
}

/// A front that runs, with its keeper and its workers.
pub struct Front {
    pub dir: tempfile::TempDir,
    pub process: Child,
    pub fifo: File,
}

impl Front {
    pub fn start() -> Self {
        Self::start_with(|_| {})
    }

    pub fn start_with(change: impl FnOnce(&mut Command)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        nix::unistd::mkfifo(&dir.path().join("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        // A FIFO without a writer is opened at once.
        let flags = nix::fcntl::OFlag::O_NONBLOCK.bits();
        let fifo = File::options().read(true).custom_flags(flags).open(dir.path().join("fifo")).unwrap();
        let mut command = command(dir.path());
        change(&mut command);
        let process = command.spawn().unwrap();
        let front = Self { dir, process, fifo };
        // The file exists before the front listens.
        until("the front's socket", || UnixStream::connect(front.socket()).is_ok());
        front
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("task.sock")
    }

    pub fn client(&self) -> Client {
        let stream = UnixStream::connect(self.socket()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Client { stream, assembler: Assembler::default(), ready: Vec::new() }
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.process.id().try_into().unwrap()), signal).unwrap();
    }

    /// Returns the front itself. The process that was started is its keeper.
    pub fn pid(&self) -> Pid {
        let mut front = None;
        until("a front", || {
            front = self.children().first().copied();
            front.is_some()
        });
        front.unwrap()
    }

    /// Returns the keeper's children: the front, or none while it is replaced.
    pub fn children(&self) -> Vec<Pid> {
        let keeper = self.process.id();
        let children = std::fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children")).unwrap();
        children.split_whitespace().map(|pid| Pid::from_raw(pid.parse().unwrap())).collect()
    }

    /// Kills the front. Its successor may be there already.
    pub fn kill(&self) {
        // It may have died by itself.
        let _ = kill(self.pid(), Signal::SIGKILL);
    }

    pub fn ended(&mut self) -> std::process::ExitStatus {
        until("the front's end", || self.process.try_wait().unwrap().is_some());
        self.process.wait().unwrap()
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        if self.process.try_wait().is_ok_and(|ended| ended.is_none()) {
            self.signal(Signal::SIGTERM);
            let _ = self.process.wait();
        }
    }
}

/// Returns the command of a front in this directory.
pub fn command(dir: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.arg("front").arg(dir).env_remove("NOTIFY_SOCKET");
    command
}

/// Waits until something is there.
pub fn until(what: &str, mut there: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !there() {
        assert!(Instant::now() < end, "{what} did not come");
        thread::yield_now();
    }
}

/// A connection to a front, as containerd has it.
pub struct Client {
    pub stream: UnixStream,
    pub assembler: Assembler,
    pub ready: Vec<Frame>,
}

impl Client {
    pub fn ask(&mut self, stream: u32, word: &str) {
        self.stream.write_all(&wire(stream, REQUEST, word.as_bytes())).unwrap();
    }

    /// Sends a complete request of a container, as containerd does.
    pub fn ask_method(&mut self, stream: u32, method: &str) {
        let mut body = vec![0x12, u8::try_from(method.len()).unwrap()];
        body.extend_from_slice(method.as_bytes());
        body.extend_from_slice(b"\x1a\x04\x0a\x02c1");
        self.stream.write_all(&wire(stream, REQUEST, &body)).unwrap();
    }

    /// Returns the next response: its request's number, and its text.
    pub fn answer(&mut self) -> (u32, String) {
        while self.ready.is_empty() {
            let mut scratch = [0; 4096];
            let count = self.stream.read(&mut scratch).unwrap();
            assert!(count > 0, "the connection was closed");
            self.ready = self.assembler.take(&scratch[..count]).unwrap();
        }
        let frame = self.ready.remove(0);
        (frame.stream(), String::from_utf8_lossy(&frame.bytes()[HEADER..]).into_owned())
    }

    pub fn call(&mut self, stream: u32, word: &str) -> String {
        self.ask(stream, word);
        let (answered, words) = self.answer();
        assert_eq!(answered, stream);
        words
    }
}

/// Lets time pass in which something must not happen, or in which a slow request completes.
#[expect(clippy::disallowed_methods, reason = "there is no event to wait for where nothing is to happen")]
pub fn pass(time: Duration) {
    std::thread::sleep(time);
}
