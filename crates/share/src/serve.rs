//! Requests of one guest, by whichever way they come, served by a few threads.

use std::{fs::File, os::unix::net::UnixListener, sync::Arc, thread};

use anyhow::Context;
use sandboxer_protocol::share::SLOTS;

use crate::{confine, disk::Mailbox, files::Files, jail::Entered, stream};

/// Requests that are carried out at a time: while some wait for a slow disk, others are served. A guest has no more
/// under way.
const THREADS: usize = SLOTS;
/// Of a thread, bytes.
const STACK: usize = 256 << 10;

/// By which way requests come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// A VMM that connects has a disk of this program's.
    Disk,
    /// Each connection is a stream of requests.
    Streams,
}

impl Way {
    /// The one of this name.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "disk" => Some(Self::Disk),
            "streams" => Some(Self::Streams),
            _ => None,
        }
    }
}

/// Serves whoever connects.
pub fn serve(listener: UnixListener, way: Way, nowhere: File, entered: Entered) -> anyhow::Result<()> {
    let quiet = nowhere.try_clone().context("cannot duplicate a descriptor")?;
    let files = Arc::new(Files::open(nowhere)?);
    let listener = Arc::new(listener);
    let mailbox = Arc::new(Mailbox::new(Arc::clone(&files)));
    let (restricted, all_restricted) = std::sync::mpsc::sync_channel(THREADS);
    let mut threads = Vec::new();
    for _ in 0..THREADS {
        let (listener, files, mailbox) = (Arc::clone(&listener), Arc::clone(&files), Arc::clone(&mailbox));
        let restricted = restricted.clone();
        let work = move || {
            let done = confine::restrict_calls();
            let may_serve = done.is_ok();
            // Whoever waits for it learns of a failure by what is sent.
            let _ = restricted.send(done);
            match way {
                Way::Disk if may_serve => mailbox.work(),
                Way::Streams if may_serve => stream::serve(&listener, &files)?,
                _ => {}
            }
            Ok::<_, std::io::Error>(())
        };
        threads.push(thread::Builder::new().stack_size(STACK).spawn(work).context("cannot start a thread")?);
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
    match way {
        Way::Disk => loop {
            let (stream, _) = listener.accept().context("cannot accept a VMM")?;
            // However it ends, the next one may be as it should.
            let _ = mailbox.serve(stream);
        },
        Way::Streams => {
            for thread in threads {
                thread.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
            }
            Ok(())
        }
    }
}
