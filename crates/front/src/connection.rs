//! A connection of containerd, and its link to the current worker.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, Read},
    mem,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
        unix::net::UnixStream,
    },
};

use nix::sys::epoll::EpollFlags;

use crate::{
    frame::{Assembler, EXHAUSTED, Frame, INTERNAL, REQUEST, RESPONSE, TooLong},
    journal::{Journal, Record, RecordedConnection, RecordedRequest},
    log::log,
    outbox::Outbox,
    store::Stored,
    stream::{Answers, Received},
};

/// The most pending requests of one connection, and their most bytes. containerd has one connection for each container,
/// with one Wait request per process.
const MAX_UNANSWERED: usize = 4096;
const MAX_UNANSWERED_BYTES: usize = 8 << 20;
/// While one side has this many unwritten bytes, the other side is not read.
const MAX_BUFFERED_BYTES: usize = 1 << 20;
/// The length of the connection's files, bytes, from which they are replaced by shorter ones, if they are also four
/// times as long as the bytes still needed.
const LONG: u64 = 16 << 10;
/// The most links that one connection may lose to the same worker.
const MAX_LINKS: u32 = 3;
/// The number of workers that must die with a request to make it a suspect. A suspect is sent alone, to find out which
/// request kills workers.
const SUSPECT_DEATHS: u8 = 2;
/// The number of workers that must die with a request before it gets an error.
const MAX_DEATHS: u8 = 3;
/// The method that waits for a process's exit and does nothing else. Such requests are pending at every death of a
/// worker, whatever the cause, and containerd would take an error as the process's exit.
const WAIT: &str = "Wait";

/// The stream numbers of requests. A number is reused after two thousand million requests.
#[derive(Debug)]
pub struct Numbers(u32);

impl Default for Numbers {
    /// Starts with 1: ttrpc clients use odd numbers.
    fn default() -> Self {
        Self(1)
    }
}

impl Numbers {
    /// Returns numbers that continue from this one.
    pub fn starting_at(number: u32) -> Self {
        Self(number)
    }

    /// Returns the next number that is not `taken`.
    fn next_free(&mut self, taken: impl Fn(u32) -> bool) -> u32 {
        loop {
            let number = self.0;
            self.0 = number.wrapping_add(2);
            if !taken(number) {
                return number;
            }
        }
    }
}

/// The state of one side of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The side is open.
    Open,
    /// The side is open, and has no data now.
    Idle,
    /// The side has closed, or has sent invalid ttrpc.
    Gone,
}

/// The files with the bytes of a connection.
#[derive(Debug)]
pub struct Files {
    received: Received,
    answers: Answers,
}

impl Files {
    /// Creates empty files.
    pub fn create() -> io::Result<Self> {
        Ok(Self { received: Received::create(&[])?, answers: Answers::create(&[])? })
    }

    /// Returns the journal's description of a new connection, without bytes, with the socket `client`.
    pub fn description(&self, client: RawFd) -> RecordedConnection {
        let fds = [client, self.received.as_raw_fd(), self.answers.as_raw_fd()];
        RecordedConnection { fds, requests: BTreeMap::new() }
    }
}

/// A connection of containerd.
#[derive(Debug)]
pub struct Connection {
    /// The connection's number in the journal.
    id: u64,
    client: Stored,
    received: Received,
    from_client: Assembler,
    to_client: Answers,
    link: Option<Link>,
    /// The number of links to the current worker.
    links: u32,
    /// The requests without a response, by number.
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
    /// The stream number in containerd.
    stream: u32,
    frame: Frame,
    /// Whether the request was sent to the current worker.
    sent: bool,
    /// The number of workers that died with the request.
    deaths: u8,
}

impl Unanswered {
    fn is_suspect(&self) -> bool {
        self.deaths >= SUSPECT_DEATHS
    }

    /// Returns the error for a request that is not sent to another worker.
    fn error_message(&self) -> String {
        let of_container = |id: &str| format!(" of container {}", id.escape_debug());
        format!(
            "{}{} failed: {} workers of sandboxer have died while they handled it, so it is not repeated; see sandboxer's \
             log for their exit statuses",
            self.frame.method().unwrap_or("a request").escape_debug(),
            self.frame.container().map(of_container).unwrap_or_default(),
            self.deaths,
        )
    }
}

impl Connection {
    /// Creates a connection, which the journal already names, from a non-blocking stream.
    pub fn new(id: u64, client: Stored, files: Files) -> Self {
        Self {
            id,
            client,
            received: files.received,
            from_client: Assembler::default(),
            to_client: files.answers,
            link: None,
            links: 0,
            unanswered: BTreeMap::new(),
            unanswered_bytes: 0,
        }
    }

    /// Continues a connection of another front, with its socket, the received bytes and the responses.
    pub fn reopen(
        id: u64,
        [client, received, answers]: [Stored; 3],
        recorded: &RecordedConnection,
        journal: &mut Journal,
        numbers: &mut Numbers,
    ) -> io::Result<Self> {
        let mut received = Received::reopen(received)?;
        if journal.reading() == id {
            received.empty(journal.pipe())?;
        }
        let bytes = received.content()?;
        let (mut to_client, answered) = Answers::reopen(answers)?;
        let mut assembler = Assembler::default();
        let answered = assembler.take(&answered).map_err(invalid)?;
        let whole: usize = answered.iter().map(|frame| frame.bytes().len()).sum();
        to_client.cut(whole)?;
        let mut connection = Self {
            id,
            client,
            received,
            from_client: Assembler::default(),
            to_client,
            link: None,
            links: 0,
            unanswered: BTreeMap::new(),
            unanswered_bytes: 0,
        };
        let answered: BTreeSet<u32> = answered.iter().map(Frame::stream).collect();
        for frame in connection.from_client.take(&bytes).map_err(invalid)? {
            if frame.kind() != REQUEST {
                return Err(io::ErrorKind::InvalidData.into());
            }
            if !answered.contains(&frame.stream()) {
                let known = recorded.requests.get(&frame.stream()).cloned();
                connection.accept(frame, known, journal, numbers);
            }
        }
        // The previous front may have been killed just before it did this.
        connection.refuse_deadly();
        Ok(connection)
    }

    /// Returns the journal's description of the connection.
    fn description(&self) -> RecordedConnection {
        let request = |(number, request): (&u32, &Unanswered)| {
            (request.stream, RecordedRequest { number: *number, deaths: request.deaths })
        };
        RecordedConnection {
            fds: [self.client.as_raw_fd(), self.received.as_raw_fd(), self.to_client.as_raw_fd()],
            requests: self.unanswered.iter().map(request).collect(),
        }
    }

    /// Replaces the connection's files by shorter ones if most of their bytes are no longer needed. They stay if there
    /// are no descriptors left.
    pub fn shorten(&mut self, journal: &mut Journal) {
        let length = self.received.length() + self.to_client.length();
        let rest = self.from_client.rest().len();
        let needed = self.unanswered_bytes + rest + self.to_client.waiting();
        if length < LONG || length < 4 * needed as u64 {
            return;
        }
        let mut received: Vec<u8> = Vec::with_capacity(needed);
        for request in self.unanswered.values() {
            let mut frame = request.frame.clone();
            frame.set_stream(request.stream);
            received.extend(frame.bytes());
        }
        received.extend(self.from_client.rest());
        let files = Received::create(&received)
            .and_then(|received| Ok((received, Answers::create(&self.to_client.unsent()?)?)));
        let Ok((received, answers)) = files else { return };
        // The old files are open until the journal names the new ones.
        let _old = (mem::replace(&mut self.received, received), mem::replace(&mut self.to_client, answers));
        journal.add(&Record::Connection { id: self.id, connection: self.description() });
    }

    /// Returns containerd's end.
    pub fn client(&self) -> BorrowedFd<'_> {
        self.client.as_fd()
    }

    /// Returns the front's end of the link.
    pub fn link(&self) -> Option<BorrowedFd<'_>> {
        self.link.as_ref().map(|link| link.stream.as_fd())
    }

    /// Links the connection to a worker, and sends all requests without a response, marked as repeated; suspects only
    /// if the worker already has them.
    pub fn set_link(&mut self, stream: UnixStream) {
        self.links += 1;
        self.link = Some(Link { stream, from_worker: Assembler::default(), to_worker: Outbox::default() });
        let due = self.unanswered.iter().filter(|(_, request)| request.sent || !request.is_suspect());
        let due: Vec<_> = due.map(|(number, _)| *number).collect();
        due.into_iter().for_each(|number| self.send(number));
    }

    /// Sends the worker a request that another worker may have received.
    pub fn send(&mut self, number: u32) {
        let (Some(link), Some(request)) = (&mut self.link, self.unanswered.get_mut(&number)) else { return };
        request.sent = true;
        let mut again = request.frame.clone();
        again.set_repeated(true);
        link.to_worker.push(again.into_bytes());
    }

    /// Returns the oldest suspect that can be sent to the worker.
    pub fn suspect(&self) -> Option<u32> {
        self.link.as_ref()?;
        let mut suspects =
            self.unanswered.iter().filter(|(_, request)| request.is_suspect() && !request.sent);
        suspects.next().map(|(number, _)| *number)
    }

    /// Returns whether a request has no response yet.
    pub fn awaits(&self, number: u32) -> bool {
        self.unanswered.contains_key(&number)
    }

    /// Returns whether the connection may have another link to the same worker.
    pub fn may_link(&self) -> bool {
        self.links < MAX_LINKS
    }

    /// Handles the end of the worker: forwards its remaining responses, then closes the link. `died`: the worker exited
    /// unexpectedly, possibly because of one of its requests.
    pub fn worker_exited(&mut self, scratch: &mut [u8], died: bool, journal: &mut Journal) {
        while self.read_link(scratch) == Side::Open {}
        self.link = None;
        self.links = 0;
        for request in self.unanswered.values_mut() {
            if mem::take(&mut request.sent) && died && request.frame.method() != Some(WAIT) {
                request.deaths += 1;
                let (connection, stream, deaths) = (self.id, request.stream, request.deaths);
                journal.add(&Record::Deaths { connection, stream, deaths });
            }
        }
        self.refuse_deadly();
    }

    /// Sends an error response for each request with which too many workers have died.
    fn refuse_deadly(&mut self) {
        let deadly = self.unanswered.iter().filter(|(_, request)| request.deaths >= MAX_DEATHS);
        let deadly: Vec<_> = deadly.map(|(number, _)| *number).collect();
        for request in deadly.iter().filter_map(|number| self.unanswered.remove(number)) {
            self.unanswered_bytes -= request.frame.bytes().len();
            let message = request.error_message();
            log!("{message}");
            self.to_client.push(Frame::error(request.stream, INTERNAL, &message).bytes());
        }
    }

    /// Returns the events to wait for on the connection and on its link.
    pub fn interest(&self) -> (EpollFlags, EpollFlags) {
        let flags = |read: bool, unwritten: usize| {
            let mut flags = EpollFlags::empty();
            flags.set(EpollFlags::EPOLLIN, read);
            flags.set(EpollFlags::EPOLLOUT, unwritten > 0);
            flags
        };
        let to_client = self.to_client.waiting();
        let Some(link) = &self.link else {
            return (flags(false, to_client), EpollFlags::empty());
        };
        let to_worker = link.to_worker.bytes();
        (flags(to_worker < MAX_BUFFERED_BYTES, to_client), flags(to_client < MAX_BUFFERED_BYTES, to_worker))
    }

    /// Reads from containerd, once.
    pub fn read_client(&mut self, scratch: &mut [u8], numbers: &mut Numbers, journal: &mut Journal) -> Side {
        if self.link.is_none() {
            return Side::Open;
        }
        let count = match self.received.read(&self.client, journal.pipe_of(self.id), scratch) {
            Ok(Some(count)) => count,
            Ok(None) => return Side::Gone,
            Err(error) => return close(&error),
        };
        let frames = match self.from_client.take(&scratch[..count]) {
            Ok(frames) => frames,
            Err(error) => return close(&error),
        };
        for frame in frames {
            if frame.kind() != REQUEST {
                return close(&"streaming requests are not supported");
            }
            if let Some(number) = self.accept(frame, None, journal, numbers)
                && let (Some(link), Some(request)) = (&mut self.link, self.unanswered.get_mut(&number))
            {
                request.sent = true;
                link.to_worker.push(request.frame.bytes().to_vec());
            }
        }
        Side::Open
    }

    /// Remembers a request until it is answered. Returns its number: the known one, or a new one, which is recorded. A
    /// request that exceeds the limit is answered at once.
    fn accept(
        &mut self,
        mut frame: Frame,
        known: Option<RecordedRequest>,
        journal: &mut Journal,
        numbers: &mut Numbers,
    ) -> Option<u32> {
        let stream = frame.stream();
        let bytes = self.unanswered_bytes + frame.bytes().len();
        if self.unanswered.len() >= MAX_UNANSWERED || bytes > MAX_UNANSWERED_BYTES {
            const WORDS: &str = "too many pending requests on this connection";
            self.to_client.push(Frame::error(stream, EXHAUSTED, WORDS).bytes());
            return None;
        }
        let RecordedRequest { number, deaths } = known.unwrap_or_else(|| {
            let number = numbers.next_free(|number| self.unanswered.contains_key(&number));
            journal.add(&Record::Request { connection: self.id, stream, number });
            RecordedRequest { number, deaths: 0 }
        });
        frame.set_repeated(false);
        frame.set_stream(number);
        self.unanswered_bytes = bytes;
        self.unanswered.insert(number, Unanswered { stream, frame, sent: false, deaths });
        Some(number)
    }

    /// Reads from the worker, once.
    pub fn read_link(&mut self, scratch: &mut [u8]) -> Side {
        let Some(link) = &mut self.link else { return Side::Gone };
        let Some(count) = read(&link.stream, scratch) else { return Side::Gone };
        let frames = match link.from_worker.take(&scratch[..count]) {
            Ok(frames) => frames,
            Err(error) => return close(&error),
        };
        for mut frame in frames.into_iter().filter(|frame| frame.kind() == RESPONSE) {
            // An unknown request was already answered.
            if let Some(request) = self.unanswered.remove(&frame.stream()) {
                self.unanswered_bytes -= request.frame.bytes().len();
                frame.set_stream(request.stream);
                self.to_client.push(frame.bytes());
            }
        }
        if count == 0 { Side::Idle } else { Side::Open }
    }

    /// Writes pending bytes to containerd.
    pub fn flush_client(&mut self) -> Side {
        side(self.to_client.flush(&self.client))
    }

    /// Writes pending bytes to the worker.
    pub fn flush_link(&mut self) -> Side {
        self.link.as_mut().map_or(Side::Open, |link| side(link.to_worker.flush(&link.stream)))
    }

    /// Closes the link.
    pub fn cut_link(&mut self) {
        drop(mem::take(&mut self.link));
    }
}

/// Reads once. Returns the number of bytes, 0 if there are none now; `None` at the end.
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

fn invalid(error: TooLong) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

fn side(done: io::Result<()>) -> Side {
    if done.is_ok() { Side::Open } else { Side::Gone }
}

fn close(why: &dyn std::fmt::Display) -> Side {
    log!("closing a task connection: {why}");
    Side::Gone
}
