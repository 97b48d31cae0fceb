//! What a VMM tells unasked: JSON objects, an empty line after each, on a pipe that it is given.
//!
//! The pipe has a name, so that the next daemon can read on. While nobody reads, the VMM drops what it
//! would have told.

use std::{collections::HashMap, fs::File, io, os::fd::OwnedFd, path::Path};

use futures::StreamExt;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde::Deserialize;
use tokio::net::unix::pipe;
use tokio_util::codec::{FramedRead, LinesCodec};

/// The pipe, in the VM's directory.
pub const FILE: &str = "events";
/// Longest line accepted, bytes.
const MAX_LINE: usize = 4 << 10;
/// Longest event accepted, bytes.
const MAX_EVENT: usize = 16 << 10;

/// Something happened.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Event {
    /// To whom: "vmm", "vm", "guest", "virtio-device".
    pub source: String,
    /// What: "booted", "rebooting", "device-removed".
    #[serde(rename = "event")]
    pub name: String,
    /// More of it.
    #[serde(default)]
    pub properties: Option<HashMap<String, String>>,
}

impl Event {
    /// Returns whether this is the event `name` of the VM.
    pub fn is(&self, name: &str) -> bool {
        self.source == "vm" && self.name == name
    }

    /// Returns the device it is about.
    pub fn device(&self) -> Option<&str> {
        self.properties.as_ref()?.get("id").map(String::as_str)
    }
}

/// Events as they come.
#[derive(Debug)]
pub struct Events(FramedRead<pipe::Receiver, LinesCodec>);

impl Events {
    /// Makes the pipe; the other end is for the VMM.
    pub fn create(run_dir: &Path) -> io::Result<(Self, OwnedFd)> {
        mknodat(CWD, run_dir.join(FILE), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
        let events = Self::open(run_dir)?;
        // Opened after the reader, or it would wait for one.
        let told = File::options().write(true).open(run_dir.join(FILE))?;
        Ok((events, told.into()))
    }

    /// Reads on where an earlier daemon left off.
    pub fn open(run_dir: &Path) -> io::Result<Self> {
        let pipe = pipe::OpenOptions::new().open_receiver(run_dir.join(FILE))?;
        Ok(Self(FramedRead::new(pipe, LinesCodec::new_with_max_length(MAX_LINE))))
    }

    /// Returns the next event; none when the VMM has ended, or tells what no VMM tells.
    pub async fn next(&mut self) -> Option<Event> {
        let mut text = String::new();
        loop {
            let line = match self.0.next().await? {
                Ok(line) => line,
                Err(error) => {
                    tracing::warn!(%error, "no longer reading a VMM's events");
                    return None;
                }
            };
            text.push_str(&line);
            if text.len() > MAX_EVENT {
                tracing::warn!("no longer reading a VMM's events: one is over {MAX_EVENT} bytes");
                return None;
            }
            if line.is_empty() && !text.is_empty() {
                match serde_json::from_str(&text) {
                    Ok(event) => return Some(event),
                    // Cut short, since nobody read for a while.
                    Err(error) => tracing::debug!(%error, "half an event of a VMM"),
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

    fn told(told: &[u8]) -> (tempfile::TempDir, Events) {
        let dir = tempfile::tempdir().unwrap();
        let (events, writer) = Events::create(dir.path()).unwrap();
        File::from(writer).write_all(told).unwrap();
        (dir, events)
    }

    #[tokio::test]
    async fn events_are_read_past_halves_to_the_end() {
        let (_dir, mut events) = told(
            b"{\n  \"timestamp\": {\n \"secs\": 0\n},\n \"source\": \"vm\",\n \"event\": \"booted\",\n \"properties\": null\n}\n\n\
              \"source\": \"vm\"\n}\n\n\
              {\"source\": \"vm\", \"event\": \"device-removed\", \"properties\": {\"id\": \"disk-a\"}}\n\n",
        );
        assert!(events.next().await.unwrap().is("booted"));
        let removed = events.next().await.unwrap();
        assert!(removed.is("device-removed") && removed.device() == Some("disk-a"), "{removed:?}");
        assert_eq!(events.next().await, None);
    }

    #[tokio::test]
    async fn events_without_end_are_given_up() {
        let (_dir, mut events) = told(&[b'x'; MAX_LINE + 2]);
        assert_eq!(events.next().await, None);
        let (_dir, mut events) = told("x\n".repeat(MAX_EVENT + 1).as_bytes());
        assert_eq!(events.next().await, None);
    }
}
