//! A process's input and output, which continue after the host has lost its connection.
//!
//! Output is kept in a bounded buffer under absolute offsets until the host acknowledges it by requesting the next
//! bytes. While the buffer is full the pipe is not read, so the process blocks.

use std::{
    collections::VecDeque,
    io,
    ops::Deref,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    sync::{Arc, Mutex},
    time::Duration,
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, OFlag, fcntl},
};
use rustix::pty::OpenptFlags;
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::{Notify, OwnedMutexGuard, watch},
    time::timeout,
};

use crate::{
    failure::{Failure, internal},
    pipe_helper,
    sync::{detached, lock, watched},
};

/// The most output kept per stream, bytes.
pub const CAPACITY: usize = 64 << 10;

/// How long to wait for the last output of a terminal: a kernel thread delivers it shortly after the process has
/// exited.
const TERMINAL_LINGER: Duration = Duration::from_millis(200);

/// The streams that a process has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StdioSpec {
    /// Whether the process's standard input can be written.
    pub stdin: bool,
    /// Whether the process's standard output is kept.
    pub stdout: bool,
    /// Whether the process's standard error is kept.
    pub stderr: bool,
    /// Whether one terminal replaces all three.
    pub terminal: bool,
}

/// The agent's end of a pipe or a terminal.
pub type Stream = Arc<End>;

/// The descriptor of a [`Stream`].
pub struct End(AsyncFd<OwnedFd>);

impl Deref for End {
    type Target = AsyncFd<OwnedFd>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl AsRawFd for End {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl Drop for End {
    fn drop(&mut self) {
        pipe_helper::close_after(self.0.get_ref());
    }
}

/// Makes `fd` non-blocking and usable with await.
pub fn stream(fd: OwnedFd, interest: Interest) -> io::Result<Stream> {
    fcntl(&fd, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    Ok(Arc::new(End(watched(fd, interest)?)))
}

/// The child's ends of its pipes; `/dev/null` for an unused stream.
pub struct ChildEnds {
    /// The standard input.
    pub stdin: OwnedFd,
    /// The standard output.
    pub stdout: OwnedFd,
    /// The standard error.
    pub stderr: OwnedFd,
}

impl ChildEnds {
    /// Returns all three ends, to be kept over a fork.
    pub fn all(&self) -> [BorrowedFd<'_>; 3] {
        [self.stdin.as_fd(), self.stdout.as_fd(), self.stderr.as_fd()]
    }
}

/// The agent's ends of a process's pipes.
#[derive(Default)]
pub struct Pipes {
    /// The end to which input is written.
    pub stdin: Option<OwnedFd>,
    /// The end from which output is read.
    pub stdout: Option<OwnedFd>,
    /// The end from which error output is read.
    pub stderr: Option<OwnedFd>,
}

/// Opens the pipes of the streams of `stdio`.
pub fn pipes(stdio: StdioSpec) -> Result<(Pipes, ChildEnds), Failure> {
    let pipe = || nix::unistd::pipe2(OFlag::O_CLOEXEC).map_err(internal("cannot open a pipe for a process"));
    let null = || {
        let file = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null");
        file.map(OwnedFd::from).map_err(internal("cannot open /dev/null"))
    };
    let mut ours = Pipes::default();
    let output = |is_open: bool, ours: &mut Option<OwnedFd>| {
        if !is_open {
            return null();
        }
        let (read, write) = pipe()?;
        *ours = Some(read);
        Ok(write)
    };
    let stdout = output(stdio.stdout, &mut ours.stdout)?;
    let stderr = output(stdio.stderr, &mut ours.stderr)?;
    let stdin = if stdio.stdin {
        let (read, write) = pipe()?;
        ours.stdin = Some(write);
        read
    } else {
        null()?
    };
    Ok((ours, ChildEnds { stdin, stdout, stderr }))
}

/// One output stream.
#[derive(Default)]
pub struct Output {
    // The lock is never held across an await.
    state: Mutex<OutputState>,
    /// Notified when bytes or the end are added.
    grown: Notify,
    /// Notified when bytes are acknowledged.
    shrunk: Notify,
}

#[derive(Default)]
struct OutputState {
    bytes: VecDeque<u8>,
    /// The offset of the first byte kept: all bytes before it are acknowledged.
    start: u64,
    ended: bool,
    /// The number of hosts before the one that reads.
    hosts: u64,
}

/// A part of an output.
#[derive(Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The offset of the first byte.
    pub offset: u64,
    /// The bytes; empty only at the end.
    pub bytes: Vec<u8>,
    /// Whether no bytes follow.
    pub end: bool,
}

impl Output {
    /// Returns at most `max` bytes from `offset` on, or without an offset from the oldest byte kept; waits while there
    /// are none. Drops all bytes before `offset`.
    pub async fn read(&self, offset: Option<u64>, max: usize) -> Result<Chunk, Failure> {
        let host = lock(&self.state).hosts;
        loop {
            let grown = self.grown.notified();
            tokio::pin!(grown);
            // The waiter is registered before the check, so that nothing added in between is missed.
            grown.as_mut().enable();
            if let Some(chunk) = self.take(host, offset, max)? {
                return Ok(chunk);
            }
            grown.await;
        }
    }

    fn take(&self, host: u64, offset: Option<u64>, max: usize) -> Result<Option<Chunk>, Failure> {
        let mut state = lock(&self.state);
        if state.hosts != host {
            return Err(Failure::precondition("another host reads the output now"));
        }
        let offset = offset.unwrap_or(state.start);
        let buffered = state.bytes.len() as u64;
        let Some(skip) = offset.checked_sub(state.start) else {
            return Err(Failure::invalid(format!(
                "output before offset {} was acknowledged and dropped; requested offset {offset}",
                state.start
            )));
        };
        if skip > buffered {
            return Err(Failure::invalid(format!(
                "output has {} bytes so far; requested offset {offset}",
                state.start + buffered
            )));
        }
        if skip > 0 {
            // The number is at most `buffered`, which fits.
            state.bytes.drain(..skip as usize);
            state.start = offset;
            self.shrunk.notify_one();
        }
        if state.bytes.is_empty() && !state.ended {
            return Ok(None);
        }
        // Copies whole slices: byte by byte, this was the most expensive step of a long log.
        let (first, second) = state.bytes.as_slices();
        let count = max.max(1).min(state.bytes.len());
        let head = &first[..count.min(first.len())];
        let bytes = [head, &second[..count - head.len()]].concat();
        let end = state.ended && bytes.len() == state.bytes.len();
        Ok(Some(Chunk { offset, bytes, end }))
    }

    fn append(&self, bytes: &[u8]) {
        lock(&self.state).bytes.extend(bytes);
        self.grown.notify_waiters();
    }

    /// Drops what was not read, and counts the following bytes from 0, for another host. Ends the calls of the one before.
    pub fn begin_anew(&self) {
        let mut state = lock(&self.state);
        state.bytes.clear();
        state.start = 0;
        state.hosts += 1;
        drop(state);
        self.shrunk.notify_one();
        self.grown.notify_waiters();
    }

    /// Marks the end of the output.
    pub fn finish(&self) {
        lock(&self.state).ended = true;
        self.grown.notify_waiters();
    }

    /// Waits until the buffer has free space; returns the size of that space in bytes.
    async fn free_space(&self) -> usize {
        loop {
            let free = CAPACITY - lock(&self.state).bytes.len().min(CAPACITY);
            if free > 0 {
                return free;
            }
            self.shrunk.notified().await;
        }
    }
}

/// Copies from `from` to `output` until the end of `from`. After the process has `exited`, only reads what is already
/// in the pipe: a child of the process may keep the stream open forever.
pub async fn capture(from: Stream, terminal: bool, output: Arc<Output>, mut exited: watch::Receiver<bool>) {
    let mut left = None;
    loop {
        let mut max = output.free_space().await;
        let has_exited = *exited.borrow_and_update();
        if has_exited && !terminal {
            let left = match left {
                Some(left) => left,
                None => *left.insert(pipe_helper::waiting(&from).await),
            };
            max = max.min(left);
            if max == 0 {
                break;
            }
        }
        match pipe_helper::read(&from, max).await {
            Ok(bytes) if bytes.is_empty() => break,
            Ok(bytes) => {
                output.append(&bytes);
                left = left.map(|left: usize| left.saturating_sub(bytes.len()));
            }
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) if has_exited && !terminal => break,
            Err(Errno::EAGAIN) if has_exited => {
                if timeout(TERMINAL_LINGER, becomes_readable(&from)).await.is_err() {
                    break;
                }
            }
            Err(Errno::EAGAIN) => {
                tokio::select! {
                    () = becomes_readable(&from) => {}
                    _ = exited.changed() => {}
                }
            }
            // A terminal without users returns EIO.
            Err(_) => break,
        }
    }
    output.finish();
}

/// Waits for the next readiness after a read that would have blocked.
async fn becomes_readable(from: &Stream) {
    // The cached readiness is wrong: the caller has just received EAGAIN. It is cleared only if poll(2)
    // agrees, so that bytes that arrive in between are not missed.
    loop {
        let Ok(mut guard) = from.readable().await else {
            return;
        };
        let mut look = [rustix::event::PollFd::new(from.get_ref(), rustix::event::PollFlags::IN)];
        let ready = rustix::event::poll(&mut look, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 }));
        if ready != Ok(0) {
            return;
        }
        guard.clear_ready();
    }
}

/// The input of one process.
pub struct Input {
    // The state. The lock is held while bytes are written, since input has one order.
    state: Arc<tokio::sync::Mutex<InputState>>,
    terminal: bool,
}

struct InputState {
    to: Option<Stream>,
    bytes: u64,
}

impl Input {
    /// Creates an input that writes to `to`. A terminal is hung up at the end of the input, as under other runtimes, and not closed: its
    /// output has the same descriptor.
    pub fn new(to: Stream, terminal: bool) -> Self {
        let state = InputState { to: Some(to), bytes: 0 };
        Self { state: Arc::new(tokio::sync::Mutex::new(state)), terminal }
    }

    /// Counts the bytes from 0 again, for a host that has written none of them. Returns `false` if the host before is
    /// still writing.
    pub fn begin_anew(&self) -> bool {
        let state = self.state.try_lock();
        state.is_ok_and(|mut state| {
            state.bytes = 0;
            true
        })
    }

    /// Writes the part of `bytes`, which begin at `offset`, that was not written before; returns the offset up to which
    /// input was written. Discards input that the process no longer reads.
    pub async fn write(&self, offset: u64, bytes: &[u8], end: bool) -> Result<u64, Failure> {
        let mut state = Arc::clone(&self.state).lock_owned().await;
        let Some(skip) = state.bytes.checked_sub(offset) else {
            return Err(Failure::invalid(format!(
                "input was written up to offset {}, the next bytes start at {offset}",
                state.bytes
            )));
        };
        let all = offset + bytes.len() as u64;
        let mut rest = usize::try_from(skip).ok().and_then(|skip| bytes.get(skip..)).unwrap_or_default();
        while let Some(to) = state.to.clone().filter(|_| !rest.is_empty()) {
            let Ok(mut writable) = to.writable().await else { break };
            let had = state.bytes;
            let wrote;
            (state, wrote) = write_some(state, Arc::clone(&to), rest.to_vec()).await?;
            match wrote {
                Ok(()) => rest = &rest[(state.bytes - had) as usize..],
                Err(Errno::EAGAIN) => writable.clear_ready(),
                Err(Errno::EINTR) => {}
                Err(_) => state.to = None,
            }
        }
        state.bytes = state.bytes.max(all);
        if end
            && let Some(to) = state.to.take()
            && self.terminal
        {
            hang_up(to.get_ref()).map_err(internal("cannot hang up the terminal"))?;
        }
        Ok(state.bytes)
    }
}

/// Hangs up the terminal with this master: its session gets SIGHUP, reads of it end, and writes fail. What was written before can still
/// be read from the master.
fn hang_up(master: &OwnedFd) -> io::Result<()> {
    let terminal = rustix::pty::ioctl_tiocgptpeer(master, OpenptFlags::RDWR | OpenptFlags::NOCTTY)?;
    // SAFETY: the request has no argument, and the descriptor is open.
    Errno::result(unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCVHANGUP) })?;
    Ok(())
}

/// Makes one attempt, which is counted even if the caller is dropped in the meantime.
async fn write_some(
    mut state: OwnedMutexGuard<InputState>,
    to: Stream,
    bytes: Vec<u8>,
) -> Result<(OwnedMutexGuard<InputState>, Result<(), Errno>), Failure> {
    detached(async move {
        let wrote = pipe_helper::write(&to, &bytes).await;
        state.bytes += wrote.unwrap_or(0) as u64;
        Ok((state, wrote.map(drop)))
    })
    .await
}
