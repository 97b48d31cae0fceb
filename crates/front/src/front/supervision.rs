//! The front's worker: start, messages, pings, exit.

use std::{
    io, mem,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    process::ExitStatus,
    rc::Rc,
    slice,
    time::{Duration, Instant},
};

use nix::{
    fcntl::{OFlag, open},
    sys::{
        epoll::{EpollEvent, EpollFlags},
        signal::Signal,
        stat::Mode,
    },
};
use sandboxer_base::failpoint::pass;
use sd_notify::NotifyState;

use crate::{
    connection::Side,
    control::{self, ANSWERS_PINGS, FOR_READING, Kind, Message, RELOADS, TASK_LISTENER},
    holder::UPGRADE,
    journal::Record,
    log::log,
    worker::{Pulse, Worker},
};

use super::{CONTROL, Entry, Front};

impl Front<'_> {
    pub(super) fn start_worker(&mut self) -> io::Result<()> {
        let (control, theirs) = control::pair()?;
        self.journal.add(&Record::Worker(Some(control.as_raw_fd())));
        let started = Worker::start(self.work.program, self.work.arguments, &theirs);
        let mut worker = match started {
            Ok(child) => Worker::new(child, control),
            Err(error) => {
                self.journal.add(&Record::Worker(None));
                return Err(error);
            }
        };
        pass(format_args!("the front has started a worker"));
        drop(theirs);
        for (key, entry) in &self.kept {
            worker.queue(Kind::Kept, key, &entry.note, entry.fds.clone());
        }
        let (reloads, stayed) = &self.reloads;
        worker.queue(Kind::Kept, RELOADS, format!("{reloads} {stayed}").as_bytes(), Vec::new());
        worker.queue(Kind::AllKept, "", self.identity.as_bytes(), Vec::new());
        self.epoll
            .add(worker.control(), EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT, CONTROL))?;
        self.worker = Some(worker);
        Ok(())
    }

    pub(super) fn pulse(&mut self) -> Option<&mut Pulse> {
        self.worker.as_mut()?.pulse.as_mut()
    }

    /// Sends the worker a ping; kills a worker that has not responded for too long, which is then replaced.
    pub(super) fn ping_worker(&mut self) {
        let silence = self.work.silence;
        let Some(worker) = &mut self.worker else { return };
        let Some(pulse) = &mut worker.pulse else { return };
        if pulse.ping() {
            worker.queue(Kind::Ping, "", &[], Vec::new());
            worker.flush();
            return self.watch_worker();
        }
        log!("worker has not responded for {silence:?}; killing and replacing it");
        worker.pulse = None;
        worker.signal(Signal::SIGKILL);
    }

    pub(super) fn read_worker(&mut self) {
        loop {
            let Some(worker) = &mut self.worker else { return };
            worker.flush();
            match control::peek(worker.control()) {
                Ok(Some(message)) => self.handle_next(message),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return self.watch_worker(),
                Ok(None) => {
                    // It is exiting, or has failed: in both cases it is replaced.
                    let _ = self.epoll.delete(worker.control());
                    return worker.signal(Signal::SIGKILL);
                }
                // It exited before it read everything; its own last messages follow.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
                Err(error) => {
                    log!("cannot parse a message of the worker: {error}");
                    let _ = control::skip(worker.control());
                }
            }
        }
    }

    /// Handles a message of the worker that has been looked at, then takes it from the socket: a front that is killed in between has it
    /// handled twice, which is the same as once.
    fn handle_next(&mut self, message: Message) {
        self.handle(message);
        pass(format_args!("the front has handled a message"));
        if let Some(worker) = &self.worker {
            let _ = control::skip(worker.control());
        }
    }

    pub(super) fn watch_worker(&mut self) {
        if let Some(worker) = &self.worker {
            let mut flags = EpollFlags::EPOLLIN;
            flags.set(EpollFlags::EPOLLOUT, worker.has_outgoing());
            let _ = self.epoll.modify(worker.control(), &mut EpollEvent::new(flags, CONTROL));
        }
    }

    pub(super) fn handle(&mut self, Message { kind, key, note, fds }: Message) {
        match kind {
            Kind::Keep => {
                self.record_kept(&key, &note, &fds);
                let fds: Vec<_> = fds.into_iter().map(Rc::new).collect();
                if let Some(listener) = fds.first().filter(|_| key.starts_with(TASK_LISTENER)) {
                    self.listen(listener.clone());
                }
                self.kept.insert(key, Entry { note, fds });
            }
            Kind::Forget => {
                if self.kept.contains_key(&key) {
                    self.journal.add(&Record::Forgotten(key.clone()));
                    self.kept.remove(&key);
                }
            }
            Kind::Open => self.open(key, note, fds),
            Kind::Ready => {
                if let Some(worker) = &mut self.worker {
                    worker.ready = Some(Instant::now());
                    worker.pulse = (note == ANSWERS_PINGS).then(|| Pulse::new(self.work.silence));
                }
                if !mem::replace(&mut self.was_ready, true) {
                    self.journal.add(&Record::Ready);
                    let _ = sd_notify::notify(&[NotifyState::Ready]);
                }
                let all: Vec<_> = self.connections.keys().copied().collect();
                all.into_iter().for_each(|number| self.link(number));
            }
            Kind::Pong => {
                if let Some(pulse) = self.pulse() {
                    pulse.answered();
                }
            }
            Kind::Kept | Kind::AllKept | Kind::Connection | Kind::Ping => {}
        }
    }

    /// Opens a FIFO, keeps it, and responds with it.
    pub(super) fn open(&mut self, key: String, note: Vec<u8>, fds: Vec<OwnedFd>) {
        let Ok([named, answer]) = <[OwnedFd; 2]>::try_from(fds) else { return };
        let mut flags = OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        flags.insert(if note == FOR_READING { OFlag::O_RDONLY } else { OFlag::O_RDWR });
        let opened = self.loose.take(&named, flags).map_or_else(
            || open(format!("/proc/self/fd/{}", named.as_raw_fd()).as_str(), flags, Mode::empty()),
            Ok,
        );
        let sent = match opened {
            Ok(opened) => {
                pass(format_args!("the front has opened a FIFO"));
                self.record_kept(&key, &note, slice::from_ref(&opened));
                let opened = Rc::new(opened);
                self.kept.insert(key, Entry { note, fds: vec![opened.clone()] });
                control::send(answer.as_fd(), Kind::Kept, "", &[], &[opened.as_fd()])
            }
            Err(error) => {
                let number = (error as i32).to_string();
                control::send(answer.as_fd(), Kind::Kept, "", number.as_bytes(), &[])
            }
        };
        if let Err(error) = sent {
            log!("cannot respond to the worker: {error}");
        }
    }

    fn record_kept(&mut self, key: &str, note: &[u8], fds: &[OwnedFd]) {
        let fds = fds.iter().map(AsRawFd::as_raw_fd).collect();
        self.journal.add(&Record::Kept { key: key.to_owned(), note: note.to_vec(), fds });
    }

    /// Handles the worker's exit. Returns an exit code if the front is to exit as well.
    pub(super) fn worker_ended(&mut self, status: ExitStatus) -> Option<u8> {
        // Its last messages are still valid.
        while let Some(worker) = &self.worker {
            match control::peek(worker.control()) {
                Ok(Some(message)) => self.handle_next(message),
                Ok(None) => break,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => drop(control::skip(worker.control())),
            }
        }
        self.journal.add(&Record::Worker(None));
        let worker = self.worker.take()?;
        self.relink = None;
        self.trial = None;
        self.suspects = true;
        let died = !self.ending && !self.replacing;
        let numbers: Vec<_> = self.connections.keys().copied().collect();
        for number in numbers {
            if let Some(linked) = self.connections.get_mut(&number) {
                linked.connection.worker_gone(&mut self.scratch, died, &mut self.journal);
            }
            self.settle(number, Side::Open);
        }
        if self.ending {
            return Some(0);
        }
        if let Some(code) = status.code().filter(|code| *code != 0 && !self.was_ready) {
            return Some(u8::try_from(code).ok().filter(|code| *code != UPGRADE).unwrap_or(1));
        }
        let pause = match mem::take(&mut self.replacing) {
            true if self.can_upgrade() => return Some(UPGRADE),
            true => Duration::ZERO,
            false => {
                let pause = self.back_off.after(worker.ready.map(|since| since.elapsed()));
                log!("worker exited ({status}); starting the next one in {pause:?}");
                pause
            }
        };
        self.due = Some(Instant::now() + pause);
        None
    }
}
