//! Requests that arrive as writes to a disk, and responses that are read from it.
//!
//! ```text
//!  VMM ──▶ receiver ──write──▶ slot ◀──────────▶ a worker, once the response is read
//!   ▲          └─────read────▶  │                    │
//!   └──────── response ◀────────┴────────────────────┘
//! ```
//!
//! A read of a response that is not ready in time receives [`LATER`] and is repeated: a VMM waits for all requests of
//! its disks when it pauses or gets another disk, and one hung volume must not block that. A VMM may split a read: if
//! any part was deferred, the part with the state is [`LATER`] as well.
//!
//! A guest can make this process hold two messages for each of [`SLOTS`] slots.

use std::{
    collections::VecDeque,
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use anyhow::Context;
use rustix::net::sockopt::set_socket_send_buffer_size;
use sandboxer_protocol::share::{
    Head, SLOTS,
    disk::{ANSWER, ANSWER_LENGTH, DONE, FIRST, LATER, MESSAGE, REQUEST, SECTOR, SLOT, STATE},
};

use crate::{
    files::Files,
    nbd::{self, Kind},
};

/// How long a read may wait for the response.
const MAX_WAIT: Duration = Duration::from_secs(1);
/// The most waiting reads of one slot's response: a VMM splits a guest's read into a few.
const MAX_WAITING: usize = 16;
/// The requested size of the socket's buffer, bytes; the system sets less. A message should need few writes.
const SEND_BUFFER: usize = 1 << 20;

static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// The disk, with the layout of [`sandboxer_protocol::share::disk`].
pub struct Mailbox {
    files: Arc<Files>,
    slots: [Mutex<Slot>; SLOTS],
    pending: Mutex<VecDeque<usize>>,
    work_added: Condvar,
}

#[derive(Default)]
struct Slot {
    phase: Phase,
    request: Vec<u8>,
    /// The buffer of the response. After the first response it has the length of the longest one.
    answer: Vec<u8>,
    waiting: Vec<Waiting>,
    /// Whether a part of a response was deferred, but not the part with the state: the whole response must be read
    /// again.
    torn: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Phase {
    /// No request is written yet.
    #[default]
    Unused,
    /// A request is being written, or is complete.
    Asked,
    /// A worker carries out the request.
    Working,
    /// The response is ready.
    Answered,
}

/// A read that waits for the response.
struct Waiting {
    connection: Arc<Connection>,
    part: Part,
    since: Instant,
}

/// A part of a response, which is read.
#[derive(Debug, Clone, Copy)]
struct Part {
    cookie: u64,
    offset: usize,
    length: usize,
}

impl Part {
    /// Returns whether the part contains the state.
    fn has_state(&self) -> bool {
        (self.offset..self.offset + self.length).contains(&STATE)
    }
}

/// The connection to the VMM. The lock is held while a message is sent, so that messages are not mixed.
struct Connection(Mutex<UnixStream>);

impl Mailbox {
    pub fn new(files: Arc<Files>) -> Self {
        Self {
            files,
            slots: [const { Mutex::new(Slot::new()) }; SLOTS],
            pending: Mutex::default(),
            work_added: Condvar::new(),
        }
    }

    /// Serves a connected VMM until it disconnects.
    pub fn serve(&self, mut stream: UnixStream) -> anyhow::Result<()> {
        // With a smaller buffer, sending is slower but still works.
        let _ = set_socket_send_buffer_size(&stream, SEND_BUFFER);
        if !nbd::negotiate(&mut stream).context("cannot negotiate the disk")? {
            return Ok(());
        }
        stream.set_read_timeout(Some(MAX_WAIT / 2)).context("cannot set a read timeout")?;
        let connection =
            Arc::new(Connection(Mutex::new(stream.try_clone().context("cannot duplicate a connection")?)));
        let served = self.receive(&mut stream, &connection);
        for slot in &self.slots {
            lock(slot).waiting.clear();
        }
        served.context("connection to the VMM ended")
    }

    fn receive(&self, stream: &mut UnixStream, connection: &Arc<Connection>) -> io::Result<()> {
        let mut checked = Instant::now();
        loop {
            let mut head = [0; nbd::REQUEST];
            fill(stream, &mut head, || self.defer())?;
            if checked.elapsed() >= MAX_WAIT / 2 {
                checked = Instant::now();
                self.defer()?;
            }
            let request = nbd::Request::parse(&head).ok_or(io::ErrorKind::InvalidData)?;
            let place = usize::try_from(request.offset).ok().map(|offset| (offset / SLOT, offset % SLOT));
            let slot = place.and_then(|(number, at)| Some((number, self.slots.get(number)?, at)));
            match (request.kind, slot) {
                (Kind::Write, Some((_, slot, at)))
                    if at + request.length <= REQUEST.next_multiple_of(SECTOR) =>
                {
                    let errno = take(stream, &mut lock(slot), at, request.length)?;
                    connection.send(&[&nbd::reply(request.cookie, errno)])?;
                }
                (Kind::Write, _) => {
                    discard(stream, request.length)?;
                    connection.send(&[&nbd::reply(request.cookie, libc::EINVAL)])?;
                }
                (Kind::Read, Some((number, slot, at)))
                    if at >= ANSWER && at - ANSWER + request.length <= ANSWER_LENGTH =>
                {
                    let part = Part { cookie: request.cookie, offset: at - ANSWER, length: request.length };
                    self.read(number, &mut lock(slot), part, connection)?;
                }
                // Scanners for partitions find an empty disk.
                (Kind::Read, _) => connection.send_zeroes(request.cookie, request.length)?,
                (Kind::Disconnect, _) => return Ok(()),
                (Kind::Other, _) => connection.send(&[&nbd::reply(request.cookie, libc::EINVAL)])?,
            }
        }
    }

    /// Handles a read of a response: sends the response if it is ready, otherwise the read waits. The first read starts
    /// the work.
    fn read(
        &self,
        number: usize,
        slot: &mut Slot,
        part: Part,
        connection: &Arc<Connection>,
    ) -> io::Result<()> {
        if part.has_state() && std::mem::take(&mut slot.torn) {
            return connection.send_later(part);
        }
        match slot.phase {
            Phase::Unused => return connection.send_zeroes(part.cookie, part.length),
            Phase::Answered => return connection.send_part(&mut slot.answer, part),
            Phase::Working if slot.waiting.len() >= MAX_WAITING => {
                return connection.send(&[&nbd::reply(part.cookie, libc::EIO)]);
            }
            Phase::Working => {}
            Phase::Asked => {
                slot.phase = Phase::Working;
                lock(&self.pending).push_back(number);
                self.work_added.notify_one();
            }
        }
        slot.waiting.push(Waiting { connection: Arc::clone(connection), part, since: Instant::now() });
        Ok(())
    }

    /// Sends [`LATER`] to reads that have waited too long.
    fn defer(&self) -> io::Result<()> {
        for slot in &self.slots {
            let mut slot = lock(slot);
            if slot.waiting.iter().any(|waiting| waiting.since.elapsed() >= MAX_WAIT) {
                slot.torn = !slot.waiting.iter().any(|waiting| waiting.part.has_state());
                for Waiting { connection, part, .. } in slot.waiting.drain(..) {
                    connection.send_later(part)?;
                }
            }
        }
        Ok(())
    }

    /// Runs a worker forever.
    pub fn work(&self) {
        loop {
            let number = self.next();
            let Some(slot) = self.slots.get(number) else { continue };
            let (request, mut answer) = {
                let mut slot = lock(slot);
                (std::mem::take(&mut slot.request), std::mem::take(&mut slot.answer))
            };
            if answer.is_empty() {
                // Pages stay unused until they are needed: most responses are short.
                answer = vec![0; ANSWER_LENGTH];
            }
            self.carry_out(&request, &mut answer);
            let mut slot = lock(slot);
            (slot.request, slot.answer, slot.phase) = (request, answer, Phase::Answered);
            let Slot { answer, waiting, .. } = &mut *slot;
            for Waiting { connection, part, .. } in waiting.drain(..) {
                // Fails if the VMM has disconnected.
                let _ = connection.send_part(answer, part);
            }
        }
    }

    fn next(&self) -> usize {
        let mut pending = lock(&self.pending);
        loop {
            match pending.pop_front() {
                Some(number) => return number,
                None => pending = self.work_added.wait(pending).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Writes the response to `request` to the place where it is read.
    fn carry_out(&self, request: &[u8], answer: &mut [u8]) {
        let request = Head::begins(request).and_then(|length| request.get(..length));
        let head = request.and_then(Head::parse);
        let length = match (head, request) {
            (Some(head), Some(request)) => self.files.answer(head, request, &mut answer[MESSAGE..]).len(),
            _ => 0,
        };
        if length == 0 {
            answer[MESSAGE..MESSAGE + 4].fill(0);
        }
        answer[STATE..STATE + 4].copy_from_slice(&DONE.to_le_bytes());
    }
}

impl Slot {
    const fn new() -> Self {
        Self {
            phase: Phase::Unused,
            request: Vec::new(),
            answer: Vec::new(),
            waiting: Vec::new(),
            torn: false,
        }
    }
}

impl Connection {
    fn send(&self, pieces: &[&[u8]]) -> io::Result<()> {
        let mut stream = lock(&self.0);
        pieces.iter().try_for_each(|piece| stream.write_all(piece))
    }

    fn send_zeroes(&self, cookie: u64, length: usize) -> io::Result<()> {
        let mut pieces = vec![&ZEROES[..]; length / ZEROES.len()];
        pieces.push(&ZEROES[..length % ZEROES.len()]);
        let reply = nbd::reply(cookie, 0);
        pieces.insert(0, &reply);
        self.send(&pieces)
    }

    fn send_part(&self, answer: &mut [u8], part: Part) -> io::Result<()> {
        let reply = nbd::reply(part.cookie, 0);
        if part.offset == FIRST {
            // The header fits directly before the response, so everything is sent in one write.
            answer[FIRST - nbd::REPLY..FIRST].copy_from_slice(&reply);
            return self.send(&[&answer[FIRST - nbd::REPLY..FIRST + part.length]]);
        }
        self.send(&[&reply, &answer[part.offset..part.offset + part.length]])
    }

    fn send_later(&self, part: Part) -> io::Result<()> {
        let mut answer = vec![0; part.length];
        if let Some(state) = STATE.checked_sub(part.offset).and_then(|at| answer.get_mut(at..at + 4)) {
            state.copy_from_slice(&LATER.to_le_bytes());
        }
        self.send(&[&nbd::reply(part.cookie, 0), &answer])
    }
}

/// Receives `length` bytes of a request at offset `at`; returns 0, or an error number if the slot is busy.
fn take(stream: &mut UnixStream, slot: &mut Slot, at: usize, length: usize) -> io::Result<i32> {
    if slot.phase == Phase::Working {
        discard(stream, length)?;
        return Ok(libc::EIO);
    }
    (slot.phase, slot.torn) = (Phase::Asked, false);
    if slot.request.len() < at + length {
        slot.request.resize(at + length, 0);
    }
    fill(stream, &mut slot.request[at..at + length], || Ok(()))?;
    Ok(0)
}

fn discard(stream: &mut UnixStream, mut length: usize) -> io::Result<()> {
    let mut scratch = [0; 16 << 10];
    while length > 0 {
        let some = length.min(scratch.len());
        fill(stream, &mut scratch[..some], || Ok(()))?;
        length -= some;
    }
    Ok(())
}

/// Fills `buffer`; calls `meanwhile` whenever no bytes arrive for a while.
fn fill(
    stream: &mut UnixStream,
    buffer: &mut [u8],
    meanwhile: impl Fn() -> io::Result<()>,
) -> io::Result<()> {
    let mut filled = 0;
    while filled < buffer.len() {
        match stream.read(&mut buffer[filled..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => meanwhile()?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Locks a mutex. It is never poisoned: a thread that panics ends the process.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
