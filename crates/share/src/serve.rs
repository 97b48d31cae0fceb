//! Serves the requests of one guest with a few threads, over either transport.

use std::{
    fs::File,
    os::unix::net::{UnixListener, UnixStream},
    sync::Arc,
    thread,
};

use anyhow::Context;
use nix::sched::{CloneFlags, unshare};
use sandboxer_protocol::{link::LinkKey, share::SLOTS};

use crate::{confine, disk::Mailbox, files::Files, jail::Ready, stream::Streams};

/// The number of requests carried out at a time: while some wait for a slow disk, others are served. A guest never has
/// more in progress.
const THREADS: usize = SLOTS;
/// The size of a thread's stack, bytes.
const STACK: usize = 256 << 10;

/// The transport of requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Transport {
    /// A disk of the VMM that connects.
    Disk,
    /// Streams: on each connection, requests follow this key.
    Streams(LinkKey),
}

impl Transport {
    /// Parses `disk`, or `streams:` and the key's hex digits.
    pub fn named(name: &str) -> Option<Self> {
        match name.split_once(':') {
            None if name == "disk" => Some(Self::Disk),
            Some(("streams", key)) => LinkKey::from_hex(key).map(Self::Streams),
            _ => None,
        }
    }
}

/// The part that accepts connections and carries out their requests.
enum Backend {
    Disk(Box<Mailbox>),
    Streams(Streams),
}

impl Backend {
    fn work(&self) {
        match self {
            Self::Disk(mailbox) => mailbox.work(),
            Self::Streams(streams) => streams.work(),
        }
    }

    fn accept(&self, connection: UnixStream) {
        match self {
            // The next connection is served, however this one ends.
            Self::Disk(mailbox) => drop(mailbox.serve(connection)),
            Self::Streams(streams) => streams.accept(connection),
        }
    }
}

/// Serves all connections.
pub fn serve(
    listener: UnixListener,
    transport: Transport,
    files: Files,
    null: &File,
    ready: Ready,
) -> anyhow::Result<()> {
    let files = Arc::new(files);
    let backend = Arc::new(match transport {
        Transport::Disk => Backend::Disk(Box::new(Mailbox::new(files))),
        Transport::Streams(key) => Backend::Streams(Streams::new(files, key)),
    });
    let (restricted, all_restricted) = std::sync::mpsc::sync_channel(THREADS);
    for _ in 0..THREADS {
        let (backend, restricted) = (Arc::clone(&backend), restricted.clone());
        let work = move || {
            // Each thread needs its own mask of permissions.
            let own = unshare(CloneFlags::CLONE_FS).context("cannot leave the process's working directory");
            let done = own.and_then(|()| confine::restrict_calls());
            let may_serve = done.is_ok();
            // The receiver gets the error.
            let _ = restricted.send(done);
            if may_serve {
                backend.work();
            }
        };
        thread::Builder::new().stack_size(STACK).spawn(work).context("cannot start a thread")?;
    }
    for _ in 0..THREADS {
        all_restricted.recv().context("a thread exited early")??;
    }
    ready.signal().context("cannot signal readiness")?;
    // No process reads this process's output from here on.
    rustix::stdio::dup2_stdin(null)?;
    rustix::stdio::dup2_stdout(null)?;
    rustix::stdio::dup2_stderr(null)?;
    confine::restrict_calls()?;
    loop {
        let (connection, _) = listener.accept().context("cannot accept a connection")?;
        backend.accept(connection);
    }
}
