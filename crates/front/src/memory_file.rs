//! Files in memory. They last as long as a descriptor of them, and so outlive the process that writes them.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
};

use nix::{
    errno::Errno,
    fcntl::OFlag,
    sys::{
        memfd::{MFdFlags, memfd_create},
        stat::fstat,
        uio::{pread, pwrite},
    },
    unistd::dup3,
};

/// A file in memory.
#[derive(Debug)]
pub struct MemoryFile(OwnedFd);

impl MemoryFile {
    /// Makes an empty file.
    pub fn create() -> io::Result<Self> {
        Ok(Self(memfd_create(c"sandboxer-front", MFdFlags::MFD_CLOEXEC)?))
    }

    /// Returns its length.
    pub fn length(&self) -> io::Result<u64> {
        Ok(fstat(&self.0)?.st_size.unsigned_abs())
    }

    /// Writes all `bytes` at an offset.
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

    /// Fills `bytes` with what begins at an offset.
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

    /// Returns its content.
    pub fn content(&self) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(self.length()?).map_err(io::Error::other)?];
        self.read(&mut bytes, 0)?;
        Ok(bytes)
    }

    /// Puts another file in the place of this one, at once: at the same descriptor.
    pub fn replace(&mut self, by: &Self) -> io::Result<()> {
        Ok(dup3(&by.0, &mut self.0, OFlag::O_CLOEXEC)?)
    }
}

impl From<OwnedFd> for MemoryFile {
    fn from(fd: OwnedFd) -> Self {
        Self(fd)
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
