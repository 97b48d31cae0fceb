//! Processes that touch other processes' pipes in this one's place, once there are shares.
//!
//! ```text
//!  container ──sendfile──▶ pipe (locked) ◀── read ── deputy ◀──▶ agent
//!      └── waits for a shared file's bytes ◀── the host
//! ```
//!
//! Whoever copies between a file and a pipe within the kernel, as `cat` does, holds the pipe's lock until the file's
//! bytes are there or are written. Those of a shared file may take as long as a server of the host's does: should the
//! agent's one thread touch the pipe, be it to close it, the whole guest waits for that server. A deputy may wait.

use std::{
    fs,
    io::{self, IoSlice, IoSliceMut},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    sync::{Mutex, OnceLock},
};

use nix::{
    cmsg_space,
    errno::Errno,
    fcntl::{FcntlArg, OFlag, fcntl},
    sys::{
        signal::{SigSet, SigmaskHow, sigprocmask},
        socket::{
            AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, recv, recvmsg,
            send, sendmsg, socketpair,
        },
    },
    unistd::{ForkResult, fork},
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    runtime::Handle,
    sync::Semaphore,
};

use crate::{
    io::Stream,
    sync::{lock, watched},
    worker::close_all_but,
};

/// Most bytes moved at once.
const MAX_MOVED_BYTES: usize = 16 << 10;
/// What comes ahead of a request's bytes: what is to be done, and how many bytes are to be read at most.
const REQUEST: usize = 8;
/// What comes ahead of the bytes that were read: a number, or an error if it is negative.
const ANSWER: usize = 4;
/// Deputies at a time. Each that waits for a share keeps one from other pipes.
const PARALLEL: usize = 4;

/// What a deputy does with the descriptor that comes with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Read,
    Write,
    Count,
    /// After one message more, which says that the agent has closed its own: only the last to close it may have to wait.
    Close,
}

struct Deputies {
    places: Semaphore,
    // Never held across an await.
    idle: Mutex<Vec<Line>>,
}

/// To one deputy, which ends when this does.
type Line = AsyncFd<OwnedFd>;

static DEPUTIES: OnceLock<Deputies> = OnceLock::new();

/// From now on pipes are left to deputies. To be called before there is a file that a pipe may be waiting for.
pub fn start() -> io::Result<()> {
    if DEPUTIES.get().is_none() {
        let idle = Mutex::new(vec![appoint()?]);
        let _ = DEPUTIES.set(Deputies { places: Semaphore::new(PARALLEL), idle });
    }
    Ok(())
}

/// As read(2): at most `max` bytes, none at the end.
pub async fn read(from: &Stream, max: usize) -> Result<Vec<u8>, Errno> {
    let max = max.min(MAX_MOVED_BYTES);
    let Some(deputies) = DEPUTIES.get() else {
        let mut bytes = vec![0; max];
        let count = nix::unistd::read(from.get_ref(), &mut bytes)?;
        bytes.truncate(count);
        return Ok(bytes);
    };
    Ok(deputies.ask(Stream::clone(from), What::Read, max, Vec::new()).await?.1)
}

/// As write(2).
pub async fn write(to: &Stream, bytes: &[u8]) -> Result<usize, Errno> {
    let Some(deputies) = DEPUTIES.get() else {
        return nix::unistd::write(to.get_ref(), bytes);
    };
    let bytes = bytes[..bytes.len().min(MAX_MOVED_BYTES)].to_vec();
    Ok(deputies.ask(Stream::clone(to), What::Write, 0, bytes).await?.0)
}

/// Bytes that lie in a pipe.
pub async fn waiting(pipe: &Stream) -> usize {
    let counted = match DEPUTIES.get() {
        None => count(pipe.get_ref()),
        Some(deputies) => {
            let asked = deputies.ask(Stream::clone(pipe), What::Count, 0, Vec::new());
            asked.await.map(|(count, _)| count)
        }
    };
    counted.unwrap_or(0)
}

/// Has `pipe` closed by a deputy after its owner, who is about to.
pub fn close_after(pipe: &OwnedFd) {
    if let (Some(deputies), Ok(runtime)) = (DEPUTIES.get(), Handle::try_current())
        && let Ok(pipe) = pipe.try_clone()
    {
        runtime.spawn(deputies.ask(pipe, What::Close, 0, Vec::new()));
    }
}

impl Deputies {
    /// Has it done: the answer's number, and what was read. Goes on to the end though whoever asks is gone, since the
    /// answer is nobody else's.
    async fn ask(
        &'static self,
        of: impl AsRawFd + Send + 'static,
        what: What,
        max: usize,
        bytes: Vec<u8>,
    ) -> Result<(usize, Vec<u8>), Errno> {
        let asked = tokio::spawn(async move {
            let _place = self.places.acquire().await.map_err(|_| Errno::EIO)?;
            // Of one that has ended the line doesn't take the request.
            let line = loop {
                let idle = lock(&self.idle).pop();
                let (line, new) = match idle {
                    Some(line) => (line, false),
                    None => (appoint().map_err(errno)?, true),
                };
                match request(&line, &of, what, max, &bytes) {
                    Ok(()) => break line,
                    Err(_) if !new => {}
                    Err(error) => return Err(error),
                }
            };
            if what == What::Close {
                drop(of);
                send(line.as_raw_fd(), &[0], MsgFlags::MSG_NOSIGNAL)?;
            }
            // One that doesn't answer is given up: its line goes.
            let answer = answer(&line).await?;
            lock(&self.idle).push(line);
            answer
        });
        asked.await.unwrap_or(Err(Errno::EIO))
    }
}

fn errno(error: io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

/// Forks one.
fn appoint() -> io::Result<Line> {
    let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
    fcntl(&ours, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    let line = watched(ours, Interest::READABLE)?;
    #[expect(clippy::disallowed_methods, reason = "the agent has one thread, so a fork copies all of it")]
    // SAFETY: no other thread exists that could hold a lock or be in the middle of a change.
    match unsafe { fork() }? {
        ForkResult::Child => serve(&theirs),
        ForkResult::Parent { child } => {
            // A guest without memory ends its containers, and not what they wait for.
            fs::write(format!("/proc/{child}/oom_score_adj"), "-1000")?;
            Ok(line)
        }
    }
}

fn request(line: &Line, of: &impl AsRawFd, what: What, max: usize, bytes: &[u8]) -> Result<(), Errno> {
    let mut head = [0; REQUEST];
    head[..4].copy_from_slice(&(what as u32).to_ne_bytes());
    head[4..].copy_from_slice(&u32::try_from(max).unwrap_or(0).to_ne_bytes());
    let descriptor = [of.as_raw_fd()];
    let attached = [ControlMessage::ScmRights(&descriptor)];
    let message = [IoSlice::new(&head), IoSlice::new(bytes)];
    sendmsg::<()>(line.as_raw_fd(), &message, &attached, MsgFlags::MSG_NOSIGNAL, None).map(drop)
}

/// Waits for it; an error of its own if there will be none.
async fn answer(line: &Line) -> Result<Result<(usize, Vec<u8>), Errno>, Errno> {
    let mut answer = vec![0; ANSWER + MAX_MOVED_BYTES];
    loop {
        let mut guard = line.readable().await.map_err(|_| Errno::EIO)?;
        let length = match recv(line.as_raw_fd(), &mut answer, MsgFlags::empty()) {
            Err(Errno::EAGAIN) => {
                guard.clear_ready();
                continue;
            }
            Err(Errno::EINTR) => continue,
            length => length?,
        };
        let Some((number, bytes)) = answer[..length].split_first_chunk::<ANSWER>() else {
            return Err(Errno::EIO);
        };
        let number = i32::from_ne_bytes(*number);
        return Ok(match usize::try_from(number) {
            Ok(count) => Ok((count, bytes.to_vec())),
            Err(_) => Err(Errno::from_raw(number.saturating_neg())),
        });
    }
}

/// Returns a deputy's whole life.
fn serve(line: &OwnedFd) -> ! {
    let _ = sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), None);
    close_all_but(vec![line.as_raw_fd()]);
    let (mut request, mut answer) = ([0; REQUEST + MAX_MOVED_BYTES], [0; ANSWER + MAX_MOVED_BYTES]);
    let mut attached = cmsg_space!(std::os::fd::RawFd);
    while let Some((pipe, length)) = receive(line, &mut request, &mut attached) {
        let word =
            |at: usize| u32::from_ne_bytes([request[at], request[at + 1], request[at + 2], request[at + 3]]);
        let max = usize::try_from(word(4)).unwrap_or(0).min(MAX_MOVED_BYTES);
        let mut read = 0;
        let done = match word(0) {
            what if what == What::Read as u32 => {
                let done = nix::unistd::read(&pipe, &mut answer[ANSWER..ANSWER + max]);
                read = done.unwrap_or(0);
                done
            }
            what if what == What::Write as u32 => nix::unistd::write(&pipe, &request[REQUEST..length]),
            what if what == What::Count as u32 => count(&pipe),
            _ => recv(line.as_raw_fd(), &mut [0], MsgFlags::empty()),
        };
        drop(pipe);
        let number = done.map_or_else(|error| -(error as i32), |count| i32::try_from(count).unwrap_or(0));
        answer[..ANSWER].copy_from_slice(&number.to_ne_bytes());
        if send(line.as_raw_fd(), &answer[..ANSWER + read], MsgFlags::MSG_NOSIGNAL).is_err() {
            break;
        }
    }
    // SAFETY: ends this process without the agent's destructors and exit handlers, which are the agent's alone.
    unsafe { libc::_exit(0) }
}

/// Returns the next request's descriptor and length; `None` when the agent has given this deputy up.
fn receive(line: &OwnedFd, request: &mut [u8], attached: &mut [u8]) -> Option<(OwnedFd, usize)> {
    let mut space = [IoSliceMut::new(request)];
    let message =
        recvmsg::<()>(line.as_raw_fd(), &mut space, Some(attached), MsgFlags::MSG_CMSG_CLOEXEC).ok()?;
    let length = message.bytes;
    let descriptor = message.cmsgs().ok()?.find_map(|each| match each {
        ControlMessageOwned::ScmRights(descriptors) => descriptors.first().copied(),
        _ => None,
    })?;
    // SAFETY: the kernel has just made it for this process.
    let pipe = unsafe { OwnedFd::from_raw_fd(descriptor) };
    (length >= REQUEST).then_some((pipe, length))
}

fn count(pipe: &OwnedFd) -> Result<usize, Errno> {
    let mut count: libc::c_int = 0;
    // SAFETY: the ioctl writes one int.
    Errno::result(unsafe { libc::ioctl(pipe.as_raw_fd(), libc::FIONREAD, &mut count) })?;
    Ok(usize::try_from(count).unwrap_or(0))
}
