//! The connection to QEMU, which carries commands one way and responses and events the other.

use std::{
    collections::VecDeque,
    fmt,
    io::{self, IoSlice},
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex, PoisonError},
};

use futures::{SinkExt, StreamExt};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde::Deserialize;
use serde_json::Value;
use tokio::{
    io::Interest,
    net::UnixStream,
    sync::{mpsc, oneshot},
};
use tokio_util::codec::{Framed, LinesCodec, LinesCodecError};

use super::QmpError;

/// Maximum length of a line, bytes.
pub(super) const MAX_LINE: usize = 256 << 10;
/// Initial size of the read and write buffers of each VMM, bytes; the codec's default is 8 KiB each.
const BUFFER: usize = 256;
/// Maximum number of characters kept of a refusal.
pub(super) const MAX_REASON: usize = 400;
/// Maximum number of commands that wait for the socket.
pub(super) const QUEUE: usize = 16;
/// Maximum number of commands that wait for a response, including those whose callers have given up. A QEMU that owes
/// more has stopped responding.
const OWED: usize = 256;

/// An event of QEMU.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Event {
    /// Name of the event, such as `DEVICE_DELETED`.
    #[serde(rename = "event")]
    pub name: String,
    /// Data of the event.
    #[serde(default)]
    pub data: EventData,
}

/// The parts of an event's data that are used.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct EventData {
    /// ID of the device.
    pub device: Option<String>,
    /// Progress of a migration.
    pub status: Option<String>,
}

/// The calls that wait for an event. Clones share them.
///
/// Whoever reads the connection hands each event to those who wait for it, and keeps none: a guest can make QEMU send
/// any number of events, so a queue of them would lose the awaited one.
#[derive(Clone)]
pub(super) struct Waits(Arc<Mutex<Option<Vec<Wait>>>>);

/// One call that waits.
struct Wait {
    wanted: Box<dyn Fn(&Event) -> bool + Send>,
    found: oneshot::Sender<Event>,
}

impl Default for Waits {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Some(Vec::new()))))
    }
}

impl fmt::Debug for Waits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Waits")
    }
}

impl Waits {
    /// Begins to wait for the next event for which `wanted` is true. The receiver is told that there will be none when
    /// the connection has ended.
    pub(super) fn begin(&self, wanted: impl Fn(&Event) -> bool + Send + 'static) -> oneshot::Receiver<Event> {
        let (found, event) = oneshot::channel();
        if let Some(waits) = self.0.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            waits.retain(|wait| !wait.found.is_closed());
            waits.push(Wait { wanted: Box::new(wanted), found });
        }
        event
    }

    /// Hands an event to all that wait for it.
    fn tell(&self, event: &Event) {
        let mut waits = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(waits) = waits.as_mut() else { return };
        for wait in waits.extract_if(.., |wait| (wait.wanted)(event)) {
            // The caller may be gone.
            let _ = wait.found.send(event.clone());
        }
    }

    /// Ends all waits, also those that are begun later.
    fn end(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// Returns the number of waits that are kept.
    #[cfg(test)]
    pub(super) fn pending(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().flatten().count()
    }
}

/// A command, and the destination of its response.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) command: Value,
    /// Descriptor that is passed with the command.
    pub(super) fd: Option<OwnedFd>,
    pub(super) answer: oneshot::Sender<Result<Value, QmpError>>,
}

/// A line from QEMU.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum Message {
    Answer {
        r#return: Value,
    },
    Error {
        error: ErrorBody,
    },
    Event(Event),
    Greeting {
        #[serde(rename = "QMP")]
        _greeting: Value,
    },
}

#[derive(Deserialize)]
pub(super) struct ErrorBody {
    class: String,
    desc: String,
}

/// The socket, line by line.
pub(super) type Wire = Framed<UnixStream, LinesCodec>;

/// Returns `socket`, line by line.
pub(super) fn open(socket: UnixStream) -> Wire {
    Framed::with_capacity(socket, LinesCodec::new_with_max_length(MAX_LINE), BUFFER)
}

type Answer = oneshot::Sender<Result<Value, QmpError>>;

/// Carries commands and responses until either side is gone. Pending commands then get [`QmpError::Closed`].
///
/// Commands have no IDs: QEMU takes a turn of its main loop for each byte, about 17 µs on KVM, and responds in order.
pub(super) async fn converse(mut wire: Wire, queue: mpsc::Receiver<Box<Request>>, waits: Waits) {
    carry(&mut wire, queue, &waits).await;
    waits.end();
}

async fn carry(wire: &mut Wire, mut queue: mpsc::Receiver<Box<Request>>, waits: &Waits) {
    let mut waiting: VecDeque<Answer> = VecDeque::new();
    while waiting.len() < OWED {
        let request = loop {
            tokio::select! {
                request = queue.recv() => break request,
                message = next(wire) => match message {
                    Ok(message) => deliver(message, &mut waiting, waits),
                    Err(error) => {
                        tracing::debug!(%error, "QMP connection ended");
                        return;
                    }
                },
            }
        };
        let Some(Request { command, fd, answer }) = request.map(|request| *request) else {
            return;
        };
        waiting.push_back(answer);
        // Boxed: mostly nothing is sent.
        if Box::pin(send(wire, &command, fd)).await.is_err() {
            return;
        }
    }
    tracing::warn!(commands = OWED, "QEMU does not answer its control socket: the connection is closed");
}

async fn send(wire: &mut Wire, command: &Value, fd: Option<OwnedFd>) -> io::Result<()> {
    match fd {
        Some(fd) => send_with(wire.get_ref(), format!("{command}\n").as_bytes(), &fd).await,
        None => wire.send(command.to_string()).await.map_err(|error| match error {
            LinesCodecError::Io(error) => error,
            LinesCodecError::MaxLineLengthExceeded => io::ErrorKind::InvalidInput.into(),
        }),
    }
}

/// Sends a line, with a descriptor beside its first byte. No other line may be waiting to be sent.
async fn send_with(socket: &UnixStream, line: &[u8], fd: &OwnedFd) -> io::Result<()> {
    let fds = [fd.as_fd()];
    let mut sent = 0;
    while sent < line.len() {
        sent += socket
            .async_io(Interest::WRITABLE, || {
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut ancillary = SendAncillaryBuffer::new(&mut space);
                if sent == 0 {
                    ancillary.push(SendAncillaryMessage::ScmRights(&fds));
                }
                Ok(sendmsg(socket, &[IoSlice::new(&line[sent..])], &mut ancillary, SendFlags::NOSIGNAL)?)
            })
            .await?;
    }
    Ok(())
}

fn deliver(message: Message, waiting: &mut VecDeque<Answer>, waits: &Waits) {
    let answer = match message {
        Message::Answer { r#return } => Ok(r#return),
        Message::Error { error } => {
            let reason = error.desc.chars().take(MAX_REASON).collect();
            Err(QmpError::Refused { class: error.class, reason })
        }
        Message::Event(event) => {
            waits.tell(&event);
            return;
        }
        Message::Greeting { .. } => return,
    };
    // The caller may be gone.
    waiting.pop_front().map(|caller| caller.send(answer));
}

/// Reads the next message.
pub(super) async fn next(wire: &mut Wire) -> Result<Message, QmpError> {
    match wire.next().await {
        Some(Ok(line)) => parse(&line),
        Some(Err(LinesCodecError::MaxLineLengthExceeded)) => {
            Err(QmpError::Malformed(format!("a line is longer than {MAX_LINE} bytes")))
        }
        Some(Err(LinesCodecError::Io(_))) | None => Err(QmpError::Closed),
    }
}

fn parse(line: &str) -> Result<Message, QmpError> {
    serde_json::from_str(line).map_err(|error| QmpError::Malformed(format!("not a QMP message: {error}")))
}

/// Returns whether `line` is a message that QEMU may send.
#[cfg(fuzzing)]
pub(crate) fn is_message(line: &str) -> bool {
    parse(line).is_ok()
}
