//! Runs one operation of the container runtime in a short-lived process of its own.
//!
//! ```text
//!  agent ──fork──▶ worker ──(libcontainer forks)──▶ container's init
//!    ▲               │ report: length, JSON                │
//!    ├───────────────┘ then exits                          │ causes: lines, until it
//!    ├─────────────────────────────────────────────────────┘ executes its payload
//!    └── adopts the orphaned init as PID 1 does
//! ```
//!
//! An error in the runtime ends the worker, not the guest. Forking is safe because the agent has only one thread.

use std::{
    io::{self, Write as _},
    os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd},
    sync::Arc,
};

use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    unistd::{ForkResult, fork, pipe2},
};
use serde::{Serialize, de::DeserializeOwned};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::Semaphore,
};

use crate::{
    failure::{Failure, Kind, internal},
    log,
    reaper::{Reaper, Since},
    sync::watched,
};

/// The longest report, bytes. It fits in a pipe without a reader, so a worker never blocks.
const MAX_REPORT: usize = 60 << 10;
/// The longest text of causes that is read, bytes.
const MAX_CAUSES: usize = 64 << 10;
/// The most workers at a time. More would only compete for the few virtual CPUs.
const PARALLEL: usize = 4;

/// The workers: forks them and receives their reports.
pub struct Workers {
    reaper: Arc<Reaper>,
    places: Semaphore,
}

/// The results of a worker.
pub struct Outcome<T> {
    /// The worker's report.
    pub result: Result<T, Failure>,
    /// A point before the fork, by which the processes that the worker created are claimed.
    pub since: Since,
    /// The pipe of causes that the worker and its descendants write to. It is closed when the last of them has executed
    /// another program or exited.
    pub causes: Causes,
}

impl<T> Outcome<T> {
    /// Returns the worker's result; a failure with its causes.
    pub fn into_result(self) -> Result<T, Failure> {
        self.result.map_err(|failure| self.causes.explain(failure))
    }
}

impl Workers {
    /// Creates a set of workers, whose exits `reaper` reports.
    pub fn new(reaper: Arc<Reaper>) -> Self {
        Self { reaper, places: Semaphore::new(PARALLEL) }
    }

    /// Runs `job` in a worker that keeps only the descriptors `keep` of the agent: any other would keep another
    /// container's pipe open.
    pub async fn run<T, F>(&self, keep: &[BorrowedFd<'_>], job: F) -> Result<Outcome<T>, Failure>
    where
        T: Serialize + DeserializeOwned,
        F: FnOnce() -> Result<T, Failure>,
    {
        let _place = self.places.acquire().await.map_err(internal("cannot wait for a worker"))?;
        let (report, report_end) = new_pipe()?;
        let (causes, causes_end) = new_pipe()?;
        // The read ends never block, and the write end of the causes drops what does not fit.
        for fd in [&report, &causes, &causes_end] {
            fcntl(fd, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))
                .map_err(internal("cannot prepare a worker's pipes"))?;
        }
        let since = self.reaper.now();
        #[expect(clippy::disallowed_methods, reason = "the agent has one thread, so a fork copies all of it")]
        // SAFETY: no other thread exists that could hold a lock or be in the middle of a change.
        let forked = unsafe { fork() }.map_err(internal("cannot fork a worker"))?;
        let pid = match forked {
            ForkResult::Child => {
                let mut fds: Vec<RawFd> = keep.iter().map(AsRawFd::as_raw_fd).collect();
                fds.extend([report_end.as_raw_fd(), causes_end.as_raw_fd()]);
                work(fds, report_end, &causes_end, job)
            }
            ForkResult::Parent { child } => child.as_raw(),
        };
        let death = self.reaper.claim(pid, since);
        drop((report_end, causes_end));

        let unreadable = || internal("cannot read from a worker");
        let causes = Causes(watched(causes, Interest::READABLE).map_err(unreadable())?);
        let mut report = Report::new(report).map_err(unreadable())?;
        let result = tokio::select! {
            biased;
            complete = report.completed() => complete,
            died = death => match (report.pull(), died) {
                // The worker may have reported and exited before this was polled again.
                (Ok(true), _) => Ok(()),
                (Err(failure), _) => Err(failure),
                (Ok(false), Ok(death)) => {
                    let code = death.code;
                    Err(Failure::new(Kind::Internal, format!("worker exited with code {code} without a report")))
                }
                (Ok(false), Err(_)) => Err(Failure::new(Kind::Internal, "worker was lost")),
            },
        };
        Ok(Outcome { result: result.and_then(|()| report.decode()), since, causes })
    }
}

fn new_pipe() -> Result<(OwnedFd, OwnedFd), Failure> {
    pipe2(OFlag::O_CLOEXEC).map_err(internal("cannot open a pipe for a worker"))
}

/// Runs a worker until it exits.
fn work<T: Serialize>(
    fds: Vec<RawFd>,
    report: OwnedFd,
    causes: &OwnedFd,
    job: impl FnOnce() -> Result<T, Failure>,
) -> ! {
    log::into_worker(log::number(causes));
    close_all_but(fds);
    let result = job();
    let encoded = match serde_json::to_vec(&result) {
        Ok(bytes) if bytes.len() <= MAX_REPORT => bytes,
        _ => Vec::new(),
    };
    // The length fits: it is at most MAX_REPORT.
    let length = encoded.len() as u32;
    let mut report = io::PipeWriter::from(report);
    let _ = report.write_all(&[&length.to_le_bytes()[..], &encoded].concat());
    // SAFETY: `_exit` ends the process without the agent's destructors and exit handlers, which must run in
    // the agent only.
    unsafe { libc::_exit(0) }
}

/// Closes every descriptor except standard input, output, error and `fds`.
pub fn close_all_but(mut fds: Vec<RawFd>) {
    fds.sort_unstable();
    let mut next: libc::c_uint = 3;
    for fd in fds.into_iter().filter_map(|fd| libc::c_uint::try_from(fd).ok()).chain([libc::c_uint::MAX]) {
        if fd > next {
            // SAFETY: the descriptors belong to objects of the agent that this process never uses again: it
            // ends by `_exit` or by executing another program.
            unsafe { libc::close_range(next, fd - 1, 0) };
        }
        next = next.max(fd.saturating_add(1));
    }
}

/// A report as it arrives: its length in four bytes, then JSON.
struct Report {
    pipe: AsyncFd<OwnedFd>,
    bytes: Vec<u8>,
}

impl Report {
    fn new(pipe: OwnedFd) -> io::Result<Self> {
        Ok(Self { pipe: watched(pipe, Interest::READABLE)?, bytes: Vec::new() })
    }

    /// Waits until the report is complete. The caller watches for a worker that exits first.
    async fn completed(&mut self) -> Result<(), Failure> {
        loop {
            if self.pull()? {
                return Ok(());
            }
            let readable = self.pipe.readable().await;
            let mut guard = readable.map_err(internal("cannot read from a worker"))?;
            let closed = guard.ready().is_read_closed();
            guard.clear_ready();
            drop(guard);
            if closed && !self.pull()? {
                // The pipe was closed without a report: the worker's exit status explains more.
                return std::future::pending().await;
            }
        }
    }

    /// Reads the bytes in the pipe; returns whether the report is complete.
    fn pull(&mut self) -> Result<bool, Failure> {
        read_now(self.pipe.get_ref(), &mut self.bytes, MAX_REPORT + size_of::<u32>());
        let Some((length, body)) = self.bytes.split_first_chunk() else { return Ok(false) };
        match usize::try_from(u32::from_le_bytes(*length)) {
            Ok(length @ 1..=MAX_REPORT) => Ok(body.len() >= length),
            _ => Err(Failure::new(Kind::Internal, "worker announced a report of invalid length")),
        }
    }

    fn decode<T: DeserializeOwned>(&self) -> Result<T, Failure> {
        let body = self.bytes.get(size_of::<u32>()..).unwrap_or_default();
        serde_json::from_slice::<Result<T, Failure>>(body)
            .map_err(internal("worker's report is malformed"))
            .and_then(|result| result)
    }
}

/// Appends the bytes that a non-blocking `pipe` contains now, up to `max` bytes in all. Reads directly: the async
/// runtime's knowledge of the pipe may be outdated.
fn read_now(pipe: &OwnedFd, bytes: &mut Vec<u8>, max: usize) {
    let mut chunk = [0; 4096];
    while bytes.len() < max {
        let free = chunk.len().min(max - bytes.len());
        match nix::unistd::read(pipe, &mut chunk[..free]) {
            Ok(count) if count > 0 => bytes.extend(&chunk[..count]),
            Err(nix::errno::Errno::EINTR) => {}
            _ => return,
        }
    }
}

/// The causes of a failure, as written by a worker and its descendants.
pub struct Causes(AsyncFd<OwnedFd>);

impl Causes {
    /// Adds the causes written so far to `failure`.
    pub fn explain(&self, failure: Failure) -> Failure {
        let mut text = Vec::new();
        read_now(self.0.get_ref(), &mut text, MAX_CAUSES);
        explained(failure, &String::from_utf8_lossy(&text))
    }

    /// Waits until the payload runs; an error explains why it cannot.
    pub async fn until_executed(self) -> Result<(), Failure> {
        let mut text = Vec::new();
        loop {
            read_now(self.0.get_ref(), &mut text, MAX_CAUSES);
            let readable = self.0.readable().await;
            let mut guard = readable.map_err(internal("cannot read from the payload"))?;
            let closed = guard.ready().is_read_closed();
            guard.clear_ready();
            if closed {
                break;
            }
        }
        read_now(self.0.get_ref(), &mut text, MAX_CAUSES);
        let text = String::from_utf8_lossy(&text);
        match text.lines().find_map(|line| line.strip_prefix(log::PAYLOAD)) {
            Some(why) => Err(Failure::precondition(why)),
            None => Ok(()),
        }
    }
}

fn explained(failure: Failure, causes: &str) -> Failure {
    // A payload's cause replaces the failure; otherwise the first logged cause is the innermost one.
    if let Some(why) = causes.lines().find_map(|line| line.strip_prefix(log::PAYLOAD)) {
        return Failure::new(Kind::FailedPrecondition, why);
    }
    match causes.lines().find_map(|line| line.strip_prefix(log::LOGGED)) {
        Some(first) if !failure.message.contains(first) => {
            Failure::new(failure.kind, format!("{}: {first}", failure.message))
        }
        _ => failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_payloads_own_words_replace_the_runtimes() {
        let failure = Failure::new(Kind::Internal, "cannot wait for init");
        let causes = "Lexecutable not found\nPexec: \"nosuch\": executable file not found in $PATH\nLlate\n";
        assert_eq!(
            explained(failure, causes).message,
            "exec: \"nosuch\": executable file not found in $PATH"
        );
    }

    #[test]
    fn the_deepest_logged_cause_is_added() {
        let failure = Failure::new(Kind::Internal, "cannot prepare rootfs");
        assert_eq!(
            explained(failure, "Lno such device\nLfailed\n").message,
            "cannot prepare rootfs: no such device"
        );
    }
}
