//! Queues writes to a guest in memory, so that they never block.
//!
//! ttrpc cannot abort half a frame: when a call is dropped or times out while it is being written, the whole
//! session ends, and with it every other call. So a guest that is busy or paused for longer than one call's
//! timeout would lose its session. Here a write never waits: what the stream does not accept is queued in
//! memory. [`Room`] makes callers wait while the queue is long.
//!
//! ```text
//! call ─▶ Room ─▶ ttrpc's writer ─▶ Outbox ─▶ stream
//!                  ttrpc's reader ◀─────────── stream         also writes the queue
//! ```

use std::{
    collections::VecDeque,
    io,
    pin::Pin,
    task::{Context, Poll, Waker, ready},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::watch,
};

/// No call is started while so many bytes are queued. Concurrent calls may exceed it by their own size.
const MAX_WAITING: usize = 1 << 20;
/// Memory that an empty queue keeps, bytes.
const KEPT: usize = 64 << 10;

/// A stream with writes that never block.
#[derive(Debug)]
pub struct Outbox<S> {
    stream: S,
    waiting: VecDeque<u8>,
    length: watch::Sender<usize>,
    /// The reader's task, which also writes the queue.
    reader: Option<Waker>,
}

/// Whether a guest accepts calls.
#[derive(Debug, Clone)]
pub struct Room(watch::Receiver<usize>);

impl Room {
    /// Waits until the queue is short enough for another call; also returns at the end of the session.
    pub async fn wait(&self) {
        let _ = self.0.clone().wait_for(|&waiting| waiting < MAX_WAITING).await;
    }
}

impl<S> Outbox<S> {
    /// Creates an empty queue.
    pub fn new(stream: S) -> Self {
        Self { stream, waiting: VecDeque::new(), length: watch::Sender::new(0), reader: None }
    }

    /// Returns a handle to wait for space in the queue.
    pub fn room(&self) -> Room {
        Room(self.length.subscribe())
    }
}

impl<S: AsyncWrite + Unpin> Outbox<S> {
    fn move_on(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.waiting.is_empty() {
            let (first, _) = self.waiting.as_slices();
            let count = ready!(Pin::new(&mut self.stream).poll_write(cx, first))?;
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.waiting.drain(..count);
            self.length.send_replace(self.waiting.len());
        }
        self.waiting.shrink_to(KEPT);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Outbox<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.reader = Some(cx.waker().clone());
        if let Poll::Ready(Err(error)) = this.move_on(cx) {
            return Poll::Ready(Err(error));
        }
        Pin::new(&mut this.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Outbox<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.waiting.is_empty()
            && let Poll::Ready(written) = Pin::new(&mut this.stream).poll_write(cx, bytes)
        {
            return Poll::Ready(written);
        }
        this.waiting.extend(bytes);
        this.length.send_replace(this.waiting.len());
        // The stream wakes the last task that polled it for writing: that must be the reader, since no other
        // task writes now.
        if let Some(reader) = &this.reader {
            reader.wake_by_ref();
        }
        Poll::Ready(Ok(bytes.len()))
    }

    /// Returns at once: the queue is written in the background, and waiting for it here would block.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use protobuf::Message;
    use sandboxer_protocol::agent::{AgentClient, StatsRequest, WriteInputRequest};
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt, DuplexStream},
        time::timeout,
    };
    use ttrpc::{
        MessageHeader, Response,
        asynchronous::{Client, transport::Socket},
        context::{Context, with_duration},
        proto::{MESSAGE_HEADER_LENGTH, MESSAGE_TYPE_RESPONSE},
    };

    use super::*;

    fn client(room: usize) -> (AgentClient, Room, DuplexStream) {
        let (ours, theirs) = tokio::io::duplex(room);
        let outbox = Outbox::new(ours);
        let room = outbox.room();
        (AgentClient::new(Client::new(Socket::new(outbox))), room, theirs)
    }

    /// Reads calls, and responds to the last one.
    async fn answer_last(guest: &mut DuplexStream, calls: usize) {
        for call in 1..=calls {
            let mut head = [0; MESSAGE_HEADER_LENGTH];
            guest.read_exact(&mut head).await.unwrap();
            let head = MessageHeader::from(head);
            guest.read_exact(&mut vec![0; head.length as usize]).await.unwrap();
            if call == calls {
                let answer = Response::default().write_to_bytes().unwrap();
                let head = MessageHeader {
                    length: answer.len() as u32,
                    stream_id: head.stream_id,
                    type_: MESSAGE_TYPE_RESPONSE,
                    flags: 0,
                };
                guest.write_all(&[Vec::from(head), answer].concat()).await.unwrap();
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_is_given_up_half_written_does_not_end_the_session() {
        let (client, _room, mut guest) = client(64);
        let long = WriteInputRequest { data: vec![7; 5000], ..Default::default() };
        let late = client.write_input(with_duration(Duration::from_secs(1)), &long).await;
        assert!(late.is_err(), "nobody takes it");
        let dropped = timeout(Duration::from_secs(1), client.write_input(Context::default(), &long)).await;
        assert!(dropped.is_err(), "nobody takes it");

        let stats = StatsRequest::new();
        let asked = client.stats(with_duration(Duration::from_secs(60)), &stats);
        let (answered, ()) = tokio::join!(asked, answer_last(&mut guest, 3));
        answered.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_guest_that_takes_nothing_is_not_asked_without_end() {
        let (client, room, mut guest) = client(64);
        let long = WriteInputRequest { data: vec![7; 300 << 10], ..Default::default() };
        let mut calls = 0;
        while timeout(Duration::from_secs(1), room.wait()).await.is_ok() {
            client.write_input(with_duration(Duration::from_secs(1)), &long).await.unwrap_err();
            calls += 1;
        }
        assert_eq!(calls, 4, "1 MiB is reached with the fourth");
        let stats = StatsRequest::new();
        let asked = async {
            room.wait().await;
            client.stats(with_duration(Duration::from_secs(60)), &stats).await
        };
        let (answered, ()) = tokio::join!(asked, answer_last(&mut guest, calls + 1));
        answered.unwrap();
    }
}
