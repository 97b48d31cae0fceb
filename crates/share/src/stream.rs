//! Requests that come over streams, each answered on its own before the next one is read.
//!
//! ```text
//! guest   key[32] request …          request …
//! server                   answer …            answer …
//! ```
//!
//! The key is known to the guest's agent alone: whatever runs in a guest may connect to its host's ports, and only its
//! kernel may ask for files.

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    time::{Duration, Instant},
};

use sandboxer_protocol::{
    link::LinkKey,
    share::{Head, MAX_MESSAGE, REQUEST_HEAD, SLOTS},
};

use crate::files::{self, Files};

/// How long a stream may take to tell its key.
const PATIENCE: Duration = Duration::from_secs(5);

/// The streams of one guest.
pub struct Streams {
    files: Arc<Files>,
    key: LinkKey,
    /// How many are served, or about to be.
    served: AtomicUsize,
    known: Sender<UnixStream>,
    // One worker waits for the next stream, the others for their turn.
    next: Mutex<Receiver<UnixStream>>,
}

impl Streams {
    /// None yet. Those that begin with `key` will be served.
    pub fn new(files: Arc<Files>, key: LinkKey) -> Self {
        let (known, next) = channel();
        Self { files, key, served: AtomicUsize::new(0), known, next: Mutex::new(next) }
    }

    /// Takes a stream, or hangs up. None is left waiting: its VMM would wait as well once there are many.
    pub fn take(&self, mut stream: UnixStream) {
        if self.served.load(Ordering::Acquire) < SLOTS && self.knows(&mut stream).unwrap_or(false) {
            self.served.fetch_add(1, Ordering::AcqRel);
            // There is always a worker: without them this process ends.
            let _ = self.known.send(stream);
        }
    }

    /// Returns whether a stream begins with the key.
    fn knows(&self, stream: &mut UnixStream) -> io::Result<bool> {
        let until = Instant::now() + PATIENCE;
        let mut given = [0; LinkKey::LEN];
        let mut filled = 0;
        while filled < given.len() {
            let left = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero());
            stream.set_read_timeout(Some(left.ok_or(io::ErrorKind::TimedOut)?))?;
            match stream.read(&mut given[filled..])? {
                0 => return Ok(false),
                count => filled += count,
            }
        }
        stream.set_read_timeout(None)?;
        // In a time that tells nothing of where they differ.
        Ok(given.iter().zip(self.key.as_bytes()).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0)
    }

    /// A worker's whole life.
    pub fn work(&self) {
        let (mut request, mut room) = (vec![0; MAX_MESSAGE], files::room());
        loop {
            let next = self.next.lock().unwrap_or_else(PoisonError::into_inner).recv();
            let Ok(stream) = next else { return };
            // However it ends: the guest knows, and may come again.
            let _ = converse(stream, &self.files, &mut request, &mut room);
            self.served.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

fn converse(mut stream: UnixStream, files: &Files, request: &mut [u8], room: &mut [u8]) -> io::Result<()> {
    let rubbish = || io::Error::from(io::ErrorKind::InvalidData);
    loop {
        stream.read_exact(&mut request[..REQUEST_HEAD])?;
        let length = Head::begins(request).ok_or_else(rubbish)?;
        stream.read_exact(&mut request[REQUEST_HEAD..length])?;
        let head = Head::of(&request[..length]).ok_or_else(rubbish)?;
        stream.write_all(files.answer(head, &mut request[..length], room))?;
    }
}
