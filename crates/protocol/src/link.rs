//! The byte stream between daemon and agent, and how its two ends find each other on it.
//!
//! A virtio-serial port is one endless stream: when the daemon dies and a new one connects, or when a guest is
//! restored, parts of old frames are still in both directions of the stream. So each session starts with a greeting
//! that both ends can find among other bytes:
//!
//! ```text
//! host → guest   hello     key[32] nonce[8] version:u32
//! guest → host   welcome   key[32] nonce[8] version:u32 length:u16 Ready[length]
//! after that     ttrpc frames, the guest being the server
//! ```
//!
//! Integers are big-endian. The key is random and per pod, so no payload contains it by accident; the nonce is random
//! and per session, so an old welcome is not mistaken for a new one. The guest searches for the key in all received
//! bytes, and starts a new session wherever it finds it; the host drops all bytes before its welcome. A vsock
//! connection does not need this, but uses the same handshake.
//!
//! The session has the version of the hello, if the guest speaks it. Otherwise the guest refuses, and its welcome has
//! its own version: the host greets it again with that version, if it speaks it. So either end may be one release older
//! than the other.

use std::{fmt, io, ops::RangeInclusive};

use memchr::memmem::Finder;
use protobuf::Message;
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf},
    sync::{mpsc, watch},
};

use crate::{SPOKEN, agent::Ready};

const NONCE_LEN: usize = 8;
const VERSION_LEN: usize = 4;
/// The maximum payload of a welcome, bytes, which limits what the host buffers for a guest.
const MAX_READY: usize = 4096;
/// The maximum of stale bytes that the host drops before it gives up on a guest, 64 MiB: sixteen times the largest
/// ttrpc message.
const MAX_STALE: usize = 64 << 20;
/// The number of bytes moved at once between port and session: as many as a virtio-serial port of Linux accepts in one
/// write.
const CHUNK: usize = 32 << 10;

/// The key that marks the greetings of one guest's link. It is random, per pod.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct LinkKey([u8; Self::LEN]);

impl LinkKey {
    /// The length of a key, bytes.
    pub const LEN: usize = 32;

    /// Returns the key with these bytes.
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

    /// Parses the result of [`LinkKey::to_hex`].
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
    /// Host and guest have no protocol version in common.
    #[error(
        "host speaks agent protocol {host}, guest speaks {guest}: use the initramfs built with this daemon"
    )]
    Version {
        /// The newest version of the daemon.
        host: u32,
        /// The version of the agent.
        guest: u32,
    },
    /// The agent refused the session, for this reason.
    #[error("agent refused the session: {0}")]
    Refused(String),
    /// The guest sent an invalid message.
    #[error("agent's welcome is malformed: {0}")]
    Malformed(&'static str),
}

/// Opens a session as the host; returns the agent's words and the session's version. Waits for the guest; the caller sets
/// the deadline. `stream` then carries ttrpc.
pub async fn greet<S>(stream: &mut S, key: &LinkKey) -> Result<(Ready, u32), LinkError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    greet_in(stream, key, SPOKEN).await
}

/// Same as [`greet`], for a host that speaks these versions.
async fn greet_in<S>(
    stream: &mut S,
    key: &LinkKey,
    spoken: RangeInclusive<u32>,
) -> Result<(Ready, u32), LinkError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let newest = *spoken.end();
    match greet_with(stream, key, newest).await {
        Err(LinkError::Version { guest, .. }) if guest != newest && spoken.contains(&guest) => {
            greet_with(stream, key, guest).await.map(|ready| (ready, guest))
        }
        answer => answer.map(|ready| (ready, newest)),
    }
}

/// Greets with one version, which the session then has.
async fn greet_with<S>(stream: &mut S, key: &LinkKey, version: u32) -> Result<Ready, LinkError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let nonce: [u8; NONCE_LEN] = rand::random();
    let mark = [&key.0[..], &nonce].concat();
    let hello = [&mark[..], &version.to_be_bytes()].concat();
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
    let guest = u32::from_be_bytes(scanner.read(stream).await?);
    let length = usize::from(u16::from_be_bytes(scanner.read(stream).await?));
    if length > MAX_READY {
        return Err(LinkError::Malformed("ready message is over 4096 bytes"));
    }
    while scanner.buffer.len() < length {
        scanner.fill(stream).await?;
    }
    if scanner.buffer.len() > length {
        return Err(LinkError::Malformed("bytes follow the welcome before anything was asked"));
    }
    let ready =
        Ready::parse_from_bytes(&scanner.buffer).map_err(|_| LinkError::Malformed("ready is no protobuf"))?;
    if guest != version {
        return Err(LinkError::Version { host: version, guest });
    }
    if !ready.refusal.is_empty() {
        return Err(LinkError::Refused(ready.refusal));
    }
    Ok(ready)
}

/// Serves the guest's end of `port` until it fails: each greeting ends the previous session and sends the next one to
/// `sessions`. Calls `ready` for each. A key that changes during a session is used from the next greeting on.
pub async fn serve<P>(
    port: P,
    key: watch::Receiver<LinkKey>,
    ready: impl Fn() -> Ready,
    sessions: mpsc::Sender<DuplexStream>,
) -> io::Result<()>
where
    P: AsyncRead + AsyncWrite,
{
    serve_in(port, key, ready, sessions, SPOKEN).await
}

/// Same as [`serve`], for a guest that speaks these versions, as one of another release does.
pub async fn serve_in<P>(
    port: P,
    key: watch::Receiver<LinkKey>,
    ready: impl Fn() -> Ready,
    sessions: mpsc::Sender<DuplexStream>,
    spoken: RangeInclusive<u32>,
) -> io::Result<()>
where
    P: AsyncRead + AsyncWrite,
{
    let (from_host, to_host) = tokio::io::split(port);
    let (welcomes, accepted) = mpsc::channel(1);
    tokio::try_join!(receive(from_host, key, ready, sessions, welcomes, spoken), send(to_host, accepted))?;
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
    spoken: RangeInclusive<u32>,
) -> io::Result<()> {
    let closed = || io::Error::other("agent no longer accepts sessions");
    let mut scanner = Scanner::new(&key.borrow_and_update().0);
    let mut session: Option<WriteHalf<DuplexStream>> = None;
    loop {
        // The key changes before the bytes just read are scanned: a host greets with the new key once it is confirmed.
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
        let mut version = host_version;
        if spoken.contains(&host_version) {
            let (ours, theirs) = tokio::io::duplex(CHUNK);
            let (read, write) = tokio::io::split(ours);
            sessions.send(theirs).await.map_err(|_| closed())?;
            (session, outgoing) = (Some(write), Some(read));
        } else {
            version = *spoken.end();
            words.refusal = format!(
                "guest speaks agent protocol {version}, host speaks {host_version}: \
                 use the initramfs built with this daemon"
            );
        }
        let welcome = [&key.borrow().0[..], &nonce, &encode_welcome(&words, version)?].concat();
        welcomes.send((welcome, outgoing)).await.map_err(|_| closed())?;
    }
}

fn encode_welcome(ready: &Ready, version: u32) -> io::Result<Vec<u8>> {
    let payload = ready.write_to_bytes().map_err(io::Error::other)?;
    let length = u16::try_from(payload.len()).map_err(io::Error::other)?;
    Ok([&version.to_be_bytes()[..], &length.to_be_bytes(), &payload].concat())
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

/// A search for a mark in a stream of chunks.
struct Scanner {
    finder: Finder<'static>,
    buffer: Vec<u8>,
    /// The number of bytes at the beginning of the buffer that were returned already; 0 behind a mark.
    given: usize,
    found: bool,
}

impl Scanner {
    fn new(mark: &[u8]) -> Self {
        Self { finder: Finder::new(mark).into_owned(), buffer: Vec::new(), given: 0, found: false }
    }

    fn look_for(&mut self, mark: &[u8]) {
        self.finder = Finder::new(mark).into_owned();
    }

    /// Reads once into the buffer. The end of the stream is an error.
    async fn fill<R: AsyncRead + Unpin>(&mut self, from: &mut R) -> io::Result<()> {
        self.buffer.reserve(CHUNK);
        match from.read_buf(&mut self.buffer).await? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }

    /// Removes all bytes before a mark; afterwards [`Scanner::found`] returns whether a mark followed (which is
    /// consumed).
    ///
    /// Does not wait for more bytes: a possible beginning of a mark is returned, too, and remembered. If it was held
    /// back, a frame that happens to end with the mark's first byte would be incomplete, and no more bytes come until
    /// that frame is answered. Returning it before a mark does no harm, since the mark ends that session.
    fn take_before(&mut self) -> Vec<u8> {
        let mark = self.finder.needle();
        if let Some(at) = self.finder.find(&self.buffer) {
            let before = self.buffer[..at].get(self.given..).unwrap_or_default().to_vec();
            self.buffer.drain(..at + mark.len());
            (self.given, self.found) = (0, true);
            return before;
        }
        let before = self.buffer.split_off(self.given);
        self.buffer.extend_from_slice(&before);
        let longest = self.buffer.len().min(mark.len() - 1);
        let partial = (1..=longest).rev().find(|&n| self.buffer.ends_with(&mark[..n])).unwrap_or(0);
        self.buffer.drain(..self.buffer.len() - partial);
        (self.given, self.found) = (partial, false);
        before
    }

    fn found(&self) -> bool {
        self.found
    }

    /// Returns the next `N` bytes.
    async fn read<const N: usize>(&mut self, from: &mut (impl AsyncRead + Unpin)) -> io::Result<[u8; N]> {
        while self.buffer.len() < N {
            self.fill(from).await?;
        }
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.buffer[..N]);
        self.buffer.drain(..N);
        Ok(bytes)
    }
}

const _: () = assert!(VERSION_LEN == size_of::<u32>());

#[cfg(test)]
mod tests;
