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
/// Bytes moved at once between port and session.
const CHUNK: usize = 16 << 10;

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
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn ready() -> Ready {
        Ready { agent_version: "test".into(), ..Ready::default() }
    }

    /// Returns a guest whose service answers each session's bytes with the same bytes.
    fn echoing_guest(key: &LinkKey) -> DuplexStream {
        let (host, port) = tokio::io::duplex(1 << 20);
        let (sessions, mut accepted) = mpsc::channel(1);
        let key = watch::Sender::new(key.clone()).subscribe();
        tokio::spawn(async move { serve(port, key, ready, sessions).await });
        tokio::spawn(async move {
            while let Some(session) = accepted.recv().await {
                tokio::spawn(async move {
                    let (mut read, mut write) = tokio::io::split(session);
                    tokio::io::copy(&mut read, &mut write).await
                });
            }
        });
        host
    }

    async fn echo(host: &mut DuplexStream, words: &[u8]) {
        host.write_all(words).await.unwrap();
        let mut heard = vec![0; words.len()];
        host.read_exact(&mut heard).await.unwrap();
        assert_eq!(heard, words);
    }

    #[tokio::test]
    async fn a_session_carries_bytes_both_ways() {
        let key = LinkKey::random();
        let mut host = echoing_guest(&key);
        assert_eq!(greet(&mut host, &key).await.unwrap().agent_version, "test");
        echo(&mut host, b"hello").await;
    }

    #[tokio::test]
    async fn a_frame_that_ends_like_a_greeting_begins_is_delivered_at_once() {
        let key = LinkKey::random();
        let mut host = echoing_guest(&key);
        greet(&mut host, &key).await.unwrap();
        for length in 1..LinkKey::LEN {
            let frame = [b"frame", &key.0[..length]].concat();
            let echoed = tokio::time::timeout(Duration::from_secs(20), echo(&mut host, &frame));
            echoed.await.unwrap_or_else(|_| panic!("{length} bytes of the key are held back"));
        }
    }

    #[tokio::test]
    async fn a_new_session_starts_after_half_a_frame_and_unread_answers() {
        let key = LinkKey::random();
        let mut host = echoing_guest(&key);
        greet(&mut host, &key).await.unwrap();
        // Answers to these lie unread in the stream when the next daemon comes; the last bytes look
        // like the beginning of a greeting.
        host.write_all(&vec![7; 300_000]).await.unwrap();
        host.write_all(&key.0[..20]).await.unwrap();
        for _ in 0..3 {
            greet(&mut host, &key).await.unwrap();
            echo(&mut host, b"clean again").await;
        }
    }

    #[tokio::test]
    async fn a_key_that_changes_ends_no_session_and_counts_for_the_next() {
        let (old, new) = (LinkKey::random(), LinkKey::random());
        let (mut host, port) = tokio::io::duplex(1 << 20);
        let (sessions, mut accepted) = mpsc::channel(1);
        let keys = watch::Sender::new(old.clone());
        let guest_key = keys.subscribe();
        tokio::spawn(async move { serve(port, guest_key, ready, sessions).await });
        greet(&mut host, &old).await.unwrap();
        let mut session = accepted.recv().await.unwrap();

        keys.send_replace(new.clone());
        // By the old key, nobody is greeted any more: to the session that is open it is a payload.
        host.write_all(&old.0).await.unwrap();
        let mut payload = [0; LinkKey::LEN];
        session.read_exact(&mut payload).await.unwrap();
        assert_eq!(payload, old.0);
        greet(&mut host, &new).await.unwrap();
        accepted.recv().await.unwrap();
    }

    #[tokio::test]
    async fn another_version_is_refused_by_both_with_both_numbers() {
        let key = LinkKey::random();
        let (mut host, port) = tokio::io::duplex(4096);
        let (sessions, mut accepted) = mpsc::channel(1);
        let guest_key = watch::Sender::new(key.clone()).subscribe();
        let guest = tokio::spawn(async move { serve(port, guest_key, ready, sessions).await });
        let hello = [&key.0[..], &[1; NONCE_LEN], &99_u32.to_be_bytes()].concat();
        host.write_all(&hello).await.unwrap();
        let mut mark = [0; LinkKey::LEN + NONCE_LEN + VERSION_LEN];
        host.read_exact(&mut mark).await.unwrap();
        let length = usize::from(host.read_u16().await.unwrap());
        let mut payload = vec![0; length];
        host.read_exact(&mut payload).await.unwrap();
        let refusal = Ready::parse_from_bytes(&payload).unwrap().refusal;
        assert!(
            refusal.contains(&format!("protocol {PROTOCOL_VERSION},")) && refusal.contains("speaks 99"),
            "{refusal}"
        );
        assert!(accepted.try_recv().is_err(), "a refused host got a session");
        guest.abort();

        let (mut host, mut port) = tokio::io::duplex(4096);
        let newer = tokio::spawn(async move {
            let mut hello = [0; LinkKey::LEN + NONCE_LEN + VERSION_LEN];
            port.read_exact(&mut hello).await.unwrap();
            hello[LinkKey::LEN + NONCE_LEN..].copy_from_slice(&77_u32.to_be_bytes());
            port.write_all(&hello).await.unwrap();
            port.write_all(&0_u16.to_be_bytes()).await.unwrap();
            port
        });
        let error = greet(&mut host, &key).await.unwrap_err();
        assert!(matches!(error, LinkError::Version { host: PROTOCOL_VERSION, guest: 77 }), "{error}");
        drop(newer);
    }

    #[tokio::test]
    async fn a_welcome_that_announces_too_much_is_refused_unread() {
        let key = LinkKey::random();
        let (mut host, mut port) = tokio::io::duplex(4096);
        tokio::spawn(async move {
            let mut hello = [0; LinkKey::LEN + NONCE_LEN + VERSION_LEN];
            port.read_exact(&mut hello).await.unwrap();
            port.write_all(&hello).await.unwrap();
            port.write_all(&u16::MAX.to_be_bytes()).await.unwrap();
            std::future::pending::<()>().await
        });
        assert!(matches!(greet(&mut host, &key).await, Err(LinkError::Malformed(_))));
    }

    proptest! {
        #[test]
        fn a_mark_is_found_however_the_stream_is_cut(
            before in proptest::collection::vec(0_u8..4, 0..200),
            after in proptest::collection::vec(any::<u8>(), 0..50),
            cuts in proptest::collection::vec(1_usize..20, 1..60),
        ) {
            // A mark that repeats itself, so that partial matches overlap.
            let mark = [0, 1, 0, 1, 0, 2];
            prop_assume!(Finder::new(&mark).find(&before).is_none());
            let joined = [&before[..], &mark].concat();
            prop_assume!(Finder::new(&mark).find(&joined) == Some(before.len()));
            let stream = [&before[..], &mark, &after].concat();
            let mut scanner = Scanner::new(&mark);
            let (mut seen, mut rest, mut cuts) = (Vec::new(), &stream[..], cuts.into_iter().cycle());
            while !scanner.found() {
                let (piece, later) = rest.split_at(cuts.next().unwrap().min(rest.len()));
                prop_assert!(!piece.is_empty(), "the mark was missed");
                scanner.held.extend_from_slice(piece);
                rest = later;
                seen.extend(scanner.take_before());
                let read = stream.len() - rest.len();
                prop_assert!(scanner.found() || seen == stream[..read], "bytes wait for more to come");
            }
            // Behind what came before the mark there may be a beginning of it, never all.
            let beginning = seen.strip_prefix(&before[..]);
            prop_assert!(beginning.is_some_and(|part| part.len() < mark.len() && mark.starts_with(part)));
            prop_assert_eq!([&scanner.held[..], rest].concat(), after);
        }
    }
}
