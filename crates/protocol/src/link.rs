//! The byte stream between daemon and agent, and how its two ends find each other on it.
//!
//! A virtio-serial port is one endless stream: when the daemon dies and a new one connects, or
//! when a guest is restored, parts of old frames are still in both directions of the stream. So each
//! session starts with a greeting that both ends can find among other bytes:
//!
//! ```text
//! host → guest   hello     key[32] nonce[8] version:u32
//! guest → host   welcome   key[32] nonce[8] version:u32 length:u16 Ready[length]
//! after that     ttrpc frames, the guest being the server
//! ```
//!
//! Integers are big-endian. The key is random and per pod, so no payload contains it by accident;
//! the nonce is random and per session, so an old welcome is not mistaken for a new one. The
//! guest searches the key in everything it receives and starts a new session wherever it finds it;
//! the host drops all it reads before its welcome. A vsock connection does not need this, but
//! uses the same handshake.

use std::{fmt, io};

use memchr::memmem::Finder;
use protobuf::Message;
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf},
    sync::{mpsc, watch},
};

use crate::{PROTOCOL_VERSION, agent::Ready};

const NONCE_LEN: usize = 8;
const VERSION_LEN: usize = 4;
/// Maximum welcome payload, bytes: limits what the host buffers for a guest.
const MAX_READY: usize = 4096;
/// Maximum stale bytes that the host drops before it gives up on a guest, 64 MiB: sixteen times the
/// largest ttrpc message.
const MAX_STALE: usize = 64 << 20;
/// Bytes moved at once between port and session: as many as a virtio-serial port of Linux takes in one write.
const CHUNK: usize = 32 << 10;

/// Marks the greetings of one guest's link. Random, per pod.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct LinkKey([u8; Self::LEN]);

impl LinkKey {
    /// Length in bytes.
    pub const LEN: usize = 32;

    /// Returns the key made of these bytes.
    pub const fn from_bytes(bytes: [u8; Self::LEN]) -> Self {
        Self(bytes)
    }

    /// Returns the key's bytes.
    pub const fn as_bytes(&self) -> &[u8; Self::LEN] {
        &self.0
    }

    /// Returns a new key from the system's randomness.
    pub fn random() -> Self {
        Self(rand::random())
    }

    /// Returns the key as lower-case hex digits.
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Reads what [`LinkKey::to_hex`] wrote.
    pub fn from_hex(text: &str) -> Option<Self> {
        if text.len() != 2 * Self::LEN || !text.is_ascii() {
            return None;
        }
        let mut key = [0; Self::LEN];
        for (byte, pair) in key.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
        }
        Some(Self(key))
    }
}

impl TryFrom<String> for LinkKey {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        Self::from_hex(&text).ok_or("a link key has 64 hex digits")
    }
}

impl From<LinkKey> for String {
    fn from(key: LinkKey) -> Self {
        key.to_hex()
    }
}

impl fmt::Debug for LinkKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LinkKey(…)")
    }
}

/// Why a session failed.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The stream broke.
    #[error("link to the agent broke during the greeting")]
    Io(#[from] io::Error),
    /// The two have different protocol versions.
    #[error(
        "host speaks agent protocol {host}, guest speaks {guest}: use the initramfs built with this daemon"
    )]
    Version {
        /// The daemon's [`PROTOCOL_VERSION`].
        host: u32,
        /// The agent's.
        guest: u32,
    },
    /// The agent refused, with its reason.
    #[error("agent refused the session: {0}")]
    Refused(String),
    /// The guest sent an invalid message.
    #[error("agent's welcome is malformed: {0}")]
    Malformed(&'static str),
}

/// Opens a session as the host. Waits for the guest: the caller sets the
/// deadline. `stream` then carries ttrpc.
pub async fn greet<S>(stream: &mut S, key: &LinkKey) -> Result<Ready, LinkError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let nonce: [u8; NONCE_LEN] = rand::random();
    let mark = [&key.0[..], &nonce].concat();
    let hello = [&mark[..], &PROTOCOL_VERSION.to_be_bytes()].concat();
    stream.write_all(&hello).await?;
    stream.flush().await?;

    let mut scanner = Scanner::new(&mark);
    let mut stale = 0;
    loop {
        stale += scanner.take_before().len();
        if scanner.found() {
            break;
        }
        if stale > MAX_STALE {
            return Err(LinkError::Malformed("no welcome within 64 MiB"));
        }
        scanner.fill(stream).await?;
    }
    let version = u32::from_be_bytes(scanner.read(stream).await?);
    let length = usize::from(u16::from_be_bytes(scanner.read(stream).await?));
    if length > MAX_READY {
        return Err(LinkError::Malformed("ready message is over 4096 bytes"));
    }
    while scanner.held.len() < length {
        scanner.fill(stream).await?;
    }
    if scanner.held.len() > length {
        return Err(LinkError::Malformed("bytes follow the welcome before anything was asked"));
    }
    let ready =
        Ready::parse_from_bytes(&scanner.held).map_err(|_| LinkError::Malformed("ready is no protobuf"))?;
    if version != PROTOCOL_VERSION {
        return Err(LinkError::Version { host: PROTOCOL_VERSION, guest: version });
    }
    if !ready.refusal.is_empty() {
        return Err(LinkError::Refused(ready.refusal));
    }
    Ok(ready)
}

/// Serves the guest's end of `port` until it fails: each greeting ends the session before it and
/// sends the next one to `sessions`. Calls `ready` for each. A key that changes during a
/// session is used from the next greeting on.
pub async fn serve<P>(
    port: P,
    key: watch::Receiver<LinkKey>,
    ready: impl Fn() -> Ready,
    sessions: mpsc::Sender<DuplexStream>,
) -> io::Result<()>
where
    P: AsyncRead + AsyncWrite,
{
    let (from_host, to_host) = tokio::io::split(port);
    let (welcomes, accepted) = mpsc::channel(1);
    tokio::try_join!(receive(from_host, key, ready, sessions, welcomes), send(to_host, accepted))?;
    Ok(())
}

/// A welcome to send, and the session that follows it (`None` if the host was refused).
type Welcome = (Vec<u8>, Option<ReadHalf<DuplexStream>>);

async fn receive<R: AsyncRead>(
    mut port: ReadHalf<R>,
    mut key: watch::Receiver<LinkKey>,
    ready: impl Fn() -> Ready,
    sessions: mpsc::Sender<DuplexStream>,
    welcomes: mpsc::Sender<Welcome>,
) -> io::Result<()> {
    let gone = || io::Error::other("agent no longer accepts sessions");
    let mut scanner = Scanner::new(&key.borrow_and_update().0);
    let mut session: Option<WriteHalf<DuplexStream>> = None;
    loop {
        // Before the bytes just read are scanned: a host greets with the new key once it is confirmed.
        if key.has_changed().unwrap_or(false) {
            scanner.look_for(&key.borrow_and_update().0);
        }
        let before = scanner.take_before();
        if let Some(open) = &mut session
            && open.write_all(&before).await.is_err()
        {
            // The service closed the session: its remaining bytes have no reader.
            session = None;
        }
        if !scanner.found() {
            scanner.fill(&mut port).await?;
            continue;
        }
        session = None;
        let nonce: [u8; NONCE_LEN] = scanner.read(&mut port).await?;
        let host_version = u32::from_be_bytes(scanner.read(&mut port).await?);
        let mut words = ready();
        let mut outgoing = None;
        if host_version == PROTOCOL_VERSION {
            let (ours, theirs) = tokio::io::duplex(CHUNK);
            let (read, write) = tokio::io::split(ours);
            sessions.send(theirs).await.map_err(|_| gone())?;
            (session, outgoing) = (Some(write), Some(read));
        } else {
            words.refusal = format!(
                "guest speaks agent protocol {PROTOCOL_VERSION}, host speaks {host_version}: \
                 use the initramfs built with this daemon"
            );
        }
        let welcome = [&key.borrow().0[..], &nonce, &encode_welcome(&words)?].concat();
        welcomes.send((welcome, outgoing)).await.map_err(|_| gone())?;
    }
}

fn encode_welcome(ready: &Ready) -> io::Result<Vec<u8>> {
    let payload = ready.write_to_bytes().map_err(io::Error::other)?;
    let length = u16::try_from(payload.len()).map_err(io::Error::other)?;
    Ok([&PROTOCOL_VERSION.to_be_bytes()[..], &length.to_be_bytes(), &payload].concat())
}

async fn send<W: AsyncWrite>(
    mut port: WriteHalf<W>,
    mut welcomes: mpsc::Receiver<Welcome>,
) -> io::Result<()> {
    let mut chunk = vec![0; CHUNK];
    let mut session: Option<ReadHalf<DuplexStream>> = None;
    loop {
        let outgoing = async {
            match &mut session {
                Some(open) => open.read(&mut chunk).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            // A greeting has precedence over the rest of the session before it.
            biased;
            next = welcomes.recv() => {
                let Some((welcome, next_session)) = next else { return Ok(()) };
                port.write_all(&welcome).await?;
                session = next_session;
            }
            read = outgoing => match read {
                Ok(count) if count > 0 => port.write_all(&chunk[..count]).await?,
                _ => session = None,
            },
        }
        port.flush().await?;
    }
}

/// Finds a mark in a stream of chunks.
struct Scanner {
    finder: Finder<'static>,
    held: Vec<u8>,
    /// Bytes at the beginning of what is held that were handed out already. 0 behind a mark.
    given: usize,
    found: bool,
}

impl Scanner {
    fn new(mark: &[u8]) -> Self {
        Self { finder: Finder::new(mark).into_owned(), held: Vec::new(), given: 0, found: false }
    }

    fn look_for(&mut self, mark: &[u8]) {
        self.finder = Finder::new(mark).into_owned();
    }

    /// Reads once into the buffer. The end of the stream is an error.
    async fn fill<R: AsyncRead + Unpin>(&mut self, from: &mut R) -> io::Result<()> {
        self.held.reserve(CHUNK);
        match from.read_buf(&mut self.held).await? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }

    /// Takes all bytes before a mark; afterwards [`Scanner::found`] tells whether a mark followed
    /// (it is consumed).
    ///
    /// It does not wait for more bytes: a possible beginning of a mark is returned, too, and
    /// remembered. If it was held back, a frame that happens to end with the mark's first byte would
    /// be incomplete, and no more comes until that frame is answered. Returned before a mark it does
    /// no harm, since the mark ends that session.
    fn take_before(&mut self) -> Vec<u8> {
        let mark = self.finder.needle();
        if let Some(at) = self.finder.find(&self.held) {
            let before = self.held[..at].get(self.given..).unwrap_or_default().to_vec();
            self.held.drain(..at + mark.len());
            (self.given, self.found) = (0, true);
            return before;
        }
        let before = self.held.split_off(self.given);
        self.held.extend_from_slice(&before);
        let longest = self.held.len().min(mark.len() - 1);
        let partial = (1..=longest).rev().find(|&n| self.held.ends_with(&mark[..n])).unwrap_or(0);
        self.held.drain(..self.held.len() - partial);
        (self.given, self.found) = (partial, false);
        before
    }

    fn found(&self) -> bool {
        self.found
    }

    /// Returns the next `N` bytes.
    async fn read<const N: usize>(&mut self, from: &mut (impl AsyncRead + Unpin)) -> io::Result<[u8; N]> {
        while self.held.len() < N {
            self.fill(from).await?;
        }
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.held[..N]);
        self.held.drain(..N);
        Ok(bytes)
    }
}

const _: () = assert!(VERSION_LEN == size_of::<u32>());

#[cfg(test)]
mod tests;
