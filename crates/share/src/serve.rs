//! Requests from whichever daemon is connected, served by a few threads; each carried out once, however
//! often it comes.

use std::{
    fs::File,
    io::{self, Read, Write},
    net::Shutdown,
    os::unix::net::{UnixListener, UnixStream},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
};

use anyhow::Context;
use sandboxer_protocol::share::{FRAME_HEAD, Head, SLOTS, frame_head, opcode, read_frame_head};

use crate::{
    confine,
    files::{self, Files},
    jail::Entered,
};

/// Requests that are carried out at a time: while some wait for a slow disk, others are served.
const THREADS: usize = 4;
/// Of a thread, bytes.
const STACK: usize = 256 << 10;

/// Serves every daemon that connects, one after the other.
pub fn serve(listener: &UnixListener, nowhere: File, entered: Entered) -> anyhow::Result<()> {
    let quiet = nowhere.try_clone().context("cannot duplicate a descriptor")?;
    let state = Arc::new(State {
        files: Files::open(nowhere)?,
        lines: Lines::default(),
        slots: [const { Mutex::new(Slot::Unused) }; SLOTS],
    });
    let (restricted, all_restricted) = std::sync::mpsc::sync_channel(THREADS);
    for _ in 0..THREADS {
        let (state, restricted) = (state.clone(), restricted.clone());
        let work = move || {
            let done = confine::restrict_calls();
            let may_serve = done.is_ok();
            // Whoever waits for it learns of a failure by what is sent.
            let _ = restricted.send(done);
            if may_serve {
                state.work();
            }
        };
        thread::Builder::new().stack_size(STACK).spawn(work).context("cannot start a thread")?;
    }
    for _ in 0..THREADS {
        all_restricted.recv().context("a thread ended")??;
    }
    entered.announce().context("cannot tell that it serves")?;
    // What it might say from here on, nobody hears.
    rustix::stdio::dup2_stdin(&quiet)?;
    rustix::stdio::dup2_stdout(&quiet)?;
    rustix::stdio::dup2_stderr(&quiet)?;
    confine::restrict_calls()?;
    loop {
        let (stream, _) = listener.accept().context("cannot accept a daemon")?;
        state.lines.next(Line::new(stream).context("cannot talk to a daemon")?);
    }
}

struct State {
    files: Files,
    lines: Lines,
    slots: [Mutex<Slot>; SLOTS],
}

/// The last request of a slot.
enum Slot {
    Unused,
    /// It is being carried out; its answer goes to the daemon that asked last.
    Working {
        unique: u64,
        to: Arc<Line>,
    },
    /// It has been carried out. `None`: it may be again, and its answer would be too large to keep.
    Served {
        unique: u64,
        answer: Option<Vec<u8>>,
    },
}

impl State {
    /// A thread's whole life.
    fn work(&self) {
        let (mut request, mut room) = (files::room(), files::room());
        loop {
            let line = self.lines.current();
            let asked = line.receive(&mut request);
            let served =
                asked.and_then(|(slot, length)| self.serve(&line, slot, &mut request[..length], &mut room));
            if served.is_err() {
                self.lines.end(&line);
            }
        }
    }

    /// Carries a request out, unless that has been done. An error: what came is no request that could be.
    fn serve(&self, line: &Arc<Line>, number: u32, request: &mut [u8], room: &mut [u8]) -> io::Result<()> {
        let rubbish = || io::Error::from(io::ErrorKind::InvalidData);
        let head = Head::of(request).ok_or_else(rubbish)?;
        let slot =
            usize::try_from(number).ok().and_then(|number| self.slots.get(number)).ok_or_else(rubbish)?;
        {
            let mut slot = lock(slot);
            match &mut *slot {
                Slot::Working { unique, to } if *unique == head.unique => {
                    *to = line.clone();
                    return Ok(());
                }
                // Its answer isn't there yet: nobody can have taken it.
                Slot::Working { .. } => return Err(rubbish()),
                Slot::Served { unique, answer: Some(answer) } if *unique == head.unique => {
                    return line.send(number, answer);
                }
                _ => *slot = Slot::Working { unique: head.unique, to: line.clone() },
            }
        }
        let answer = self.files.answer(head, request, room);
        let kept = (head.opcode != opcode::READ).then(|| answer.to_vec());
        let served = Slot::Served { unique: head.unique, answer: kept };
        let before = std::mem::replace(&mut *lock(slot), served);
        if let Slot::Working { to, .. } = before {
            // A daemon that is gone gets it never, the next one when it asks.
            let _ = to.send(number, answer);
        }
        Ok(())
    }
}

/// A connected daemon.
struct Line {
    // Held while a message is moved: two halves of two messages would make neither.
    incoming: Mutex<UnixStream>,
    outgoing: Mutex<UnixStream>,
    whole: UnixStream,
}

impl Line {
    fn new(stream: UnixStream) -> io::Result<Arc<Self>> {
        let (incoming, outgoing) = (Mutex::new(stream.try_clone()?), Mutex::new(stream.try_clone()?));
        Ok(Arc::new(Self { incoming, outgoing, whole: stream }))
    }

    /// Waits for a request; its slot and its length.
    fn receive(&self, request: &mut [u8]) -> io::Result<(u32, usize)> {
        let mut incoming = lock(&self.incoming);
        let mut head = [0; FRAME_HEAD];
        incoming.read_exact(&mut head)?;
        let (slot, length) = read_frame_head(head).ok_or(io::ErrorKind::InvalidData)?;
        incoming.read_exact(&mut request[..length])?;
        Ok((slot, length))
    }

    fn send(&self, slot: u32, answer: &[u8]) -> io::Result<()> {
        let mut outgoing = lock(&self.outgoing);
        outgoing.write_all(&frame_head(slot, answer))?;
        outgoing.write_all(answer)
    }
}

/// Which daemon is served.
#[derive(Default)]
struct Lines {
    current: Mutex<Option<Arc<Line>>>,
    changed: Condvar,
}

impl Lines {
    /// Waits until there is one.
    fn current(&self) -> Arc<Line> {
        let mut current = lock(&self.current);
        loop {
            if let Some(line) = &*current {
                return line.clone();
            }
            current = self.changed.wait(current).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn next(&self, line: Arc<Line>) {
        let before = lock(&self.current).replace(line);
        if let Some(before) = before {
            let _ = before.whole.shutdown(Shutdown::Both);
        }
        self.changed.notify_all();
    }

    /// Hangs up, if that has not been done.
    fn end(&self, line: &Arc<Line>) {
        let _ = line.whole.shutdown(Shutdown::Both);
        let mut current = lock(&self.current);
        if current.as_ref().is_some_and(|current| Arc::ptr_eq(current, line)) {
            *current = None;
        }
    }
}

/// A thread that panics ends the process, so a lock is never poisoned.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
