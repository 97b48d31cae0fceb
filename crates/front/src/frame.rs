//! ttrpc frames: ten bytes of header, then the body.
//!
//! ```text
//! length u32 │ stream u32 │ kind u8 │ flags u8 │ length bytes        (big-endian)
//! ```

use std::mem;

/// Length of a header, bytes.
pub const HEADER: usize = 10;
/// The most bytes that may follow a header: ttrpc's own limit.
pub const MAX_FRAME_BYTES: usize = 4 << 20;

/// The kind of a request.
pub const REQUEST: u8 = 1;
/// The kind of a response.
pub const RESPONSE: u8 = 2;

/// The flag that only the front sets: an earlier worker may have received this request, and may have carried it out.
/// ttrpc uses the three lowest bits and ignores the others.
pub const REPEATED: u8 = 0x80;

/// gRPC's RESOURCE_EXHAUSTED.
pub const EXHAUSTED: u8 = 8;
/// gRPC's INTERNAL: clients do not retry it.
pub const INTERNAL: u8 = 13;

/// A complete frame, header included.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame(Vec<u8>);

/// The error of a frame that is longer than ttrpc allows.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("frame has {0} bytes, ttrpc allows {MAX_FRAME_BYTES}")]
pub struct TooLong(usize);

impl Frame {
    /// Returns the frame with these bytes; `None` if they are not a whole frame.
    pub fn parse(bytes: Vec<u8>) -> Option<Self> {
        let whole = bytes.first_chunk::<4>().filter(|_| bytes.len() >= HEADER)?;
        (bytes.len() == HEADER + u32::from_be_bytes(*whole) as usize).then_some(Self(bytes))
    }

    /// Returns an error response with a gRPC code to the request on `stream`.
    pub fn error(stream: u32, code: u8, words: &str) -> Self {
        // Response { status: 1 = Status { code: 1 = varint, message: 2 = string } }
        let mut status = vec![0x08, code, 0x12];
        status.extend(varint(words.len()));
        status.extend_from_slice(words.as_bytes());
        let mut frame = vec![0; HEADER];
        frame.push(0x0a);
        frame.extend(varint(status.len()));
        frame.extend_from_slice(&status);
        let length = (frame.len() - HEADER) as u32;
        frame[..4].copy_from_slice(&length.to_be_bytes());
        frame[8] = RESPONSE;
        let mut frame = Self(frame);
        frame.set_stream(stream);
        frame
    }

    /// Returns the method of a request; `None` for other frames.
    pub fn method(&self) -> Option<&str> {
        // Request { service: 1 = string, method: 2 = string, payload: 3 = bytes, … }
        str::from_utf8(field(self.0.get(HEADER..)?, 2)?).ok()
    }

    /// Returns the container of a request: every request of the task service has the container's ID in field 1.
    pub fn container(&self) -> Option<&str> {
        str::from_utf8(field(field(self.0.get(HEADER..)?, 3)?, 1)?).ok()
    }

    /// Returns the frame's kind: [`REQUEST`], [`RESPONSE`] or another one.
    pub fn kind(&self) -> u8 {
        self.0[8]
    }

    /// Returns the stream number of the frame's request.
    pub fn stream(&self) -> u32 {
        u32::from_be_bytes([self.0[4], self.0[5], self.0[6], self.0[7]])
    }

    /// Sets the stream number of the frame's request.
    pub fn set_stream(&mut self, stream: u32) {
        self.0[4..8].copy_from_slice(&stream.to_be_bytes());
    }

    /// Marks the frame as [`REPEATED`], or not.
    pub fn set_repeated(&mut self, repeated: bool) {
        self.0[9] = if repeated { self.0[9] | REPEATED } else { self.0[9] & !REPEATED };
    }

    /// Returns the frame's bytes on the wire.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns the frame's bytes on the wire.
    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}

/// Returns the first length-delimited field `number` of a protobuf message.
fn field(mut message: &[u8], number: u64) -> Option<&[u8]> {
    const VARINT: u64 = 0;
    const FIXED64: u64 = 1;
    const LENGTH: u64 = 2;
    const FIXED32: u64 = 5;
    loop {
        let tag = take_varint(&mut message)?;
        let length = match tag & 7 {
            VARINT => take_varint(&mut message).map(|_| 0)?,
            FIXED64 => 8,
            LENGTH => usize::try_from(take_varint(&mut message)?).ok()?,
            FIXED32 => 4,
            _ => return None,
        };
        let (value, rest) = message.split_at_checked(length)?;
        if tag == number << 3 | LENGTH {
            return Some(value);
        }
        message = rest;
    }
}

fn take_varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

fn varint(mut value: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

/// Assembles frames from bytes in pieces of any length.
#[derive(Debug, Default)]
pub struct Assembler(Vec<u8>);

impl Assembler {
    /// Returns an assembler that has received these bytes of a frame.
    pub fn starting_with(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }

    /// Returns the bytes of an incomplete frame.
    pub fn rest(&self) -> &[u8] {
        &self.0
    }

    /// Adds bytes; returns the frames that are complete now.
    pub fn take(&mut self, mut bytes: &[u8]) -> Result<Vec<Frame>, TooLong> {
        let mut frames = Vec::new();
        while !bytes.is_empty() {
            let missing = match self.body()? {
                None => HEADER - self.0.len(),
                Some(body) => HEADER + body - self.0.len(),
            };
            let (now, later) = bytes.split_at(missing.min(bytes.len()));
            self.0.extend_from_slice(now);
            bytes = later;
            if self.body()?.is_some_and(|body| self.0.len() == HEADER + body) {
                frames.push(Frame(mem::take(&mut self.0)));
            }
        }
        Ok(frames)
    }

    /// Returns the length of the body, once the header is complete.
    fn body(&self) -> Result<Option<usize>, TooLong> {
        let Some(&length) = self.0.first_chunk::<4>().filter(|_| self.0.len() >= HEADER) else {
            return Ok(None);
        };
        match u32::from_be_bytes(length) as usize {
            body if body <= MAX_FRAME_BYTES => Ok(Some(body)),
            body => Err(TooLong(body)),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn wire(stream: u32, kind: u8, body: &[u8]) -> Vec<u8> {
        let mut bytes = (body.len() as u32).to_be_bytes().to_vec();
        bytes.extend_from_slice(&stream.to_be_bytes());
        bytes.extend_from_slice(&[kind, 0]);
        bytes.extend_from_slice(body);
        bytes
    }

    proptest! {
        #[test]
        fn frames_are_found_however_the_bytes_are_cut(
            bodies in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40), 1..8),
            cuts in proptest::collection::vec(1_usize..30, 1..40),
        ) {
            let sent: Vec<_> = bodies.iter().zip(0..).map(|(body, n)| wire(n, REQUEST, body)).collect();
            let all = sent.concat();
            let (mut assembler, mut found, mut rest) = (Assembler::default(), Vec::new(), all.as_slice());
            for cut in cuts.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (now, later) = rest.split_at((*cut).min(rest.len()));
                found.extend(assembler.take(now).unwrap());
                rest = later;
            }
            let found: Vec<_> = found.into_iter().map(Frame::into_bytes).collect();
            prop_assert_eq!(found, sent);
        }
    }

    #[test]
    fn a_frame_that_is_too_long_is_refused_before_its_body_is_kept() {
        let mut header = wire(1, REQUEST, &[]);
        header[..4].copy_from_slice(&u32::MAX.to_be_bytes());
        header.push(0);
        assert_eq!(Assembler::default().take(&header), Err(TooLong(u32::MAX as usize)));
    }

    #[test]
    fn marks_and_streams_are_changed_in_place_and_nothing_else() {
        let mut frames = Assembler::default().take(&wire(7, REQUEST, b"body")).unwrap();
        let mut frame = frames.remove(0);
        frame.set_stream(0x0102_0304);
        frame.set_repeated(true);
        assert_eq!((frame.stream(), frame.kind(), frame.bytes()[9]), (0x0102_0304, REQUEST, REPEATED));
        frame.set_repeated(false);
        assert_eq!((frame.bytes()[9], &frame.bytes()[HEADER..]), (0, b"body".as_slice()));
    }

    #[test]
    fn an_error_is_a_whole_frame_with_its_code_and_words() {
        let words = "long ".repeat(100);
        let answer = Frame::error(9, INTERNAL, &words);
        let frames = Assembler::default().take(answer.bytes()).unwrap();
        assert_eq!((frames.len(), frames[0].stream(), frames[0].kind()), (1, 9, RESPONSE));
        let status = field(&answer.bytes()[HEADER..], 1).unwrap();
        assert_eq!((&status[..2], field(status, 2).unwrap()), (&[0x08, INTERNAL][..], words.as_bytes()));
    }

    #[test]
    fn a_request_says_what_it_asks_and_of_which_container() {
        // The bytes that ttrpc's Go client writes: service, method, payload with the id "c1" and a bundle, a deadline.
        let body = b"\x0a\x04Task\x12\x06Create\x1a\x07\x0a\x02c1\x12\x01/\x20\x80\x94\xeb\xdc\x03";
        let frame = Assembler::default().take(&wire(1, REQUEST, body)).unwrap().remove(0);
        assert_eq!((frame.method(), frame.container()), (Some("Create"), Some("c1")));
    }

    proptest! {
        #[test]
        fn whatever_a_request_holds_it_can_be_asked_for_its_method(
            body in proptest::collection::vec(any::<u8>(), 0..60),
        ) {
            let frame = Assembler::default().take(&wire(1, REQUEST, &body)).unwrap().remove(0);
            let _ = (frame.method(), frame.container());
        }
    }
}
