//! Requests over streams; each stream handles one request at a time.
//!
//! ```text
//! guest   key[32] request …            request …
//! server                   response …            response …
//! ```
//!
//! Only the guest's agent knows the key: any process in a guest may connect to its host's ports, but only its kernel
//! may request files.

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

/// How long a client may take to send its key.
const KEY_TIMEOUT: Duration = Duration::from_secs(5);

/// The streams of one guest.
pub struct Streams {
    files: Arc<Files>,
    key: LinkKey,
    /// The number of streams that are served, or about to be.
    served: AtomicUsize,
    accepted: Sender<UnixStream>,
    // One worker waits for the next stream, and the others for the lock.
    next: Mutex<Receiver<UnixStream>>,
}

impl Streams {
    /// Creates an empty set, which serves streams that begin with `key`.
    pub fn new(files: Arc<Files>, key: LinkKey) -> Self {
        let (accepted, next) = channel();
        Self { files, key, served: AtomicUsize::new(0), accepted, next: Mutex::new(next) }
    }

    /// Accepts a stream, or closes it. No stream is queued: with many queued ones, the VMM would block.
    pub fn accept(&self, mut stream: UnixStream) {
        if self.served.load(Ordering::Acquire) < SLOTS && self.has_key(&mut stream).unwrap_or(false) {
            self.served.fetch_add(1, Ordering::AcqRel);
            // Does not fail: without workers this process ends.
            let _ = self.accepted.send(stream);
        }
    }

    /// Returns whether a stream begins with the key.
    fn has_key(&self, stream: &mut UnixStream) -> io::Result<bool> {
        let until = Instant::now() + KEY_TIMEOUT;
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
        // The comparison takes the same time wherever the keys differ.
        Ok(given.iter().zip(self.key.as_bytes()).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0)
    }

    /// Runs a worker forever.
    pub fn work(&self) {
        let (mut request, mut buffer) = (vec![0; MAX_MESSAGE], files::buffer());
        loop {
            let next = self.next.lock().unwrap_or_else(PoisonError::into_inner).recv();
            let Ok(stream) = next else { return };
            // The guest notices how the stream ends, and may reconnect.
            let _ = serve(stream, &self.files, &mut request, &mut buffer);
            self.served.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

fn serve(mut stream: UnixStream, files: &Files, request: &mut [u8], buffer: &mut [u8]) -> io::Result<()> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidData);
    loop {
        stream.read_exact(&mut request[..REQUEST_HEAD])?;
        let length = Head::begins(request).ok_or_else(invalid)?;
        stream.read_exact(&mut request[REQUEST_HEAD..length])?;
        let head = Head::parse(&request[..length]).ok_or_else(invalid)?;
        stream.write_all(files.answer(head, &request[..length], buffer))?;
    }
}
