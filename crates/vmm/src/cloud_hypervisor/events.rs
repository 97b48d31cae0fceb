//! The events of a VMM: JSON objects on a pipe, each followed by an empty line.
//!
//! The pipe has a name, so that the next daemon can continue reading. While no process reads, the VMM drops its
//! events.

use std::{collections::HashMap, fs::File, io, os::fd::OwnedFd, path::Path};

use futures::StreamExt;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde::Deserialize;
use tokio::net::unix::pipe;
use tokio_util::codec::{FramedRead, LinesCodec};

/// The pipe, in the VM's directory.
pub const FILE: &str = "events";
/// Maximum length of a line, bytes.
const MAX_LINE: usize = 4 << 10;
/// Maximum size of an event, bytes.
const MAX_EVENT: usize = 16 << 10;

/// An event of a VMM.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Event {
    /// The event's origin, such as "vmm", "vm", "guest" or "virtio-device".
    pub source: String,
    /// The event's name, such as "booted", "rebooting" or "device-removed".
    #[serde(rename = "event")]
    pub name: String,
    /// Details of the event, by name.
    #[serde(default)]
    pub properties: Option<HashMap<String, String>>,
}

impl Event {
    /// Returns whether this is the event `name` of the VM.
    pub fn is_named(&self, name: &str) -> bool {
        self.source == "vm" && self.name == name
    }

    /// Returns the ID of the event's device.
    pub fn device(&self) -> Option<&str> {
        self.properties.as_ref()?.get("id").map(String::as_str)
    }
}

/// The stream of events.
#[derive(Debug)]
pub struct Events(FramedRead<pipe::Receiver, LinesCodec>);

impl Events {
    /// Creates the pipe. Returns the events and the write end for the VMM.
    pub fn create(run_dir: &Path) -> io::Result<(Self, OwnedFd)> {
        mknodat(CWD, run_dir.join(FILE), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
        let events = Self::open(run_dir)?;
        // Opened after the reader: it would block without one.
        let writer = File::options().write(true).open(run_dir.join(FILE))?;
        Ok((events, writer.into()))
    }

    /// Continues where an earlier daemon stopped reading.
    pub fn open(run_dir: &Path) -> io::Result<Self> {
        let pipe = pipe::OpenOptions::new().open_receiver(run_dir.join(FILE))?;
        Ok(Self(FramedRead::new(pipe, LinesCodec::new_with_max_length(MAX_LINE))))
    }

    /// Returns the next event, or `None` once the VMM has ended or has sent something malformed.
    pub async fn next(&mut self) -> Option<Event> {
        let mut text = String::new();
        loop {
            let line = match self.0.next().await? {
                Ok(line) => line,
                Err(error) => {
                    tracing::warn!(%error, "stopped reading a VMM's events");
                    return None;
                }
            };
            text.push_str(&line);
            if text.len() > MAX_EVENT {
                tracing::warn!("stopped reading a VMM's events: one is larger than {MAX_EVENT} bytes");
                return None;
            }
            if line.is_empty() && !text.is_empty() {
                match serde_json::from_str(&text) {
                    Ok(event) => return Some(event),
                    // The VMM truncates an event when no process reads.
                    Err(error) => tracing::debug!(%error, "skipped a truncated event of a VMM"),
                }
                text.clear();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn sent(bytes: &[u8]) -> (tempfile::TempDir, Events) {
        let dir = tempfile::tempdir().unwrap();
        let (events, writer) = Events::create(dir.path()).unwrap();
        File::from(writer).write_all(bytes).unwrap();
        (dir, events)
    }

    #[tokio::test]
    async fn events_are_read_past_halves_to_the_end() {
        let (_dir, mut events) = sent(
            b"{\n  \"timestamp\": {\n \"secs\": 0\n},\n \"source\": \"vm\",\n \"event\": \"booted\",\n \"properties\": null\n}\n\n\
              \"source\": \"vm\"\n}\n\n\
              {\"source\": \"vm\", \"event\": \"device-removed\", \"properties\": {\"id\": \"disk-a\"}}\n\n",
        );
        assert!(events.next().await.unwrap().is_named("booted"));
        let removed = events.next().await.unwrap();
        assert!(removed.is_named("device-removed") && removed.device() == Some("disk-a"), "{removed:?}");
        assert_eq!(events.next().await, None);
    }

    #[tokio::test]
    async fn events_without_end_are_given_up() {
        let (_dir, mut events) = sent(&[b'x'; MAX_LINE + 2]);
        assert_eq!(events.next().await, None);
        let (_dir, mut events) = sent("x\n".repeat(MAX_EVENT + 1).as_bytes());
        assert_eq!(events.next().await, None);
    }
}
