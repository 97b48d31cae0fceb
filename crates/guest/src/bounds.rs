//! What a guest may send at all, enforced before anything is made of it.
//!
//! ttrpc reads whatever frame comes: up to 4 MiB of it, for calls that nobody made too, and it skips longer
//! ones to their end. From an agent comes one answer to each call, of a length that fits the call. So the stream
//! between them is followed frame by frame, and with the first one that doesn't fit the session is over:
//!
//! ```text
//! daemon ──call: stream, method────▶ owed: stream → most bytes ──▶ agent
//! daemon ◀─answer, its stream owed and not longer than that──────── agent
//! ```
//!
//! Only heads and methods are looked at. A guest then costs the daemon at most what its own calls may be
//! answered with; what it loses is its own pod, which ends when the session does so.

use std::{
    collections::HashMap,
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use protobuf::CodedInputStream;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::watch,
};
use ttrpc::proto::{MESSAGE_HEADER_LENGTH, MESSAGE_TYPE_REQUEST, MESSAGE_TYPE_RESPONSE, MessageHeader};

/// Most answers that an agent may owe: each process waits for one and reads two streams, as does each connection
/// that is forwarded.
const OWED: usize = 8192;
/// Bytes of a call that name its service and method, and the tag of what follows.
const NAMES: usize = 96;
/// Bytes in a message beside the data that it carries.
const AROUND: usize = 4096;
/// Most characters of a guest's words that are shown.
const WORDS: usize = 2048;

/// Most bytes that the answer to `method` may have.
fn most(method: &str) -> usize {
    match method {
        // What `container/io.rs` and `pod/forward.rs` ask for at once.
        "ReadOutput" | "ReadConnection" => (64 << 10) + AROUND,
        // Some thousand processes, and the messages of a hundred that have ended. An entry of two bytes becomes
        // one of eighty here.
        "ListContainers" => 512 << 10,
        "ListProcesses" => 256 << 10,
        _ => 64 << 10,
    }
}

/// What no agent does.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// An answer to nothing.
    #[error("the guest answered call {0}, which waits for no answer")]
    Unasked(u32),
    /// More than can be told.
    #[error("the guest answered call {stream} with {length} bytes, at most {most} are taken")]
    TooLong {
        /// The call's stream.
        stream: u32,
        /// What its answer's head says.
        length: u32,
        /// What was to be expected.
        most: usize,
    },
    /// Something other than an answer.
    #[error("the guest sent a frame of type {0}, only answers are taken")]
    NoAnswer(u8),
    /// It takes calls and answers none.
    #[error("the guest owes answers to {OWED} calls")]
    OwesTooMuch,
}

/// A stream to an agent that carries what an agent may say, and fails from the first violation on.
#[derive(Debug)]
pub struct Bounded<S> {
    stream: S,
    follow: Follow,
}

impl<S> Bounded<S> {
    /// From the first frame on: the greeting is over.
    pub fn new(stream: S) -> Self {
        Self { stream, follow: Follow::default() }
    }

    /// Returns where the first violation will be seen.
    pub fn violation(&self) -> watch::Receiver<Option<Violation>> {
        self.follow.violated.subscribe()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Bounded<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let Self { stream, follow } = self.get_mut();
        let before = buf.filled().len();
        ready!(Pin::new(stream).poll_read(cx, buf))?;
        let said = buf.filled().get(before..).unwrap_or_default();
        Poll::Ready(follow.said(said).map_err(refused))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Bounded<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let Self { stream, follow } = self.get_mut();
        let count = ready!(Pin::new(stream).poll_write(cx, bytes))?;
        // Before the answer can be read: whoever reads holds the same stream.
        follow.asked(bytes.get(..count).unwrap_or_default()).map_err(refused)?;
        Poll::Ready(Ok(count))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

fn refused(violation: Violation) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, violation)
}

/// Both directions of a session, as far as they have been seen.
#[derive(Debug, Default)]
pub struct Follow {
    asking: Frames<NAMES>,
    saying: Frames<0>,
    /// Most bytes of the answer that each call waits for, by its stream.
    owed: HashMap<u32, usize>,
    violated: watch::Sender<Option<Violation>>,
}

impl Follow {
    /// Takes what went to the guest.
    pub fn asked(&mut self, mut bytes: &[u8]) -> Result<(), Violation> {
        while let Some((head, names)) = self.asking.next(&mut bytes) {
            if head.type_ == MESSAGE_TYPE_REQUEST {
                self.owed.insert(head.stream_id, most(&method_of(names).unwrap_or_default()));
            }
        }
        match self.owed.len() {
            0..=OWED => Ok(()),
            _ => self.violate(Violation::OwesTooMuch),
        }
    }

    /// Takes what came from the guest.
    pub fn said(&mut self, mut bytes: &[u8]) -> Result<(), Violation> {
        if let Some(violation) = &*self.violated.borrow() {
            return Err(violation.clone());
        }
        while let Some((MessageHeader { length, stream_id: stream, type_, .. }, _)) =
            self.saying.next(&mut bytes)
        {
            if type_ != MESSAGE_TYPE_RESPONSE {
                return self.violate(Violation::NoAnswer(type_));
            }
            let Some(most) = self.owed.remove(&stream) else {
                return self.violate(Violation::Unasked(stream));
            };
            if length as usize > most {
                return self.violate(Violation::TooLong { stream, length, most });
            }
        }
        Ok(())
    }

    fn violate(&mut self, violation: Violation) -> Result<(), Violation> {
        tracing::warn!(%violation, "a session with a guest ends");
        self.violated.send_replace(Some(violation.clone()));
        Err(violation)
    }
}

/// Finds frames in a stream that comes in pieces: of each the head, and of what it carries the first `PEEK` bytes.
#[derive(Debug, Default)]
struct Frames<const PEEK: usize> {
    /// The beginning of a frame.
    begun: Vec<u8>,
    /// Once the beginning is whole: bytes that still belong to the frame.
    left: Option<usize>,
}

impl<const PEEK: usize> Frames<PEEK> {
    /// Takes bytes up to the end of the next frame's beginning; none when they are all taken.
    fn next<'a>(&'a mut self, bytes: &mut &[u8]) -> Option<(MessageHeader, &'a [u8])> {
        let mut take = |most: usize| {
            let (taken, rest) = bytes.split_at(most.min(bytes.len()));
            *bytes = rest;
            taken
        };
        if let Some(left) = &mut self.left {
            *left -= take(*left).len();
            if *left > 0 {
                return None;
            }
            self.begun.clear();
            self.left = None;
        }
        let missing = MESSAGE_HEADER_LENGTH.saturating_sub(self.begun.len());
        self.begun.extend_from_slice(take(missing));
        if self.begun.len() < MESSAGE_HEADER_LENGTH {
            return None;
        }
        let head = MessageHeader::from(&self.begun[..MESSAGE_HEADER_LENGTH]);
        let length = head.length as usize;
        let wanted = MESSAGE_HEADER_LENGTH + length.min(PEEK);
        let missing = wanted.saturating_sub(self.begun.len());
        self.begun.extend_from_slice(take(missing));
        if self.begun.len() < wanted {
            return None;
        }
        self.left = Some(length - length.min(PEEK));
        Some((head, &self.begun[MESSAGE_HEADER_LENGTH..]))
    }
}

/// Returns the method's name in the beginning of a ttrpc `Request`: its fields 1 and 2 are service and method.
fn method_of(request: &[u8]) -> Option<String> {
    const SERVICE: u32 = 1 << 3 | 2;
    const METHOD: u32 = 2 << 3 | 2;
    let mut fields = CodedInputStream::from_bytes(request);
    loop {
        match fields.read_raw_tag_or_eof().ok()?? {
            SERVICE => drop(fields.read_bytes().ok()?),
            METHOD => return fields.read_string().ok(),
            _ => return None,
        }
    }
}

/// Returns what a guest says of itself, fit to be shown: without control characters, cut to what a person reads.
pub fn plain(words: &str) -> String {
    let shown = words.chars().map(|c| if c.is_control() { ' ' } else { c });
    let mut shown: String = shown.take(WORDS + 1).collect();
    if let Some((cut, _)) = shown.char_indices().nth(WORDS) {
        shown.truncate(cut);
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use protobuf::Message;
    use ttrpc::Request;

    use super::*;

    fn frame(type_: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
        let head = MessageHeader { length: payload.len() as u32, stream_id: stream, type_, flags: 0 };
        [Vec::from(head), payload.to_vec()].concat()
    }

    fn call(stream: u32, method: &str, payload: usize) -> Vec<u8> {
        let request = Request {
            service: "sandboxer.agent.v1.Agent".into(),
            method: method.into(),
            payload: vec![7; payload],
            timeout_nano: 1,
            ..Default::default()
        };
        frame(MESSAGE_TYPE_REQUEST, stream, &request.write_to_bytes().unwrap())
    }

    fn answer(stream: u32, length: usize) -> Vec<u8> {
        frame(MESSAGE_TYPE_RESPONSE, stream, &vec![0; length])
    }

    #[test]
    fn each_call_is_answered_once_and_by_no_more_than_it_may_be() {
        let mut follow = Follow::default();
        follow.asked(&[call(1, "Stats", 0), call(3, "ReadOutput", 9000)].concat()).unwrap();
        follow.said(&answer(3, 68 << 10)).unwrap();
        let error = follow.said(&answer(1, 65 << 10)[..MESSAGE_HEADER_LENGTH]).unwrap_err();
        assert_eq!(error, Violation::TooLong { stream: 1, length: 65 << 10, most: 64 << 10 });
        assert_eq!(follow.said(b"").unwrap_err(), error, "it is over");

        let mut follow = Follow::default();
        follow.asked(&call(1, "Stats", 0)).unwrap();
        follow.said(&answer(1, 0)).unwrap();
        assert_eq!(follow.said(&answer(1, 0)).unwrap_err(), Violation::Unasked(1));
        let data = frame(ttrpc::proto::MESSAGE_TYPE_DATA, 1, b"");
        assert_eq!(Follow::default().said(&data).unwrap_err(), Violation::NoAnswer(3));
    }

    #[test]
    fn a_guest_that_answers_nothing_is_left_in_the_end() {
        let mut follow = Follow::default();
        let owed = (0..).map(|stream| follow.asked(&call(2 * stream + 1, "WaitProcess", 0)));
        let error = owed.take(OWED + 1).find_map(Result::err);
        assert_eq!(error, Some(Violation::OwesTooMuch));
    }

    /// A method that is renamed, or longer than what is peeked at, would get the bound of any other.
    #[test]
    fn every_method_with_a_bound_of_its_own_is_one_of_the_agents() {
        let proto = include_str!("../../protocol/proto/agent.proto");
        for method in ["ReadOutput", "ReadConnection", "ListContainers", "ListProcesses"] {
            assert!(proto.contains(&format!("rpc {method}(")), "{method}");
            let mut frames = Frames::<NAMES>::default();
            let call = call(1, method, 5000);
            let (_, names) = frames.next(&mut &call[..]).unwrap();
            assert_eq!(method_of(names).as_deref(), Some(method));
            assert_ne!(most(method), most("any other"));
        }
    }

    #[test]
    fn words_of_a_guest_cannot_steer_a_terminal() {
        assert_eq!(plain("6.1\x1b[31m\nü"), "6.1 [31m ü");
        assert_eq!(plain(&"ü".repeat(5000)).chars().count(), WORDS + 1);
    }

    proptest! {
        /// However a stream is cut, the same frames are found.
        #[test]
        fn frames_are_found_in_any_pieces(
            lengths in prop::collection::vec(0usize..300, 1..8),
            cuts in prop::collection::vec(1usize..40, 1..8),
        ) {
            let stream: Vec<u8> = lengths.iter().zip(0..).flat_map(|(&n, id)| answer(id, n)).collect();
            let mut frames = Frames::<NAMES>::default();
            let (mut found, mut rest, mut cuts) = (Vec::new(), &stream[..], cuts.into_iter().cycle());
            while !rest.is_empty() {
                let (mut piece, next) = rest.split_at(cuts.next().unwrap_or(1).min(rest.len()));
                rest = next;
                while let Some((head, peeked)) = frames.next(&mut piece) {
                    prop_assert_eq!(peeked.len(), NAMES.min(head.length as usize));
                    found.push((head.stream_id, head.length as usize));
                }
                prop_assert!(piece.is_empty());
            }
            let sent: Vec<_> = (0..).zip(lengths).collect();
            prop_assert_eq!(found, sent);
        }
    }
}
