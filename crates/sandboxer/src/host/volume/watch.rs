//! Tells when something in a directory changes. One inotify instance serves all pods.

use std::{
    collections::HashMap,
    io,
    os::fd::AsFd,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use nix::{
    errno::Errno,
    sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor},
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::watch,
};

/// Watches directories.
#[derive(Debug)]
pub struct Watches {
    inotify: Arc<Inotify>,
    // Held for a look-up or a change, never across an await.
    watched: Arc<Mutex<HashMap<WatchDescriptor, watch::Sender<u64>>>>,
}

/// A directory that is watched. Two of one directory are told alike.
#[derive(Debug)]
pub struct Watch {
    changes: watch::Receiver<u64>,
}

impl Watch {
    /// Waits for a change since the last call, or since the watch began. Never answers if nobody tells.
    pub async fn changed(&mut self) {
        if self.changes.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Watches {
    /// None yet. Needs a runtime.
    pub fn new() -> io::Result<Self> {
        let inotify = Arc::new(Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?);
        let watched: Arc<Mutex<HashMap<_, watch::Sender<u64>>>> = Arc::default();
        let (reader, senders) = (inotify.clone(), watched.clone());
        let descriptor = inotify.as_fd().try_clone_to_owned()?;
        // SAFETY: an OwnedFd is open and the same file as long as it lives, and the AsyncFd owns it.
        let descriptor = unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) }
            .map_err(io::Error::from)?;
        tokio::spawn(async move {
            loop {
                let Ok(mut ready) = descriptor.readable().await else { return };
                match reader.read_events() {
                    Ok(events) => {
                        let mut senders = senders.lock().unwrap_or_else(PoisonError::into_inner);
                        for event in events {
                            tell(&mut senders, event.wd, event.mask);
                        }
                    }
                    Err(Errno::EAGAIN) => ready.clear_ready(),
                    Err(Errno::EINTR) => {}
                    Err(error) => return tracing::error!(%error, "volumes are no longer kept up to date"),
                }
            }
        });
        Ok(Self { inotify, watched })
    }

    /// Watches `dir` from now on: names in it that come, go or are replaced.
    pub fn watch(&self, dir: &Path) -> io::Result<Watch> {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        let ended: Vec<_> =
            watched.iter().filter(|(_, sender)| sender.receiver_count() == 0).map(|(wd, _)| *wd).collect();
        for wd in ended {
            watched.remove(&wd);
            // Its directory may be gone, and the watch with it.
            let _ = self.inotify.rm_watch(wd);
        }
        let flags = AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_MOVED_TO
            | AddWatchFlags::IN_CLOSE_WRITE
            | AddWatchFlags::IN_ONLYDIR;
        let wd = self.inotify.add_watch(dir, flags)?;
        let changes = watched.entry(wd).or_default().subscribe();
        Ok(Watch { changes })
    }
}

fn tell(
    senders: &mut HashMap<WatchDescriptor, watch::Sender<u64>>,
    wd: WatchDescriptor,
    mask: AddWatchFlags,
) {
    if mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
        // What was lost is not known.
        senders.values().for_each(|sender| sender.send_modify(|changes| *changes += 1));
    } else if mask.contains(AddWatchFlags::IN_IGNORED) {
        // The directory is gone; its number may be given to another one.
        senders.remove(&wd);
    } else if let Some(sender) = senders.get(&wd) {
        sender.send_modify(|changes| *changes += 1);
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink, time::Duration};

    use super::*;

    async fn soon(watch: &mut Watch) {
        tokio::time::timeout(Duration::from_secs(60), watch.changed()).await.unwrap();
    }

    #[tokio::test]
    async fn whoever_watches_a_directory_is_told_of_its_changes_and_of_no_others() {
        let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let watches = Watches::new().unwrap();
        let mut first = watches.watch(one.path()).unwrap();
        let mut second = watches.watch(one.path()).unwrap();
        let mut elsewhere = watches.watch(other.path()).unwrap();
        symlink("x", one.path().join("..data_tmp")).unwrap();
        fs::rename(one.path().join("..data_tmp"), one.path().join("..data")).unwrap();
        soon(&mut first).await;
        soon(&mut second).await;
        fs::write(other.path().join("f"), "").unwrap();
        soon(&mut elsewhere).await;
        assert!(watches.watch(&one.path().join("..data")).is_err(), "it leads nowhere");

        // A directory that goes ends its watch, and a new one in its place has its own.
        let dir = other.path().join("d");
        fs::create_dir(&dir).unwrap();
        let before = watches.watch(&dir).unwrap();
        fs::remove_dir(&dir).unwrap();
        fs::create_dir(&dir).unwrap();
        let mut after = watches.watch(&dir).unwrap();
        fs::write(dir.join("f"), "").unwrap();
        soon(&mut after).await;
        drop(before);
    }

    #[tokio::test]
    async fn watches_that_nobody_holds_are_given_back() {
        let dirs: Vec<_> = (0..3).map(|_| tempfile::tempdir().unwrap()).collect();
        let watches = Watches::new().unwrap();
        for dir in &dirs {
            drop(watches.watch(dir.path()).unwrap());
        }
        let _held = watches.watch(dirs[0].path()).unwrap();
        assert_eq!(watches.watched.lock().unwrap().len(), 1);
    }
}
