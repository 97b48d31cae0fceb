//! The double of the worker, which dies on request.

use std::{
    fs::File,
    io::{Read, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{
            fs::OpenOptionsExt,
            net::{UnixListener, UnixStream},
        },
    },
    path::Path,
    process::{Command, ExitCode, Stdio},
    sync::Arc,
    thread,
    time::Duration,
};

use nix::sys::{
    signal::{Signal, raise},
    socket::MsgFlags,
};
use sandboxer_front::{
    control::{self, ANSWERS_PINGS, Kind, TASK_LISTENER},
    frame::{Assembler, HEADER, REPEATED, RESPONSE},
};

use crate::harness::{pass, wire};

/// What a double must support after one that was asked to `need` it.
pub const NEEDED: &str = "this";

/// Runs the double until the front lets it go.
pub fn double(dir: &Path, control: OwnedFd) -> ExitCode {
    if dir.join("refuse").exists() {
        return ExitCode::from(3);
    }
    let control = Arc::new(control);
    let (mut life, mut listens) = (1, false);
    loop {
        let message = control::receive(control.as_fd(), MsgFlags::empty()).unwrap().unwrap();
        match (message.kind, message.key.as_str()) {
            (Kind::AllKept, _) => break,
            (_, "life") => life = u32::from_be_bytes(message.note[..].try_into().unwrap()) + 1,
            (_, key) => listens |= key.starts_with(TASK_LISTENER),
        }
    }
    let keep = |key: &str, note: &[u8], fds: &[BorrowedFd<'_>]| {
        control::send(control.as_fd(), Kind::Keep, key, note, fds).unwrap();
    };
    if !listens {
        let listener = UnixListener::bind(dir.join("task.sock")).unwrap();
        listener.set_nonblocking(true).unwrap();
        keep(TASK_LISTENER, &[], &[listener.as_fd()]);
        drop(open(dir, &control));
    }
    keep("life", &life.to_be_bytes(), &[]);
    control::send(control.as_fd(), Kind::Ready, "", ANSWERS_PINGS, &[]).unwrap();
    while let Ok(Some(mut message)) = control::receive(control.as_fd(), MsgFlags::empty()) {
        if message.kind == Kind::Ping {
            control::send(control.as_fd(), Kind::Pong, "", &[], &[]).unwrap();
            continue;
        }
        let (link, control) = (UnixStream::from(message.fds.pop().unwrap()), control.clone());
        let dir = dir.to_owned();
        thread::spawn(move || answer(&dir, link, life, &control));
    }
    ExitCode::SUCCESS
}

fn open(dir: &Path, control: &OwnedFd) -> OwnedFd {
    let flags = nix::fcntl::OFlag::O_PATH.bits();
    let named = File::options().read(true).custom_flags(flags).open(dir.join("fifo")).unwrap();
    let (answer, theirs) = control::answering().unwrap();
    control::send(control.as_fd(), Kind::Open, "fifo", &[], &[named.as_fd(), theirs.as_fd()]).unwrap();
    drop(theirs);
    let mut opened = control::receive(answer.as_fd(), MsgFlags::empty()).unwrap().unwrap();
    assert_eq!((opened.kind, opened.fds.len()), (Kind::Kept, 1));
    opened.fds.remove(0)
}

/// Leaves a process that has the double's end of the control socket.
fn linger(dir: &Path, control: &OwnedFd) {
    let copy = control.try_clone().unwrap();
    let script = "while [ -e \"$0\" ] && [ ! -e \"$0/gone\" ]; do sleep 0.1; done";
    let mut command = Command::new("sh");
    command
        .args(["-c", script])
        .arg(dir)
        .stdin(Stdio::from(copy))
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut lingering = command.spawn().unwrap();
    // It ends later than this process, as a rule.
    thread::spawn(move || lingering.wait());
}

/// Waits for a server that does not answer: no signal ends that.
fn hang(dir: &Path) {
    nix::sys::prctl::set_name(c"helper").unwrap();
    let _ = std::fs::read_dir(dir.join("hung"));
}

fn answer(dir: &Path, mut link: UnixStream, life: u32, control: &OwnedFd) {
    let (mut assembler, mut scratch) = (Assembler::default(), [0; 4096]);
    loop {
        let count = link.read(&mut scratch).unwrap();
        if count == 0 {
            return;
        }
        for frame in assembler.take(&scratch[..count]).unwrap() {
            let repeated = frame.bytes()[9] & REPEATED != 0;
            let answer = format!("life {life}{}", if repeated { ", repeated" } else { "" });
            let answer = wire(frame.stream(), RESPONSE, answer.as_bytes());
            match &frame.bytes()[HEADER..] {
                b"die" if !repeated => raise(Signal::SIGKILL).unwrap(),
                b"half" if !repeated => {
                    link.write_all(&answer[..answer.len() - 2]).unwrap();
                    raise(Signal::SIGKILL).unwrap();
                }
                b"wait" if !repeated => continue,
                b"deadly" => raise(Signal::SIGKILL).unwrap(),
                b"slow" => pass(Duration::from_millis(200)),
                b"linger" => linger(dir, control),
                b"hang" if !repeated => hang(dir),
                b"stop" if !repeated => raise(Signal::SIGSTOP).unwrap(),
                _ if frame.method() == Some("Deadly") => raise(Signal::SIGKILL).unwrap(),
                _ if matches!(frame.method(), Some("Wait" | "Hold")) => continue,
                b"need" => {
                    control::send(control.as_fd(), Kind::Keep, "needs x", NEEDED.as_bytes(), &[]).unwrap();
                }
                b"forget" => control::send(control.as_fd(), Kind::Forget, "fifo", &[], &[]).unwrap(),
                b"open" => drop(open(dir, control)),
                b"twice" => {
                    let fifo = open(dir, control);
                    control::send(control.as_fd(), Kind::Keep, "copy", &[], &[fifo.as_fd()]).unwrap();
                }
                b"forget copy" => control::send(control.as_fd(), Kind::Forget, "copy", &[], &[]).unwrap(),
                _ => {}
            }
            link.write_all(&answer).unwrap();
        }
    }
}
