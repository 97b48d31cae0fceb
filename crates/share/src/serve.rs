//! Requests of one guest, by whichever way they come, served by a few threads.

use std::{
    fs::File,
    os::unix::net::{UnixListener, UnixStream},
    sync::Arc,
    thread,
};

use anyhow::Context;
use sandboxer_protocol::{link::LinkKey, share::SLOTS};

use crate::{confine, disk::Mailbox, files::Files, jail::Entered, stream::Streams};

/// Requests that are carried out at a time: while some wait for a slow disk, others are served. A guest has no more
/// under way.
const THREADS: usize = SLOTS;
/// Of a thread, bytes.
const STACK: usize = 256 << 10;

/// By which way requests come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Way {
    /// A VMM that connects has a disk of this program's.
    Disk,
    /// Each connection is a stream of requests, behind this key.
    Streams(LinkKey),
}

impl Way {
    /// Returns the one of this name: `disk`, or `streams:` and the key's hex digits.
    pub fn named(name: &str) -> Option<Self> {
        match name.split_once(':') {
            None if name == "disk" => Some(Self::Disk),
            Some(("streams", key)) => LinkKey::from_hex(key).map(Self::Streams),
            _ => None,
        }
    }
}

/// Who takes connections, and whose workers carry out what comes by them.
enum Line {
    Disk(Box<Mailbox>),
    Streams(Streams),
}

impl Line {
    fn work(&self) {
        match self {
            Self::Disk(mailbox) => mailbox.work(),
            Self::Streams(streams) => streams.work(),
        }
    }

    fn take(&self, connection: UnixStream) {
        match self {
            // However it ends, the next one may be as it should.
            Self::Disk(mailbox) => drop(mailbox.serve(connection)),
            Self::Streams(streams) => streams.take(connection),
        }
    }
}

/// Serves whoever connects.
pub fn serve(listener: UnixListener, way: Way, nowhere: File, entered: Entered) -> anyhow::Result<()> {
    let quiet = nowhere.try_clone().context("cannot duplicate a descriptor")?;
    let files = Arc::new(Files::open(nowhere)?);
    let line = Arc::new(match way {
        Way::Disk => Line::Disk(Box::new(Mailbox::new(files))),
        Way::Streams(key) => Line::Streams(Streams::new(files, key)),
    });
    let (restricted, all_restricted) = std::sync::mpsc::sync_channel(THREADS);
    for _ in 0..THREADS {
        let (line, restricted) = (Arc::clone(&line), restricted.clone());
        let work = move || {
            let done = confine::restrict_calls();
            let may_serve = done.is_ok();
            // Whoever waits for it learns of a failure by what is sent.
            let _ = restricted.send(done);
            if may_serve {
                line.work();
            }
        };
        thread::Builder::new().stack_size(STACK).spawn(work).context("cannot start a thread")?;
    }
    for _ in 0..THREADS {
        all_restricted.recv().context("a thread ended")??;
    }
    entered.announce().context("cannot tell that it serves")?;
    // What it might say from here on, nobody hears.
    rustix::stdio::dup2_stdin(&quiet)?;
    rustix::stdio::dup2_stdout(&quiet)?;
    rustix::stdio::dup2_stderr(&quiet)?;
    confine::restrict_calls()?;
    loop {
        let (connection, _) = listener.accept().context("cannot accept a connection")?;
        line.take(connection);
    }
}
