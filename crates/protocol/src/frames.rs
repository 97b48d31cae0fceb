//! ttrpc's frames over a polled stream, for programs with many open streams: a stream that waits has no buffer.

use std::{
    collections::VecDeque,
    io, mem,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use ttrpc::{
    MessageHeader,
    proto::{MESSAGE_HEADER_LENGTH, MESSAGE_LENGTH_MAX},
};

/// The memory that an empty queue keeps, bytes.
const KEPT: usize = 256;

/// A reader of frames.
#[derive(Debug, Default)]
pub struct Incoming {
    head: [u8; MESSAGE_HEADER_LENGTH],
    body: Vec<u8>,
    /// The number of bytes read of the header and the body.
    read: usize,
}

impl Incoming {
    /// Waits for the next frame. `check` gets all bytes as they arrive, before space is allocated for the length in a
    /// header. The end of the stream is an error.
    pub fn poll(
        &mut self,
        cx: &mut Context<'_>,
        stream: &mut (impl AsyncRead + Unpin),
        mut check: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> Poll<io::Result<(MessageHeader, Vec<u8>)>> {
        loop {
            let in_head = self.read < MESSAGE_HEADER_LENGTH;
            let space = match in_head {
                true => &mut self.head[self.read..],
                false => &mut self.body[self.read - MESSAGE_HEADER_LENGTH..],
            };
            let mut space = ReadBuf::new(space);
            ready!(Pin::new(&mut *stream).poll_read(cx, &mut space))?;
            let count = space.filled().len();
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
            }
            check(space.filled())?;
            self.read += count;
            if self.read < MESSAGE_HEADER_LENGTH {
                continue;
            }
            let head = MessageHeader::from(&self.head[..]);
            let length = head.length as usize;
            if in_head {
                if length > MESSAGE_LENGTH_MAX {
                    return Poll::Ready(Err(io::Error::other(too_long(length))));
                }
                self.body = vec![0; length];
            }
            if self.read == MESSAGE_HEADER_LENGTH + length {
                self.read = 0;
                return Poll::Ready(Ok((head, mem::take(&mut self.body))));
            }
        }
    }
}

/// Returns the error text for a message of this length.
pub fn too_long(length: usize) -> String {
    format!("message length {length} exceed maximum message size of {MESSAGE_LENGTH_MAX}")
}

/// Bytes that the stream has not accepted yet.
#[derive(Debug, Default)]
pub struct Outgoing(VecDeque<u8>);

impl Outgoing {
    /// Adds bytes to the queue.
    pub fn push(&mut self, bytes: &[u8]) {
        self.0.extend(bytes);
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Writes as much as the stream accepts. The task is woken when it accepts more.
    pub fn write(&mut self, cx: &mut Context<'_>, stream: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
        while !self.0.is_empty() {
            match Pin::new(&mut *stream).poll_write(cx, self.0.as_slices().0) {
                Poll::Ready(Ok(0)) => return Err(io::ErrorKind::WriteZero.into()),
                Poll::Ready(Ok(count)) => drop(self.0.drain(..count)),
                Poll::Ready(Err(error)) => return Err(error),
                Poll::Pending => return Ok(()),
            }
        }
        self.0.shrink_to(KEPT);
        Ok(())
    }
}
