//! Open files and directories of the guest's processes, by their handle numbers.

use std::{
    collections::BTreeMap,
    io::IoSlice,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use rustix::{
    fs::{OFlags, SeekFrom},
    io::{Errno, ReadWriteFlags},
};
use sandboxer_share::wire::Result;

use super::{
    lock,
    place::{self, Content},
};

/// The table of open files.
pub struct Handles {
    /// The open files by node and handle.
    open: Mutex<BTreeMap<(u64, u64), Arc<Open>>>,
    next: AtomicU64,
    most: usize,
}

/// An open file or directory.
pub struct Open {
    pub file: Arc<OwnedFd>,
    /// Whether all writes are appended to the file.
    appends: bool,
    content: Content,
    /// The lock that is held while a directory's position is used.
    position: Mutex<()>,
}

impl Handles {
    /// Creates a table of up to `most` open files.
    pub fn new(most: usize) -> Self {
        Self { open: Mutex::default(), next: AtomicU64::new(1), most }
    }

    /// Checks that one more file may be opened.
    ///
    /// # Errors
    ///
    /// `EMFILE`: too many files are open.
    pub fn check_free(&self) -> Result<()> {
        if lock(&self.open).len() < self.most { Ok(()) } else { Err(Errno::MFILE) }
    }

    /// Adds an open file of a node; returns its number.
    pub fn add(&self, node: u64, open: Open) -> Result<u64> {
        let mut all = lock(&self.open);
        if all.len() >= self.most {
            return Err(Errno::MFILE);
        }
        let handle = self.next.fetch_add(1, Ordering::Relaxed);
        all.insert((node, handle), Arc::new(open));
        Ok(handle)
    }

    /// Returns an open file.
    pub fn get(&self, node: u64, handle: u64) -> Result<Arc<Open>> {
        lock(&self.open).get(&(node, handle)).cloned().ok_or(Errno::BADF)
    }

    /// Returns any open file of this node.
    pub fn any_of(&self, node: u64) -> Option<Arc<Open>> {
        lock(&self.open).range((node, 0)..=(node, u64::MAX)).next().map(|(_, open)| Arc::clone(open))
    }

    /// Closes a file.
    pub fn release(&self, node: u64, handle: u64) -> Result<()> {
        // The file is closed after the table's lock is released.
        let removed = lock(&self.open).remove(&(node, handle));
        removed.map(drop).ok_or(Errno::BADF)
    }

    /// Closes all files.
    pub fn clear(&self) {
        lock(&self.open).clear();
    }
}

impl Open {
    pub fn new(file: OwnedFd, flags: OFlags, content: Content) -> Self {
        let appends = flags.contains(OFlags::APPEND);
        Self { file: Arc::new(file), appends, content, position: Mutex::default() }
    }

    /// Reads from `offset` on until `buffer` is full or the file ends; returns the number of bytes.
    pub fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<usize> {
        let mut filled = 0;
        while filled < buffer.len() {
            match rustix::io::pread(&self.file, &mut buffer[filled..], offset.saturating_add(filled as u64)) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(Errno::INTR) => {}
                Err(errno) if filled == 0 => return Err(errno),
                Err(_) => break,
            }
            // In such files, the next read may return other content.
            if self.content == Content::OfTheKernel {
                break;
            }
        }
        Ok(filled)
    }

    /// Writes at `offset`, or at the end of the file; returns the number of bytes.
    pub fn write(&self, offset: u64, data: &[u8], append: bool) -> Result<usize> {
        match (append, self.appends) {
            // The guest's process has changed the flag since the file was opened.
            (true, false) => {
                rustix::io::pwritev2(&self.file, &[IoSlice::new(data)], offset, ReadWriteFlags::APPEND)
            }
            // The flag was changed, or the data was written to a memory mapping of the file.
            (false, true) => rustix::io::pwrite(place::reopen(&self.file, OFlags::WRONLY)?, data, offset),
            _ => rustix::io::pwrite(&self.file, data, offset),
        }
    }

    /// Returns the offset of the next data or hole, or of the end.
    pub fn seek(&self, offset: u64, whence: u32) -> Result<u64> {
        let to = match whence.cast_signed() {
            libc::SEEK_SET => SeekFrom::Start(offset),
            libc::SEEK_END => SeekFrom::End(offset.cast_signed()),
            libc::SEEK_DATA => SeekFrom::Data(offset),
            libc::SEEK_HOLE => SeekFrom::Hole(offset),
            _ => return Err(Errno::INVAL),
        };
        let _position = lock(&self.position);
        rustix::fs::seek(&self.file, to)
    }

    /// Reads entries of a directory from `offset` on into `buffer`; returns the number of bytes.
    pub fn list(&self, offset: u64, buffer: &mut [u8]) -> Result<usize> {
        let _position = lock(&self.position);
        rustix::fs::seek(&self.file, SeekFrom::Start(offset))?;
        let (file, length) = (std::os::fd::AsRawFd::as_raw_fd(&self.file.as_fd()), buffer.len());
        // SAFETY: the kernel writes at most `length` bytes, which `buffer` has.
        let done = unsafe { libc::syscall(libc::SYS_getdents64, file, buffer.as_mut_ptr(), length) };
        usize::try_from(done)
            .map_err(|_| Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
    }
}
