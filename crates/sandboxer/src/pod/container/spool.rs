//! A buffer between the guest and a FIFO. The kernel counts the bytes that have passed, so that each byte passes
//! exactly once, even if the daemon is killed at any time.
//!
//! `splice` moves bytes and advances the count in one system call, which a kill cannot split: the count is the file's
//! position when splicing from a file, and its length when splicing into one. Both belong to the open file, a memfd.
//! The front has a descriptor of it too, so the next worker can read the progress of this one from the kernel.
//!
//! Bytes are stored at their offset in the stream. Passed pages are freed, but never written again: a pipe refers to
//! spliced pages until its reader has read them.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::FileExt,
    },
    time::Duration,
};

use rustix::{
    fs::{FallocateFlags, MemfdFlags, SeekFrom, fallocate, memfd_create, seek, tell},
    io::Errno,
    pipe::{SpliceFlags, splice},
};
use tokio::io::{Interest, unix::AsyncFd};

const PAGE: u64 = 4096;
/// Interval of checks whether a FIFO was read: the kernel reports only that it can be written to.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);

fn watched(fifo: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd stays open and refers to the same file for its lifetime, and the AsyncFd owns it.
    unsafe { AsyncFd::register_with_interest(fifo, interest) }.map_err(io::Error::from)
}

/// A memfd with bytes at their offsets in a stream.
#[derive(Debug)]
struct Spool {
    file: File,
    /// The offset before which all whole pages are freed.
    emptied: u64,
}

impl Spool {
    fn new() -> io::Result<Self> {
        Ok(Self { file: memfd_create("sandboxer-stream", MemfdFlags::CLOEXEC)?.into(), emptied: 0 })
    }

    /// Frees the whole pages before `offset`.
    fn empty(&mut self, offset: u64) -> io::Result<()> {
        let whole = offset - offset % PAGE;
        if whole > self.emptied {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(&self.file, flags, self.emptied, whole - self.emptied)?;
            self.emptied = whole;
        }
        Ok(())
    }
}

/// Output into a FIFO. The memfd's position is the number of bytes written to the FIFO.
#[derive(Debug)]
pub struct Outlet {
    fifo: AsyncFd<OwnedFd>,
    spool: Spool,
}

impl Outlet {
    /// Creates a spool that writes to a FIFO that was just opened and does not block.
    pub fn new(fifo: OwnedFd) -> io::Result<Self> {
        Ok(Self { fifo: watched(fifo, Interest::WRITABLE)?, spool: Spool::new()? })
    }

    /// Restores a spool as an earlier worker left it.
    pub fn inherited(fifo: OwnedFd, spool: OwnedFd) -> io::Result<Self> {
        let spool = Spool { file: spool.into(), emptied: 0 };
        let mut outlet = Self { fifo: watched(fifo, Interest::WRITABLE)?, spool };
        let delivered = outlet.delivered()?;
        outlet.spool.empty(delivered)?;
        Ok(outlet)
    }

    /// Returns the FIFO and the memfd, which the next worker needs.
    pub fn fds(&self) -> [BorrowedFd<'_>; 2] {
        [self.fifo.as_fd(), self.spool.file.as_fd()]
    }

    /// Returns the offset up to which the stream was written to the FIFO.
    pub fn delivered(&self) -> io::Result<u64> {
        Ok(tell(&self.spool.file)?)
    }

    /// Sets the beginning of the stream to `offset`: earlier bytes were delivered in another way.
    pub fn begin_at(&mut self, offset: u64) -> io::Result<()> {
        seek(&self.spool.file, SeekFrom::Start(offset))?;
        Ok(())
    }

    /// Writes the bytes at `offset` to the FIFO, as fast as it accepts them. Cancel-safe: continues where it stopped.
    pub async fn deliver(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let end = offset + bytes.len() as u64;
        self.spool.file.write_all_at(bytes, offset)?;
        loop {
            let at = self.delivered()?;
            if at >= end {
                return self.spool.empty(at);
            }
            let mut ready = self.fifo.writable().await?;
            let left = usize::try_from(end - at).unwrap_or(usize::MAX);
            match splice(&self.spool.file, None, &self.fifo, None, left, SpliceFlags::NONBLOCK) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => ready.clear_ready(),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits until the FIFO's reader has read all bytes, at most for `limit`.
    pub async fn read_within(&self, limit: Duration) {
        let read = async {
            while rustix::io::ioctl_fionread(&self.fifo).is_ok_and(|left| left > 0) {
                tokio::time::sleep(LOOK_INTERVAL).await;
            }
        };
        // A reader that is slow or gone gets the bytes later, or never.
        let _ = tokio::time::timeout(limit, read).await;
    }
}

/// Input from a FIFO. The memfd's length is the number of bytes read from the FIFO.
#[derive(Debug)]
pub struct Inlet {
    fifo: AsyncFd<OwnedFd>,
    spool: Spool,
}

impl Inlet {
    /// Creates a spool that reads from a FIFO that was just opened and does not block.
    pub fn new(fifo: OwnedFd) -> io::Result<Self> {
        Ok(Self { fifo: watched(fifo, Interest::READABLE)?, spool: Spool::new()? })
    }

    /// Restores a spool as an earlier worker left it.
    pub fn inherited(fifo: OwnedFd, spool: OwnedFd) -> io::Result<Self> {
        Ok(Self { fifo: watched(fifo, Interest::READABLE)?, spool: Spool { file: spool.into(), emptied: 0 } })
    }

    /// Returns the FIFO and the memfd, which the next worker needs.
    pub fn fds(&self) -> [BorrowedFd<'_>; 2] {
        [self.fifo.as_fd(), self.spool.file.as_fd()]
    }

    /// Returns the offset up to which the stream was read from the FIFO.
    pub fn taken(&self) -> io::Result<u64> {
        Ok(self.spool.file.metadata()?.len())
    }

    /// Sets the beginning of the stream to `offset`: earlier bytes were delivered in another way.
    pub fn begin_at(&mut self, offset: u64) -> io::Result<()> {
        self.spool.file.set_len(offset)
    }

    /// Waits until the FIFO has bytes and reads at most `most`; returns 0 at the end of file. Cancel-safe.
    pub async fn take(&self, most: usize) -> io::Result<usize> {
        loop {
            let mut ready = self.fifo.readable().await?;
            match self.splice(most) {
                Err(Errno::AGAIN) => ready.clear_ready(),
                Err(Errno::INTR) => {}
                done => return Ok(done?),
            }
        }
    }

    /// Reads the bytes in the FIFO, at most `most`; returns 0 if it is empty.
    pub fn take_now(&self, most: usize) -> io::Result<usize> {
        match self.splice(most) {
            Err(Errno::AGAIN) => Ok(0),
            done => Ok(done?),
        }
    }

    fn splice(&self, most: usize) -> Result<usize, Errno> {
        let mut end = rustix::fs::fstat(&self.spool.file)?.st_size.unsigned_abs();
        splice(&self.fifo, None, &self.spool.file, Some(&mut end), most, SpliceFlags::NONBLOCK)
    }

    /// Returns at most `most` bytes from `offset` on.
    pub fn read(&self, offset: u64, most: usize) -> io::Result<Vec<u8>> {
        let there = self.taken()?.saturating_sub(offset);
        let mut bytes = vec![0; usize::try_from(there).unwrap_or(most).min(most)];
        self.spool.file.read_exact_at(&mut bytes, offset)?;
        Ok(bytes)
    }

    /// Frees bytes before `offset`: the guest has them.
    pub fn passed(&mut self, offset: u64) -> io::Result<()> {
        self.spool.empty(offset)
    }
}

#[cfg(test)]
mod tests {
    use rustix::pipe::{PipeFlags, pipe_with};
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_end_of_an_output_waits_for_its_reader_but_not_for_ever() {
        let (reader, writer) = pipe_with(PipeFlags::NONBLOCK).unwrap();
        let mut outlet = Outlet::new(writer).unwrap();
        outlet.deliver(0, b"last words").await.unwrap();
        let began = Instant::now();
        outlet.read_within(Duration::from_millis(50)).await;
        assert_eq!(began.elapsed().as_millis(), 50, "nothing is read");
        let began = Instant::now();
        let read = async {
            tokio::time::sleep(Duration::from_millis(10)).await;
            rustix::io::read(&reader, &mut [0; 64]).unwrap()
        };
        let ((), count) = tokio::join!(outlet.read_within(Duration::from_secs(1)), read);
        assert_eq!(count, 10);
        assert!((10..15).contains(&began.elapsed().as_millis()), "{:?}", began.elapsed());
    }
}
