//! The front's state while another build of it takes its place in the same process.
//!
//! It is written to a file in memory, which survives the exec like the descriptors that it names. A build reads the states of the
//! releases right before and after it: each record has its length in front, so a reader skips fields that it does not know.
//!
//! ```text
//! "sbxfront" │ version u32 │ front record, entries, connections      (big-endian)
//! ```

use std::os::fd::RawFd;

/// First bytes of a state.
const MAGIC: &[u8; 8] = b"sbxfront";
/// Version of this format. It grows when an older reader would misunderstand the state, not for added fields.
const VERSION: u32 = 1;

/// What the front's successor must know.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Saved {
    /// Identifies the front to its workers.
    pub identity: String,
    /// A worker was ready before.
    pub was_ready: bool,
    /// Number of the next request.
    pub next_request: u32,
    /// Key of the entry whose first descriptor is the task listener; empty: none.
    pub listener: String,
    /// What workers keep here.
    pub entries: Vec<SavedEntry>,
    /// Task connections.
    pub connections: Vec<SavedConnection>,
}

/// What a worker keeps at the front under a key.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SavedEntry {
    /// Its key.
    pub key: String,
    /// Data of the worker.
    pub note: Vec<u8>,
    /// Its descriptors.
    pub fds: Vec<RawFd>,
}

/// A task connection without a link.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SavedConnection {
    /// containerd's end.
    pub client: RawFd,
    /// Part of a frame that containerd has sent.
    pub received: Vec<u8>,
    /// Bytes for containerd that are not written yet.
    pub unsent: Vec<u8>,
    /// Requests without a response.
    pub requests: Vec<SavedRequest>,
}

/// A request without a response.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SavedRequest {
    /// The front's number for it.
    pub number: u32,
    /// containerd's stream number.
    pub stream: u32,
    /// Number of workers that died with it.
    pub deaths: u8,
    /// Its frame.
    pub frame: Vec<u8>,
}

/// Why a state cannot be taken over.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SavedError {
    /// It is something else.
    #[error("not a state of a front")]
    Foreign,
    /// An incompatible build has written it.
    #[error("the state has version {0}, this build reads version {VERSION}")]
    Version(u32),
    /// It ends too early, or contradicts itself.
    #[error("the state is damaged: {0}")]
    Damaged(&'static str),
}

impl Saved {
    /// Writes the state.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = [MAGIC.as_slice(), &VERSION.to_be_bytes()].concat();
        record(&mut bytes, |out| {
            blob(out, self.identity.as_bytes());
            out.push(self.was_ready.into());
            number(out, self.next_request);
            blob(out, self.listener.as_bytes());
        });
        list(&mut bytes, &self.entries, |out, entry| {
            blob(out, entry.key.as_bytes());
            blob(out, &entry.note);
            list(out, &entry.fds, |out, fd| out.extend(fd.to_be_bytes()));
        });
        list(&mut bytes, &self.connections, |out, connection| {
            out.extend(connection.client.to_be_bytes());
            blob(out, &connection.received);
            blob(out, &connection.unsent);
            list(out, &connection.requests, |out, request| {
                number(out, request.number);
                number(out, request.stream);
                out.push(request.deaths);
                blob(out, &request.frame);
            });
        });
        bytes
    }

    /// Reads a state.
    pub fn of(bytes: &[u8]) -> Result<Self, SavedError> {
        let mut rest = Rest(bytes.strip_prefix(MAGIC).ok_or(SavedError::Foreign)?);
        match rest.number()? {
            VERSION => {}
            version => return Err(SavedError::Version(version)),
        }
        let mut front = Rest(rest.blob()?);
        Ok(Self {
            identity: front.text()?,
            was_ready: front.byte()? != 0,
            next_request: front.number()?,
            listener: front.text()?,
            entries: rest.list(|entry| {
                Ok(SavedEntry {
                    key: entry.text()?,
                    note: entry.blob()?.to_owned(),
                    fds: entry.list(Rest::descriptor)?,
                })
            })?,
            connections: rest.list(|connection| {
                Ok(SavedConnection {
                    client: connection.descriptor()?,
                    received: connection.blob()?.to_owned(),
                    unsent: connection.blob()?.to_owned(),
                    requests: connection.list(|request| {
                        Ok(SavedRequest {
                            number: request.number()?,
                            stream: request.number()?,
                            deaths: request.byte()?,
                            frame: request.blob()?.to_owned(),
                        })
                    })?,
                })
            })?,
        })
    }

    /// Returns all descriptors that it names.
    pub fn descriptors(&self) -> impl Iterator<Item = RawFd> {
        let kept = self.entries.iter().flat_map(|entry| entry.fds.iter().copied());
        kept.chain(self.connections.iter().map(|connection| connection.client))
    }
}

fn number(out: &mut Vec<u8>, number: u32) {
    out.extend(number.to_be_bytes());
}

fn blob(out: &mut Vec<u8>, bytes: &[u8]) {
    // The front bounds what it holds far below 4 GiB.
    number(out, bytes.len() as u32);
    out.extend_from_slice(bytes);
}

fn record(out: &mut Vec<u8>, fields: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = Vec::new();
    fields(&mut bytes);
    blob(out, &bytes);
}

fn list<T>(out: &mut Vec<u8>, items: &[T], mut fields: impl FnMut(&mut Vec<u8>, &T)) {
    number(out, items.len() as u32);
    items.iter().for_each(|item| record(out, |out| fields(out, item)));
}

/// Bytes that are not read yet.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], SavedError> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(SavedError::Damaged("it ends too early"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn byte(&mut self) -> Result<u8, SavedError> {
        Ok(self.take(1)?[0])
    }

    fn number(&mut self) -> Result<u32, SavedError> {
        let bytes = self.take(4)?;
        Ok(u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    fn descriptor(&mut self) -> Result<RawFd, SavedError> {
        let fd = RawFd::try_from(self.number()?).ok().filter(|fd| *fd > 2);
        fd.ok_or(SavedError::Damaged("a descriptor is out of range"))
    }

    fn blob(&mut self) -> Result<&'a [u8], SavedError> {
        let length = self.number()?;
        self.take(length as usize)
    }

    fn text(&mut self) -> Result<String, SavedError> {
        str::from_utf8(self.blob()?)
            .map(str::to_owned)
            .map_err(|_| SavedError::Damaged("a text is not UTF-8"))
    }

    fn list<T>(
        &mut self,
        mut item: impl FnMut(&mut Rest<'a>) -> Result<T, SavedError>,
    ) -> Result<Vec<T>, SavedError> {
        let count = self.number()?;
        // Not reserved: a damaged count would take all memory.
        let mut items = Vec::new();
        for _ in 0..count {
            items.push(item(&mut Rest(self.blob()?))?);
        }
        Ok(items)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A state as this release writes it. It stays as it is: later builds must read it.
    const RECORDED: &[u8] = include_bytes!("../tests/state-1.bin");

    fn state() -> Saved {
        Saved {
            identity: "17-1700000000000000000".into(),
            was_ready: true,
            next_request: 4711,
            listener: "task-listener".into(),
            entries: vec![
                SavedEntry { key: "task-listener".into(), note: Vec::new(), fds: vec![5] },
                SavedEntry { key: "exec/c1/e".into(), note: b"{}".to_vec(), fds: vec![7, 8, 9] },
            ],
            connections: vec![SavedConnection {
                client: 11,
                received: vec![0, 0, 1],
                unsent: b"half an answer".to_vec(),
                requests: vec![SavedRequest { number: 4709, stream: 3, deaths: 1, frame: vec![1; 12] }],
            }],
        }
    }

    #[test]
    fn a_recorded_state_is_read_and_would_be_written_the_same() {
        assert_eq!(Saved::of(RECORDED).unwrap(), state());
        assert_eq!(state().to_bytes(), RECORDED);
        assert_eq!(state().descriptors().collect::<Vec<_>>(), [5, 7, 8, 9, 11]);
    }

    #[test]
    fn fields_of_a_later_release_are_skipped() {
        let mut bytes = [MAGIC.as_slice(), &VERSION.to_be_bytes()].concat();
        record(&mut bytes, |out| {
            blob(out, b"id");
            out.push(1);
            number(out, 3);
            blob(out, b"");
            blob(out, b"a field of a later release");
        });
        list(&mut bytes, &[()], |out, ()| {
            blob(out, b"key");
            blob(out, b"note");
            list(out, &[6_i32], |out, fd| out.extend(fd.to_be_bytes()));
            number(out, 99);
        });
        list(&mut bytes, &[(); 0], |_, ()| {});
        bytes.extend(b"and another list");
        let saved = Saved::of(&bytes).unwrap();
        assert_eq!((saved.identity.as_str(), saved.next_request), ("id", 3));
        assert_eq!(saved.entries[0], SavedEntry { key: "key".into(), note: b"note".to_vec(), fds: vec![6] });
    }

    #[test]
    fn damage_is_an_error_wherever_it_is() {
        for end in 0..RECORDED.len() {
            assert!(Saved::of(&RECORDED[..end]).is_err(), "{end} bytes were enough");
        }
        for at in 0..RECORDED.len() {
            let mut bytes = RECORDED.to_vec();
            bytes[at] ^= 0xff;
            // Some changes are other valid states.
            let _ = Saved::of(&bytes);
        }
        let later = [MAGIC.as_slice(), &2_u32.to_be_bytes()].concat();
        assert_eq!(Saved::of(&later), Err(SavedError::Version(2)));
        assert_eq!(Saved::of(b"an initramfs"), Err(SavedError::Foreign));
    }
}
