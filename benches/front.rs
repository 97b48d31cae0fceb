//! Time that the front adds to a call, and its memory: `cargo bench --bench front`.
//!
//! Calls alternately go to a double of the worker, which responds at once, over a socket pair and through the front.
//! The difference of the medians is the front's part. Then there are as many connections as 50 pods have, each with an
//! open `Wait` after twenty calls, as after a while of statistics.

#![allow(clippy::unwrap_used, reason = "a bench that cannot go on ends where it stands")]

use std::{
    ffi::OsString,
    fs,
    io::{Read, Write},
    os::{
        fd::{AsFd, FromRawFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
    process::{Child, Command, ExitCode},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::{
        signal::{Signal, kill},
        socket::MsgFlags,
    },
    unistd::Pid,
};
use sandboxer_front::{
    Build,
    control::{self, ANSWERS_PINGS, Kind, TASK_LISTENER},
    frame::{Assembler, Frame, HEADER, REQUEST, RESPONSE},
};

/// Number of timed calls of each kind.
const CALLS: usize = 5000;
/// Sizes of a request and of a response, bytes: about those of `Stats`.
const REQUEST_BYTES: usize = 120;
const RESPONSE_BYTES: usize = 900;
/// Number of connections of 50 pods with two containers each, and of their sandboxes.
const CONNECTIONS: usize = 150;

fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    match args.first().and_then(|role| role.to_str()) {
        Some("front") => front(Path::new(&args[1])),
        Some("worker") => worker(Path::new(&args[1]), &args[3]),
        _ => {
            measure();
            ExitCode::SUCCESS
        }
    }
}

fn front(dir: &Path) -> ExitCode {
    let build = Build {
        program: dir.join("none"),
        check: "check".into(),
        resume: "resume".into(),
        arguments: vec![dir.into()],
        tell: "tell".into(),
        unfit: |_, _| None,
    };
    let worker = ["worker".into(), dir.into()];
    sandboxer_front::run(&std::env::current_exe().unwrap(), &worker, Duration::from_secs(30), &build).unwrap()
}

/// Runs a double of the worker, which responds to every request except `Wait`.
fn worker(dir: &Path, control: &OsString) -> ExitCode {
    // SAFETY: the front has passed the descriptor for this use.
    let control = unsafe { OwnedFd::from_raw_fd(control.to_str().unwrap().parse().unwrap()) };
    while control::receive(control.as_fd(), MsgFlags::empty()).unwrap().unwrap().kind != Kind::AllKept {}
    let listener = UnixListener::bind(dir.join("task.sock")).unwrap();
    listener.set_nonblocking(true).unwrap();
    control::send(control.as_fd(), Kind::Keep, TASK_LISTENER, &[], &[listener.as_fd()]).unwrap();
    control::send(control.as_fd(), Kind::Ready, "", ANSWERS_PINGS, &[]).unwrap();
    while let Ok(Some(mut message)) = control::receive(control.as_fd(), MsgFlags::empty()) {
        match message.kind {
            Kind::Ping => control::send(control.as_fd(), Kind::Pong, "", &[], &[]).unwrap(),
            _ => drop(thread::spawn(move || answer(UnixStream::from(message.fds.pop().unwrap())))),
        }
    }
    ExitCode::SUCCESS
}

fn answer(mut link: UnixStream) {
    let (mut assembler, mut scratch) = (Assembler::default(), [0; 4096]);
    while let Ok(count @ 1..) = link.read(&mut scratch) {
        for frame in assembler.take(&scratch[..count]).unwrap() {
            if frame.bytes()[HEADER] != b'W' {
                link.write_all(&wire(frame.stream(), RESPONSE, &[0; RESPONSE_BYTES])).unwrap();
            }
        }
    }
}

fn wire(stream: u32, kind: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = u32::try_from(body.len()).unwrap().to_be_bytes().to_vec();
    bytes.extend_from_slice(&stream.to_be_bytes());
    bytes.extend_from_slice(&[kind, 0]);
    bytes.extend_from_slice(body);
    bytes
}

struct Client {
    stream: UnixStream,
    next: u32,
}

impl Client {
    fn new(stream: UnixStream) -> Self {
        Self { stream, next: 1 }
    }

    fn send(&mut self, first: u8) {
        let mut body = [0; REQUEST_BYTES];
        body[0] = first;
        self.stream.write_all(&wire(self.next, REQUEST, &body)).unwrap();
        self.next += 2;
    }

    /// Makes a call; returns its duration, µs.
    fn call(&mut self) -> f64 {
        let (begin, mut assembler, mut scratch) = (Instant::now(), Assembler::default(), [0; 4096]);
        self.send(b'c');
        let mut frames: Vec<Frame> = Vec::new();
        while frames.is_empty() {
            let count = self.stream.read(&mut scratch).unwrap();
            assert!(count > 0, "the connection was closed");
            frames = assembler.take(&scratch[..count]).unwrap();
        }
        begin.elapsed().as_secs_f64() * 1e6
    }
}

/// A process of the front. Dropping it terminates the process.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = kill(Pid::from_raw(self.0.id().try_into().unwrap()), Signal::SIGTERM);
        let _ = self.0.wait();
    }
}

fn measure() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    let front = Running(command.arg("front").arg(dir.path()).env_remove("NOTIFY_SOCKET").spawn().unwrap());
    let connect = || UnixStream::connect(dir.path().join("task.sock")).ok();
    let first = (0..1000).find_map(|_| {
        let stream = connect();
        if stream.is_none() {
            thread::park_timeout(Duration::from_millis(10));
        }
        stream
    });
    let mut through = Client::new(first.unwrap());
    let (here, there) = UnixStream::pair().unwrap();
    let _double = thread::spawn(|| answer(there));
    let mut direct = Client::new(here);
    let (mut directly, mut indirectly) = (Vec::new(), Vec::new());
    for call in 0..CALLS + 200 {
        let times = [direct.call(), through.call()];
        if call >= 200 {
            directly.push(times[0]);
            indirectly.push(times[1]);
        }
    }
    let [direct, through] = [directly, indirectly].map(percentiles);
    println!("a call, µs (n = {CALLS} each, in turns)       p50      p99");
    println!("over a socket pair                       {:>7.1}  {:>7.1}", direct.0, direct.1);
    println!("through the front                        {:>7.1}  {:>7.1}", through.0, through.1);
    println!("the front's part                         {:>7.1}", through.0 - direct.0);
    memory(front.0.id(), connect);
}

fn percentiles(mut times: Vec<f64>) -> (f64, f64) {
    times.sort_by(f64::total_cmp);
    (times[times.len() / 2], times[times.len() * 99 / 100])
}

fn memory(keeper: u32, connect: impl Fn() -> Option<UnixStream>) {
    let connections: Vec<_> = (0..CONNECTIONS)
        .map(|_| {
            let mut client = Client::new(connect().unwrap());
            client.send(b'W');
            for _ in 0..20 {
                client.call();
            }
            client
        })
        .collect();
    println!("\nmemory with {CONNECTIONS} connections            PSS, KiB   of that private");
    let children = fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children")).unwrap();
    for pid in [keeper.to_string()].iter().map(String::as_str).chain(children.split_whitespace()) {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap();
        if line.windows(6).any(|bytes| bytes == b"worker") {
            continue;
        }
        let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
        let field = |name: &str| -> u64 {
            let line = rollup.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.trim().trim_end_matches(" kB").parse().unwrap()
        };
        println!("process {pid:<30} {:>9} {:>17}", field("Pss:"), field("Private_Dirty:"));
    }
    let mut files = (0, 0);
    for entry in fs::read_dir(format!("/proc/{}/fd", children.trim())).unwrap() {
        let path = entry.unwrap().path();
        if fs::read_link(&path).is_ok_and(|name| name.to_string_lossy().starts_with("/memfd:")) {
            use std::os::unix::fs::MetadataExt;
            files = (files.0 + 1, files.1 + fs::metadata(&path).unwrap().blocks() / 2);
        }
    }
    println!("files in memory: {}                     {:>9}", files.0, files.1);
    drop(connections);
}
