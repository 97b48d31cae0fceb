//! Both directions of a task connection, in files in memory, so that the front's successor can continue in the middle
//! of a frame.
//!
//! The kernel moves all bytes, in system calls that move and record them atomically: a front that is killed has moved
//! them or has not. The length of one file is the number of bytes received; the position of the other is the number of
//! response bytes sent.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, RawFd},
};

use nix::{
    errno::Errno,
    fcntl::{SpliceFFlags, splice},
    sys::sendfile::sendfile,
    unistd::{Whence, lseek, read},
};
use sandboxer_base::failpoint::pass;

use crate::{journal::Pipe, memory_file::MemoryFile, store::Stored};

/// The bytes from containerd.
#[derive(Debug)]
pub struct Received {
    file: MemoryFile,
    end: u64,
}

impl Received {
    /// Creates a stream that has received these bytes.
    pub fn create(bytes: &[u8]) -> io::Result<Self> {
        let file = MemoryFile::stored(bytes)?;
        Ok(Self { file, end: bytes.len() as u64 })
    }

    /// Continues a stream.
    pub fn reopen(file: Stored) -> io::Result<Self> {
        let file = MemoryFile::from(file);
        let end = file.length()?;
        Ok(Self { file, end })
    }

    /// Returns all received bytes.
    pub fn content(&self) -> io::Result<Vec<u8>> {
        self.file.content()
    }

    /// Returns the number of received bytes.
    pub fn length(&self) -> u64 {
        self.end
    }

    /// Reads the bytes that `client`, which is non-blocking, has now, through an empty pipe. Returns their number, 0 if
    /// there are none; `None` at the end.
    pub fn read(&mut self, client: &Stored, pipe: &Pipe, into: &mut [u8]) -> io::Result<Option<usize>> {
        let count = loop {
            match splice(client, None, &pipe.write, None, into.len(), SpliceFFlags::SPLICE_F_NONBLOCK) {
                Ok(0) => return Ok(None),
                Ok(count) => break count,
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return Ok(Some(0)),
                Err(error) => return Err(error.into()),
            }
        };
        pass(format_args!("the front has a request in the pipe"));
        let begin = self.end;
        if let Err(error) = self.empty(pipe) {
            // The next connection needs an empty pipe.
            while read(&pipe.read, into).is_ok_and(|count| count > 0) {}
            return Err(error);
        }
        pass(format_args!("the front has a request in its file"));
        self.file.read(&mut into[..count], begin)?;
        Ok(Some(count))
    }

    /// Moves all bytes from the pipe to the file.
    pub fn empty(&mut self, pipe: &Pipe) -> io::Result<()> {
        loop {
            let mut at = self.end.cast_signed();
            const MOST: usize = 1 << 20;
            match splice(&pipe.read, None, &self.file, Some(&mut at), MOST, SpliceFFlags::SPLICE_F_NONBLOCK) {
                Ok(0) | Err(Errno::EAGAIN) => return Ok(()),
                Ok(count) => self.end += count as u64,
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl AsRawFd for Received {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

/// The bytes for containerd.
#[derive(Debug)]
pub struct Answers {
    file: MemoryFile,
    end: u64,
    sent: u64,
    failed: Option<io::Error>,
}

impl Answers {
    /// Creates a stream with these bytes, none of which is sent.
    pub fn create(bytes: &[u8]) -> io::Result<Self> {
        let file = MemoryFile::stored(bytes)?;
        Ok(Self { file, end: bytes.len() as u64, sent: 0, failed: None })
    }

    /// Continues a stream; also returns all its bytes.
    pub fn reopen(file: Stored) -> io::Result<(Self, Vec<u8>)> {
        let sent = lseek(&file, 0, Whence::SeekCur)?.unsigned_abs();
        let file = MemoryFile::from(file);
        let bytes = file.content()?;
        Ok((Self { file, end: bytes.len() as u64, sent, failed: None }, bytes))
    }

    /// Truncates the stream to `length` bytes. None of the others is sent: a front was killed while it wrote them.
    pub fn cut(&mut self, length: usize) -> io::Result<()> {
        self.end = self.sent.max(length as u64);
        self.file.cut(self.end)
    }

    /// Returns the number of bytes, sent and unsent.
    pub fn length(&self) -> u64 {
        self.end
    }

    /// Returns the number of unsent bytes.
    pub fn waiting(&self) -> usize {
        usize::try_from(self.end - self.sent).unwrap_or(usize::MAX)
    }

    /// Returns the unsent bytes.
    pub fn unsent(&self) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; self.waiting()];
        self.file.read(&mut bytes, self.sent)?;
        Ok(bytes)
    }

    /// Adds `bytes`. The next [`Self::flush`] returns the error, if there is one.
    pub fn push(&mut self, bytes: &[u8]) {
        pass(format_args!("the front is about to write an answer to its file"));
        match self.file.write(bytes, self.end) {
            Ok(()) => {
                self.end += bytes.len() as u64;
                pass(format_args!("the front has an answer in its file"));
            }
            Err(error) => self.failed = Some(error),
        }
    }

    /// Sends as much as is possible now to `client`, which is non-blocking.
    pub fn flush(&mut self, client: &Stored) -> io::Result<()> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        while self.waiting() > 0 {
            match sendfile(client.as_fd(), &self.file, None, self.waiting()) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.sent += count as u64,
                Err(Errno::EAGAIN) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        pass(format_args!("the front has sent an answer"));
        Ok(())
    }
}

impl AsRawFd for Answers {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}
