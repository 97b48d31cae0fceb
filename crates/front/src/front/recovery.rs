//! How a front goes on where another one was killed, or has made way for another build.
//!
//! Its worker dies with it. All that the journal names is taken over. What else is open belonged to the dead front alone and is closed,
//! except what another process would notice: a connection that was accepted, or a FIFO that was opened, right before the kill.

use std::{
    collections::BTreeSet,
    fs, io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    rc::Rc,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, FdFlag, OFlag, fcntl},
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        socket::{Shutdown, UnixAddr, getpeername, getsockname, shutdown},
        stat::{FileStat, SFlag, fstat},
    },
};

use super::{Entry, Front, FrontError, Work, system};
use crate::{
    connection::{Connection, Files, Numbers, Side},
    control,
    journal::{Held, Journal, Record},
    log::log,
    memory_file::MemoryFile,
};

/// Most time for a killed worker to end.
const WORKER_END: Duration = Duration::from_secs(10);
/// How long a FIFO waits for the worker that asks for it again.
const LOOSE: Duration = Duration::from_secs(60);

impl<'a> Front<'a> {
    /// Makes a front from a journal. `reload` tells of a reload that has ended since.
    pub(super) fn recover(work: Work<'a>, journal: RawFd, reload: Option<&str>) -> Result<Self, FrontError> {
        let journal = MemoryFile::from(owned(journal));
        let held = Held::of(&journal.content().map_err(system("read the journal"))?)?;
        let known: BTreeSet<RawFd> = held.descriptors().chain([journal.as_raw_fd()]).collect();
        let unknown = others(&known).map_err(system("look for open files"))?;
        for fd in &known {
            // SAFETY: the journal names no descriptor that is not open.
            let fd = unsafe { BorrowedFd::borrow_raw(*fd) };
            fcntl(fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).map_err(system("take over a descriptor"))?;
        }
        // SAFETY: the journal names them once, and the process that owned them has gone.
        let journal = unsafe { Journal::reopen(journal, &held) }.map_err(system("take over the journal"))?;
        let mut front = Self::new(work, journal)?;
        front.take_over(held, unknown)?;
        if let Some(stayed) = reload {
            front.reloaded(stayed.to_owned());
        }
        Ok(front)
    }

    fn take_over(&mut self, held: Held, unknown: Vec<OwnedFd>) -> Result<(), FrontError> {
        self.was_ready = held.basics.was_ready;
        self.reloads = (held.basics.reloads, held.basics.stayed);
        self.numbers = Numbers::starting_at(held.basics.next_request);
        self.identity = held.basics.identity;
        for (key, entry) in held.entries {
            let fds: Vec<_> = entry.fds.into_iter().map(|fd| Rc::new(owned(fd))).collect();
            if let Some(listener) = fds.first().filter(|_| key == held.listener) {
                self.listen(listener.clone());
            }
            self.kept.insert(key, Entry { note: entry.note, fds });
        }
        let accepted = self.sort(unknown);
        if let Some(control) = held.worker {
            let control = owned(control);
            self.end_worker(&control).map_err(system("wait for the worker's end"))?;
            self.journal.add(&Record::Worker(None));
        }
        for (number, of) in held.connections {
            let (journal, numbers) = (&mut self.journal, &mut self.numbers);
            match Connection::reopen(number, of.fds.map(owned), &of, journal, numbers) {
                Ok(connection) => self.watch(number, connection),
                Err(error) => {
                    log!("a task connection cannot be taken over: {error}");
                    self.journal.add(&Record::Closed(number));
                }
            }
            self.next_connection = self.next_connection.max(number + 1);
            self.settle(number, Side::Open);
        }
        for client in accepted {
            let files = match Files::create() {
                Ok(files) => files,
                Err(error) => {
                    log!("a new task connection cannot be taken over: {error}");
                    continue;
                }
            };
            let number = self.next_connection;
            self.next_connection += 1;
            let connection = Connection::new(number, client.into(), files, &mut self.journal);
            self.watch(number, connection);
        }
        Ok(())
    }

    /// Keeps FIFOs, returns connections to the task socket, and closes the rest.
    fn sort(&mut self, unknown: Vec<OwnedFd>) -> Vec<OwnedFd> {
        let address = |fd: &OwnedFd| getsockname::<UnixAddr>(fd.as_raw_fd()).ok();
        let ours = self.listener.as_ref().and_then(|listener| address(listener));
        let (fifos, sockets): (Vec<_>, Vec<_>) =
            unknown.into_iter().partition(|fd| kind(fd) == Some(SFlag::S_IFIFO));
        fifos.into_iter().for_each(|fifo| self.loose.add(fifo));
        let accepted = |fd: &OwnedFd| {
            ours.is_some() && address(fd) == ours && getpeername::<UnixAddr>(fd.as_raw_fd()).is_ok()
        };
        sockets.into_iter().filter(accepted).collect()
    }

    /// Handles the last messages of a worker that the kernel has killed with its front, until its end.
    fn end_worker(&mut self, control: &OwnedFd) -> io::Result<()> {
        // If it lives nevertheless, it sees the end of its front.
        let _ = shutdown(control.as_raw_fd(), Shutdown::Write);
        let end = Instant::now() + WORKER_END;
        loop {
            match control::peek(control.as_fd()) {
                Ok(None) => return Ok(()),
                Ok(Some(message)) => self.handle(message),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let left = end.saturating_duration_since(Instant::now());
                    let left = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
                    match poll(&mut [PollFd::new(control.as_fd(), PollFlags::POLLIN)], left) {
                        Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
                        Ok(_) | Err(Errno::EINTR) => continue,
                        Err(error) => return Err(error.into()),
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => continue,
                Err(error) => log!("cannot parse a message of the worker: {error}"),
            }
            control::skip(control.as_fd())?;
        }
    }
}

/// FIFOs that a front has opened and not recorded. If they were closed, the process at the other end would see its end.
#[derive(Debug, Default)]
pub struct Loose {
    fifos: Vec<OwnedFd>,
    until: Option<Instant>,
}

impl Loose {
    fn add(&mut self, fifo: OwnedFd) {
        self.fifos.push(fifo);
        self.until = Some(Instant::now() + LOOSE);
    }

    /// Returns when they are to be closed.
    pub fn until(&self) -> Option<Instant> {
        self.until
    }

    /// Closes them if it is time.
    pub fn drop_at(&mut self, now: Instant) {
        if self.until.is_some_and(|until| until <= now) {
            *self = Self::default();
        }
    }

    /// Returns the FIFO that `named` refers to, if it is open in this way.
    pub fn take(&mut self, named: &OwnedFd, flags: OFlag) -> Option<OwnedFd> {
        let file = |stat: FileStat| (stat.st_dev, stat.st_ino);
        let wanted = fstat(named).ok().map(file)?;
        let found = self.fifos.iter().position(|fifo| {
            let open = fcntl(fifo, FcntlArg::F_GETFL).map(OFlag::from_bits_truncate);
            fstat(fifo).is_ok_and(|stat| file(stat) == wanted)
                && open.is_ok_and(|open| open & OFlag::O_ACCMODE == flags & OFlag::O_ACCMODE)
        });
        Some(self.fifos.swap_remove(found?))
    }
}

/// Returns the sockets and FIFOs that are open, and closes all other descriptors but these and the standard ones.
fn others(known: &BTreeSet<RawFd>) -> io::Result<Vec<OwnedFd>> {
    let listed: Vec<RawFd> = fs::read_dir("/proc/self/fd")?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|fd| *fd > 2 && !known.contains(fd))
        .collect();
    // The listing's own is closed now.
    let open = listed.into_iter().filter(|fd| {
        // SAFETY: a number that names no file is an error.
        fcntl(unsafe { BorrowedFd::borrow_raw(*fd) }, FcntlArg::F_GETFD).is_ok()
    });
    let noticed = |fd: &OwnedFd| match kind(fd) {
        Some(SFlag::S_IFSOCK) => true,
        // A pipe has a name that is no path.
        Some(SFlag::S_IFIFO) => {
            fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).is_ok_and(|name| name.is_absolute())
        }
        _ => false,
    };
    Ok(open.map(owned).filter(noticed).collect())
}

fn kind(fd: &OwnedFd) -> Option<SFlag> {
    fstat(fd).ok().map(|stat| SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT)
}

/// Takes over a descriptor of the front before.
fn owned(fd: RawFd) -> OwnedFd {
    // SAFETY: it is open, and nothing else in this process owns it: this process is new, and takes over each number once.
    unsafe { OwnedFd::from_raw_fd(fd) }
}
