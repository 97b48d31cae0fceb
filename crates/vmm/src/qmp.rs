//! QEMU's control protocol (QMP), as far as it is used here: typed, bounded, timed.
//!
//! One task owns the socket. Commands carry an id and are answered in any order; a command whose
//! caller has given up is forgotten, its late answer dropped. QEMU runs beside a hostile guest, so
//! a line over [`MAX_LINE`] ends the connection.

use std::{
    collections::HashMap,
    io::{self, IoSlice},
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    time::Duration,
};

use futures::{SinkExt, StreamExt};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::{
    io::Interest,
    net::UnixStream,
    sync::{broadcast, mpsc, oneshot},
    time::timeout,
};
use tokio_util::codec::{Framed, LinesCodec, LinesCodecError};

use sandboxer_base::failpoint::pass;

/// Longest line accepted, bytes.
const MAX_LINE: usize = 256 << 10;
/// Room for what is read and written at first, bytes, of each VMM; the codec's own would be 8 KiB each.
const BUFFER: usize = 1 << 10;
/// Longest explanation kept of a refusal, characters.
const MAX_REASON: usize = 400;
/// Commands that may wait for the socket.
const QUEUE: usize = 16;

/// Why a command had no effect, or may have had none.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// No answer in time.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// QEMU declined.
    #[error("{reason}")]
    Refused {
        /// QEMU's error class, such as `GenericError` or `DeviceNotFound`.
        class: String,
        /// Its explanation, cut to a bearable length.
        reason: String,
    },
    /// Not QMP.
    #[error("{0}")]
    Malformed(String),
    /// The connection is gone.
    #[error("control socket was closed")]
    Closed,
}

/// A connection to one QEMU, past its greeting. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Qmp {
    requests: mpsc::Sender<Request>,
    events: broadcast::Sender<Event>,
}

/// An event, by name, with what it is about.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Event {
    /// Such as `DEVICE_DELETED`.
    #[serde(rename = "event")]
    pub name: String,
    /// What it says.
    #[serde(default)]
    pub data: EventData,
}

/// What is read of an event's data.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct EventData {
    /// Id of the device.
    pub device: Option<String>,
    /// How far a migration has come.
    pub status: Option<String>,
}

/// A command of QMP's `blockdev-add`: a raw image in a file or on a block device.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct BlockNode {
    /// Always "raw".
    pub driver: &'static str,
    /// Its name.
    pub node_name: String,
    /// Nobody writes through it.
    pub read_only: bool,
    /// "unmap" where freed blocks are given back to the host.
    pub discard: &'static str,
    /// Where the bytes are.
    pub file: BlockFile,
}

/// Where a [`BlockNode`]'s bytes are.
#[derive(Debug, Clone, Serialize)]
pub struct BlockFile {
    /// "file" or "host_device".
    pub driver: &'static str,
    /// Its path.
    pub filename: String,
    /// As in [`BlockNode`]: the host's file is opened this way.
    #[serde(rename = "read-only")]
    pub read_only: bool,
    /// As in [`BlockNode`].
    pub discard: &'static str,
}

/// A command of QMP's `blockdev-add`: a disk that is served by NBD.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct NbdNode {
    /// Always "nbd".
    pub driver: &'static str,
    /// Its name.
    pub node_name: String,
    /// Who serves it.
    pub server: UnixServer,
}

/// Who serves a disk by NBD.
#[derive(Debug, Clone, Serialize)]
pub struct UnixServer {
    /// Always "unix".
    pub r#type: &'static str,
    /// Path of its socket.
    pub path: String,
}

/// A file that was handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddedFd {
    /// Number of the set of descriptors in which it is, alone.
    pub set: u64,
    /// Number of QEMU's descriptor.
    pub number: u64,
}

#[derive(Debug)]
struct Request {
    command: Value,
    /// Handed over with the command.
    fd: Option<OwnedFd>,
    answer: oneshot::Sender<Result<Value, QmpError>>,
}

/// What QEMU sends.
#[derive(Deserialize)]
#[serde(untagged)]
enum Message {
    Answer {
        id: u64,
        r#return: Value,
    },
    Error {
        id: Option<u64>,
        error: ErrorBody,
    },
    Event(Event),
    Greeting {
        #[serde(rename = "QMP")]
        _greeting: Value,
    },
}

#[derive(Deserialize)]
struct ErrorBody {
    class: String,
    desc: String,
}

type Wire = Framed<UnixStream, LinesCodec>;

impl Qmp {
    /// Waits for QEMU's greeting and enters command mode, all within `limit`.
    pub async fn handshake(socket: UnixStream, limit: Duration) -> Result<Self, QmpError> {
        let mut wire = Framed::with_capacity(socket, LinesCodec::new_with_max_length(MAX_LINE), BUFFER);
        let greeting = async {
            match next(&mut wire).await? {
                Message::Greeting { .. } => Ok(()),
                _ => Err(QmpError::Malformed("a greeting was due".into())),
            }
        };
        timeout(limit, greeting).await.map_err(|_| QmpError::Timeout(limit))??;
        let (requests, queue) = mpsc::channel(QUEUE);
        let (events, _) = broadcast::channel(QUEUE);
        tokio::spawn(converse(wire, queue, events.clone()));
        let qmp = Self { requests, events };
        qmp.execute("qmp_capabilities", Value::Null, limit).await?;
        Ok(qmp)
    }

    /// Makes a disk image known under a name.
    pub async fn blockdev_add(&self, node: &impl Serialize, limit: Duration) -> Result<(), QmpError> {
        let arguments = serde_json::to_value(node).map_err(|error| QmpError::Malformed(error.to_string()))?;
        self.execute("blockdev-add", arguments, limit).await
    }

    /// Forgets a disk image. One that isn't known is fine.
    pub async fn blockdev_del(&self, node: &str, limit: Duration) -> Result<(), QmpError> {
        match self.execute("blockdev-del", json!({ "node-name": node }), limit).await {
            // QEMU has no class of its own for it.
            Err(QmpError::Refused { reason, .. }) if reason.starts_with("Failed to find node") => Ok(()),
            other => other,
        }
    }

    /// Stops the guest's processors.
    pub async fn stop(&self, limit: Duration) -> Result<(), QmpError> {
        self.execute("stop", Value::Null, limit).await
    }

    /// Lets them run again.
    pub async fn cont(&self, limit: Duration) -> Result<(), QmpError> {
        self.execute("cont", Value::Null, limit).await
    }

    /// Writes the state of a stopped VM to `into`, all but the memory that lies in a shared file.
    pub async fn save(&self, into: OwnedFd, limit: Duration) -> Result<(), QmpError> {
        const NAME: &str = "state";
        self.command("getfd", json!({ "fdname": NAME }), Some(into), limit).await?;
        self.migration("migrate", &format!("fd:{NAME}"), limit).await
    }

    /// Reads what [`Qmp::save`] wrote from a descriptor that QEMU inherited. The guest stays stopped.
    pub async fn load(&self, from: i32, limit: Duration) -> Result<(), QmpError> {
        self.migration("migrate-incoming", &format!("fd:{from}"), limit).await
    }

    async fn migration(&self, command: &str, uri: &str, limit: Duration) -> Result<(), QmpError> {
        let capabilities = ["x-ignore-shared", "events"]
            .map(|capability| json!({ "capability": capability, "state": true }));
        self.execute("migrate-set-capabilities", json!({ "capabilities": capabilities }), limit).await?;
        // No packets in the name of a network interface that is not the pod's yet.
        self.execute("migrate-set-parameters", json!({ "announce-rounds": 0 }), limit).await?;
        // Subscribed before asking, or the event could come too early.
        let events = self.events.subscribe();
        self.execute(command, json!({ "uri": uri }), limit).await?;
        let status =
            until(events, limit, |event| match (event.name.as_str(), event.data.status.as_deref()) {
                ("MIGRATION", Some(status @ ("completed" | "failed" | "cancelled"))) => {
                    Some(status.to_owned())
                }
                _ => None,
            });
        match status.await?.as_str() {
            "completed" => Ok(()),
            status => {
                Err(QmpError::Refused { class: "Migration".into(), reason: format!("{command} {status}") })
            }
        }
    }

    /// Plugs a device in. `arguments` hold its driver, id and properties.
    pub async fn device_add(&self, arguments: Value, limit: Duration) -> Result<(), QmpError> {
        self.execute("device_add", arguments, limit).await
    }

    /// Unplugs a device and waits until it is gone. One that isn't there is fine.
    pub async fn device_del(&self, id: &str, limit: Duration) -> Result<(), QmpError> {
        // Subscribed before asking, or the event could come too early.
        let events = self.events.subscribe();
        match self.execute("device_del", json!({ "id": id }), limit).await {
            Err(QmpError::Refused { class, .. }) if class == "DeviceNotFound" => return Ok(()),
            other => other?,
        }
        until(events, limit, |event| {
            (event.name == "DEVICE_DELETED" && event.data.device.as_deref() == Some(id)).then_some(())
        })
        .await
    }

    /// Hands an open file over.
    pub async fn add_fd(&self, file: OwnedFd, limit: Duration) -> Result<AddedFd, QmpError> {
        let answer = self.command("add-fd", Value::Null, Some(file), limit).await?;
        let number = |name: &str| {
            let number = answer.get(name).and_then(Value::as_u64);
            number.ok_or_else(|| QmpError::Malformed(format!("no {name} in the answer to add-fd")))
        };
        Ok(AddedFd { set: number("fdset-id")?, number: number("fd")? })
    }

    /// Takes a file handed over back; what QEMU has opened by it stays open.
    pub async fn remove_fd(&self, set: u64, limit: Duration) -> Result<(), QmpError> {
        self.execute("remove-fd", json!({ "fdset-id": set }), limit).await
    }

    async fn execute(&self, command: &str, arguments: Value, limit: Duration) -> Result<(), QmpError> {
        self.command(command, arguments, None, limit).await.map(drop)
    }

    async fn command(
        &self,
        command: &str,
        arguments: Value,
        fd: Option<OwnedFd>,
        limit: Duration,
    ) -> Result<Value, QmpError> {
        let (answer, answered) = oneshot::channel();
        pass(format_args!("before the VMM is asked to {command}"));
        let name = command;
        let command = match arguments {
            Value::Null => json!({ "execute": command }),
            arguments => json!({ "execute": command, "arguments": arguments }),
        };
        let exchange = async {
            self.requests.send(Request { command, fd, answer }).await.map_err(|_| QmpError::Closed)?;
            answered.await.map_err(|_| QmpError::Closed)?
        };
        let answered = timeout(limit, exchange).await.map_err(|_| QmpError::Timeout(limit));
        pass(format_args!("the VMM has answered {name}"));
        answered?
    }
}

/// Waits for the event that `wanted` makes something of.
async fn until<T>(
    mut events: broadcast::Receiver<Event>,
    limit: Duration,
    wanted: impl Fn(Event) -> Option<T>,
) -> Result<T, QmpError> {
    let found = async {
        loop {
            match events.recv().await {
                Ok(event) => {
                    if let Some(found) = wanted(event) {
                        return Ok(found);
                    }
                }
                Err(broadcast::error::RecvError::Lagged(_)) => {}
                Err(broadcast::error::RecvError::Closed) => return Err(QmpError::Closed),
            }
        }
    };
    timeout(limit, found).await.map_err(|_| QmpError::Timeout(limit))?
}

/// Carries commands and answers until either side is gone. What waits then sees [`QmpError::Closed`].
async fn converse(mut wire: Wire, mut queue: mpsc::Receiver<Request>, events: broadcast::Sender<Event>) {
    let mut waiting: HashMap<u64, oneshot::Sender<Result<Value, QmpError>>> = HashMap::new();
    for id in 0.. {
        let request = loop {
            tokio::select! {
                request = queue.recv() => break request,
                message = next(&mut wire) => match message {
                    Ok(message) => deliver(message, &mut waiting, &events),
                    Err(error) => {
                        tracing::debug!(%error, "QMP connection ended");
                        return;
                    }
                },
            }
        };
        let Some(Request { mut command, fd, answer }) = request else {
            return;
        };
        waiting.retain(|_, caller| !caller.is_closed());
        command["id"] = id.into();
        waiting.insert(id, answer);
        let sent = match fd {
            Some(fd) => send_with(wire.get_ref(), format!("{command}\n").as_bytes(), &fd).await,
            None => wire.send(command.to_string()).await.map_err(|error| match error {
                LinesCodecError::Io(error) => error,
                LinesCodecError::MaxLineLengthExceeded => io::ErrorKind::InvalidInput.into(),
            }),
        };
        if sent.is_err() {
            return;
        }
    }
}

/// Sends a line, and a descriptor with its first byte. Nothing else may wait to be sent.
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

fn deliver(
    message: Message,
    waiting: &mut HashMap<u64, oneshot::Sender<Result<Value, QmpError>>>,
    events: &broadcast::Sender<Event>,
) {
    // A caller or subscriber that has gone needs no answer.
    match message {
        Message::Answer { id, r#return } => {
            waiting.remove(&id).map(|caller| caller.send(Ok(r#return)));
        }
        Message::Error { id, error } => {
            let reason = error.desc.chars().take(MAX_REASON).collect();
            let refused = QmpError::Refused { class: error.class, reason };
            id.and_then(|id| waiting.remove(&id)).map(|caller| caller.send(Err(refused)));
        }
        Message::Event(event) => {
            let _ = events.send(event);
        }
        Message::Greeting { .. } => {}
    }
}

/// Returns the next message.
async fn next(wire: &mut Wire) -> Result<Message, QmpError> {
    match wire.next().await {
        Some(Ok(line)) => parse(&line),
        Some(Err(LinesCodecError::MaxLineLengthExceeded)) => {
            Err(QmpError::Malformed(format!("a line is over {MAX_LINE} bytes")))
        }
        Some(Err(LinesCodecError::Io(_))) | None => Err(QmpError::Closed),
    }
}

fn parse(line: &str) -> Result<Message, QmpError> {
    serde_json::from_str(line).map_err(|error| QmpError::Malformed(format!("not a QMP message: {error}")))
}

/// Returns whether a line is one that QEMU may send.
#[cfg(fuzzing)]
pub(crate) fn is_message(line: &str) -> bool {
    parse(line).is_ok()
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(5);

    /// Returns a QEMU that greets, accepts the first command and then sends `answers`, one per command;
    /// `ID` in them becomes the command's id.
    fn qemu(answers: Vec<String>) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        tokio::spawn(async move {
            let (read, mut write) = theirs.into_split();
            let mut commands = BufReader::new(read).lines();
            write.write_all(b"{\"QMP\": {\"version\": {}, \"capabilities\": []}}\r\n").await.unwrap();
            for answer in std::iter::once("{\"return\": {}, \"id\": ID}".to_owned()).chain(answers) {
                let Ok(Some(command)) = commands.next_line().await else {
                    return;
                };
                let id = serde_json::from_str::<Value>(&command).unwrap()["id"].to_string();
                write.write_all(answer.replace("ID", &id).as_bytes()).await.unwrap();
                write.write_all(b"\r\n").await.unwrap();
            }
            std::future::pending::<()>().await;
        });
        ours
    }

    async fn connected(answers: &[&str]) -> Qmp {
        let answers = answers.iter().map(|&answer| answer.to_owned()).collect();
        Qmp::handshake(qemu(answers), LIMIT).await.unwrap()
    }

    #[tokio::test]
    async fn a_refusal_carries_class_and_words_of_bounded_length() {
        let desc = "x".repeat(5000);
        let answer =
            format!("{{\"id\": ID, \"error\": {{\"class\": \"GenericError\", \"desc\": \"{desc}\"}}}}");
        let error = connected(&[&answer]).await.device_add(json!({}), LIMIT).await.unwrap_err();
        assert!(
            matches!(&error, QmpError::Refused { class, reason } if class == "GenericError" && reason.len() == MAX_REASON),
            "{error:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_late_answer_is_not_taken_for_the_next_one() {
        // The first command gets no answer; the second gets the first one's, then its own.
        let qmp = connected(&[
            "{\"event\": \"RTC_CHANGE\", \"data\": {\"offset\": 1}}",
            "{\"return\": {}, \"id\": 1}\r\n{\"id\": ID, \"error\": {\"class\": \"E\", \"desc\": \"no\"}}",
        ])
        .await;
        let error = qmp.blockdev_del("a", Duration::from_millis(50)).await.unwrap_err();
        assert!(matches!(error, QmpError::Timeout(_)), "{error:?}");
        let error = qmp.blockdev_del("b", LIMIT).await.unwrap_err();
        assert!(matches!(error, QmpError::Refused { .. }), "{error:?}");
    }

    #[tokio::test]
    async fn unplugging_waits_for_the_event_of_that_device() {
        let qmp = connected(&[
            "{\"return\": {}, \"id\": ID}\r\n\
             {\"event\": \"DEVICE_DELETED\", \"data\": {\"device\": \"other\", \"path\": \"/\"}}\r\n\
             {\"event\": \"DEVICE_DELETED\", \"data\": {\"device\": \"disk-a\", \"path\": \"/\"}}",
            "{\"id\": ID, \"error\": {\"class\": \"DeviceNotFound\", \"desc\": \"gone\"}}",
        ])
        .await;
        qmp.device_del("disk-a", LIMIT).await.unwrap();
        qmp.device_del("disk-a", LIMIT).await.unwrap();
    }

    #[tokio::test]
    async fn rubbish_ends_the_connection_for_everybody() {
        for rubbish in ["not json", "[1]", &"x".repeat(MAX_LINE + 1)] {
            let qmp = connected(&[rubbish]).await;
            let error = qmp.device_add(json!({}), LIMIT).await.unwrap_err();
            assert!(matches!(error, QmpError::Closed), "{error:?}");
            let error = qmp.device_add(json!({}), LIMIT).await.unwrap_err();
            assert!(matches!(error, QmpError::Closed), "{error:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_qemu_that_never_greets_is_given_up() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let error = Qmp::handshake(ours, LIMIT).await.unwrap_err();
        assert!(matches!(error, QmpError::Timeout(LIMIT)), "{error:?}");
    }
}
