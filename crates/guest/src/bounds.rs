//! Limits of what a guest may send, enforced before it is parsed.
//!
//! ttrpc reads any frame: up to 4 MiB, also for calls that were never made, and skips longer ones to their end. An
//! agent must send one response per call, of a length that fits the call. So the stream is checked frame by frame, and
//! the first violation ends the session:
//!
//! ```text
//! daemon ──call: stream, method───────▶ pending: stream → most bytes ──▶ agent
//! daemon ◀─response: pending stream, not longer than that────────────── agent
//! ```
//!
//! Only headers and methods are parsed. So a guest costs the daemon at most the responses to the daemon's own calls. A
//! violation only costs the guest's own pod, which ends with the session.

use std::collections::HashMap;

use protobuf::CodedInputStream;
use ttrpc::proto::{MESSAGE_HEADER_LENGTH, MESSAGE_TYPE_REQUEST, MESSAGE_TYPE_RESPONSE, MessageHeader};

/// The most calls without a response. Each process has one call waiting for its exit and two for its streams, and each
/// forwarded connection has one.
const MAX_PENDING: usize = 8192;
/// The length of the beginning of a call that contains its service and method, and the next tag, bytes.
const NAMES: usize = 96;
/// The most bytes of a message in addition to its data.
const OVERHEAD: usize = 4096;
/// The most characters of a guest's text that are shown.
const MAX_SHOWN: usize = 2048;

/// Returns the most bytes of a response to `method`.
fn most(method: &str) -> usize {
    match method {
        // The most bytes that `container/io.rs` and `pod/forward.rs` request.
        "ReadOutput" | "ReadConnection" => (64 << 10) + OVERHEAD,
        // About a thousand processes, and the termination messages of a hundred exited ones. An entry of two bytes on
        // the wire takes eighty in memory.
        "ListContainers" => 512 << 10,
        "ListProcesses" => 256 << 10,
        _ => 64 << 10,
    }
}

/// An error in a guest's stream that no agent makes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// A response without a call.
    #[error("the guest sent a response to call {0}, which has none pending")]
    UnexpectedResponse(u32),
    /// A response that is too long.
    #[error("the guest sent a response of {length} bytes to call {stream}, at most {most} are allowed")]
    TooLong {
        /// The call's stream.
        stream: u32,
        /// The length in the response's header.
        length: u32,
        /// The limit.
        most: usize,
    },
    /// A frame that is not a response.
    #[error("the guest sent a frame of type {0}, only responses are allowed")]
    NotAResponse(u8),
    /// Too many calls without a response.
    #[error("the guest has not responded to more than {MAX_PENDING} calls")]
    TooManyPending,
}

/// The state of both directions of a session.
#[derive(Debug, Default)]
pub struct Follow {
    requests: Frames<NAMES>,
    responses: Frames<0>,
    /// The most bytes of each pending response, by stream.
    pending: HashMap<u32, usize>,
    violated: Option<Violation>,
}

impl Follow {
    /// Checks bytes sent to the guest.
    pub fn sent(&mut self, mut bytes: &[u8]) -> Result<(), Violation> {
        while let Some((head, names)) = self.requests.next(&mut bytes) {
            if head.type_ == MESSAGE_TYPE_REQUEST {
                self.pending.insert(head.stream_id, most(&method_of(names).unwrap_or_default()));
            }
        }
        match self.pending.len() {
            0..=MAX_PENDING => Ok(()),
            _ => self.violate(Violation::TooManyPending),
        }
    }

    /// Checks bytes received from the guest.
    pub fn received(&mut self, mut bytes: &[u8]) -> Result<(), Violation> {
        if let Some(violation) = &self.violated {
            return Err(violation.clone());
        }
        while let Some((MessageHeader { length, stream_id: stream, type_, .. }, _)) =
            self.responses.next(&mut bytes)
        {
            if type_ != MESSAGE_TYPE_RESPONSE {
                return self.violate(Violation::NotAResponse(type_));
            }
            let Some(most) = self.pending.remove(&stream) else {
                return self.violate(Violation::UnexpectedResponse(stream));
            };
            if length as usize > most {
                return self.violate(Violation::TooLong { stream, length, most });
            }
        }
        Ok(())
    }

    /// Returns the first violation.
    pub fn violation(&self) -> Option<&Violation> {
        self.violated.as_ref()
    }

    fn violate(&mut self, violation: Violation) -> Result<(), Violation> {
        tracing::warn!(%violation, "ending the session with a guest");
        self.violated = Some(violation.clone());
        Err(violation)
    }
}

/// A search for frames in a stream of pieces: the header of each, and the first `PEEK` bytes of its body.
#[derive(Debug, Default)]
struct Frames<const PEEK: usize> {
    /// The beginning of the current frame.
    begun: Vec<u8>,
    /// The number of bytes of the frame that have not arrived, once its beginning is complete.
    left: Option<usize>,
}

impl<const PEEK: usize> Frames<PEEK> {
    /// Consumes bytes up to the end of the next frame's beginning; `None` when all are consumed.
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

/// Returns the method in the beginning of a ttrpc `Request`: its fields 1 and 2 are service and method.
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

/// Sanitizes a guest's text for display: replaces control characters, and truncates it.
pub fn plain(words: &str) -> String {
    let shown = words.chars().map(|c| if c.is_control() { ' ' } else { c });
    let mut shown: String = shown.take(MAX_SHOWN + 1).collect();
    if let Some((cut, _)) = shown.char_indices().nth(MAX_SHOWN) {
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
        follow.sent(&[call(1, "Stats", 0), call(3, "ReadOutput", 9000)].concat()).unwrap();
        follow.received(&answer(3, 68 << 10)).unwrap();
        let error = follow.received(&answer(1, 65 << 10)[..MESSAGE_HEADER_LENGTH]).unwrap_err();
        assert_eq!(error, Violation::TooLong { stream: 1, length: 65 << 10, most: 64 << 10 });
        assert_eq!(follow.received(b"").unwrap_err(), error, "it is over");

        let mut follow = Follow::default();
        follow.sent(&call(1, "Stats", 0)).unwrap();
        follow.received(&answer(1, 0)).unwrap();
        assert_eq!(follow.received(&answer(1, 0)).unwrap_err(), Violation::UnexpectedResponse(1));
        let data = frame(ttrpc::proto::MESSAGE_TYPE_DATA, 1, b"");
        assert_eq!(Follow::default().received(&data).unwrap_err(), Violation::NotAResponse(3));
    }

    #[test]
    fn a_guest_that_answers_nothing_is_left_in_the_end() {
        let mut follow = Follow::default();
        let pending = (0..).map(|stream| follow.sent(&call(2 * stream + 1, "WaitProcess", 0)));
        let error = pending.take(MAX_PENDING + 1).find_map(Result::err);
        assert_eq!(error, Some(Violation::TooManyPending));
    }

    /// A renamed method, or one longer than [`NAMES`], would get the default limit.
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
        assert_eq!(plain(&"ü".repeat(5000)).chars().count(), MAX_SHOWN + 1);
    }

    proptest! {
        /// The same frames are found however a stream is cut.
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
