//! The parts of QEMU's control protocol (QMP) that are used here: typed, bounded, with time limits.
//!
//! One task owns the socket. QEMU responds to commands in their order; if a command's caller has given up, its late
//! response is dropped. QEMU runs a hostile guest, so a line longer than [`connection::MAX_LINE`] ends the connection.

mod block;
mod connection;

use std::{os::fd::OwnedFd, time::Duration};

use sandboxer_base::failpoint::pass;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::{
    net::UnixStream,
    sync::{mpsc, oneshot},
    time::timeout,
};

use crate::{DiskLimits, Rate};

pub use self::block::{BlockNode, NbdNode, TopNode, UnixServer};
#[cfg(fuzzing)]
pub(crate) use self::connection::is_message;
use self::connection::{Event, Message, QUEUE, Request, Waits, converse, next};

/// The reason why a command had no effect, or may have had none.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// No response arrived in time.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// QEMU refused the command.
    #[error("{reason}")]
    Refused {
        /// QEMU's error class, such as `GenericError` or `DeviceNotFound`.
        class: String,
        /// QEMU's explanation, bounded.
        reason: String,
    },
    /// QEMU's output is not QMP.
    #[error("{0}")]
    Malformed(String),
    /// The connection is gone.
    #[error("control socket was closed")]
    Closed,
}

/// Name under which QEMU has the file for the state of a VM.
const STATE: &str = "state";

/// A connection to one QEMU, after its greeting. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Qmp {
    // Boxed and counted, because both channels keep the space of their messages.
    requests: mpsc::Sender<Box<Request>>,
    waits: Waits,
}

/// A file that was passed to QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddedFd {
    /// Number of the descriptor set that holds only this file.
    pub set: u64,
    /// Number of the descriptor in QEMU.
    pub number: u64,
}

impl Qmp {
    /// Waits for QEMU's greeting and enters command mode, all within `limit`.
    pub async fn handshake(socket: UnixStream, limit: Duration) -> Result<Self, QmpError> {
        let mut wire = connection::open(socket);
        let greeting = async {
            match next(&mut wire).await? {
                Message::Greeting { .. } => Ok(()),
                _ => Err(QmpError::Malformed("expected a greeting".into())),
            }
        };
        timeout(limit, greeting).await.map_err(|_| QmpError::Timeout(limit))??;
        let (requests, queue) = mpsc::channel(QUEUE);
        let waits = Waits::default();
        tokio::spawn(converse(wire, queue, waits.clone()));
        let qmp = Self { requests, waits };
        qmp.execute("qmp_capabilities", Value::Null, limit).await?;
        Ok(qmp)
    }

    /// Adds a disk image under a name.
    pub async fn blockdev_add(&self, node: &impl Serialize, limit: Duration) -> Result<(), QmpError> {
        let arguments = serde_json::to_value(node).map_err(|error| QmpError::Malformed(error.to_string()))?;
        self.execute("blockdev-add", arguments, limit).await
    }

    /// Replaces the content of a disk.
    pub async fn blockdev_reopen(&self, node: &TopNode, limit: Duration) -> Result<(), QmpError> {
        self.execute("blockdev-reopen", json!({ "options": [node] }), limit).await
    }

    /// Removes a disk image. Removing an unknown image is no error.
    pub async fn blockdev_del(&self, node: &str, limit: Duration) -> Result<(), QmpError> {
        match self.execute("blockdev-del", json!({ "node-name": node }), limit).await {
            // QEMU has no error class for this.
            Err(QmpError::Refused { reason, .. }) if reason.starts_with("Failed to find node") => Ok(()),
            other => other,
        }
    }

    /// Stops the guest's CPUs.
    pub async fn stop(&self, limit: Duration) -> Result<(), QmpError> {
        self.execute("stop", Value::Null, limit).await
    }

    /// Lets the guest's CPUs run again.
    pub async fn cont(&self, limit: Duration) -> Result<(), QmpError> {
        self.execute("cont", Value::Null, limit).await
    }

    /// Writes the state of a stopped VM to `into`, except the memory in a shared file.
    pub async fn save(&self, into: OwnedFd, limit: Duration) -> Result<(), QmpError> {
        self.command("getfd", json!({ "fdname": STATE }), Some(into), limit).await?;
        self.migration("migrate", &format!("fd:{STATE}"), limit).await
    }

    /// Loads what [`Qmp::save`] wrote, from a descriptor that QEMU inherited. The guest stays stopped.
    pub async fn load(&self, from: i32, limit: Duration) -> Result<(), QmpError> {
        self.migration("migrate-incoming", &format!("fd:{from}"), limit).await
    }

    /// Writes the whole state of a stopped VM to `into`, with its memory, as fast as `into` takes it. The VM can be
    /// resumed afterwards.
    pub async fn save_all(&self, into: OwnedFd, limit: Duration) -> Result<(), QmpError> {
        // QEMU's own limit is 128 MiB/s.
        let fast = json!({ "max-bandwidth": 1_u64 << 40 });
        self.execute("migrate-set-parameters", fast, limit).await?;
        let saved = self.save(into, limit).await;
        if saved.is_err() {
            // Best effort: whoever reads `into` waits until QEMU has closed it.
            let _ = self.execute("migrate_cancel", Value::Null, limit).await;
            let _ = self.execute("closefd", json!({ "fdname": STATE }), limit).await;
        }
        saved
    }

    /// Returns the numbers of the descriptors in QEMU, by the sets in which they were passed.
    pub async fn passed_fds(&self, limit: Duration) -> Result<Vec<(u64, u64)>, QmpError> {
        let answer = self.command("query-fdsets", Value::Null, None, limit).await?;
        let sets = answer.as_array().map(Vec::as_slice).unwrap_or_default().iter();
        let number = |object: &Value, name: &str| object.get(name).and_then(Value::as_u64);
        let passed = sets.filter_map(|set| {
            let first = set.get("fds")?.as_array()?.first()?;
            Some((number(set, "fdset-id")?, number(first, "fd")?))
        });
        Ok(passed.collect())
    }

    /// Returns the number of a disk at its controller; `None`: it is at none.
    pub async fn scsi_id(&self, device: &str, limit: Duration) -> Result<Option<u64>, QmpError> {
        let property = json!({ "path": format!("/machine/peripheral/{device}"), "property": "scsi-id" });
        match self.command("qom-get", property, None, limit).await {
            Ok(number) => Ok(number.as_u64()),
            // QEMU has no error class for this.
            Err(QmpError::Refused { reason, .. }) if reason.contains("scsi-id' not found") => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Migrates the state of a VM. QEMU's command line sets what is common to all migrations of templates and their
    /// copies; other VMs have no events without a request.
    async fn migration(&self, command: &str, uri: &str, limit: Duration) -> Result<(), QmpError> {
        let wanted = ["x-ignore-shared", "events"].map(|name| json!({ "capability": name, "state": true }));
        self.execute("migrate-set-capabilities", json!({ "capabilities": wanted }), limit).await?;
        // Begun before the command, so that the event is not missed.
        let ended = self.waits.begin(|event| {
            event.name == "MIGRATION"
                && matches!(event.data.status.as_deref(), Some("completed" | "failed" | "cancelled"))
        });
        self.execute(command, json!({ "uri": uri }), limit).await?;
        match until(ended, limit).await?.data.status.as_deref() {
            Some("completed") => Ok(()),
            status => {
                let reason = format!("{command} {}", status.unwrap_or_default());
                Err(QmpError::Refused { class: "Migration".into(), reason })
            }
        }
    }

    /// Hotplugs a device. `arguments` holds its driver, ID and properties.
    pub async fn device_add(&self, arguments: Value, limit: Duration) -> Result<(), QmpError> {
        self.execute("device_add", arguments, limit).await
    }

    /// Unplugs a device and waits until it is gone. A missing device is no error.
    pub async fn device_del(&self, id: &str, limit: Duration) -> Result<(), QmpError> {
        let device = id.to_owned();
        // Begun before the command, so that the event is not missed.
        let deleted = self.waits.begin(move |event| {
            event.name == "DEVICE_DELETED" && event.data.device.as_ref() == Some(&device)
        });
        match self.execute("device_del", json!({ "id": id }), limit).await {
            Err(QmpError::Refused { class, .. }) if class == "DeviceNotFound" => return Ok(()),
            other => other?,
        }
        until(deleted, limit).await.map(drop)
    }

    /// Limits a disk that is plugged in. The burst has to be at least the tokens of one second, the minimum that QEMU
    /// accepts.
    pub async fn throttle(&self, id: &str, limits: DiskLimits, limit: Duration) -> Result<(), QmpError> {
        let [bytes, operations] = [limits.bytes, limits.operations].map(|rate| {
            // 0: no limit.
            rate.map_or((0, 0), |Rate { per_second, burst }| (per_second, burst))
        });
        let arguments = json!({
            "id": id,
            "bps": bytes.0, "bps_rd": 0, "bps_wr": 0, "bps_max": bytes.1,
            "iops": operations.0, "iops_rd": 0, "iops_wr": 0, "iops_max": operations.1,
        });
        self.execute("block_set_io_throttle", arguments, limit).await
    }

    /// Passes an open file to QEMU, in the descriptor set `set`, which holds no other file.
    pub async fn add_fd_to(&self, set: u64, file: OwnedFd, limit: Duration) -> Result<(), QmpError> {
        self.command("add-fd", json!({ "fdset-id": set }), Some(file), limit).await.map(drop)
    }

    /// Passes an open file to QEMU.
    pub async fn add_fd(&self, file: OwnedFd, limit: Duration) -> Result<AddedFd, QmpError> {
        let answer = self.command("add-fd", Value::Null, Some(file), limit).await?;
        let number = |name: &str| {
            let number = answer.get(name).and_then(Value::as_u64);
            number.ok_or_else(|| QmpError::Malformed(format!("no {name} in the answer to add-fd")))
        };
        Ok(AddedFd { set: number("fdset-id")?, number: number("fd")? })
    }

    /// Removes a passed file; QEMU's own descriptors of it stay open. A missing set is no error.
    pub async fn remove_fd(&self, set: u64, limit: Duration) -> Result<(), QmpError> {
        match self.execute("remove-fd", json!({ "fdset-id": set }), limit).await {
            // QEMU has no error class for this.
            Err(QmpError::Refused { reason, .. }) if reason.ends_with("not found") => Ok(()),
            other => other,
        }
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
            self.requests
                .send(Box::new(Request { command, fd, answer }))
                .await
                .map_err(|_| QmpError::Closed)?;
            answered.await.map_err(|_| QmpError::Closed)?
        };
        let answered = timeout(limit, exchange).await.map_err(|_| QmpError::Timeout(limit));
        pass(format_args!("the VMM has answered {name}"));
        answered?
    }
}

/// Waits for the event of a wait that was begun.
async fn until(event: oneshot::Receiver<Event>, limit: Duration) -> Result<Event, QmpError> {
    timeout(limit, event).await.map_err(|_| QmpError::Timeout(limit))?.map_err(|_| QmpError::Closed)
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};

    use super::{
        connection::{MAX_LINE, MAX_REASON},
        *,
    };

    const LIMIT: Duration = Duration::from_secs(5);

    /// Returns a socket to a QEMU that greets, accepts the first command and then sends `answers`, one per command.
    fn qemu(answers: Vec<String>) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        tokio::spawn(async move {
            let (read, mut write) = theirs.into_split();
            let mut commands = BufReader::new(read).lines();
            write.write_all(b"{\"QMP\": {\"version\": {}, \"capabilities\": []}}\r\n").await.unwrap();
            for answer in std::iter::once("{\"return\": {}}".to_owned()).chain(answers) {
                let Ok(Some(_command)) = commands.next_line().await else {
                    return;
                };
                write.write_all(answer.as_bytes()).await.unwrap();
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
        let answer = format!("{{\"error\": {{\"class\": \"GenericError\", \"desc\": \"{desc}\"}}}}");
        let error = connected(&[&answer]).await.device_add(json!({}), LIMIT).await.unwrap_err();
        assert!(
            matches!(&error, QmpError::Refused { class, reason } if class == "GenericError" && reason.len() == MAX_REASON),
            "{error:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_late_answer_is_not_taken_for_the_next_one() {
        // The first command gets no response in time; the second gets the first one's, then its own.
        let qmp = connected(&[
            "{\"event\": \"RTC_CHANGE\", \"data\": {\"offset\": 1}}",
            "{\"return\": {}}\r\n{\"error\": {\"class\": \"E\", \"desc\": \"no\"}}",
        ])
        .await;
        let error = qmp.blockdev_del("a", Duration::from_millis(50)).await.unwrap_err();
        assert!(matches!(error, QmpError::Timeout(_)), "{error:?}");
        let error = qmp.blockdev_del("b", LIMIT).await.unwrap_err();
        assert!(matches!(error, QmpError::Refused { .. }), "{error:?}");
    }

    #[tokio::test]
    async fn files_and_places_of_disks_are_found() {
        let sets = r#"{"return": [{"fdset-id": 9, "fds": [{"fd": 17, "opaque": "x"}]}, {"fdset-id": 8, "fds": []}]}"#;
        let none = r#"{"error": {"class": "GenericError", "desc": "Property 'virtio-blk-device.scsi-id' not found"}}"#;
        let no_device =
            r#"{"error": {"class": "DeviceNotFound", "desc": "Device '/machine/peripheral/c' not found"}}"#;
        let qmp = connected(&[sets, r#"{"return": 3}"#, none, no_device]).await;
        assert_eq!(qmp.passed_fds(LIMIT).await.unwrap(), [(9, 17)]);
        assert_eq!(qmp.scsi_id("disk-a", LIMIT).await.unwrap(), Some(3));
        assert_eq!(qmp.scsi_id("disk-b", LIMIT).await.unwrap(), None);
        assert!(qmp.scsi_id("disk-c", LIMIT).await.is_err());
    }

    #[tokio::test]
    async fn unplugging_waits_for_the_event_of_that_device() {
        let qmp = connected(&[
            "{\"return\": {}}\r\n\
             {\"event\": \"DEVICE_DELETED\", \"data\": {\"device\": \"other\", \"path\": \"/\"}}\r\n\
             {\"event\": \"DEVICE_DELETED\", \"data\": {\"device\": \"disk-a\", \"path\": \"/\"}}",
            "{\"error\": {\"class\": \"DeviceNotFound\", \"desc\": \"gone\"}}",
        ])
        .await;
        qmp.device_del("disk-a", LIMIT).await.unwrap();
        qmp.device_del("disk-a", LIMIT).await.unwrap();
    }

    /// More events than any queue of the connection has places for.
    const FLOOD: usize = 1000;

    #[tokio::test(start_paused = true)]
    async fn no_number_of_other_events_hides_the_one_that_is_waited_for() {
        let event = |name: &str, data: Value| format!("{}\r\n", json!({ "event": name, "data": data }));
        let others = event("RTC_CHANGE", json!({ "offset": 1 })).repeat(FLOOD);
        let deleted = event("DEVICE_DELETED", json!({ "device": "disk-a", "path": "/" }));
        let loaded = event("MIGRATION", json!({ "status": "completed" }));
        let answer = |events: &str| format!("{{\"return\": {{}}}}\r\n{events}{}", others.trim_end());
        let only_others = answer("");
        let qmp =
            connected(&[&answer(&deleted), "{\"return\": {}}", &answer(&loaded), &only_others, &only_others])
                .await;
        qmp.device_del("disk-a", LIMIT).await.unwrap();
        qmp.load(3, LIMIT).await.unwrap();
        for device in ["disk-b", "disk-c"] {
            let error = qmp.device_del(device, LIMIT).await.unwrap_err();
            assert!(matches!(error, QmpError::Timeout(_)), "{error:?}");
            assert_eq!(qmp.waits.pending(), 1, "a wait that was given up is kept for ever");
        }
    }

    #[tokio::test]
    async fn a_wait_ends_with_the_connection() {
        let qmp = connected(&["{\"return\": {}}\r\nrubbish"]).await;
        let error = qmp.device_del("disk-a", LIMIT).await.unwrap_err();
        assert!(matches!(error, QmpError::Closed), "{error:?}");
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
