//! Detects the time of a container's first output by inotify: its first byte in the CRI log.
//!
//! The runtime creates the log file when it starts the container, and appends what the process prints. One thread
//! blocks in the kernel and takes the time of each event as soon as it wakes, independently of the scheduling of other
//! tasks.

use std::collections::HashMap;
use std::ffi::OsString;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::inotify;
use tokio::sync::oneshot;

/// Why a first byte cannot be detected.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// The directory cannot be watched.
    #[error("cannot watch {path:?} for container logs")]
    Watch {
        /// Directory of the logs.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The kernel dropped events, or the watching thread ended.
    #[error("the watch on the container logs was lost: {0}")]
    Lost(String),
}

/// Waiters by file name. The lock is held only for a lookup.
type Waiting = Arc<Mutex<HashMap<OsString, oneshot::Sender<Result<Instant, String>>>>>;

/// A watch on a directory of logs. Dropping it ends the watch.
#[derive(Debug)]
pub struct LogWatch {
    dir: PathBuf,
    waiting: Waiting,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

/// An expected first byte.
#[derive(Debug)]
pub struct FirstByte(oneshot::Receiver<Result<Instant, String>>);

impl FirstByte {
    /// Waits for the first byte and returns its time. The caller sets the deadline.
    pub async fn seen(self) -> Result<Instant, WatchError> {
        match self.0.await {
            Ok(Ok(at)) => Ok(at),
            Ok(Err(why)) => Err(WatchError::Lost(why)),
            Err(_) => Err(WatchError::Lost("its thread has ended".into())),
        }
    }
}

impl LogWatch {
    /// Watches the existing directory `dir`.
    pub fn new(dir: &Path) -> Result<Self, WatchError> {
        let failed =
            |source: rustix::io::Errno| WatchError::Watch { path: dir.to_owned(), source: source.into() };
        let events = inotify::init(inotify::CreateFlags::CLOEXEC).map_err(failed)?;
        inotify::add_watch(&events, dir, inotify::WatchFlags::MODIFY).map_err(failed)?;
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).map_err(failed)?);
        let waiting = Waiting::default();
        let thread = std::thread::Builder::new()
            .name("first-byte".into())
            .spawn({
                let (stop, waiting) = (stop.clone(), waiting.clone());
                move || {
                    let why = watch(&events, &stop, &waiting);
                    for (_, waiter) in lock(&waiting).drain() {
                        let _ = waiter.send(Err(why.clone()));
                    }
                }
            })
            .map_err(|source| WatchError::Watch { path: dir.to_owned(), source })?;
        Ok(Self { dir: dir.to_owned(), waiting, stop, thread: Some(thread) })
    }

    /// Returns the watched directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Starts waiting for a file of the directory. Must be called before anything is written to the file.
    pub fn expect(&self, file: &str) -> FirstByte {
        let (sender, receiver) = oneshot::channel();
        lock(&self.waiting).insert(file.into(), sender);
        FirstByte(receiver)
    }

    /// Stops waiting for a file.
    pub fn forget(&self, file: &str) {
        lock(&self.waiting).remove(std::ffi::OsStr::new(file));
    }
}

impl Drop for LogWatch {
    fn drop(&mut self) {
        let signalled = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let (Ok(_), Some(thread)) = (signalled, self.thread.take()) {
            let _ = thread.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Watches until it is stopped; returns the reason for its end.
fn watch(events: &OwnedFd, stop: &OwnedFd, waiting: &Waiting) -> String {
    let mut buffer = [MaybeUninit::uninit(); 16 << 10];
    loop {
        let mut ready = [PollFd::new(events, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
        match poll(&mut ready, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return error.to_string(),
        }
        if !ready[1].revents().is_empty() {
            return "it was stopped".into();
        }
        if ready[0].revents().is_empty() {
            continue;
        }
        let mut reader = inotify::Reader::new(events, &mut buffer);
        loop {
            let event = match reader.next() {
                Ok(event) => event,
                Err(error) => return error.to_string(),
            };
            let at = Instant::now();
            if event.events().contains(inotify::ReadFlags::QUEUE_OVERFLOW) {
                return "the kernel dropped events: raise fs.inotify.max_queued_events".into();
            }
            if let Some(name) = event.file_name() {
                let name = OsString::from_vec(name.to_bytes().to_vec());
                if let Some(waiter) = lock(waiting).remove(&name) {
                    let _ = waiter.send(Ok(at));
                }
            }
            if reader.is_buffer_empty() {
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn the_first_write_is_stamped_and_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let watch = LogWatch::new(dir.path()).unwrap();
        let (a, b) = (watch.expect("a.log"), watch.expect("b.log"));
        let mut file = std::fs::File::create(dir.path().join("a.log")).unwrap();
        let _untouched = std::fs::File::create(dir.path().join("b.log")).unwrap();
        let before = Instant::now();
        file.write_all(b"x").unwrap();
        let written = Instant::now();
        file.write_all(b"y").unwrap();
        let seen = a.seen().await.unwrap();
        assert!(seen >= before, "stamped before it was written");
        assert!(seen.saturating_duration_since(written) < Duration::from_secs(5));
        // The file was created but never written: no byte, so no stamp.
        assert!(tokio::time::timeout(Duration::from_millis(50), b.seen()).await.is_err());
    }

    #[tokio::test]
    async fn an_ended_watch_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let watch = LogWatch::new(dir.path()).unwrap();
        let waiting = watch.expect("a.log");
        drop(watch);
        assert!(matches!(waiting.seen().await, Err(WatchError::Lost(_))));
    }

    #[test]
    fn a_directory_that_is_not_there_is_named() {
        let error = LogWatch::new(Path::new("/nowhere/logs")).unwrap_err();
        assert!(error.to_string().contains("/nowhere/logs"), "{error}");
    }
}
