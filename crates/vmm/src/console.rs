//! Reads a guest's console log while it is being written.
//!
//! The log is two files of bounded size: [`FILE`], and [`OLDER`] with the half before it. When the newer file is full,
//! it replaces the older one.

use std::{
    fs::File,
    io::{self, Read},
    os::{fd::OwnedFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
};

use futures::{Stream, stream};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use tokio::io::{Interest, unix::AsyncFd};

/// The newer part of a console log, in its VM's run directory.
pub const FILE: &str = "console.log";
/// The older part of a console log.
pub const OLDER: &str = "console.log.1";

/// Bytes per read.
const CHUNK: usize = 16 << 10;

/// A console log being read.
#[derive(Debug)]
pub struct Reader {
    newer: PathBuf,
    /// The file being read, and the one after it.
    open: File,
    next: Option<File>,
    changes: AsyncFd<OwnedFd>,
}

impl Reader {
    /// Opens the console log of the VM in `run_dir`.
    pub fn open(run_dir: &Path) -> io::Result<Self> {
        let newer = run_dir.join(FILE);
        let changes = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
        // The watch is on the directory, in which a rotation is a rename, and is added before the files are opened, so
        // that no change is missed.
        let wanted = AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_CREATE | AddWatchFlags::IN_DELETE_SELF;
        changes.add_watch(run_dir, wanted)?;
        let last = File::open(&newer)?;
        let (open, next) = match File::open(run_dir.join(OLDER)) {
            Ok(older) => (older, Some(last)),
            Err(_) => (last, None),
        };
        // SAFETY: an OwnedFd stays open and is the same file for its lifetime, and the AsyncFd owns it.
        let changes = unsafe { AsyncFd::register_with_interest(changes.into(), Interest::READABLE) }
            .map_err(io::Error::from)?;
        Ok(Self { newer, open, next, changes })
    }

    /// Streams everything that is kept and then, with `follow`, what is added until the log is removed.
    pub fn into_stream(self, follow: bool) -> impl Stream<Item = io::Result<Vec<u8>>> + Send {
        stream::unfold(Some(self), move |reader| async move {
            let mut reader = reader?;
            match reader.chunk(follow).await {
                Ok(chunk) if chunk.is_empty() => None,
                Ok(chunk) => Some((Ok(chunk), Some(reader))),
                Err(error) => Some((Err(error), None)),
            }
        })
    }

    /// Returns the next bytes; empty at the end.
    async fn chunk(&mut self, follow: bool) -> io::Result<Vec<u8>> {
        let mut chunk = vec![0; CHUNK];
        loop {
            let count = self.open.read(&mut chunk)?;
            if count > 0 {
                chunk.truncate(count);
                return Ok(chunk);
            }
            if let Some(next) = self.next.take() {
                self.open = next;
                continue;
            }
            if !follow {
                return Ok(Vec::new());
            }
            if let Ok(newest) = File::open(&self.newer)
                && newest.metadata()?.ino() != self.open.metadata()?.ino()
            {
                // After a rotation the open file is the older half; it is read to its end after one more check.
                self.next = Some(newest);
                continue;
            }
            if !self.newer.exists() {
                return Ok(Vec::new());
            }
            let mut ready = self.changes.readable().await?;
            match nix::unistd::read(ready.get_inner(), &mut [0; 4096]) {
                Ok(_) => {}
                Err(nix::errno::Errno::EAGAIN) => ready.clear_ready(),
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Write};

    use futures::StreamExt;

    use super::*;

    #[tokio::test]
    async fn a_log_is_read_in_order_across_a_rotation_and_to_its_removal() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("pod");
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join(OLDER), "one ").unwrap();
        fs::write(dir.join(FILE), "two ").unwrap();
        let read = Reader::open(&dir).unwrap().into_stream(false);
        let read: Vec<u8> = read.map(Result::unwrap).concat().await;
        assert_eq!(read, b"one two ");

        let mut following = Box::pin(Reader::open(&dir).unwrap().into_stream(true));
        let mut seen = Vec::new();
        while seen.len() < 8 {
            seen.extend(following.next().await.unwrap().unwrap());
        }
        fs::OpenOptions::new().append(true).open(dir.join(FILE)).unwrap().write_all(b"three ").unwrap();
        fs::rename(dir.join(FILE), dir.join(OLDER)).unwrap();
        fs::write(dir.join(FILE), "four").unwrap();
        while seen.len() < 18 {
            seen.extend(following.next().await.unwrap().unwrap());
        }
        assert_eq!(seen, b"one two three four");
        fs::remove_dir_all(&dir).unwrap();
        assert!(following.next().await.is_none(), "the log is gone, the reader is not");
    }
}
