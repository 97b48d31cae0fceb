//! Files in memory. A file lasts as long as one of its descriptors, and so outlives the process that writes it.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
};

use nix::{
    errno::Errno,
    sys::{
        memfd::{MFdFlags, memfd_create},
        stat::fstat,
        uio::{pread, pwrite},
    },
    unistd::ftruncate,
};

use crate::store::Stored;

/// A file in memory.
#[derive(Debug)]
pub struct MemoryFile(Stored);

impl MemoryFile {
    /// Creates an empty file, which is not in the store yet.
    pub fn create() -> io::Result<Self> {
        Ok(Self(Stored::not_yet(memfd_create(c"sandboxer-front", MFdFlags::MFD_CLOEXEC)?)))
    }

    /// Creates a file with this content, and puts it into the store.
    pub fn stored(content: &[u8]) -> io::Result<Self> {
        let mut file = Self::create()?;
        file.write(content, 0)?;
        file.0.store();
        Ok(file)
    }

    /// Puts the file into the store as the journal of a generation.
    pub fn store_journal(&mut self, generation: u32) {
        self.0.store_journal(generation);
    }

    /// Records that the file is in the store as the journal of a generation.
    pub fn mark_as_journal(&mut self, generation: u32) {
        self.0.mark_as_journal(generation);
    }

    /// Returns the file's length.
    pub fn length(&self) -> io::Result<u64> {
        Ok(fstat(&self.0)?.st_size.unsigned_abs())
    }

    /// Writes all `bytes` at the offset `at`.
    pub fn write(&self, mut bytes: &[u8], mut at: u64) -> io::Result<()> {
        while !bytes.is_empty() {
            match pwrite(&self.0, bytes, at.cast_signed()) {
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
                Ok(count) => {
                    bytes = &bytes[count..];
                    at += count as u64;
                }
            }
        }
        Ok(())
    }

    /// Fills `bytes` from the offset `at`.
    pub fn read(&self, mut bytes: &mut [u8], mut at: u64) -> io::Result<()> {
        while !bytes.is_empty() {
            match pread(&self.0, bytes, at.cast_signed()) {
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => {
                    bytes = &mut bytes[count..];
                    at += count as u64;
                }
            }
        }
        Ok(())
    }

    /// Returns the file's content.
    pub fn content(&self) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(self.length()?).map_err(io::Error::other)?];
        self.read(&mut bytes, 0)?;
        Ok(bytes)
    }

    /// Truncates the file to this length.
    pub fn cut(&self, length: u64) -> io::Result<()> {
        Ok(ftruncate(&self.0, length.cast_signed())?)
    }

    /// Replaces this file by another one atomically, at the same descriptor. Both are in the store.
    pub fn replace(&mut self, by: Self) -> io::Result<()> {
        self.0.replace(by.0)
    }
}

impl From<Stored> for MemoryFile {
    fn from(file: Stored) -> Self {
        Self(file)
    }
}

impl AsFd for MemoryFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for MemoryFile {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
