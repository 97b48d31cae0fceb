//! One connection of containerd's, and its link to whatever worker there is.

use std::{
    collections::BTreeMap,
    io::{self, Read},
    mem,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
};

use nix::sys::epoll::EpollFlags;

use crate::{
    frame::{Assembler, EXHAUSTED, Frame, INTERNAL, REQUEST, RESPONSE},
    outbox::Outbox,
    say::say,
};

/// Most requests of one connection under way, and most bytes of them. containerd has one connection for each
/// container, on which it waits for each process once.
const MAX_UNANSWERED: usize = 4096;
const MAX_UNANSWERED_BYTES: usize = 8 << 20;
/// With so many bytes waiting for one side, the other isn't read.
const MAX_BUFFERED_BYTES: usize = 1 << 20;
/// So many times a worker that lives may lose one connection's link.
const MAX_LINKS: u32 = 3;
/// A request that so many workers ended under is a suspect: it is given alone, so that it is known which of several ends
/// the next one.
const SUSPECT_DEATHS: u8 = 2;
/// A request that so many workers ended under is answered with an error.
const MAX_DEATHS: u8 = 3;
/// The method whose requests wait for a process's end and do nothing else. They are under way through every worker's
/// end, whatever that was caused by, and containerd takes an error for the process's end.
const WAIT: &str = "Wait";

/// Names requests. A number is not used again for two thousand million requests.
#[derive(Debug)]
pub struct Numbers(u32);

impl Default for Numbers {
    /// ttrpc wants odd numbers of whoever asks.
    fn default() -> Self {
        Self(1)
    }
}

impl Numbers {
    fn next(&mut self) -> u32 {
        let number = self.0;
        self.0 = number.wrapping_add(2);
        number
    }
}

/// Whether a side is still there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// It is.
    Open,
    /// It is, with nothing to say now.
    Idle,
    /// It has closed, or said what is no ttrpc.
    Gone,
}

/// A connection of containerd's.
#[derive(Debug)]
pub struct Connection {
    client: UnixStream,
    from_client: Assembler,
    to_client: Outbox,
    link: Option<Link>,
    /// Links that the present worker has had.
    links: u32,
    /// Requests whose answer has not passed, by number.
    unanswered: BTreeMap<u32, Unanswered>,
    unanswered_bytes: usize,
}

#[derive(Debug)]
struct Link {
    stream: UnixStream,
    from_worker: Assembler,
    to_worker: Outbox,
}

#[derive(Debug)]
struct Unanswered {
    /// containerd's number for it.
    stream: u32,
    frame: Frame,
    /// The present worker has it.
    given: bool,
    /// Workers that ended while they had it.
    deaths: u8,
}

impl Unanswered {
    fn is_suspect(&self) -> bool {
        self.deaths >= SUSPECT_DEATHS
    }

    /// Answers with the error that it gets instead of another worker.
    fn refusal(&self) -> String {
        let of = |id: &str| format!(" of container {}", id.escape_debug());
        format!(
            "{}{} was given to {} workers of sandboxer, and each of them ended before it had an answer: it is not given to \
             another one; sandboxer's log says how they ended",
            self.frame.method().unwrap_or("a request").escape_debug(),
            self.frame.container().map(of).unwrap_or_default(),
            self.deaths,
        )
    }
}

impl Connection {
    /// Returns a connection that was just accepted; it doesn't block.
    pub fn new(client: UnixStream) -> Self {
        Self {
            client,
            from_client: Assembler::default(),
            to_client: Outbox::default(),
            link: None,
            links: 0,
            unanswered: BTreeMap::new(),
            unanswered_bytes: 0,
        }
    }

    /// Returns the connection itself.
    pub fn client(&self) -> BorrowedFd<'_> {
        self.client.as_fd()
    }

    /// Returns the end of its link that is here.
    pub fn link(&self) -> Option<BorrowedFd<'_>> {
        self.link.as_ref().map(|link| link.stream.as_fd())
    }

    /// Links it to a worker, which gets all that has no answer yet, marked; suspects only if it has them already.
    pub fn set_link(&mut self, stream: UnixStream) {
        self.links += 1;
        self.link = Some(Link { stream, from_worker: Assembler::default(), to_worker: Outbox::default() });
        let due = self.unanswered.iter().filter(|(_, request)| request.given || !request.is_suspect());
        let due: Vec<_> = due.map(|(number, _)| *number).collect();
        due.into_iter().for_each(|number| self.give(number));
    }

    /// Gives the worker a request that another one may have had.
    pub fn give(&mut self, number: u32) {
        let (Some(link), Some(request)) = (&mut self.link, self.unanswered.get_mut(&number)) else { return };
        request.given = true;
        let mut again = request.frame.clone();
        again.set_repeated(true);
        link.to_worker.push(again.into_bytes());
    }

    /// Returns the oldest suspect that the worker could be given.
    pub fn suspect(&self) -> Option<u32> {
        self.link.as_ref()?;
        let mut suspects =
            self.unanswered.iter().filter(|(_, request)| request.is_suspect() && !request.given);
        suspects.next().map(|(number, _)| *number)
    }

    /// Returns whether a request has no answer yet.
    pub fn awaits(&self, number: u32) -> bool {
        self.unanswered.contains_key(&number)
    }

    /// Returns whether the worker, which lives, may have another link for it.
    pub fn may_link(&self) -> bool {
        self.links < MAX_LINKS
    }

    /// The worker is gone: what it still has answered passes, then the link is no more. `died`: nobody asked it to end,
    /// and what it had and did not answer may be why.
    pub fn worker_gone(&mut self, scratch: &mut [u8], died: bool) {
        while self.read_link(scratch) == Side::Open {}
        self.link = None;
        self.links = 0;
        for request in self.unanswered.values_mut() {
            let counts = mem::take(&mut request.given) && died && request.frame.method() != Some(WAIT);
            request.deaths += u8::from(counts);
        }
        let deadly = self.unanswered.iter().filter(|(_, request)| request.deaths >= MAX_DEATHS);
        let deadly: Vec<_> = deadly.map(|(number, _)| *number).collect();
        for request in deadly.iter().filter_map(|number| self.unanswered.remove(number)) {
            self.unanswered_bytes -= request.frame.bytes().len();
            let words = request.refusal();
            say!("{words}");
            self.to_client.push(Frame::error(request.stream, INTERNAL, &words).into_bytes());
        }
    }

    /// Returns what to wait for on the connection and on its link.
    pub fn interest(&self) -> (EpollFlags, EpollFlags) {
        let flags = |read: bool, write: &Outbox| {
            let mut flags = EpollFlags::empty();
            flags.set(EpollFlags::EPOLLIN, read);
            flags.set(EpollFlags::EPOLLOUT, write.bytes() > 0);
            flags
        };
        let Some(link) = &self.link else {
            return (flags(false, &self.to_client), EpollFlags::empty());
        };
        (
            flags(link.to_worker.bytes() < MAX_BUFFERED_BYTES, &self.to_client),
            flags(self.to_client.bytes() < MAX_BUFFERED_BYTES, &link.to_worker),
        )
    }

    /// Reads what containerd says, once.
    pub fn read_client(&mut self, scratch: &mut [u8], numbers: &mut Numbers) -> Side {
        let Some(link) = &mut self.link else { return Side::Open };
        let Some(count) = read(&self.client, scratch) else { return Side::Gone };
        let frames = match self.from_client.take(&scratch[..count]) {
            Ok(frames) => frames,
            Err(error) => return refuse(&error),
        };
        for mut frame in frames {
            if frame.kind() != REQUEST {
                return refuse(&"the task service has no streams");
            }
            let (stream, number) = (frame.stream(), numbers.next());
            let bytes = self.unanswered_bytes + frame.bytes().len();
            if self.unanswered.len() >= MAX_UNANSWERED || bytes > MAX_UNANSWERED_BYTES {
                const WORDS: &str = "too many requests are under way on this connection";
                self.to_client.push(Frame::error(stream, EXHAUSTED, WORDS).into_bytes());
                continue;
            }
            frame.set_repeated(false);
            frame.set_stream(number);
            link.to_worker.push(frame.bytes().to_vec());
            self.unanswered_bytes = bytes;
            self.unanswered.insert(number, Unanswered { stream, frame, given: true, deaths: 0 });
        }
        Side::Open
    }

    /// Reads what the worker says, once.
    pub fn read_link(&mut self, scratch: &mut [u8]) -> Side {
        let Some(link) = &mut self.link else { return Side::Gone };
        let Some(count) = read(&link.stream, scratch) else { return Side::Gone };
        let frames = match link.from_worker.take(&scratch[..count]) {
            Ok(frames) => frames,
            Err(error) => return refuse(&error),
        };
        for mut frame in frames.into_iter().filter(|frame| frame.kind() == RESPONSE) {
            // One that is not known was answered already.
            if let Some(request) = self.unanswered.remove(&frame.stream()) {
                self.unanswered_bytes -= request.frame.bytes().len();
                frame.set_stream(request.stream);
                self.to_client.push(frame.into_bytes());
            }
        }
        if count == 0 { Side::Idle } else { Side::Open }
    }

    /// Writes what waits for containerd.
    pub fn flush_client(&mut self) -> Side {
        side(self.to_client.flush(&self.client))
    }

    /// Writes what waits for the worker.
    pub fn flush_link(&mut self) -> Side {
        self.link.as_mut().map_or(Side::Open, |link| side(link.to_worker.flush(&link.stream)))
    }

    /// Ends the link.
    pub fn cut_link(&mut self) {
        drop(mem::take(&mut self.link));
    }
}

/// Bytes read, 0 also where there are none now; none at the end.
fn read(mut from: &UnixStream, scratch: &mut [u8]) -> Option<usize> {
    loop {
        match from.read(scratch) {
            Ok(0) => return None,
            Ok(count) => return Some(count),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Some(0),
            Err(_) => return None,
        }
    }
}

fn side(done: io::Result<()>) -> Side {
    if done.is_ok() { Side::Open } else { Side::Gone }
}

fn refuse(why: &dyn std::fmt::Display) -> Side {
    say!("a task connection is closed: {why}");
    Side::Gone
}
