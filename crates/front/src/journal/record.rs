//! Records of the journal. Each has its length in front, so a reader skips fields and kinds that it does not know.
//!
//! ```text
//! length u32 │ kind u8 │ fields                    (big-endian; texts, notes and lists have their length in front)
//! ```

use std::{collections::BTreeMap, fmt, os::fd::RawFd};

use super::VERSION;

/// A change of the front's state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    /// The part of the state that is in no other record.
    Front(Basics),
    /// A worker was ready for the first time.
    Ready,
    /// A worker keeps this under the key, in place of an earlier entry.
    Kept {
        /// The key of the entry.
        key: String,
        /// The worker's data.
        note: Vec<u8>,
        /// The descriptors of the entry.
        fds: Vec<RawFd>,
    },
    /// The entry with the key is removed.
    Forgotten(String),
    /// The socket from which the next worker's messages come; `None`: that worker has ended.
    Worker(Option<RawFd>),
    /// The process ID of that worker.
    Process(u32),
    /// A task connection, or new files for one.
    Connection {
        /// The connection's number, which no other connection of this front has.
        id: u64,
        /// The connection's descriptors and requests.
        connection: RecordedConnection,
    },
    /// The connection is closed.
    Closed(u64),
    /// A request got its number.
    Request {
        /// The number of the request's connection.
        connection: u64,
        /// The stream number in containerd.
        stream: u32,
        /// The request's number in the front.
        number: u32,
    },
    /// Workers have died with a request.
    Deaths {
        /// The number of the request's connection.
        connection: u64,
        /// The stream number in containerd.
        stream: u32,
        /// The number of workers.
        deaths: u8,
    },
    /// A reload has ended. The text says why the front was not replaced; empty: it was.
    Reloaded(String),
}

/// The part of the state that is in no other record.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Basics {
    /// The identity of the front, by which its workers recognize it.
    pub identity: String,
    /// Whether a worker was ready before.
    pub was_ready: bool,
    /// The number of the next request.
    pub next_request: u32,
    /// Both ends of the pipe through which all requests come.
    pub pipe: [RawFd; 2],
    /// The number of reloads.
    pub reloads: u32,
    /// Why the last reload did not replace the front; empty: it did.
    pub stayed: String,
}

/// A task connection.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RecordedConnection {
    /// The descriptors of the socket, and of the files with the bytes received from it and the responses to it.
    pub fds: [RawFd; 3],
    /// The requests by containerd's stream number. Some may have been answered.
    pub requests: BTreeMap<u32, RecordedRequest>,
}

/// A request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RecordedRequest {
    /// The request's number in the front.
    pub number: u32,
    /// The number of workers that have died with the request.
    pub deaths: u8,
}

/// Why a journal cannot be read.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum JournalError {
    /// The file is not a journal.
    #[error("not a journal of a front")]
    Foreign,
    /// An incompatible build wrote the journal.
    #[error("the journal has version {0}, this build reads version {VERSION}")]
    Version(u32),
    /// The journal ends too early, or contradicts itself.
    #[error("the journal is damaged: {0}")]
    Damaged(&'static str),
}

/// Formats the kind of the record, for the names of points at which tests kill the front.
impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Front(_) => "itself",
            Self::Ready => "that a worker was ready",
            Self::Kept { .. } => "an entry",
            Self::Forgotten(_) => "the end of an entry",
            Self::Worker(Some(_)) => "a worker",
            Self::Worker(None) => "the end of a worker",
            Self::Process(_) => "a worker's process",
            Self::Connection { .. } => "a connection",
            Self::Closed(_) => "the end of a connection",
            Self::Request { .. } => "a request",
            Self::Deaths { .. } => "deaths",
            Self::Reloaded(_) => "a reload",
        })
    }
}

impl Record {
    fn kind(&self) -> u8 {
        match self {
            Self::Front(_) => 1,
            Self::Ready => 2,
            Self::Kept { .. } => 3,
            Self::Forgotten(_) => 4,
            Self::Worker(_) => 5,
            Self::Connection { .. } => 6,
            Self::Closed(_) => 7,
            Self::Request { .. } => 8,
            Self::Deaths { .. } => 9,
            Self::Reloaded(_) => 10,
            Self::Process(_) => 11,
        }
    }

    /// Appends the record to `out`.
    pub fn write(&self, out: &mut Vec<u8>) {
        let mut bytes = vec![self.kind()];
        match self {
            Self::Front(basics) => basics.write(&mut bytes),
            Self::Ready => {}
            Self::Kept { key, note, fds } => {
                blob(&mut bytes, key.as_bytes());
                blob(&mut bytes, note);
                number(&mut bytes, fds.len() as u32);
                fds.iter().for_each(|fd| descriptor(&mut bytes, *fd));
            }
            Self::Forgotten(key) => blob(&mut bytes, key.as_bytes()),
            Self::Worker(control) => descriptor(&mut bytes, control.unwrap_or(-1)),
            Self::Connection { id, connection } => {
                bytes.extend(id.to_be_bytes());
                connection.write(&mut bytes);
            }
            Self::Closed(id) => bytes.extend(id.to_be_bytes()),
            Self::Request { connection, stream, number: given } => {
                bytes.extend(connection.to_be_bytes());
                number(&mut bytes, *stream);
                number(&mut bytes, *given);
            }
            Self::Deaths { connection, stream, deaths } => {
                bytes.extend(connection.to_be_bytes());
                number(&mut bytes, *stream);
                bytes.push(*deaths);
            }
            Self::Reloaded(stayed) => blob(&mut bytes, stayed.as_bytes()),
            Self::Process(process) => number(&mut bytes, *process),
        }
        blob(out, &bytes);
    }

    /// Reads one record, without its length; `None` if a later build has added its kind.
    pub fn read(bytes: &[u8]) -> Result<Option<Self>, JournalError> {
        let mut rest = Rest(bytes);
        Ok(Some(match rest.byte()? {
            1 => Self::Front(Basics::read(&mut rest)?),
            2 => Self::Ready,
            3 => Self::Kept {
                key: rest.text()?,
                note: rest.blob()?.to_owned(),
                fds: (0..rest.number()?).map(|_| rest.descriptor()).collect::<Result<_, _>>()?,
            },
            4 => Self::Forgotten(rest.text()?),
            5 => Self::Worker(rest.descriptor().ok()),
            6 => Self::Connection { id: rest.long()?, connection: RecordedConnection::read(&mut rest)? },
            7 => Self::Closed(rest.long()?),
            8 => Self::Request { connection: rest.long()?, stream: rest.number()?, number: rest.number()? },
            9 => Self::Deaths { connection: rest.long()?, stream: rest.number()?, deaths: rest.byte()? },
            10 => Self::Reloaded(rest.text()?),
            11 => Self::Process(rest.number()?),
            _ => return Ok(None),
        }))
    }
}

impl Basics {
    fn write(&self, bytes: &mut Vec<u8>) {
        blob(bytes, self.identity.as_bytes());
        bytes.push(self.was_ready.into());
        number(bytes, self.next_request);
        self.pipe.iter().for_each(|fd| descriptor(bytes, *fd));
        number(bytes, self.reloads);
        blob(bytes, self.stayed.as_bytes());
    }

    fn read(rest: &mut Rest<'_>) -> Result<Self, JournalError> {
        Ok(Self {
            identity: rest.text()?,
            was_ready: rest.byte()? != 0,
            next_request: rest.number()?,
            pipe: [rest.descriptor()?, rest.descriptor()?],
            reloads: rest.number()?,
            stayed: rest.text()?,
        })
    }
}

impl RecordedConnection {
    fn write(&self, bytes: &mut Vec<u8>) {
        self.fds.iter().for_each(|fd| descriptor(bytes, *fd));
        number(bytes, self.requests.len() as u32);
        for (stream, request) in &self.requests {
            number(bytes, *stream);
            number(bytes, request.number);
            bytes.push(request.deaths);
        }
    }

    fn read(rest: &mut Rest<'_>) -> Result<Self, JournalError> {
        let fds = [rest.descriptor()?, rest.descriptor()?, rest.descriptor()?];
        let count = rest.number()?;
        let request =
            |_| Ok((rest.number()?, RecordedRequest { number: rest.number()?, deaths: rest.byte()? }));
        Ok(Self { fds, requests: (0..count).map(request).collect::<Result<_, _>>()? })
    }
}

fn number(out: &mut Vec<u8>, number: u32) {
    out.extend(number.to_be_bytes());
}

fn descriptor(out: &mut Vec<u8>, fd: RawFd) {
    out.extend(fd.to_be_bytes());
}

fn blob(out: &mut Vec<u8>, bytes: &[u8]) {
    // No item is longer than a message of a worker.
    number(out, bytes.len() as u32);
    out.extend_from_slice(bytes);
}

/// The bytes that are not read yet.
pub struct Rest<'a>(pub &'a [u8]);

impl<'a> Rest<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], JournalError> {
        let (taken, rest) =
            self.0.split_at_checked(count).ok_or(JournalError::Damaged("it ends too early"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn byte(&mut self) -> Result<u8, JournalError> {
        Ok(self.take(1)?[0])
    }

    /// Reads a number.
    pub fn number(&mut self) -> Result<u32, JournalError> {
        let bytes = self.take(4)?;
        Ok(u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    fn long(&mut self) -> Result<u64, JournalError> {
        Ok(u64::from(self.number()?) << 32 | u64::from(self.number()?))
    }

    fn descriptor(&mut self) -> Result<RawFd, JournalError> {
        let fd = RawFd::try_from(self.number()?).ok().filter(|fd| *fd > 2);
        fd.ok_or(JournalError::Damaged("a descriptor is out of range"))
    }

    /// Reads bytes that have their length in front.
    pub fn blob(&mut self) -> Result<&'a [u8], JournalError> {
        let length = self.number()?;
        self.take(length as usize)
    }

    fn text(&mut self) -> Result<String, JournalError> {
        str::from_utf8(self.blob()?)
            .map(str::to_owned)
            .map_err(|_| JournalError::Damaged("a text is not UTF-8"))
    }
}
