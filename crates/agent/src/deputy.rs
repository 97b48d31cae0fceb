//! A process that reads what processes write, in this one's place, once there are shares.
//!
//! ```text
//!  container ──sendfile──▶ pipe (locked) ◀── read ── deputy ◀──▶ agent
//!      └── waits for a shared file's bytes ◀── /dev/fuse ───────────┘
//! ```
//!
//! Whoever copies a file into a pipe within the kernel, as `cat` does, holds the pipe's lock until the file's bytes are
//! there. Those of a shared file come by the agent's one thread: should that thread touch the pipe, both wait for
//! ever. The deputy may wait. It has the agent's table of descriptors, and nothing else of it but a copy of its memory.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd, RawFd},
    sync::{Arc, OnceLock},
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, OFlag, fcntl},
    sys::{
        signal::{SigSet, SigmaskHow, sigprocmask},
        socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, send, socketpair},
    },
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::Mutex,
};

use crate::{io::Stream, sync::watched};

/// Most bytes moved at once.
const MOST: usize = 16 << 10;
/// A request: a descriptor, what is to be done with it, how many bytes are to be read at most.
const REQUEST: usize = 12;
/// What comes ahead of what was read: a number, or an error if it is negative.
const ANSWER: usize = 4;

const READ: u32 = 0;
const COUNT: u32 = 1;

/// One request is under way at a time.
type Line = Arc<Mutex<AsyncFd<OwnedFd>>>;

static DEPUTY: OnceLock<Line> = OnceLock::new();

/// Starts it, once. Before there is a file that a pipe may be waiting for.
pub fn start() -> io::Result<()> {
    if DEPUTY.get().is_some() {
        return Ok(());
    }
    let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
    fcntl(&ours, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    // SAFETY: as fork does, since this process has one thread; but with one table of descriptors for both. The new
    // process makes no other use of what it has a copy of.
    let forked = unsafe {
        libc::syscall(libc::SYS_clone, libc::CLONE_FILES | libc::SIGCHLD, 0_u64, 0_u64, 0_u64, 0_u64)
    };
    match Errno::result(forked)? {
        0 => serve(theirs.as_raw_fd()),
        _ => {
            // Open for as long as the guest runs: the table is one.
            std::mem::forget(theirs);
            let line = Arc::new(Mutex::new(watched(ours, Interest::READABLE)?));
            let _ = DEPUTY.set(line);
            Ok(())
        }
    }
}

/// As read(2): at most `max` bytes, none at the end.
pub async fn read(from: &Stream, max: usize) -> Result<Vec<u8>, Errno> {
    let max = max.min(MOST);
    let Some(line) = DEPUTY.get() else {
        let mut bytes = vec![0; max];
        let count = nix::unistd::read(from.get_ref(), &mut bytes)?;
        bytes.truncate(count);
        return Ok(bytes);
    };
    let (_, bytes) = ask(line, from, READ, max).await?;
    Ok(bytes)
}

/// Bytes that lie in a pipe.
pub async fn waiting(pipe: &Stream) -> usize {
    match DEPUTY.get() {
        None => count(pipe.as_raw_fd()).unwrap_or(0),
        Some(line) => ask(line, pipe, COUNT, 0).await.map_or(0, |(count, _)| count),
    }
}

/// Has it done: the answer's number, and what was read. Goes on to the end though whoever asks is gone: the answer is not another's, and the descriptor is
/// open until then.
async fn ask(line: &Line, of: &Stream, what: u32, max: usize) -> Result<(usize, Vec<u8>), Errno> {
    let (line, of) = (Arc::clone(line), Arc::clone(of));
    let asked = tokio::spawn(async move {
        let line = line.lock().await;
        let mut request = [0; REQUEST];
        request[..4].copy_from_slice(&of.as_raw_fd().to_ne_bytes());
        request[4..8].copy_from_slice(&what.to_ne_bytes());
        request[8..].copy_from_slice(&u32::try_from(max).unwrap_or(0).to_ne_bytes());
        send(line.as_raw_fd(), &request, MsgFlags::MSG_NOSIGNAL)?;
        let mut answer = vec![0; ANSWER + MOST];
        loop {
            let mut guard = line.readable().await.map_err(|_| Errno::EIO)?;
            match recv(line.as_raw_fd(), &mut answer, MsgFlags::empty()) {
                Err(Errno::EAGAIN) => guard.clear_ready(),
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error),
                Ok(length) => {
                    let Some((number, _)) = answer.split_first_chunk() else { return Err(Errno::EIO) };
                    let number = i32::from_ne_bytes(*number);
                    let Ok(count) = usize::try_from(number) else { return Err(Errno::from_raw(-number)) };
                    if length < ANSWER {
                        return Err(Errno::EIO);
                    }
                    return Ok((count, answer[ANSWER..length].to_vec()));
                }
            }
        }
    });
    asked.await.unwrap_or(Err(Errno::EIO))
}

fn count(fd: RawFd) -> Result<usize, Errno> {
    let mut count: libc::c_int = 0;
    // SAFETY: the ioctl writes one int.
    Errno::result(unsafe { libc::ioctl(fd, libc::FIONREAD, &mut count) })?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// The deputy's whole life. Allocates nothing: the copy of the heap is not its own.
fn serve(line: RawFd) -> ! {
    let _ = sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), None);
    let (mut request, mut answer) = ([0; REQUEST], [0; ANSWER + MOST]);
    loop {
        match recv(line, &mut request, MsgFlags::empty()) {
            Ok(REQUEST) => {}
            Err(Errno::EINTR) => continue,
            // SAFETY: ends this process without the agent's exit handlers.
            _ => unsafe { libc::_exit(0) },
        }
        let word = |at: usize| [request[at], request[at + 1], request[at + 2], request[at + 3]];
        let (fd, what) = (i32::from_ne_bytes(word(0)), u32::from_ne_bytes(word(4)));
        let max = usize::try_from(u32::from_ne_bytes(word(8))).unwrap_or(0).min(MOST);
        let (number, bytes) = match what {
            READ => {
                // SAFETY: the buffer has room for so many bytes.
                let read = unsafe { libc::read(fd, answer[ANSWER..].as_mut_ptr().cast(), max) };
                let read = Errno::result(read).map(|count| usize::try_from(count).unwrap_or(0));
                (read, read.unwrap_or(0))
            }
            _ => (count(fd), 0),
        };
        let number = number.map_or_else(|error| -(error as i32), |count| i32::try_from(count).unwrap_or(0));
        answer[..ANSWER].copy_from_slice(&number.to_ne_bytes());
        let _ = send(line, &answer[..ANSWER + bytes], MsgFlags::MSG_NOSIGNAL);
    }
}
