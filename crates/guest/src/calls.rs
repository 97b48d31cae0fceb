//! The calls of one session: one task writes them to the agent's stream, and reads the responses.
//!
//! ttrpc's own client keeps space for 32 messages for each session, and for 32 more for each call that waits. A pod
//! with a container has three calls that wait for as long as it lives, which took 16 KiB of its 97 KiB in the daemon.
//! Here a session has one queue of bytes, and a call has space for its own response.
//!
//! A write never waits: bytes that the stream does not accept stay in the queue. So a guest that is busy or paused does
//! not stop a call halfway, which would end the session, and with it every other call. [`Calls::wait_for_capacity`]
//! makes callers wait while the queue is long.
//!
//! ```text
//! call ─▶ wait ─▶ queue ─▶ task ─▶ stream
//! call ◀────── response ◀─ task ◀─ stream      both directions are checked by [`Follow`]
//! ```

use std::{
    collections::HashMap,
    future::poll_fn,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use protobuf::Message;
use sandboxer_base::failpoint;
use sandboxer_protocol::{
    agent::Caller,
    frames::{Incoming, Outgoing, too_long},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::{Notify, oneshot},
    task::AbortHandle,
    time::timeout,
};
use ttrpc::{Code, Error, MessageHeader, Request, Response, Result, proto::MESSAGE_LENGTH_MAX};

use crate::{
    bounds::{Follow, Violation},
    error::TIME_IS_OVER,
};

/// The number of queued bytes from which no call is started. Concurrent calls may exceed it by their own size.
const MAX_WAITING: usize = 1 << 20;

/// The number of streams of a session: a caller's are odd.
const STREAMS: u32 = 1 << 31;

/// The calls of one session. Cheap to clone; the session ends with the last clone.
#[derive(Clone)]
pub struct Calls(Arc<Owner>);

struct Owner {
    shared: Arc<Shared>,
    task: AbortHandle,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The state shared by callers and the task.
#[derive(Default)]
struct Shared {
    // The plain lock is never held across an await.
    session: Mutex<Session>,
    /// Notified when the queue becomes shorter, or the session ends.
    changed: Notify,
}

#[derive(Default)]
struct Session {
    follow: Follow,
    queue: Outgoing,
    /// The number of earlier streams, modulo their number.
    streams: u32,
    /// The callers that wait for a response, by stream.
    waiting: HashMap<u32, oneshot::Sender<Result<Vec<u8>>>>,
    task: Option<Waker>,
    /// The reason why the session has ended.
    end: Option<Error>,
}

impl Session {
    /// Returns the stream of the next call. A session may make more calls than there are streams, while some of its
    /// first calls still wait: their streams are skipped. [`Follow`] limits their number.
    fn next_stream(&mut self) -> u32 {
        loop {
            let stream = self.streams.wrapping_mul(2) | 1;
            self.streams = self.streams.wrapping_add(1) % failpoint::streams(STREAMS);
            if !self.waiting.contains_key(&stream) {
                return stream;
            }
        }
    }
}

impl Calls {
    /// Starts a session over `stream`, after the greeting.
    pub fn over(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> Self {
        let shared = Arc::<Shared>::default();
        let task = tokio::spawn(serve(stream, shared.clone())).abort_handle();
        Self(Arc::new(Owner { shared, task }))
    }

    /// Waits until the queue is short enough for another call; also returns at the end of the session.
    pub async fn wait_for_capacity(&self) {
        self.wait_until(|session| session.queue.len() < MAX_WAITING).await;
    }

    /// Returns whether [`Self::wait_for_capacity`] would return at once.
    pub fn has_capacity(&self) -> bool {
        self.0.shared.lock().queue.len() < MAX_WAITING
    }

    /// Waits for the session's end. Returns the guest's violation if that was the cause.
    pub async fn end(&self) -> Option<Violation> {
        self.wait_until(|session| session.end.is_some()).await;
        self.violation()
    }

    /// Returns the violation if the guest has committed one.
    pub fn violation(&self) -> Option<Violation> {
        self.0.shared.lock().follow.violation().cloned()
    }

    async fn wait_until(&self, done: impl Fn(&Session) -> bool) {
        loop {
            let changed = self.0.shared.changed.notified();
            {
                let session = self.0.shared.lock();
                if session.end.is_some() || done(&session) {
                    return;
                }
            }
            changed.await;
        }
    }
}

impl Caller for Calls {
    fn request(&self, request: Request) -> impl Future<Output = Result<Response>> + Send {
        let limit = u64::try_from(request.timeout_nano).ok().filter(|&nanos| nanos > 0);
        let sent = self.0.shared.send(&request);
        async move {
            let response = sent?;
            let response = match limit.map(Duration::from_nanos) {
                None => response.await,
                Some(limit) => {
                    let late = |_| Error::Others(TIME_IS_OVER.to_owned());
                    // The timer is boxed: a call without a limit waits for long, and needs none.
                    Box::pin(timeout(limit, response)).await.map_err(late)?
                }
            };
            read(&response.map_err(|_| Error::RemoteClosed)??)
        }
    }
}

/// Reads a response.
fn read(payload: &[u8]) -> Result<Response> {
    let response = Response::parse_from_bytes(payload);
    let response = response.map_err(|error| Error::Others(format!("Unpack response error {error}")))?;
    match response.status.as_ref() {
        Some(status) if status.code() != Code::OK => Err(Error::RpcStatus(status.clone())),
        _ => Ok(response),
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Session> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a call. Returns the receiver of its response.
    fn send(&self, request: &Request) -> Result<oneshot::Receiver<Result<Vec<u8>>>> {
        let payload = request.write_to_bytes().map_err(|error| Error::Others(error.to_string()))?;
        if payload.len() > MESSAGE_LENGTH_MAX {
            return Err(Error::Others(too_long(payload.len())));
        }
        let (sender, response) = oneshot::channel();
        let task = {
            let mut session = self.lock();
            if let Some(end) = &session.end {
                return Err(end.clone());
            }
            let stream = session.next_stream();
            let head: Vec<u8> = MessageHeader::new_request(stream, payload.len() as u32).into();
            for bytes in [&head, &payload] {
                // After a violation the task ends the session, and this call.
                let _ = session.follow.sent(bytes);
                session.queue.push(bytes);
            }
            session.waiting.insert(stream, sender);
            session.task.clone()
        };
        if let Some(task) = task {
            task.wake();
        }
        Ok(response)
    }

    /// Writes as many queued bytes as the stream accepts.
    fn write(&self, cx: &mut Context<'_>, stream: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
        let mut session = self.lock();
        if !session.task.as_ref().is_some_and(|task| task.will_wake(cx.waker())) {
            session.task = Some(cx.waker().clone());
        }
        if let Some(violation) = session.follow.violation() {
            return Err(refused(violation.clone()));
        }
        let before = session.queue.len();
        session.queue.write(cx, stream)?;
        if before >= MAX_WAITING && session.queue.len() < MAX_WAITING {
            self.changed.notify_waiters();
        }
        Ok(())
    }

    /// Checks bytes from the guest.
    fn received(&self, bytes: &[u8]) -> io::Result<()> {
        self.lock().follow.received(bytes).map_err(refused)
    }

    /// Passes a response to its caller, which may be gone.
    fn deliver(&self, stream: u32, payload: Vec<u8>) {
        let caller = self.lock().waiting.remove(&stream);
        if let Some(caller) = caller {
            let _ = caller.send(Ok(payload));
        }
    }

    /// Ends the session, and each call that waits.
    fn end(&self, error: &io::Error) {
        let end = Error::Socket(error.to_string());
        let waiting = {
            let mut session = self.lock();
            session.end = Some(end.clone());
            session.queue = Outgoing::default();
            std::mem::take(&mut session.waiting)
        };
        for caller in waiting.into_values() {
            let _ = caller.send(Err(end.clone()));
        }
        self.changed.notify_waiters();
    }
}

fn refused(violation: Violation) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, violation)
}

/// Carries calls and responses until the stream ends.
async fn serve(mut stream: impl AsyncRead + AsyncWrite + Unpin, shared: Arc<Shared>) {
    let mut incoming = Incoming::default();
    let error = poll_fn(|cx| {
        if let Err(error) = shared.write(cx, &mut stream) {
            return Poll::Ready(error);
        }
        loop {
            match ready!(incoming.poll(cx, &mut stream, |bytes| shared.received(bytes))) {
                Ok((head, payload)) => shared.deliver(head.stream_id, payload),
                Err(error) => return Poll::Ready(error),
            }
        }
    });
    let error = error.await;
    shared.end(&error);
}

#[cfg(test)]
mod tests {
    use sandboxer_protocol::agent::{AgentClient, StatsRequest, WriteInputRequest};
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
    use ttrpc::{
        context::{Context as Forever, with_duration},
        proto::{MESSAGE_HEADER_LENGTH, MESSAGE_TYPE_RESPONSE},
    };

    use super::*;

    fn client(buffer_bytes: usize) -> (AgentClient<Calls>, Calls, DuplexStream) {
        let (ours, theirs) = tokio::io::duplex(buffer_bytes);
        let calls = Calls::over(ours);
        (AgentClient::new(calls.clone()), calls, theirs)
    }

    /// Reads calls, and responds to the last one.
    async fn answer_last(guest: &mut DuplexStream, calls: usize) {
        for call in 1..=calls {
            let stream = next_call(guest).await;
            if call == calls {
                guest.write_all(&answer(stream, MESSAGE_TYPE_RESPONSE)).await.unwrap();
            }
        }
    }

    fn answer(stream_id: u32, type_: u8) -> Vec<u8> {
        let answer = Response::default().write_to_bytes().unwrap();
        let head = MessageHeader { length: answer.len() as u32, stream_id, type_, flags: 0 };
        [Vec::from(head), answer].concat()
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_is_given_up_half_written_does_not_end_the_session() {
        let (client, _calls, mut guest) = client(64);
        let long = WriteInputRequest { data: vec![7; 5000], ..Default::default() };
        let late = client.write_input(with_duration(Duration::from_secs(1)), &long).await;
        assert!(late.is_err(), "nobody takes it");
        let dropped = timeout(Duration::from_secs(1), client.write_input(Forever::default(), &long)).await;
        assert!(dropped.is_err(), "nobody takes it");

        let stats = StatsRequest::new();
        let call = client.stats(with_duration(Duration::from_secs(60)), &stats);
        let (answered, ()) = tokio::join!(call, answer_last(&mut guest, 3));
        answered.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_guest_that_takes_nothing_is_not_asked_without_end() {
        let (client, calls, mut guest) = client(64);
        let long = WriteInputRequest { data: vec![7; 300 << 10], ..Default::default() };
        let mut sent = 0;
        while timeout(Duration::from_secs(1), calls.wait_for_capacity()).await.is_ok() {
            client.write_input(with_duration(Duration::from_secs(1)), &long).await.unwrap_err();
            sent += 1;
        }
        assert_eq!(sent, 4, "1 MiB is reached with the fourth");
        assert!(!calls.has_capacity());
        let stats = StatsRequest::new();
        let call = async {
            calls.wait_for_capacity().await;
            client.stats(with_duration(Duration::from_secs(60)), &stats).await
        };
        let (answered, ()) = tokio::join!(call, answer_last(&mut guest, sent + 1));
        answered.unwrap();
    }

    /// Reads one call. Returns its stream.
    async fn next_call(guest: &mut DuplexStream) -> u32 {
        let mut head = [0; MESSAGE_HEADER_LENGTH];
        guest.read_exact(&mut head).await.unwrap();
        let head = MessageHeader::from(head);
        guest.read_exact(&mut vec![0; head.length as usize]).await.unwrap();
        head.stream_id
    }

    #[tokio::test]
    async fn a_session_that_has_used_every_stream_takes_none_from_a_call_that_still_waits() {
        let (client, calls, mut guest) = client(1 << 10);
        let stats = StatsRequest::new();
        let waiting = tokio::spawn({
            let (client, stats) = (client.clone(), stats.clone());
            async move { client.stats(Forever::default(), &stats).await }
        });
        let first = next_call(&mut guest).await;
        calls.0.shared.lock().streams = u32::MAX / 2 - 2;
        let mut streams = Vec::new();
        for _ in 0..6 {
            let call = client.stats(Forever::default(), &stats);
            let answered = async {
                let stream = next_call(&mut guest).await;
                guest.write_all(&answer(stream, MESSAGE_TYPE_RESPONSE)).await.unwrap();
                stream
            };
            let (answered, stream) = tokio::join!(call, answered);
            answered.unwrap();
            streams.push(stream);
        }
        assert_eq!((first, &streams[..]), (1, &[u32::MAX - 4, u32::MAX - 2, u32::MAX, 3, 5, 7][..]));
        guest.write_all(&answer(first, MESSAGE_TYPE_RESPONSE)).await.unwrap();
        waiting.await.unwrap().unwrap();
        assert_eq!(calls.violation(), None);
    }

    #[tokio::test]
    async fn the_end_of_a_stream_ends_each_call_and_so_does_a_frame_that_is_no_response() {
        for violation in [None, Some(Violation::NotAResponse(1))] {
            let (client, calls, mut guest) = client(1 << 10);
            let stats = StatsRequest::new();
            let call = client.stats(Forever::default(), &stats);
            let ended = async {
                match violation {
                    None => guest.shutdown().await.unwrap(),
                    Some(_) => guest.write_all(&answer(1, 1)).await.unwrap(),
                }
                calls.end().await
            };
            let (answered, ended) = tokio::join!(call, ended);
            assert!(matches!(answered, Err(Error::Socket(_))), "{answered:?}");
            assert_eq!(ended, violation);
            let late = client.stats(Forever::default(), &stats).await;
            assert!(matches!(late, Err(Error::Socket(_))), "{late:?}");
        }
    }

    #[tokio::test]
    async fn the_stream_ends_with_the_last_clone() {
        let (client, calls, mut guest) = client(1 << 10);
        drop(calls);
        drop(client);
        assert_eq!(guest.read(&mut [0]).await.unwrap(), 0);
    }
}
