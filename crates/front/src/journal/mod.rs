//! What the front's successor must know: after the front was killed, or when another build takes its place.
//!
//! It is in a file in memory, which survives the front like all its descriptors (see [`crate::holder`]). The front only appends to it,
//! before it acts on what it has recorded. Now and then a shorter file with the same state takes its place, at the same descriptor.
//!
//! ```text
//! "sbxfront" │ version u32 │ 0 u32 │ connection that is read u64 │ records        (big-endian)
//! ```

mod record;

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
};

use nix::{
    fcntl::OFlag,
    sys::signal::{Signal, raise},
    unistd::pipe2,
};
use sandboxer_base::failpoint::pass;

use crate::{control::TASK_LISTENER, log::log, memory_file::MemoryFile};

use record::Rest;
pub use record::{Basics, HeldConnection, HeldRequest, JournalError, Record};

/// First bytes of a journal.
const MAGIC: &[u8; 8] = b"sbxfront";
/// Version of this format. It grows when an older reader would misunderstand the state, not for added fields or records.
const VERSION: u32 = 1;
/// Where the number of the connection is whose bytes may be in the pipe.
const READING: usize = 16;
/// Where the records begin.
const RECORDS: usize = 24;
/// A journal is replaced by a shorter one when it has this length, and four times the length that it had at first.
const LONG: u64 = 64 << 10;

/// The journal of a running front.
#[derive(Debug)]
pub struct Journal {
    file: MemoryFile,
    end: u64,
    /// Length that it had at first.
    least: u64,
    reading: u64,
    pipe: Pipe,
}

/// The pipe through which all requests come, on their way from a connection to that connection's file.
#[derive(Debug)]
pub struct Pipe {
    /// Its end for reading.
    pub read: OwnedFd,
    /// Its end for writing.
    pub write: OwnedFd,
}

/// The state that a journal tells.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Held {
    /// All that is not in the other fields.
    pub basics: Basics,
    /// The connection whose bytes may be in the pipe.
    pub reading: u64,
    /// The control socket of a worker that may be alive.
    pub worker: Option<RawFd>,
    /// Key of the entry whose first descriptor is the task listener; empty: none.
    pub listener: String,
    /// What workers keep here.
    pub entries: BTreeMap<String, HeldEntry>,
    /// Task connections.
    pub connections: BTreeMap<u64, HeldConnection>,
}

/// What a worker keeps at the front under a key.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HeldEntry {
    /// Data of the worker.
    pub note: Vec<u8>,
    /// Its descriptors.
    pub fds: Vec<RawFd>,
}

impl Journal {
    /// Makes the journal of a new front.
    pub fn create(identity: String) -> io::Result<Self> {
        let (read, write) = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
        let pipe = [read.as_raw_fd(), write.as_raw_fd()];
        let basics = Basics { identity, next_request: 1, pipe, ..Basics::default() };
        let (file, end) = written(0, &[Record::Front(basics)])?;
        Ok(Self { file, end, least: end, reading: 0, pipe: Pipe { read, write } })
    }

    /// Goes on with a journal that tells this state.
    ///
    /// # Safety
    ///
    /// The descriptors of the pipe are open, and nothing else in this process owns them.
    pub unsafe fn reopen(file: MemoryFile, held: &Held) -> io::Result<Self> {
        // SAFETY: the caller says so.
        let [read, write] = held.basics.pipe.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
        let end = file.length()?;
        Ok(Self { file, end, least: end, reading: held.reading, pipe: Pipe { read, write } })
    }

    /// Returns its file.
    pub fn file(&self) -> &MemoryFile {
        &self.file
    }

    /// Adds a record: before what it tells is done, but after what it names exists.
    pub fn add(&mut self, record: &Record) {
        let mut bytes = Vec::new();
        record.write(&mut bytes);
        self.write(&bytes, self.end);
        self.end += bytes.len() as u64;
        pass(format_args!("the front has recorded {record}"));
    }

    /// Returns the connection whose bytes may be in the pipe.
    pub fn reading(&self) -> u64 {
        self.reading
    }

    /// Returns the pipe.
    pub fn pipe(&self) -> &Pipe {
        &self.pipe
    }

    /// Returns the pipe, which must be empty, for bytes of this connection.
    pub fn pipe_of(&mut self, connection: u64) -> &Pipe {
        if self.reading != connection {
            self.write(&connection.to_be_bytes(), READING as u64);
            self.reading = connection;
        }
        &self.pipe
    }

    /// Writes to its file. A front that cannot record what it does must not do it: it ends, and the next one goes on from what is
    /// recorded, later and perhaps with more memory.
    fn write(&self, bytes: &[u8], at: u64) {
        if let Err(error) = self.file.write(bytes, at) {
            log!(
                "cannot write the journal in memory, so this process ends and another takes its place: {error}"
            );
            let _ = raise(Signal::SIGABRT);
        }
    }

    /// Returns whether most of it is out of date.
    pub fn is_long(&self) -> bool {
        self.end > LONG && self.end > 4 * self.least
    }

    /// Replaces all records, at once, by those that tell the state as it is.
    pub fn shorten(&mut self) -> io::Result<()> {
        let held = Held::of(&self.file.content()?).map_err(io::Error::other)?;
        let (file, end) = written(self.reading, &held.records())?;
        self.file.replace(&file)?;
        (self.end, self.least) = (end, end);
        Ok(())
    }
}

/// Makes a journal's file; returns it with its length.
fn written(reading: u64, records: &[Record]) -> io::Result<(MemoryFile, u64)> {
    let mut bytes = [MAGIC.as_slice(), &VERSION.to_be_bytes(), &[0; 4], &reading.to_be_bytes()].concat();
    records.iter().for_each(|record| record.write(&mut bytes));
    let file = MemoryFile::create()?;
    file.write(&bytes, 0)?;
    Ok((file, bytes.len() as u64))
}

impl Held {
    /// Reads a journal.
    pub fn of(bytes: &[u8]) -> Result<Self, JournalError> {
        let mut rest = Rest(bytes.strip_prefix(MAGIC).ok_or(JournalError::Foreign)?);
        match rest.number()? {
            VERSION => {}
            version => return Err(JournalError::Version(version)),
        }
        let reading = bytes.get(READING..RECORDS).and_then(<[u8]>::first_chunk);
        let reading = u64::from_be_bytes(*reading.ok_or(JournalError::Damaged("it ends too early"))?);
        let (mut held, mut rest) = (Self { reading, ..Self::default() }, Rest(&bytes[RECORDS..]));
        // The last record may be incomplete: the front was killed while it wrote it, and has not acted on it.
        while let Ok(record) = rest.blob() {
            if let Some(record) = Record::read(record)? {
                held.apply(record);
            }
        }
        if held.basics.pipe == [0; 2] {
            return Err(JournalError::Damaged("it does not begin with the front"));
        }
        Ok(held)
    }

    fn apply(&mut self, record: Record) {
        match record {
            Record::Front(basics) => self.basics = basics,
            Record::Ready => self.basics.was_ready = true,
            Record::Kept { key, note, fds } => {
                if key.starts_with(TASK_LISTENER) && !fds.is_empty() {
                    self.listener.clone_from(&key);
                }
                self.entries.insert(key, HeldEntry { note, fds });
            }
            Record::Forgotten(key) => drop(self.entries.remove(&key)),
            Record::Worker(control) => self.worker = control,
            Record::Connection { id, of } => drop(self.connections.insert(id, of)),
            Record::Closed(id) => drop(self.connections.remove(&id)),
            Record::Request { connection, stream, number } => {
                self.basics.next_request = number.wrapping_add(2);
                if let Some(connection) = self.connections.get_mut(&connection) {
                    connection.requests.insert(stream, HeldRequest { number, deaths: 0 });
                }
            }
            Record::Deaths { connection, stream, deaths } => {
                let connection = self.connections.get_mut(&connection);
                if let Some(request) = connection.and_then(|of| of.requests.get_mut(&stream)) {
                    request.deaths = deaths;
                }
            }
            Record::Reloaded(stayed) => {
                self.basics.reloads += 1;
                self.basics.stayed = stayed;
            }
        }
    }

    /// Returns records that tell this state.
    pub fn records(&self) -> Vec<Record> {
        let mut records = vec![Record::Front(self.basics.clone()), Record::Worker(self.worker)];
        let kept = |(key, entry): (&String, &HeldEntry)| Record::Kept {
            key: key.clone(),
            note: entry.note.clone(),
            fds: entry.fds.clone(),
        };
        // The listener is the last of its kind.
        let (listener, others): (Vec<_>, Vec<_>) =
            self.entries.iter().partition(|(key, _)| **key == self.listener);
        records.extend(others.into_iter().chain(listener).map(kept));
        records
            .extend(self.connections.iter().map(|(id, of)| Record::Connection { id: *id, of: of.clone() }));
        records
    }

    /// Returns all descriptors that it names.
    pub fn descriptors(&self) -> impl Iterator<Item = RawFd> {
        let kept = self.entries.values().flat_map(|entry| entry.fds.iter().copied());
        let connections = self.connections.values().flat_map(|connection| connection.fds);
        self.basics.pipe.into_iter().chain(self.worker).chain(kept).chain(connections)
    }
}

#[cfg(test)]
mod tests;
