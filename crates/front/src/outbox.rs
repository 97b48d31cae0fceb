//! Bytes that a peer has not taken yet.

use std::{
    collections::VecDeque,
    io::{self, Write},
};

/// What waits to be written to one stream, in order.
#[derive(Debug, Default)]
pub struct Outbox {
    waiting: VecDeque<Vec<u8>>,
    /// How much of the first is written.
    written: usize,
    bytes: usize,
}

impl Outbox {
    /// Bytes that wait.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds `bytes`.
    pub fn push(&mut self, bytes: Vec<u8>) {
        self.bytes += bytes.len();
        self.waiting.push_back(bytes);
    }

    /// Writes as much as `to`, which doesn't block, takes now.
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
