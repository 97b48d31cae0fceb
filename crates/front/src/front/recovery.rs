//! The recovery of a front where another one was killed, or has executed another build.
//!
//! A front takes over the descriptors that the journal names. Until it has succeeded, it removes nothing from the
//! store: it may fail at each step, and the next front finds everything unchanged. Other descriptors in the store were
//! created just before the kill, for actions that did not happen, and are closed.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::fd::{BorrowedFd, RawFd},
    rc::Rc,
};

use nix::{
    fcntl::{FcntlArg, fcntl},
    sys::{
        epoll::{EpollEvent, EpollFlags},
        socket::{Shutdown, shutdown},
    },
};
use sandboxer_base::failpoint::{fail, pass};

use super::{CONTROL, Entry, Front, FrontError, Work, at, system};
use crate::{
    connection::{Connection, Numbers, Side},
    journal::{Journal, Pipe, Record, RecordedEntry, RecordedState},
    log::log,
    memory_file::MemoryFile,
    store::{self, Left, Stored},
    worker::Worker,
};

impl<'a> Front<'a> {
    /// Continues from the state that an earlier front left in the store; `None` if there was no front.
    pub(super) fn recover_from(work: Work<'a>, left: &Left) -> Result<Option<Self>, FrontError> {
        // The last journal is complete: it was completed before it was put into the store.
        let Some((generation, journal)) = left.journals.last_key_value() else { return Ok(None) };
        let (front, taken) = Self::recover(work, *journal)?;
        left.close_but(&taken, Some(*generation));
        Ok(Some(front))
    }

    /// Creates a front from a journal. Also returns the descriptors that it has taken over.
    pub(super) fn recover(work: Work<'a>, journal: RawFd) -> Result<(Self, BTreeSet<RawFd>), FrontError> {
        at("the front takes over the journal", "take over the journal")?;
        // SAFETY: the descriptor is open, and was left for this process.
        let mut journal = MemoryFile::from(unsafe { Stored::taken(journal) });
        let mut recorded = RecordedState::parse(&journal.content().map_err(system("read the journal"))?)?;
        let needs_storing = recorded.generation == 0;
        if !needs_storing {
            journal.mark_as_journal(recorded.generation);
        }
        let lost = recorded.drop_what_is_not(is_open)?;
        let mut taken = Taken { needs_storing, known: BTreeMap::new() };
        let [read, write] = recorded.basics.pipe;
        let pipe = Pipe { read: taken.alone(read), write: taken.alone(write) };
        let mut journal =
            Journal::reopen(journal, &recorded, pipe).map_err(system("take over the journal"))?;
        lost.iter().for_each(|record| journal.add(record));
        if needs_storing {
            journal.shorten().map_err(system("write the journal"))?;
        }
        let mut front = Self::new(work, journal, recorded.basics.identity.clone())?;
        let numbers = recorded.descriptors().collect();
        front.take_over(recorded, &mut taken)?;
        Ok((front, numbers))
    }

    fn take_over(&mut self, recorded: RecordedState, taken: &mut Taken) -> Result<(), FrontError> {
        self.was_ready = recorded.basics.was_ready;
        self.reloads = (recorded.basics.reloads, recorded.basics.stayed);
        self.numbers = Numbers::starting_at(recorded.basics.next_request);
        for (key, RecordedEntry { note, fds }) in recorded.entries {
            at("the front takes over an entry", "take over an entry")?;
            let fds: Vec<_> = fds.into_iter().map(|fd| taken.shared(fd, &mut self.files)).collect();
            if let Some(listener) = fds.first().filter(|_| key == recorded.listener) {
                self.listen(listener.clone());
            }
            self.entries.insert(key, Entry { note, fds });
        }
        for (number, recorded) in recorded.connections {
            let files = recorded.fds.map(|fd| taken.alone(fd));
            let (journal, numbers) = (&mut self.journal, &mut self.numbers);
            pass(format_args!("the front takes over a connection"));
            let reopened = fail(format_args!("the front takes over a connection"))
                .and_then(|()| Connection::reopen(number, files, &recorded, journal, numbers));
            self.next_connection = self.next_connection.max(number + 1);
            match reopened {
                Ok(connection) => self.watch(number, connection),
                Err(error) if error.kind() == std::io::ErrorKind::InvalidData => {
                    log!("a task connection is closed: {error}");
                    self.journal.add(&Record::Closed(number));
                }
                Err(error) => return Err(system("take over a task connection")(error)),
            }
            self.settle(number, Side::Open);
        }
        if let Some(control) = recorded.worker {
            self.take_orphan(recorded.process, taken.alone(control))?;
        }
        if self.was_ready {
            // The front serves already: clients wait for the next worker.
            store::tell("READY=1");
        }
        Ok(())
    }

    /// Registers a worker that the kernel killed with its front. The loop waits for its end, and does other work
    /// meanwhile.
    fn take_orphan(&mut self, process: Option<u32>, control: Stored) -> Result<(), FrontError> {
        at("the front takes over a worker", "take over the worker")?;
        // If the worker lives nevertheless, it sees the end of its front.
        let _ = shutdown(std::os::fd::AsRawFd::as_raw_fd(&control), Shutdown::Write);
        self.epoll
            .add(&control, EpollEvent::new(EpollFlags::EPOLLIN, CONTROL))
            .map_err(system("take over the worker"))?;
        self.due = None;
        self.worker = Some(Worker::orphan(process, control));
        Ok(())
    }
}

/// The descriptors of the previous front.
struct Taken {
    /// Whether the descriptors are not in the store: a build without a store left them.
    needs_storing: bool,
    /// The descriptors that several entries may name.
    known: BTreeMap<RawFd, Rc<Stored>>,
}

impl Taken {
    fn alone(&self, fd: RawFd) -> Stored {
        // SAFETY: the journal names the descriptor for one purpose, its former owner is gone, and it is open.
        let mut stored = unsafe { Stored::taken(fd) };
        if self.needs_storing {
            stored.store();
        }
        stored
    }

    fn shared(&mut self, fd: RawFd, files: &mut store::Files) -> Rc<Stored> {
        if let Some(known) = self.known.get(&fd) {
            return known.clone();
        }
        let stored = files.add(self.alone(fd));
        self.known.insert(fd, stored.clone());
        stored
    }
}

fn is_open(fd: RawFd) -> bool {
    // SAFETY: a number without an open file results in an error.
    fcntl(unsafe { BorrowedFd::borrow_raw(fd) }, FcntlArg::F_GETFD).is_ok()
}
