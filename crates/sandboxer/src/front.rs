//! What outlives this process: the front, to which containerd is connected, and what it keeps for the next worker.
//!
//! An entry that was handed over is safe the moment [`Front::keep`] returns, whatever happens to this process:
//! no file is written, and nothing is waited for. It lasts as long as the front, and so as long as containerd's
//! connections: what must outlive those is in the journal.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use nix::sys::socket::MsgFlags;
use sandboxer_front::control::{self, ANSWERS_PINGS, FOR_READING, Kind};
use sandboxer_protocol::id::{ContainerId, ExecId};
use serde::{Serialize, de::DeserializeOwned};
use tokio::{
    io::{Interest, unix::AsyncFd},
    net::UnixStream,
    runtime::{Handle, RuntimeFlavor},
    sync::mpsc,
};
use tokio_util::sync::CancellationToken;

use sandboxer_base::failpoint::pass;

/// Connections that may wait to be served.
const QUEUED_CONNECTIONS: usize = 16;
/// Answers to deletions that are remembered, for those who ask again.
const MAX_DELETED: usize = 64;

/// Kind of an entry that says what a deletion answered.
pub const DELETED: &str = "deleted";

/// What an earlier worker had kept under a key.
#[derive(Debug)]
pub struct Entry {
    /// Its note.
    note: Vec<u8>,
    /// Its descriptors.
    pub fds: Vec<OwnedFd>,
}

impl Entry {
    /// Returns the note, if it is one of these; a worker of another build may have written it.
    pub fn note<T: DeserializeOwned>(&self) -> Option<T> {
        serde_json::from_slice(&self.note).ok()
    }
}

/// This worker's side of the front.
#[derive(Debug)]
pub struct Front {
    /// None: nobody outlives this process.
    socket: Option<OwnedFd>,
    identity: String,
    /// No worker before this one had this front.
    new: bool,
    // Plain locks: held for a look-up, never across an await.
    inherited: Mutex<BTreeMap<String, Entry>>,
    deleted: Mutex<VecDeque<String>>,
}

/// An entry of this worker's, to be let go of by whoever knows that it is over. Dropping it changes nothing: a
/// worker that ends must not take along what the next one needs.
#[derive(Debug, Clone)]
pub struct Kept {
    front: Arc<Front>,
    key: String,
}

impl Kept {
    /// The front forgets it.
    pub fn release(&self) {
        self.front.forget(&self.key);
    }
}

impl Front {
    /// Nobody: what this process holds ends with it.
    pub fn none() -> Arc<Self> {
        Arc::new(Self {
            socket: None,
            identity: String::new(),
            new: true,
            inherited: Mutex::default(),
            deleted: Mutex::default(),
        })
    }

    /// Returns the front at the other end of `socket`, which blocks: receives all that earlier workers had kept.
    pub fn connect(socket: OwnedFd) -> io::Result<Arc<Self>> {
        let mut inherited = BTreeMap::new();
        let identity = loop {
            let message = control::receive(socket.as_fd(), MsgFlags::empty())?;
            let message = message.ok_or(io::ErrorKind::UnexpectedEof)?;
            match message.kind {
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
            inherited: Mutex::new(inherited),
            deleted: Mutex::new(deleted),
        }))
    }

    /// Tells this front from those before and after it; empty if there is none.
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// Returns whether no earlier worker could hand anything over.
    pub fn is_new(&self) -> bool {
        self.new
    }

    /// Has descriptors and a note kept under a key, in place of what was there.
    pub fn keep(
        self: &Arc<Self>,
        key: &str,
        note: &impl Serialize,
        fds: &[BorrowedFd<'_>],
    ) -> io::Result<Kept> {
        let note = serde_json::to_vec(note).map_err(io::Error::other)?;
        if let Some(socket) = &self.socket {
            pass(format_args!("before the front keeps {}", kind(key)));
            send(socket, Kind::Keep, key, &note, fds)?;
            pass(format_args!("the front keeps {}", kind(key)));
        }
        self.lock().remove(key);
        Ok(Kept { front: self.clone(), key: key.to_owned() })
    }

    /// Opens the FIFO at `path`, for reading alone or for both, in such a way that it stays open whatever happens to
    /// this process. It is kept under the key.
    pub fn open(&self, key: &str, path: &Path, reading: bool) -> io::Result<OwnedFd> {
        use rustix::fs::{FileType, Mode, OFlags, fstat, open};
        let named = open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        if FileType::from_raw_mode(fstat(&named)?.st_mode) != FileType::Fifo {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no FIFO"));
        }
        let Some(socket) = &self.socket else {
            let access = if reading { OFlags::RDONLY } else { OFlags::RDWR };
            return Ok(open(path, access | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())?);
        };
        let (answer, theirs) = control::answering()?;
        let note = if reading { FOR_READING } else { &[] };
        pass(format_args!("before the front opens {}", kind(key)));
        send(socket, Kind::Open, key, note, &[named.as_fd(), theirs.as_fd()])?;
        // It has it alone: its end is then seen here.
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

    /// Has an entry forgotten, whoever kept it.
    pub fn forget(&self, key: &str) {
        self.lock().remove(key);
        pass(format_args!("before the front forgets {}", kind(key)));
        self.tell(Kind::Forget, key, &[]);
        pass(format_args!("the front has forgotten {}", kind(key)));
    }

    /// Takes over what an earlier worker had kept. It stays kept.
    pub fn take(&self, key: &str) -> Option<Entry> {
        self.lock().remove(key)
    }

    /// Same as [`Front::take`], with a hold on the entry.
    pub fn take_kept(self: &Arc<Self>, key: &str) -> Option<(Entry, Kept)> {
        let entry = self.take(key)?;
        Some((entry, Kept { front: self.clone(), key: key.to_owned() }))
    }

    /// Returns the note of what an earlier worker had kept, which stays there.
    pub fn peek<T: DeserializeOwned>(&self, key: &str) -> Option<T> {
        self.lock().get(key).and_then(Entry::note)
    }

    /// Returns whether an earlier worker had kept this, and nobody has taken it.
    pub fn has(&self, key: &str) -> bool {
        self.lock().contains_key(key)
    }

    /// Returns the process that containerd is connected to.
    pub fn pid(&self) -> u32 {
        match self.socket {
            Some(_) => std::os::unix::process::parent_id(),
            None => std::process::id(),
        }
    }

    /// Keys that begin so, of what an earlier worker had kept and nobody has taken.
    pub fn keys(&self, prefix: &str) -> Vec<String> {
        self.lock().keys().filter(|key| key.starts_with(prefix)).cloned().collect()
    }

    /// Forgets what nobody has taken: it belonged to what is no more. What begins with `but` stays.
    pub fn forget_rest(&self, but: &str) {
        for key in self.keys("").iter().filter(|key| !key.starts_with(but)) {
            self.forget(key);
        }
    }

    /// Remembers what a deletion answers, as the last thing before it.
    pub fn remember_deleted(self: &Arc<Self>, key: String, answer: &impl Serialize) {
        if self.socket.is_none() {
            return;
        }
        if let Err(error) = self.keep(&key, answer, &[]) {
            return tracing::debug!(%error, key, "the front cannot keep a deletion's answer");
        }
        let mut deleted = self.deleted.lock().unwrap_or_else(PoisonError::into_inner);
        deleted.push_back(key);
        let oldest = if deleted.len() > MAX_DELETED { deleted.pop_front() } else { None };
        drop(deleted);
        if let Some(oldest) = oldest {
            self.forget(&oldest);
        }
    }

    /// Says that requests may come.
    pub fn ready(&self) {
        self.tell(Kind::Ready, "", ANSWERS_PINGS);
    }

    /// Returns the task connections that the front hands over. `lost` is cancelled when there is no front any more. Returns the
    /// front's pings, too, here and not in a thread: that shows that the runtime's threads get on.
    pub fn connections(
        self: &Arc<Self>,
        lost: CancellationToken,
    ) -> io::Result<mpsc::Receiver<io::Result<UnixStream>>> {
        let (sender, connections) = mpsc::channel(QUEUED_CONNECTIONS);
        let Some(socket) = &self.socket else { return Ok(connections) };
        let socket = socket.try_clone()?;
        // SAFETY: an OwnedFd is open and the same file as long as it lives, and the AsyncFd owns it.
        let socket = unsafe { AsyncFd::register_with_interest(socket, Interest::READABLE) }
            .map_err(io::Error::from)?;
        tokio::spawn(async move {
            while let Ok(Some(connection)) = next_connection(&socket).await {
                if sender.send(Ok(connection)).await.is_err() {
                    return;
                }
            }
            tracing::warn!("the front is gone, and containerd's connections with it: ending, pods stay");
            lost.cancel();
        });
        Ok(connections)
    }

    fn tell(&self, kind: Kind, key: &str, note: &[u8]) {
        if let Some(socket) = &self.socket
            && let Err(error) = send(socket, kind, key, note, &[])
        {
            // It is gone, and that is acted on elsewhere.
            tracing::debug!(%error, ?kind, key, "the front takes no word");
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        self.inherited.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends one message to the front. Waits while its queue is full, which it is when the front gets no processor or is stopped.
fn send(socket: &OwnedFd, kind: Kind, key: &str, note: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    match control::send_with(socket.as_fd(), kind, key, note, fds, MsgFlags::MSG_DONTWAIT) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            waiting(|| control::send(socket.as_fd(), kind, key, note, fds))
        }
        sent => sent,
    }
}

/// Does what may wait for the front. Other tasks get another thread meanwhile, where there are several.
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
            // Without waiting: a front that does not read has other troubles, and asks again.
            let _ = control::send_with(socket.as_fd(), Kind::Pong, "", &[], &[], MsgFlags::MSG_DONTWAIT);
        }
        if let (Kind::Connection, Some(fd)) = (message.kind, message.fds.pop()) {
            let stream = std::os::unix::net::UnixStream::from(fd);
            stream.set_nonblocking(true)?;
            return UnixStream::from_std(stream).map(Some);
        }
    }
}

/// Returns what the entries under such keys are.
fn kind(key: &str) -> &str {
    key.split(' ').next().unwrap_or_default()
}

/// Key of an entry about a process: a container's init, or an exec.
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
        // More than the kernel queues.
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
