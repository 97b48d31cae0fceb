//! Requests that come as writes to a disk, and answers that are read from it.
//!
//! ```text
//!  VMM ──▶ receiver ──write──▶ slot ◀──────────▶ a worker, once the answer is read
//!   ▲          └─────read────▶  │                    │
//!   └──────── the answer ◀──────┴────────────────────┘
//! ```
//!
//! A read whose answer takes long is told so ([`LATER`]) and comes again: a VMM waits for all its disks' requests
//! when it pauses or gets another disk, and one volume that hangs must not hold it up. A VMM may split a read: if any part
//! of one was put off, the part with the state says so.
//!
//! What a guest can have held here is two messages for each of [`SLOTS`] slots.

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

/// How long a read may wait for its answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// Reads of one slot's answer that wait at a time: a VMM splits one of a guest's into few.
const MAX_WAITING: usize = 16;
/// What is asked for of the socket's buffer, bytes; the system gives less. A message should pass at few goes.
const SEND_BUFFER: usize = 1 << 20;

static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// The disk. Its parts are as [`sandboxer_protocol::share::disk`] says.
pub struct Mailbox {
    files: Arc<Files>,
    slots: [Mutex<Slot>; SLOTS],
    asked: Mutex<VecDeque<usize>>,
    news: Condvar,
}

#[derive(Default)]
struct Slot {
    phase: Phase,
    request: Vec<u8>,
    /// As long as an answer can be, once there was one.
    answer: Vec<u8>,
    waiting: Vec<Waiting>,
    /// A part of an answer was put off, and not the one that says so: the whole is to be read again.
    torn: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Phase {
    /// Nothing was ever asked.
    #[default]
    Unused,
    /// A request is there, or comes.
    Asked,
    /// A worker has it.
    Working,
    /// The answer is there.
    Answered,
}

/// A read that waits for the answer.
struct Waiting {
    line: Arc<Line>,
    part: Part,
    since: Instant,
}

/// What of an answer is read.
#[derive(Debug, Clone, Copy)]
struct Part {
    cookie: u64,
    offset: usize,
    length: usize,
}

impl Part {
    /// Returns whether it is what says if the answer is there.
    fn has_state(&self) -> bool {
        (self.offset..self.offset + self.length).contains(&STATE)
    }
}

/// To the VMM. Held while a message is sent: two halves of two messages would make neither.
struct Line(Mutex<UnixStream>);

impl Mailbox {
    pub fn new(files: Arc<Files>) -> Self {
        Self {
            files,
            slots: [const { Mutex::new(Slot::new()) }; SLOTS],
            asked: Mutex::default(),
            news: Condvar::new(),
        }
    }

    /// Serves a VMM that has connected until it is gone.
    pub fn serve(&self, mut stream: UnixStream) -> anyhow::Result<()> {
        // Less is slower, and no more than that.
        let _ = set_socket_send_buffer_size(&stream, SEND_BUFFER);
        if !nbd::negotiate(&mut stream).context("cannot agree on the disk")? {
            return Ok(());
        }
        stream.set_read_timeout(Some(PATIENCE / 2)).context("cannot bound a wait")?;
        let line = Arc::new(Line(Mutex::new(stream.try_clone().context("cannot duplicate a connection")?)));
        let served = self.receive(&mut stream, &line);
        for slot in &self.slots {
            lock(slot).waiting.clear();
        }
        served.context("the VMM's connection ended")
    }

    fn receive(&self, stream: &mut UnixStream, line: &Arc<Line>) -> io::Result<()> {
        let mut looked = Instant::now();
        loop {
            let mut head = [0; nbd::REQUEST];
            fill(stream, &mut head, || self.put_off())?;
            if looked.elapsed() >= PATIENCE / 2 {
                looked = Instant::now();
                self.put_off()?;
            }
            let request = nbd::Request::of(&head).ok_or(io::ErrorKind::InvalidData)?;
            let place = usize::try_from(request.offset).ok().map(|offset| (offset / SLOT, offset % SLOT));
            let slot = place.and_then(|(number, at)| Some((number, self.slots.get(number)?, at)));
            match (request.kind, slot) {
                (Kind::Write, Some((_, slot, at)))
                    if at + request.length <= REQUEST.next_multiple_of(SECTOR) =>
                {
                    let errno = take(stream, &mut lock(slot), at, request.length)?;
                    line.send(&[&nbd::reply(request.cookie, errno)])?;
                }
                (Kind::Write, _) => {
                    discard(stream, request.length)?;
                    line.send(&[&nbd::reply(request.cookie, libc::EINVAL)])?;
                }
                (Kind::Read, Some((number, slot, at)))
                    if at >= ANSWER && at - ANSWER + request.length <= ANSWER_LENGTH =>
                {
                    let part = Part { cookie: request.cookie, offset: at - ANSWER, length: request.length };
                    self.read(number, &mut lock(slot), part, line)?;
                }
                // Who looks what is on the disk finds nothing.
                (Kind::Read, _) => line.send_zeroes(request.cookie, request.length)?,
                (Kind::Disconnect, _) => return Ok(()),
                (Kind::Other, _) => line.send(&[&nbd::reply(request.cookie, libc::EINVAL)])?,
            }
        }
    }

    /// A read of an answer: sent if it is there, else it waits for it; the first has it made.
    fn read(&self, number: usize, slot: &mut Slot, part: Part, line: &Arc<Line>) -> io::Result<()> {
        if part.has_state() && std::mem::take(&mut slot.torn) {
            return line.send_later(part);
        }
        match slot.phase {
            Phase::Unused => return line.send_zeroes(part.cookie, part.length),
            Phase::Answered => return line.send_part(&mut slot.answer, part),
            Phase::Working if slot.waiting.len() >= MAX_WAITING => {
                return line.send(&[&nbd::reply(part.cookie, libc::EIO)]);
            }
            Phase::Working => {}
            Phase::Asked => {
                slot.phase = Phase::Working;
                lock(&self.asked).push_back(number);
                self.news.notify_one();
            }
        }
        slot.waiting.push(Waiting { line: Arc::clone(line), part, since: Instant::now() });
        Ok(())
    }

    /// Tells reads that have waited long that their answers come later.
    fn put_off(&self) -> io::Result<()> {
        for slot in &self.slots {
            let mut slot = lock(slot);
            if slot.waiting.iter().any(|waiting| waiting.since.elapsed() >= PATIENCE) {
                slot.torn = !slot.waiting.iter().any(|waiting| waiting.part.has_state());
                for Waiting { line, part, .. } in slot.waiting.drain(..) {
                    line.send_later(part)?;
                }
            }
        }
        Ok(())
    }

    /// A worker's whole life.
    pub fn work(&self) {
        loop {
            let number = self.next();
            let Some(slot) = self.slots.get(number) else { continue };
            let (mut request, mut answer) = {
                let mut slot = lock(slot);
                (std::mem::take(&mut slot.request), std::mem::take(&mut slot.answer))
            };
            if answer.is_empty() {
                // Untouched until it is used: most answers are short.
                answer = vec![0; ANSWER_LENGTH];
            }
            self.carry_out(&mut request, &mut answer);
            let mut slot = lock(slot);
            (slot.request, slot.answer, slot.phase) = (request, answer, Phase::Answered);
            let Slot { answer, waiting, .. } = &mut *slot;
            for Waiting { line, part, .. } in waiting.drain(..) {
                // A VMM that is gone gets it never.
                let _ = line.send_part(answer, part);
            }
        }
    }

    fn next(&self) -> usize {
        let mut asked = lock(&self.asked);
        loop {
            match asked.pop_front() {
                Some(number) => return number,
                None => asked = self.news.wait(asked).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Puts the answer to `request` where it is read.
    fn carry_out(&self, request: &mut [u8], answer: &mut [u8]) {
        let request = Head::begins(request).and_then(|length| request.get_mut(..length));
        let head = request.as_deref().and_then(Head::of);
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

impl Line {
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
            // There is room for it right before, so all goes at once.
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

/// Takes `length` bytes of a request that belong at `at`; an error number if that can't be.
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

/// Reads as many bytes as there is room for; whenever there are none for a while, `meanwhile`.
fn fill(stream: &mut UnixStream, room: &mut [u8], meanwhile: impl Fn() -> io::Result<()>) -> io::Result<()> {
    let mut filled = 0;
    while filled < room.len() {
        match stream.read(&mut room[filled..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => meanwhile()?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Returns a thread that panics ends the process, so a lock is never poisoned.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
