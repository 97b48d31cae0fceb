//! A queue of bytes to write.

use std::{
    collections::VecDeque,
    io::{self, Write},
};

/// A queue of bytes for one stream.
#[derive(Debug, Default)]
pub struct Outbox {
    waiting: VecDeque<Vec<u8>>,
    /// The number of bytes of the first element that are already written.
    written: usize,
    bytes: usize,
}

impl Outbox {
    /// Returns the number of queued bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds `bytes`.
    pub fn push(&mut self, bytes: Vec<u8>) {
        self.bytes += bytes.len();
        self.waiting.push_back(bytes);
    }

    /// Writes to `to`, which is non-blocking, as much as is possible now.
    pub fn flush(&mut self, mut to: impl Write) -> io::Result<()> {
        while let Some(first) = self.waiting.front() {
            match to.write(&first[self.written..]) {
                Ok(count) => {
                    self.bytes -= count;
                    self.written += count;
                    if self.written == first.len() {
                        self.waiting.pop_front();
                        self.written = 0;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
