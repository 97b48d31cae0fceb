//! Helper processes that read, write and close pipes on behalf of the agent, once there are shares.
//!
//! ```text
//!  container ──sendfile──▶ pipe (locked) ◀── read ── helper ◀──▶ agent
//!      └── waits for a shared file's bytes ◀── the host
//! ```
//!
//! A process that copies between a file and a pipe within the kernel, as `cat` does, holds the pipe's lock until the
//! file's bytes are read or written. For a shared file that may take as long as the host's file server does. If the
//! agent's one thread touched the pipe, even to close it, the whole guest would wait for that server. A helper may
//! wait.

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
use rustix::buffer::spare_capacity;
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

/// The most bytes that a helper moves at once.
const MAX_MOVED_BYTES: usize = 16 << 10;
/// The length of a request's header: the operation, and the most bytes to read.
const REQUEST: usize = 8;
/// The length of a response's header: a number, or an error if it is negative.
const RESPONSE: usize = 4;
/// The most helpers at a time. A helper that waits for a share is not available for other pipes.
const PARALLEL: usize = 4;

/// The operation on the descriptor of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Read,
    Write,
    Count,
    /// Closes the pipe, after a second message: by then the agent has closed its own copy, and only the last to close
    /// may have to wait.
    Close,
}

struct Helpers {
    places: Semaphore,
    // The lock is never held across an await.
    idle: Mutex<Vec<Helper>>,
}

/// The connection to one helper, which exits when this is closed.
type Helper = AsyncFd<OwnedFd>;

static HELPERS: OnceLock<Helpers> = OnceLock::new();

/// Switches to helpers. Must be called before a pipe may be used with a shared file.
pub fn start() -> io::Result<()> {
    if HELPERS.get().is_none() {
        let idle = Mutex::new(vec![spawn()?]);
        let _ = HELPERS.set(Helpers { places: Semaphore::new(PARALLEL), idle });
    }
    Ok(())
}

/// Reads at most `max` bytes as read(2) does, but a helper may return fewer; none at the end.
pub async fn read(from: &Stream, max: usize) -> Result<Vec<u8>, Errno> {
    let Some(helpers) = HELPERS.get() else {
        let mut bytes = Vec::with_capacity(max);
        rustix::io::read(from.get_ref(), spare_capacity(&mut bytes))
            .map_err(|error| Errno::from_raw(error.raw_os_error()))?;
        return Ok(bytes);
    };
    let max = max.min(MAX_MOVED_BYTES);
    Ok(helpers.ask(Stream::clone(from), Operation::Read, max, Vec::new()).await?.1)
}

/// Writes as write(2) does.
pub async fn write(to: &Stream, bytes: &[u8]) -> Result<usize, Errno> {
    let Some(helpers) = HELPERS.get() else {
        return nix::unistd::write(to.get_ref(), bytes);
    };
    let bytes = bytes[..bytes.len().min(MAX_MOVED_BYTES)].to_vec();
    Ok(helpers.ask(Stream::clone(to), Operation::Write, 0, bytes).await?.0)
}

/// Returns the number of bytes in a pipe.
pub async fn waiting(pipe: &Stream) -> usize {
    let count = match HELPERS.get() {
        None => count(pipe.get_ref()),
        Some(helpers) => {
            let response = helpers.ask(Stream::clone(pipe), Operation::Count, 0, Vec::new());
            response.await.map(|(count, _)| count)
        }
    };
    count.unwrap_or(0)
}

/// Closes `pipe` in a helper, after its owner has closed it.
pub fn close_after(pipe: &OwnedFd) {
    if let (Some(helpers), Ok(runtime)) = (HELPERS.get(), Handle::try_current())
        && let Ok(pipe) = pipe.try_clone()
    {
        runtime.spawn(helpers.ask(pipe, Operation::Close, 0, Vec::new()));
    }
}

impl Helpers {
    /// Carries out a request; returns the number in the response, and the bytes read. Completes even if the caller is
    /// dropped: the connection must not keep an unread response.
    async fn ask(
        &'static self,
        pipe: impl AsRawFd + Send + 'static,
        operation: Operation,
        max: usize,
        bytes: Vec<u8>,
    ) -> Result<(usize, Vec<u8>), Errno> {
        let request_task = tokio::spawn(async move {
            let _place = self.places.acquire().await.map_err(|_| Errno::EIO)?;
            // The request cannot be sent to a helper that has exited.
            let helper = loop {
                let idle = lock(&self.idle).pop();
                let (helper, new) = match idle {
                    Some(helper) => (helper, false),
                    None => (spawn().map_err(errno)?, true),
                };
                match request(&helper, &pipe, operation, max, &bytes) {
                    Ok(()) => break helper,
                    Err(_) if !new => {}
                    Err(error) => return Err(error),
                }
            };
            if operation == Operation::Close {
                drop(pipe);
                send(helper.as_raw_fd(), &[0], MsgFlags::MSG_NOSIGNAL)?;
            }
            // A helper that does not respond is dropped with its connection.
            let response = response(&helper).await?;
            lock(&self.idle).push(helper);
            response
        });
        request_task.await.unwrap_or(Err(Errno::EIO))
    }
}

fn errno(error: io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

/// Forks a helper.
fn spawn() -> io::Result<Helper> {
    let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
    fcntl(&ours, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    let helper = watched(ours, Interest::READABLE)?;
    #[expect(clippy::disallowed_methods, reason = "the agent has one thread, so a fork copies all of it")]
    // SAFETY: no other thread exists that could hold a lock or be in the middle of a change.
    match unsafe { fork() }? {
        ForkResult::Child => serve(&theirs),
        ForkResult::Parent { child } => {
            // When the guest is out of memory, the kernel must kill containers, not the helper that they depend on.
            fs::write(format!("/proc/{child}/oom_score_adj"), "-1000")?;
            Ok(helper)
        }
    }
}

fn request(
    helper: &Helper,
    pipe: &impl AsRawFd,
    operation: Operation,
    max: usize,
    bytes: &[u8],
) -> Result<(), Errno> {
    let mut head = [0; REQUEST];
    head[..4].copy_from_slice(&(operation as u32).to_ne_bytes());
    head[4..].copy_from_slice(&u32::try_from(max).unwrap_or(0).to_ne_bytes());
    let descriptor = [pipe.as_raw_fd()];
    let attached = [ControlMessage::ScmRights(&descriptor)];
    let message = [IoSlice::new(&head), IoSlice::new(bytes)];
    sendmsg::<()>(helper.as_raw_fd(), &message, &attached, MsgFlags::MSG_NOSIGNAL, None).map(drop)
}

/// Waits for the response. The outer error means that there will be none.
async fn response(helper: &Helper) -> Result<Result<(usize, Vec<u8>), Errno>, Errno> {
    let mut response = vec![0; RESPONSE + MAX_MOVED_BYTES];
    loop {
        let mut guard = helper.readable().await.map_err(|_| Errno::EIO)?;
        let length = match recv(helper.as_raw_fd(), &mut response, MsgFlags::empty()) {
            Err(Errno::EAGAIN) => {
                guard.clear_ready();
                continue;
            }
            Err(Errno::EINTR) => continue,
            length => length?,
        };
        let Some((number, bytes)) = response[..length].split_first_chunk::<RESPONSE>() else {
            return Err(Errno::EIO);
        };
        let number = i32::from_ne_bytes(*number);
        return Ok(match usize::try_from(number) {
            Ok(count) => Ok((count, bytes.to_vec())),
            Err(_) => Err(Errno::from_raw(number.saturating_neg())),
        });
    }
}

/// Runs a helper until its connection is closed.
fn serve(helper: &OwnedFd) -> ! {
    let _ = sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), None);
    close_all_but(vec![helper.as_raw_fd()]);
    let (mut request, mut response) = ([0; REQUEST + MAX_MOVED_BYTES], [0; RESPONSE + MAX_MOVED_BYTES]);
    let mut attached = cmsg_space!(std::os::fd::RawFd);
    while let Some((pipe, length)) = receive(helper, &mut request, &mut attached) {
        let word =
            |at: usize| u32::from_ne_bytes([request[at], request[at + 1], request[at + 2], request[at + 3]]);
        let max = usize::try_from(word(4)).unwrap_or(0).min(MAX_MOVED_BYTES);
        let mut read = 0;
        let result = match word(0) {
            operation if operation == Operation::Read as u32 => {
                let result = nix::unistd::read(&pipe, &mut response[RESPONSE..RESPONSE + max]);
                read = result.unwrap_or(0);
                result
            }
            operation if operation == Operation::Write as u32 => {
                nix::unistd::write(&pipe, &request[REQUEST..length])
            }
            operation if operation == Operation::Count as u32 => count(&pipe),
            _ => recv(helper.as_raw_fd(), &mut [0], MsgFlags::empty()),
        };
        drop(pipe);
        let number = result.map_or_else(|error| -(error as i32), |count| i32::try_from(count).unwrap_or(0));
        response[..RESPONSE].copy_from_slice(&number.to_ne_bytes());
        if send(helper.as_raw_fd(), &response[..RESPONSE + read], MsgFlags::MSG_NOSIGNAL).is_err() {
            break;
        }
    }
    // SAFETY: ends this process without the agent's destructors and exit handlers, which must run in the
    // agent only.
    unsafe { libc::_exit(0) }
}

/// Receives the next request's descriptor and length; `None` when the agent has dropped this helper.
fn receive(helper: &OwnedFd, request: &mut [u8], attached: &mut [u8]) -> Option<(OwnedFd, usize)> {
    let mut space = [IoSliceMut::new(request)];
    let message =
        recvmsg::<()>(helper.as_raw_fd(), &mut space, Some(attached), MsgFlags::MSG_CMSG_CLOEXEC).ok()?;
    let length = message.bytes;
    let descriptor = message.cmsgs().ok()?.find_map(|each| match each {
        ControlMessageOwned::ScmRights(descriptors) => descriptors.first().copied(),
        _ => None,
    })?;
    // SAFETY: the kernel has just created the descriptor for this process.
    let pipe = unsafe { OwnedFd::from_raw_fd(descriptor) };
    (length >= REQUEST).then_some((pipe, length))
}

fn count(pipe: &OwnedFd) -> Result<usize, Errno> {
    let mut count: libc::c_int = 0;
    // SAFETY: the ioctl writes one int.
    Errno::result(unsafe { libc::ioctl(pipe.as_raw_fd(), libc::FIONREAD, &mut count) })?;
    Ok(usize::try_from(count).unwrap_or(0))
}
