//! Reports changes in directories. One inotify instance serves all pods.

use std::{
    collections::HashMap,
    io,
    os::fd::AsFd,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use nix::{
    errno::Errno,
    sys::inotify::{AddWatchFlags, InitFlags, Inotify},
};
use sandboxer_protocol::id::SandboxId;
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::watch,
};

use super::VolumeError;
use crate::helper::Helpers;

/// Watches directories.
#[derive(Debug)]
pub struct Watches {
    inotify: Arc<Inotify>,
    helpers: Helpers,
    // Held for a look-up or a change, never across an await.
    watched: Arc<Mutex<Watched>>,
}

#[derive(Debug, Default)]
struct Watched {
    senders: HashMap<i32, watch::Sender<u64>>,
    /// Number of watches that helpers are adding: a new one may have the number of a watch that is not used
    /// any more.
    being_added: usize,
}

/// A watched directory. Two watches of one directory both receive its changes.
#[derive(Debug)]
pub struct Watch {
    changes: watch::Receiver<u64>,
}

impl Watch {
    /// Waits for a change since the last call, or since the watch began. Never returns if the source of
    /// changes has ended.
    pub async fn changed(&mut self) {
        if self.changes.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// Counts a watch as being added until dropped.
struct Adding<'a>(&'a Watches);

impl Drop for Adding<'_> {
    fn drop(&mut self) {
        self.0.watched().being_added -= 1;
    }
}

impl Watches {
    /// Creates an empty set. Needs a runtime.
    pub fn new(helpers: Helpers) -> io::Result<Self> {
        let inotify = Arc::new(Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?);
        let watched: Arc<Mutex<Watched>> = Arc::default();
        let (reader, shared) = (inotify.clone(), watched.clone());
        let descriptor = inotify.as_fd().try_clone_to_owned()?;
        // SAFETY: an OwnedFd stays open and the same for its lifetime, and the AsyncFd owns it.
        let descriptor = unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) }
            .map_err(io::Error::from)?;
        tokio::spawn(async move {
            loop {
                let Ok(mut ready) = descriptor.readable().await else { return };
                match reader.read_events() {
                    Ok(events) => {
                        let mut watched = shared.lock().unwrap_or_else(PoisonError::into_inner);
                        for event in events {
                            tell(&mut watched.senders, event.wd.as_raw(), event.mask);
                        }
                    }
                    Err(Errno::EAGAIN) => ready.clear_ready(),
                    Err(Errno::EINTR) => {}
                    Err(error) => {
                        return tracing::error!(%error, "cannot read inotify events: volumes are no longer updated");
                    }
                }
            }
        });
        Ok(Self { inotify, helpers, watched })
    }

    /// Starts watching `dir` of `pod` for names that are created, removed or replaced.
    pub async fn watch(&self, pod: &SandboxId, dir: &Path) -> Result<Watch, VolumeError> {
        let failed = |source| VolumeError::Watch { dir: dir.to_owned(), source };
        let instance = self.inotify.as_fd().try_clone_to_owned().map_err(failed)?;
        self.watched().being_added += 1;
        let adding = Adding(self);
        let wd = self.helpers.watch(pod, dir, instance).await?;
        // Earlier changes are seen when the caller reads the directory afterwards.
        let changes = self.watched().senders.entry(wd).or_default().subscribe();
        drop(adding);
        self.clear();
        Ok(Watch { changes })
    }

    /// Ends unused watches.
    fn clear(&self) {
        let mut watched = self.watched();
        if watched.being_added > 0 {
            return;
        }
        let ended = watched.senders.extract_if(|_, sender| sender.receiver_count() == 0);
        for (wd, _) in ended {
            // Fails if its directory is gone, and the watch with it.
            let _ = rustix::fs::inotify::remove_watch(&self.inotify, wd);
        }
    }

    fn watched(&self) -> MutexGuard<'_, Watched> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn tell(senders: &mut HashMap<i32, watch::Sender<u64>>, wd: i32, mask: AddWatchFlags) {
    if mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
        // The lost events are unknown.
        senders.values().for_each(|sender| sender.send_modify(|changes| *changes += 1));
    } else if mask.contains(AddWatchFlags::IN_IGNORED) {
        // The directory is gone; its number may be reused.
        senders.remove(&wd);
    } else if let Some(sender) = senders.get(&wd) {
        sender.send_modify(|changes| *changes += 1);
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink, time::Duration};

    use super::*;

    fn watches() -> Watches {
        Watches::new(Helpers::new(None, Duration::from_secs(60))).unwrap()
    }

    fn pod() -> SandboxId {
        "pod".parse().unwrap()
    }

    async fn soon(watch: &mut Watch) {
        tokio::time::timeout(Duration::from_secs(60), watch.changed()).await.unwrap();
    }

    #[tokio::test]
    async fn whoever_watches_a_directory_is_told_of_its_changes_and_of_no_others() {
        let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let watches = watches();
        let mut first = watches.watch(&pod(), one.path()).await.unwrap();
        let mut second = watches.watch(&pod(), one.path()).await.unwrap();
        let mut elsewhere = watches.watch(&pod(), other.path()).await.unwrap();
        symlink("x", one.path().join("..data_tmp")).unwrap();
        fs::rename(one.path().join("..data_tmp"), one.path().join("..data")).unwrap();
        soon(&mut first).await;
        soon(&mut second).await;
        fs::write(other.path().join("f"), "").unwrap();
        soon(&mut elsewhere).await;
        assert!(watches.watch(&pod(), &one.path().join("..data")).await.is_err(), "it leads nowhere");

        // A removed directory ends its watch, and a new one in its place has its own.
        let dir = other.path().join("d");
        fs::create_dir(&dir).unwrap();
        let before = watches.watch(&pod(), &dir).await.unwrap();
        fs::remove_dir(&dir).unwrap();
        fs::create_dir(&dir).unwrap();
        let mut after = watches.watch(&pod(), &dir).await.unwrap();
        fs::write(dir.join("f"), "").unwrap();
        soon(&mut after).await;
        drop(before);
    }

    #[tokio::test]
    async fn watches_that_nobody_holds_are_given_back() {
        let dirs: Vec<_> = (0..3).map(|_| tempfile::tempdir().unwrap()).collect();
        let watches = watches();
        for dir in &dirs {
            drop(watches.watch(&pod(), dir.path()).await.unwrap());
        }
        let _held = watches.watch(&pod(), dirs[0].path()).await.unwrap();
        assert_eq!(watches.watched().senders.len(), 1);
    }
}
