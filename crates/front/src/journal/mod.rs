//! The journal: the state that the front's successor needs, after the front was killed or replaced by another build.
//!
//! The journal is a file in memory, which survives the front like all its descriptors (see [`crate::store`]). The front
//! only appends to it, and acts on a record only after writing it. Now and then a shorter file with the same state
//! replaces it at the same descriptor, as the next generation.
//!
//! ```text
//! "sbxfront" │ version u32 │ generation u32 │ connection that is read u64 │ records        (big-endian)
//! ```

mod record;

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsRawFd, RawFd},
};

use nix::{
    fcntl::OFlag,
    sys::signal::{Signal, raise},
    unistd::pipe2,
};
use sandboxer_base::failpoint::pass;

use crate::{control::TASK_LISTENER, log::log, memory_file::MemoryFile, store::Stored};

use record::Rest;
pub use record::{Basics, JournalError, Record, RecordedConnection, RecordedRequest};

/// The first bytes of a journal.
const MAGIC: &[u8; 8] = b"sbxfront";
/// The version of this format. It is incremented when an older reader would misunderstand the state, not for added
/// fields or records.
const VERSION: u32 = 1;
/// The offset of the generation.
const GENERATION: usize = 12;
/// The offset of the number of the connection whose bytes may be in the pipe.
const READING: usize = 16;
/// The offset of the records.
const RECORDS: usize = 24;
/// The generation of a front's first journal. A build whose front was not stored wrote 0.
const FIRST: u32 = 1;
/// The length, bytes, from which a journal is replaced by a shorter one, if it is also four times as long as at first.
const LONG: u64 = 64 << 10;

/// The journal of a running front.
#[derive(Debug)]
pub struct Journal {
    file: MemoryFile,
    generation: u32,
    end: u64,
    /// The length that the journal had at first, bytes.
    least: u64,
    reading: u64,
    pipe: Pipe,
}

/// The pipe through which all requests pass from a connection to that connection's file.
#[derive(Debug)]
pub struct Pipe {
    /// The end for reading.
    pub read: Stored,
    /// The end for writing.
    pub write: Stored,
}

/// The state that is recorded in a journal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RecordedState {
    /// The part of the state that is in no other field.
    pub basics: Basics,
    /// The connection whose bytes may be in the pipe.
    pub reading: u64,
    /// The control socket of a worker that may be alive.
    pub worker: Option<RawFd>,
    /// The process ID of that worker.
    pub process: Option<u32>,
    /// The key of the entry whose first descriptor is the task listener; empty: there is none.
    pub listener: String,
    /// The entries that workers keep at the front.
    pub entries: BTreeMap<String, RecordedEntry>,
    /// The task connections.
    pub connections: BTreeMap<u64, RecordedConnection>,
    /// The journal's generation.
    pub generation: u32,
    /// The offset of the end of the last whole record.
    pub end: u64,
}

/// An entry that a worker keeps at the front under a key.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RecordedEntry {
    /// The worker's data.
    pub note: Vec<u8>,
    /// The descriptors of the entry.
    pub fds: Vec<RawFd>,
}

impl Journal {
    /// Creates the journal of a new front.
    pub fn create(identity: String) -> io::Result<Self> {
        let (read, write) = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
        let pipe = Pipe { read: Stored::new(read), write: Stored::new(write) };
        let ends = [pipe.read.as_raw_fd(), pipe.write.as_raw_fd()];
        let basics = Basics { identity, next_request: 1, pipe: ends, ..Basics::default() };
        let (mut file, end) = written(FIRST, 0, &[Record::Front(basics)])?;
        file.store_journal(FIRST);
        Ok(Self { file, generation: FIRST, end, least: end, reading: 0, pipe })
    }

    /// Continues a journal with this state, behind its last whole record.
    pub fn reopen(file: MemoryFile, recorded: &RecordedState, pipe: Pipe) -> io::Result<Self> {
        let (end, generation) = (recorded.end, recorded.generation);
        file.cut(end)?;
        Ok(Self { file, generation, end, least: end, reading: recorded.reading, pipe })
    }

    /// Returns the journal's file.
    pub fn file(&self) -> &MemoryFile {
        &self.file
    }

    /// Adds a record, before the recorded action is done, but after the objects that it names exist.
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

    /// Returns the pipe, which must be empty, for the bytes of this connection.
    pub fn pipe_of(&mut self, connection: u64) -> &Pipe {
        if self.reading != connection {
            self.write(&connection.to_be_bytes(), READING as u64);
            self.reading = connection;
        }
        &self.pipe
    }

    /// Writes to the journal's file. A front that cannot record an action must not do it: it ends, and the next one
    /// continues from the recorded state, later and perhaps with more memory.
    fn write(&self, bytes: &[u8], at: u64) {
        if let Err(error) = self.file.write(bytes, at) {
            log!(
                "cannot write the journal in memory, so this process ends and another takes its place: {error}"
            );
            let _ = raise(Signal::SIGABRT);
        }
    }

    /// Returns whether most of the journal is out of date.
    pub fn is_long(&self) -> bool {
        self.end > LONG && self.end > 4 * self.least
    }

    /// Replaces all records atomically by records of the current state.
    pub fn shorten(&mut self) -> io::Result<()> {
        let recorded = RecordedState::parse(&self.file.content()?).map_err(io::Error::other)?;
        let generation = self.generation.wrapping_add(1).max(FIRST);
        let (mut file, end) = written(generation, self.reading, &recorded.records())?;
        file.store_journal(generation);
        pass(format_args!("the front has two journals"));
        self.file.replace(file)?;
        (self.end, self.least, self.generation) = (end, end, generation);
        Ok(())
    }
}

/// Creates a journal's file, which is not in the store yet; returns it with its length.
fn written(generation: u32, reading: u64, records: &[Record]) -> io::Result<(MemoryFile, u64)> {
    let mut bytes = [MAGIC.as_slice(), &VERSION.to_be_bytes(), &generation.to_be_bytes()].concat();
    bytes.extend(reading.to_be_bytes());
    records.iter().for_each(|record| record.write(&mut bytes));
    let file = MemoryFile::create()?;
    file.write(&bytes, 0)?;
    Ok((file, bytes.len() as u64))
}

impl RecordedState {
    /// Reads a journal.
    pub fn parse(bytes: &[u8]) -> Result<Self, JournalError> {
        let mut rest = Rest(bytes.strip_prefix(MAGIC).ok_or(JournalError::Foreign)?);
        match rest.number()? {
            VERSION => {}
            version => return Err(JournalError::Version(version)),
        }
        let reading = bytes.get(READING..RECORDS).and_then(<[u8]>::first_chunk);
        let reading = u64::from_be_bytes(*reading.ok_or(JournalError::Damaged("it ends too early"))?);
        let generation = Rest(&bytes[GENERATION..]).number()?;
        let (mut recorded, mut rest) =
            (Self { reading, generation, ..Self::default() }, Rest(&bytes[RECORDS..]));
        // The last record may be incomplete: the front was killed while it wrote the record, and has not acted on it.
        while let Ok(record) = rest.blob() {
            recorded.end = (bytes.len() - rest.0.len()) as u64;
            if let Some(record) = Record::read(record)? {
                recorded.apply(record);
            }
        }
        if recorded.basics.pipe == [0; 2] {
            return Err(JournalError::Damaged("it does not begin with the front"));
        }
        Ok(recorded)
    }

    fn apply(&mut self, record: Record) {
        match record {
            Record::Front(basics) => self.basics = basics,
            Record::Ready => self.basics.was_ready = true,
            Record::Kept { key, note, fds } => {
                if key.starts_with(TASK_LISTENER) && !fds.is_empty() {
                    self.listener.clone_from(&key);
                }
                self.entries.insert(key, RecordedEntry { note, fds });
            }
            Record::Forgotten(key) => drop(self.entries.remove(&key)),
            Record::Worker(control) => (self.worker, self.process) = (control, None),
            Record::Process(process) => self.process = Some(process),
            Record::Connection { id, connection } => drop(self.connections.insert(id, connection)),
            Record::Closed(id) => drop(self.connections.remove(&id)),
            Record::Request { connection, stream, number } => {
                self.basics.next_request = number.wrapping_add(2);
                if let Some(connection) = self.connections.get_mut(&connection) {
                    connection.requests.insert(stream, RecordedRequest { number, deaths: 0 });
                }
            }
            Record::Deaths { connection, stream, deaths } => {
                let connection = self.connections.get_mut(&connection);
                if let Some(request) = connection.and_then(|connection| connection.requests.get_mut(&stream))
                {
                    request.deaths = deaths;
                }
            }
            Record::Reloaded(stayed) => {
                self.basics.reloads += 1;
                self.basics.stayed = stayed;
            }
        }
    }

    /// Drops the entries and connections whose descriptors do not exist according to `there`: they were about to be
    /// created when the front was killed. Returns records of the removals.
    pub fn drop_what_is_not(&mut self, there: impl Fn(RawFd) -> bool) -> Result<Vec<Record>, JournalError> {
        if !self.basics.pipe.into_iter().all(&there) {
            return Err(JournalError::Damaged("its pipe is not there"));
        }
        let mut lost = Vec::new();
        self.entries.retain(|key, entry| {
            let whole = entry.fds.iter().copied().all(&there);
            lost.extend((!whole).then(|| Record::Forgotten(key.clone())));
            whole
        });
        self.connections.retain(|id, connection| {
            let whole = connection.fds.into_iter().all(&there);
            lost.extend((!whole).then_some(Record::Closed(*id)));
            whole
        });
        if self.worker.is_some_and(|control| !there(control)) {
            (self.worker, self.process) = (None, None);
            lost.push(Record::Worker(None));
        }
        Ok(lost)
    }

    /// Returns records of this state.
    pub fn records(&self) -> Vec<Record> {
        let mut records = vec![Record::Front(self.basics.clone()), Record::Worker(self.worker)];
        let of_entry = |(key, entry): (&String, &RecordedEntry)| Record::Kept {
            key: key.clone(),
            note: entry.note.clone(),
            fds: entry.fds.clone(),
        };
        records.extend(self.process.map(Record::Process));
        // The listener comes last of the entries.
        let (listener, others): (Vec<_>, Vec<_>) =
            self.entries.iter().partition(|(key, _)| **key == self.listener);
        records.extend(others.into_iter().chain(listener).map(of_entry));
        records.extend(
            self.connections
                .iter()
                .map(|(id, connection)| Record::Connection { id: *id, connection: connection.clone() }),
        );
        records
    }

    /// Returns all descriptors that the state names.
    pub fn descriptors(&self) -> impl Iterator<Item = RawFd> {
        let entries = self.entries.values().flat_map(|entry| entry.fds.iter().copied());
        let connections = self.connections.values().flat_map(|connection| connection.fds);
        self.basics.pipe.into_iter().chain(self.worker).chain(entries).chain(connections)
    }
}

#[cfg(test)]
mod tests;
