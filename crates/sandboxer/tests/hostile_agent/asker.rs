//! A guest's kernel that asks for files of a share as fast as it is answered.

use std::collections::VecDeque;

use protobuf::Message;
use sandboxer_protocol::{
    agent::{ExchangeSharesRequest, ExchangeSharesResponse, ShareMessage},
    share::{MAX_DATA, SLOTS, opcode},
};

use super::Nature;

/// The file that is read; a test puts it into the directory that it shares.
pub const FILE: &str = "big";

const GETATTR: u32 = 3;
const ROOT: u64 = 1;
/// No request has this number.
const FIRST: u64 = 2;

/// How far it has come to an open file.
#[derive(Debug, Clone, Copy)]
enum Step {
    Begin,
    OpenRoot,
    ListRoot,
    FindShare,
    FindFile,
    OpenFile,
    Ask { node: u64, handle: u64 },
}

/// What it asks, and the daemon's calls by which it may.
pub struct Asker {
    nature: Nature,
    step: Step,
    free: Vec<u32>,
    unique: u64,
    /// Of the last request on the way to an open file.
    node: u64,
    /// By which the root is listed.
    listing: u64,
    waiting: VecDeque<u32>,
}

impl Asker {
    pub fn new(nature: Nature) -> Self {
        let free = (0..SLOTS as u32).collect();
        Self {
            nature,
            step: Step::Begin,
            free,
            unique: FIRST,
            node: ROOT,
            listing: 0,
            waiting: VecDeque::new(),
        }
    }

    /// Whether all it wants to know from now on is how much the daemon keeps for it.
    pub fn is_done(&self) -> bool {
        self.nature == Nature::NeverTakesAnswers
            && matches!(self.step, Step::Ask { .. })
            && self.free.is_empty()
    }

    /// Takes a call of the daemon's: calls that are answered now, and by what.
    pub fn called(&mut self, stream: u32, payload: &[u8]) -> Vec<(u32, Vec<u8>)> {
        let Ok(exchange) = ExchangeSharesRequest::parse_from_bytes(payload) else { return Vec::new() };
        let mut requests = Vec::new();
        if self.unique == FIRST {
            // 7.36, reading ahead, all flags.
            let init = [7, 36, 65536, 0x7fff_ffff].map(u32::to_le_bytes).concat();
            requests.push(self.request(opcode::INIT, 0, &[init, vec![0; 48]].concat()));
        }
        for ShareMessage { slot, message, .. } in exchange.answers {
            self.free.push(slot);
            requests.extend(self.next(&message));
        }
        self.waiting.push_back(stream);
        let mut answered = Vec::new();
        if !requests.is_empty() {
            let requests = ExchangeSharesResponse { requests, ..Default::default() };
            answered.extend(self.waiting.pop_front().zip(requests.write_to_bytes().ok()));
        }
        while self.waiting.len() > 1 {
            answered.extend(self.waiting.pop_front().map(|stream| (stream, Vec::new())));
        }
        answered
    }

    /// What it asks after this answer: as much as there are free slots, once it knows what for.
    fn next(&mut self, answer: &[u8]) -> Vec<ShareMessage> {
        let number = |at: usize| {
            let bytes = answer.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
            u64::from_le_bytes(bytes.unwrap_or_default())
        };
        let name = || {
            // `struct fuse_dirent`, behind the answer's head.
            let length = number(32) as usize & 0xff;
            answer.get(40..40 + length).unwrap_or_default()
        };
        let named = |name: &[u8]| [name, b"\0"].concat();
        let (step, request) = match self.step {
            Step::Begin if self.nature == Nature::FloodsRequests => {
                (Step::Ask { node: ROOT, handle: 0 }, None)
            }
            Step::Begin => (Step::OpenRoot, Some((opcode::OPENDIR, ROOT, vec![0; 8]))),
            Step::OpenRoot => {
                self.listing = number(16);
                (Step::ListRoot, Some((opcode::READDIR, ROOT, reading(self.listing, 4096))))
            }
            // The share comes a little after the first request.
            Step::ListRoot if name().is_empty() => {
                (Step::ListRoot, Some((opcode::READDIR, ROOT, reading(self.listing, 4096))))
            }
            Step::ListRoot => (Step::FindShare, Some((opcode::LOOKUP, ROOT, named(name())))),
            Step::FindShare => (Step::FindFile, Some((opcode::LOOKUP, number(16), named(FILE.as_bytes())))),
            Step::FindFile => (Step::OpenFile, Some((opcode::OPEN, number(16), vec![0; 8]))),
            Step::OpenFile => (Step::Ask { node: self.node, handle: number(16) }, None),
            asking @ Step::Ask { .. } => (asking, None),
        };
        if let Some((opcode, node, body)) = request {
            self.step = step;
            self.node = node;
            return vec![self.request(opcode, node, &body)];
        }
        self.step = step;
        let Step::Ask { node, handle } = step else { return Vec::new() };
        let mut requests = Vec::new();
        while !self.free.is_empty() {
            requests.push(match self.nature {
                Nature::FloodsRequests => self.request(GETATTR, node, &[0; 16]),
                _ => self.request(opcode::READ, node, &reading(handle, MAX_DATA as u32)),
            });
        }
        requests
    }

    /// In the next free slot.
    fn request(&mut self, opcode: u32, node: u64, body: &[u8]) -> ShareMessage {
        self.unique += 2;
        let length = 40 + body.len() as u32;
        let mut message = [length, opcode].map(u32::to_le_bytes).concat();
        message.extend([self.unique, node, 0, 0].map(u64::to_le_bytes).concat());
        message.extend(body);
        ShareMessage { slot: self.free.pop().unwrap_or(0), message, ..Default::default() }
    }
}

/// `struct fuse_read_in`, from the beginning.
fn reading(handle: u64, size: u32) -> Vec<u8> {
    let mut body = [handle, 0].map(u64::to_le_bytes).concat();
    body.extend([size, 0, 0, 0, 0, 0].map(u32::to_le_bytes).concat());
    body
}
