//! The worker's side of the front. The front outlives this process: containerd is connected to the front, which also
//! keeps entries for the next worker.
//!
//! An entry is safe once [`Front::keep`] returns, even if this process dies: no file is written, and nothing is waited
//! for. It lasts as long as the front, and so as long as containerd's connections. State that must outlive those is in
//! the journal.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use nix::sys::socket::MsgFlags;
use sandboxer_front::{
    KEEPER,
    control::{self, ANSWERS_PINGS, FOR_READING, Kind, RELOADS},
};
use sandboxer_protocol::id::{ContainerId, ExecId};
use serde::{Serialize, de::DeserializeOwned};
use tokio::{
    io::{Interest, unix::AsyncFd},
    net::UnixStream,
    runtime::{Handle, RuntimeFlavor},
    sync::mpsc,
};
use tokio_util::sync::CancellationToken;

use sandboxer_base::failpoint::{fail, pass};

/// Maximum number of connections that wait to be served.
const QUEUED_CONNECTIONS: usize = 16;
/// Maximum number of results of deletions that are kept for repeated requests.
const MAX_DELETED: usize = 64;

/// Kind of the entries that hold the result of a deletion.
pub const DELETED: &str = "deleted";

/// An entry that an earlier worker kept under a key.
#[derive(Debug)]
pub struct Entry {
    /// The serialised note of the entry.
    note: Vec<u8>,
    /// The descriptors of the entry.
    pub fds: Vec<OwnedFd>,
}

impl Entry {
    /// Returns the note if it has this type; a worker of another build may have written it.
    pub fn note<T: DeserializeOwned>(&self) -> Option<T> {
        serde_json::from_slice(&self.note).ok()
    }
}

/// This worker's side of the front.
#[derive(Debug)]
pub struct Front {
    /// The connection to the front; `None`: no front outlives this process.
    socket: Option<OwnedFd>,
    identity: String,
    /// Whether no earlier worker used this front.
    new: bool,
    reloads: Reloads,
    // Plain locks: held for a look-up, never across an await.
    inherited: Mutex<BTreeMap<String, Entry>>,
    deleted: Mutex<VecDeque<String>>,
}

/// A handle that releases an entry of this worker once it is no longer needed. Dropping it does nothing: a worker that
/// exits must leave what the next one needs.
#[derive(Debug, Clone)]
pub struct EntryHandle {
    front: Arc<Front>,
    key: String,
}

impl EntryHandle {
    /// Removes the entry from the front.
    pub fn release(&self) {
        self.front.forget(&self.key);
    }
}

/// The reloads of this front.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reloads {
    /// The number of reloads.
    pub count: u32,
    /// The reason why the last reload did not replace the front; empty if it did.
    pub error: String,
}

impl Reloads {
    /// Parses the front's report.
    fn parse(note: &[u8]) -> Self {
        let text = String::from_utf8_lossy(note);
        let (count, error) = text.split_once(' ').unwrap_or((&text, ""));
        Self { count: count.parse().unwrap_or_default(), error: error.to_owned() }
    }
}

impl Front {
    /// Returns a placeholder without a front: this process's entries end with it.
    pub fn none() -> Arc<Self> {
        Arc::new(Self {
            socket: None,
            identity: String::new(),
            new: true,
            reloads: Reloads::default(),
            inherited: Mutex::default(),
            deleted: Mutex::default(),
        })
    }

    /// Connects to the front at the other end of the blocking `socket`, and receives all entries of earlier workers.
    pub fn connect(socket: OwnedFd) -> io::Result<Arc<Self>> {
        let (mut inherited, mut reloads) = (BTreeMap::new(), Reloads::default());
        let identity = loop {
            let message = control::receive(socket.as_fd(), MsgFlags::empty())?;
            let message = message.ok_or(io::ErrorKind::UnexpectedEof)?;
            match message.kind {
                Kind::Kept if message.key == RELOADS => reloads = Reloads::parse(&message.note),
                Kind::Kept => {
                    inherited.insert(message.key, Entry { note: message.note, fds: message.fds });
                }
                Kind::AllKept => break String::from_utf8_lossy(&message.note).into_owned(),
                _ => {}
            }
        };
        let deleted = inherited.keys().filter(|key| key.starts_with(DELETED)).cloned().collect();
        Ok(Arc::new(Self {
            socket: Some(socket),
            identity,
            new: inherited.is_empty(),
            reloads,
            inherited: Mutex::new(inherited),
            deleted: Mutex::new(deleted),
        }))
    }

    /// Returns a string that distinguishes this front from earlier and later ones; empty if there is no front.
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// Returns whether no earlier worker used this front.
    pub fn is_new(&self) -> bool {
        self.new
    }

    /// Keeps descriptors and a note under a key, and replaces an earlier entry.
    pub fn keep(
        self: &Arc<Self>,
        key: &str,
        note: &impl Serialize,
        fds: &[BorrowedFd<'_>],
    ) -> io::Result<EntryHandle> {
        let note = serde_json::to_vec(note).map_err(io::Error::other)?;
        fail(format_args!("the front keeps a note: {key}"))?;
        if let Some(socket) = &self.socket {
            pass(format_args!("before the front keeps {}", kind(key)));
            send(socket, Kind::Keep, key, &note, fds)?;
            pass(format_args!("the front keeps {}", kind(key)));
        }
        self.lock().remove(key);
        Ok(EntryHandle { front: self.clone(), key: key.to_owned() })
    }

    /// Opens the FIFO at `path`, read-only or for both reading and writing, and keeps it under the key: it stays open
    /// even if this process dies.
    pub fn open(&self, key: &str, path: &Path, reading: bool) -> io::Result<OwnedFd> {
        use rustix::fs::{FileType, Mode, OFlags, fstat, open};
        let named = open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        if FileType::from_raw_mode(fstat(&named)?.st_mode) != FileType::Fifo {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a FIFO"));
        }
        let Some(socket) = &self.socket else {
            let access = if reading { OFlags::RDONLY } else { OFlags::RDWR };
            return Ok(open(path, access | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())?);
        };
        let (answer, theirs) = control::answering()?;
        let note = if reading { FOR_READING } else { &[] };
        pass(format_args!("before the front opens {}", kind(key)));
        send(socket, Kind::Open, key, note, &[named.as_fd(), theirs.as_fd()])?;
        // Only the other process keeps this end, so its exit is seen here.
        drop(theirs);
        let message = waiting(|| control::receive(answer.as_fd(), MsgFlags::empty()))?;
        let message = message.ok_or(io::ErrorKind::UnexpectedEof)?;
        pass(format_args!("the front has opened {}", kind(key)));
        let refused = || {
            let number = String::from_utf8_lossy(&message.note).parse().ok();
            number.map_or_else(|| io::ErrorKind::InvalidData.into(), io::Error::from_raw_os_error)
        };
        message.fds.into_iter().next().ok_or_else(refused)
    }

    /// Removes an entry, whichever worker kept it.
    pub fn forget(&self, key: &str) {
        self.lock().remove(key);
        pass(format_args!("before the front forgets {}", kind(key)));
        self.tell(Kind::Forget, key, &[]);
        pass(format_args!("the front has forgotten {}", kind(key)));
    }

    /// Takes an entry of an earlier worker. The front still keeps it.
    pub fn take(&self, key: &str) -> Option<Entry> {
        self.lock().remove(key)
    }

    /// Takes an entry as [`Front::take`] does, with its handle.
    pub fn take_with_handle(self: &Arc<Self>, key: &str) -> Option<(Entry, EntryHandle)> {
        let entry = self.take(key)?;
        Some((entry, EntryHandle { front: self.clone(), key: key.to_owned() }))
    }

    /// Returns the note of an earlier worker's entry, without taking the entry.
    pub fn peek<T: DeserializeOwned>(&self, key: &str) -> Option<T> {
        self.lock().get(key).and_then(Entry::note)
    }

    /// Returns whether an earlier worker kept this entry and it has not been taken.
    pub fn has(&self, key: &str) -> bool {
        self.lock().contains_key(key)
    }

    /// Returns the PID of the front, which is this process's parent; this process's own PID if there is no front.
    pub fn pid(&self) -> u32 {
        let front = rustix::process::getppid().filter(|_| self.socket.is_some());
        front.map_or_else(std::process::id, |front| front.as_raw_nonzero().get().unsigned_abs())
    }

    /// Returns the PID of the process that keeps the front's descriptors; 0 if the service manager does.
    pub fn keeper_pid(&self) -> u32 {
        std::env::var(KEEPER).ok().and_then(|pid| pid.parse().ok()).unwrap_or_default()
    }

    /// Returns the reloads that preceded this worker.
    pub fn reloads(&self) -> &Reloads {
        &self.reloads
    }

    /// Starts a reload, which ends this process.
    pub fn reload(&self) -> io::Result<()> {
        let front = rustix::process::getppid().filter(|_| self.socket.is_some());
        let front = front.ok_or_else(|| io::Error::other("this daemon runs without a front"))?;
        Ok(rustix::process::kill_process(front, rustix::process::Signal::HUP)?)
    }

    /// Returns the keys with this prefix of the entries of earlier workers that have not been taken.
    pub fn keys(&self, prefix: &str) -> Vec<String> {
        self.lock().keys().filter(|key| key.starts_with(prefix)).cloned().collect()
    }

    /// Removes all entries that have not been taken: they belong to nothing. Entries with the key prefix `but` stay.
    pub fn forget_rest(&self, but: &str) {
        for key in self.keys("").iter().filter(|key| !key.starts_with(but)) {
            self.forget(key);
        }
    }

    /// Keeps the result of a deletion, as the last step before it is sent.
    pub fn remember_deleted(self: &Arc<Self>, key: String, answer: &impl Serialize) {
        if self.socket.is_none() {
            return;
        }
        if let Err(error) = self.keep(&key, answer, &[]) {
            return tracing::debug!(%error, key, "cannot keep a deletion's answer in the front");
        }
        let mut deleted = self.deleted.lock().unwrap_or_else(PoisonError::into_inner);
        deleted.push_back(key);
        let oldest = if deleted.len() > MAX_DELETED { deleted.pop_front() } else { None };
        drop(deleted);
        if let Some(oldest) = oldest {
            self.forget(&oldest);
        }
    }

    /// Notifies the front that this worker accepts requests.
    pub fn ready(&self) {
        self.tell(Kind::Ready, "", ANSWERS_PINGS);
    }

    /// Receives the task connections from the front. `lost` is cancelled when the front is gone. Also replies to the
    /// front's pings here, not in a thread, which shows that the runtime's threads make progress.
    pub fn connections(
        self: &Arc<Self>,
        lost: CancellationToken,
    ) -> io::Result<mpsc::Receiver<io::Result<UnixStream>>> {
        let (sender, connections) = mpsc::channel(QUEUED_CONNECTIONS);
        let Some(socket) = &self.socket else { return Ok(connections) };
        let socket = socket.try_clone()?;
        // SAFETY: an OwnedFd stays open and is the same file for its lifetime, and the AsyncFd owns it.
        let socket = unsafe { AsyncFd::register_with_interest(socket, Interest::READABLE) }
            .map_err(io::Error::from)?;
        tokio::spawn(async move {
            while let Ok(Some(connection)) = next_connection(&socket).await {
                if sender.send(Ok(connection)).await.is_err() {
                    return;
                }
            }
            tracing::warn!("the front is gone, with containerd's connections: exiting; pods keep running");
            lost.cancel();
        });
        Ok(connections)
    }

    fn tell(&self, kind: Kind, key: &str, note: &[u8]) {
        if let Some(socket) = &self.socket
            && let Err(error) = send(socket, kind, key, note, &[])
        {
            // The front is gone, which is handled elsewhere.
            tracing::debug!(%error, ?kind, key, "cannot notify the front");
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        self.inherited.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends one message to the front. Waits while the queue is full: the front is stopped or gets no CPU time.
fn send(socket: &OwnedFd, kind: Kind, key: &str, note: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    match control::send_with(socket.as_fd(), kind, key, note, fds, MsgFlags::MSG_DONTWAIT) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            waiting(|| control::send(socket.as_fd(), kind, key, note, fds))
        }
        sent => sent,
    }
}

/// Runs work that may wait for the front. Other tasks continue on another thread, if there is one.
#[expect(
    clippy::disallowed_methods,
    reason = "it borrows what is sent, waits once in a long while, and must be over when it returns"
)]
fn waiting<T>(work: impl FnOnce() -> T) -> T {
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(work),
        _ => work(),
    }
}

async fn next_connection(socket: &AsyncFd<OwnedFd>) -> io::Result<Option<UnixStream>> {
    loop {
        let mut guard = socket.readable().await?;
        let received = match control::receive(socket.as_fd(), MsgFlags::MSG_DONTWAIT) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                guard.clear_ready();
                continue;
            }
            received => received?,
        };
        let Some(mut message) = received else { return Ok(None) };
        if message.kind == Kind::Ping {
            // Without waiting: a front that does not read will ping again.
            let _ = control::send_with(socket.as_fd(), Kind::Pong, "", &[], &[], MsgFlags::MSG_DONTWAIT);
        }
        if let (Kind::Connection, Some(fd)) = (message.kind, message.fds.pop()) {
            let stream = std::os::unix::net::UnixStream::from(fd);
            stream.set_nonblocking(true)?;
            return UnixStream::from_std(stream).map(Some);
        }
    }
}

/// Returns the kind of the entries with this key.
fn kind(key: &str) -> &str {
    key.split(' ').next().unwrap_or_default()
}

/// Returns the key of an entry about a process: a container's init, or an exec.
pub fn key(kind: &str, container: &ContainerId, exec: Option<&ExecId>) -> String {
    match exec {
        None => format!("{kind} {container}"),
        Some(exec) => format!("{kind} {container} {exec}"),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::{sync::oneshot, time::timeout};

    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn a_front_that_takes_nothing_stops_no_other_task() {
        const ENTRIES: usize = 100;
        let (theirs, ours) = control::pair().unwrap();
        control::send(theirs.as_fd(), Kind::AllKept, "", b"front", &[]).unwrap();
        let front = Front::connect(ours).unwrap();
        let (full, is_full) = oneshot::channel();
        // More than the kernel's queue holds.
        let keeping = tokio::spawn(async move {
            let note = "n".repeat(30_000);
            full.send(()).unwrap();
            for _ in 0..ENTRIES {
                front.keep("key", &note, &[]).unwrap();
            }
        });
        is_full.await.unwrap();
        let other = tokio::spawn(tokio::time::sleep(Duration::from_millis(100)));
        timeout(Duration::from_secs(30), other).await.expect("nothing else is done").unwrap();
        assert!(!keeping.is_finished(), "the queue takes everything");
        let read = tokio::task::spawn_blocking(move || {
            let mut read = 0;
            while read < ENTRIES {
                match control::receive(theirs.as_fd(), MsgFlags::empty()) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::yield_now(),
                    received => read += usize::from(received.unwrap().is_some_and(|m| m.kind == Kind::Keep)),
                }
            }
        });
        keeping.await.unwrap();
        read.await.unwrap();
    }
}
