//! The front's worker: start, messages, pings, exit.

use std::{
    io, mem,
    os::fd::{AsFd, AsRawFd, OwnedFd, RawFd},
    process::ExitStatus,
    rc::Rc,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, OFlag, fcntl, open},
    sys::{
        epoll::{EpollEvent, EpollFlags},
        signal::Signal,
        stat::Mode,
    },
};
use sandboxer_base::failpoint::pass;

use crate::{
    connection::Side,
    control::{self, ANSWERS_PINGS, FOR_READING, Kind, Message, RELOADS, TASK_LISTENER},
    journal::Record,
    log::log,
    store::{self, Reserved, Stored},
    worker::{Pulse, Worker},
};

use super::{CONTROL, Entry, Front};

impl Front<'_> {
    pub(super) fn start_worker(&mut self) -> io::Result<()> {
        let (control, theirs) = control::pair()?;
        let control = Stored::new(control);
        self.journal.add(&Record::Worker(Some(control.as_raw_fd())));
        let started = Worker::start(self.work.program, self.work.arguments, &theirs);
        let mut worker = match started {
            Ok(child) => {
                self.journal.add(&Record::Process(child.id()));
                Worker::new(child, control)
            }
            Err(error) => {
                self.journal.add(&Record::Worker(None));
                return Err(error);
            }
        };
        pass(format_args!("the front has started a worker"));
        drop(theirs);
        for (key, entry) in &self.entries {
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

    /// Sends the worker a ping. Kills a worker that has not responded for too long, which is then replaced.
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
        worker.signal(Signal::SIGKILL);
    }

    pub(super) fn read_worker(&mut self) {
        loop {
            let Some(worker) = &mut self.worker else { return };
            worker.flush();
            match control::peek(worker.control()) {
                Ok(Some(message)) => self.handle_next(message),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return self.watch_worker(),
                Ok(None) if worker.is_orphan() => {
                    // All of the worker's descriptors are closed, so it has ended. If the front must end, too, its loop
                    // does that.
                    let _ = self.worker_ended(None);
                    return;
                }
                Ok(None) => {
                    // The worker is exiting or has failed. In both cases it is replaced.
                    let _ = self.epoll.delete(worker.control());
                    return worker.signal(Signal::SIGKILL);
                }
                // The worker exited before it read everything; its own last messages follow.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
                Err(error) => {
                    log!("cannot parse a message of the worker: {error}");
                    let _ = control::skip(worker.control());
                }
            }
        }
    }

    /// Handles a message of the worker that was peeked at, then removes it from the socket. If the front is killed in
    /// between, the message is handled twice, which has the same effect as once.
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
                let fds: Vec<_> = fds.into_iter().map(|fd| self.files.store(fd)).collect();
                self.record_entry(&key, &note, fds.iter().map(AsRawFd::as_raw_fd).collect());
                if let Some(listener) = fds.first().filter(|_| key.starts_with(TASK_LISTENER)) {
                    self.listen(listener.clone());
                }
                self.entries.insert(key, Entry { note, fds });
            }
            Kind::Forget => {
                if self.entries.contains_key(&key) {
                    self.journal.add(&Record::Forgotten(key.clone()));
                    self.entries.remove(&key);
                }
            }
            Kind::Open => self.open(key, note, fds),
            Kind::Ready => {
                if !mem::replace(&mut self.was_ready, true) {
                    self.journal.add(&Record::Ready);
                    store::tell("READY=1");
                }
                let Some(worker) = self.worker.as_mut().filter(|worker| !worker.is_orphan()) else { return };
                worker.ready = Some(Instant::now());
                worker.pulse = (note == ANSWERS_PINGS).then(|| Pulse::new(self.work.silence));
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
    fn open(&mut self, key: String, note: Vec<u8>, fds: Vec<OwnedFd>) {
        let Ok([named, answer]) = <[OwnedFd; 2]>::try_from(fds) else { return };
        let mut flags = OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        flags.insert(if note == FOR_READING { OFlag::O_RDONLY } else { OFlag::O_RDWR });
        let sent = match self.opened(key, note, &named, flags) {
            Ok(opened) => control::send(answer.as_fd(), Kind::Kept, "", &[], &[opened.as_fd()]),
            Err(error) => {
                let number = (error as i32).to_string();
                control::send(answer.as_fd(), Kind::Kept, "", number.as_bytes(), &[])
            }
        };
        if let Err(error) = sent {
            log!("cannot respond to the worker: {error}");
        }
    }

    /// Returns the FIFO that `named` refers to. It is recorded before it is opened: if this process is killed
    /// meanwhile, the next one has it under its key. A FIFO that is kept under the key is not opened again: the process
    /// at the other end must not see it closed.
    fn opened(
        &mut self,
        key: String,
        note: Vec<u8>,
        named: &OwnedFd,
        flags: OFlag,
    ) -> Result<Rc<Stored>, Errno> {
        let wanted = |known: &Rc<Stored>| {
            fcntl(known, FcntlArg::F_GETFL).is_ok_and(|open| {
                OFlag::from_bits_truncate(open) & OFlag::O_ACCMODE == flags & OFlag::O_ACCMODE
            })
        };
        let mut of_entry = self.entries.get(&key).into_iter().flat_map(|entry| &entry.fds);
        if let Some(known) =
            self.files.of_same_file(named).find(|known| of_entry.any(|fd| Rc::ptr_eq(fd, known)))
            && wanted(&known)
        {
            return Ok(known);
        }
        let number =
            Reserved::new().map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or_default()))?;
        self.record_entry(&key, &note, vec![number.as_raw_fd()]);
        pass(format_args!("the front is about to open a FIFO"));
        let path = format!("/proc/self/fd/{}", named.as_raw_fd());
        let opened = number.fill(|| open(path.as_str(), flags, Mode::empty()));
        pass(format_args!("the front has opened a FIFO"));
        match opened {
            Ok(opened) => {
                let opened = self.files.add(opened);
                self.entries.insert(key, Entry { note, fds: vec![opened.clone()] });
                Ok(opened)
            }
            Err(error) => {
                self.journal.add(&Record::Forgotten(key.clone()));
                self.entries.remove(&key);
                Err(error)
            }
        }
    }

    fn record_entry(&mut self, key: &str, note: &[u8], fds: Vec<RawFd>) {
        self.journal.add(&Record::Kept { key: key.to_owned(), note: note.to_vec(), fds });
    }

    /// Handles the worker's exit. Without a status, the worker was the child of an earlier front, or counts as gone.
    /// Returns an exit code if the front must exit as well.
    pub(super) fn worker_ended(&mut self, status: Option<ExitStatus>) -> Option<u8> {
        // The worker's last messages are still valid.
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
        let (ready, orphan) = (worker.ready, worker.is_orphan());
        let _ = self.epoll.delete(worker.control());
        // Dropped before an upgrade, which would leave the control socket in the store for good.
        let child = worker.into_child();
        if status.is_none() {
            // A child is reaped when it ends after all.
            self.stuck.extend(child);
        }
        self.relink = None;
        self.trial = None;
        self.has_suspects = true;
        let died = !self.is_ending && !self.is_replacing;
        let numbers: Vec<_> = self.connections.keys().copied().collect();
        for number in numbers {
            if let Some(linked) = self.connections.get_mut(&number) {
                linked.connection.worker_exited(&mut self.scratch, died, &mut self.journal);
            }
            self.settle(number, Side::Open);
        }
        if self.is_ending {
            return Some(0);
        }
        if let Some(code) =
            status.and_then(|status| status.code()).filter(|code| *code != 0 && !self.was_ready)
        {
            return Some(u8::try_from(code).unwrap_or(1));
        }
        let pause = if mem::take(&mut self.is_replacing) {
            self.upgrade();
            Duration::ZERO
        } else {
            let pause = self.back_off.after(ready.map(|since| since.elapsed()));
            match status {
                Some(status) => log!("worker exited ({status}); starting the next one in {pause:?}"),
                None if orphan => log!("the worker of the front before has ended; starting the next one"),
                None => {}
            }
            pause
        };
        self.due = Some(Instant::now() + pause);
        None
    }
}
