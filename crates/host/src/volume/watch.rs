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

/// The watches of directories.
#[derive(Debug)]
pub struct Watches {
    inotify: Arc<Inotify>,
    // The lock is held for a look-up or a change, never across an await.
    watched: Arc<Mutex<Watched>>,
}

#[derive(Debug, Default)]
struct Watched {
    senders: HashMap<i32, watch::Sender<Counts>>,
    /// The number of watches that helpers are adding. A new watch may have the number of one that is not used any more.
    being_added: usize,
}

/// The number of changes of a directory, and of times at which changes may have been missed.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Counts {
    seen: u64,
    lost: u64,
}

/// A report from a watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The directory has changed.
    Seen,
    /// The directory may have changed: there were more events than the kernel keeps. It need not be read again if its
    /// stamp is the same.
    Lost,
}

/// A watched directory. Two watches of one directory both receive its changes.
#[derive(Debug)]
pub struct Watch {
    changes: watch::Receiver<Counts>,
    last: Counts,
}

impl Watch {
    /// Waits for a change since the last call, or since the watch began. Never returns if the source of changes has
    /// ended.
    pub async fn changed(&mut self) -> Change {
        if self.changes.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        let before = std::mem::replace(&mut self.last, *self.changes.borrow_and_update());
        if self.last.seen == before.seen { Change::Lost } else { Change::Seen }
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
    pub fn new() -> io::Result<Self> {
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
        Ok(Self { inotify, watched })
    }

    /// Watches `dir` of `pod`, with the pod's `helpers`, for names that are created, removed or replaced.
    pub async fn watch(&self, helpers: &Helpers, pod: &SandboxId, dir: &Path) -> Result<Watch, VolumeError> {
        let failed = |source| VolumeError::Watch { dir: dir.to_owned(), source };
        let instance = self.inotify.as_fd().try_clone_to_owned().map_err(failed)?;
        self.watched().being_added += 1;
        let adding = Adding(self);
        let wd = helpers.watch(pod, dir, instance).await?;
        // The caller reads the directory afterwards, and so sees earlier changes.
        let changes = self.watched().senders.entry(wd).or_default().subscribe();
        drop(adding);
        self.clear();
        let last = *changes.borrow();
        Ok(Watch { changes, last })
    }

    /// Ends unused watches.
    fn clear(&self) {
        let mut watched = self.watched();
        if watched.being_added > 0 {
            return;
        }
        let ended = watched.senders.extract_if(|_, sender| sender.receiver_count() == 0);
        for (wd, _) in ended {
            // Fails if the directory is gone, and the watch with it.
            let _ = rustix::fs::inotify::remove_watch(&self.inotify, wd);
        }
    }

    fn watched(&self) -> MutexGuard<'_, Watched> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn tell(senders: &mut HashMap<i32, watch::Sender<Counts>>, wd: i32, mask: AddWatchFlags) {
    if mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
        // The kernel does not report which events were lost.
        senders.values().for_each(|sender| sender.send_modify(|counts| counts.lost += 1));
    } else if mask.contains(AddWatchFlags::IN_IGNORED) {
        // The directory is gone; the watch's number may be reused.
        senders.remove(&wd);
    } else if let Some(sender) = senders.get(&wd) {
        sender.send_modify(|counts| counts.seen += 1);
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink, path::PathBuf, time::Duration};

    use super::*;

    /// A pod's directory in kubelet's, and the pod's helpers.
    struct Node {
        root: tempfile::TempDir,
        helpers: Helpers,
        watches: Watches,
    }

    impl Node {
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            let helpers =
                Helpers::new(None, Duration::from_secs(60)).with_kubelet_root(root.path()).on_behalf_of("u");
            Self { root, helpers, watches: Watches::new().unwrap() }
        }

        fn volume(&self, name: &str) -> PathBuf {
            let dir = self.root.path().join("pods/u/volumes/kubernetes.io~secret").join(name);
            fs::create_dir_all(&dir).unwrap();
            dir
        }

        async fn watch(&self, dir: &Path) -> Result<Watch, VolumeError> {
            self.watches.watch(&self.helpers, &"pod".parse().unwrap(), dir).await
        }
    }

    async fn soon(watch: &mut Watch) -> Change {
        tokio::time::timeout(Duration::from_secs(60), watch.changed()).await.unwrap()
    }

    #[tokio::test]
    async fn whoever_watches_a_directory_is_told_of_its_changes_and_of_no_others() {
        let node = Node::new();
        let (one, other) = (node.volume("one"), node.volume("other"));
        let mut first = node.watch(&one).await.unwrap();
        let mut second = node.watch(&one).await.unwrap();
        let mut elsewhere = node.watch(&other).await.unwrap();
        symlink("x", one.join("..data_tmp")).unwrap();
        fs::rename(one.join("..data_tmp"), one.join("..data")).unwrap();
        assert_eq!(soon(&mut first).await, Change::Seen);
        soon(&mut second).await;
        fs::write(other.join("f"), "").unwrap();
        soon(&mut elsewhere).await;
        assert!(node.watch(&one.join("..data")).await.is_err(), "it leads nowhere");
        assert!(node.watch(Path::new("/etc")).await.is_err(), "it is not the pod's");

        // A removed directory ends its watch, and a new one in its place has its own.
        let dir = node.volume("d");
        let before = node.watch(&dir).await.unwrap();
        fs::remove_dir(&dir).unwrap();
        fs::create_dir(&dir).unwrap();
        let mut after = node.watch(&dir).await.unwrap();
        fs::write(dir.join("f"), "").unwrap();
        soon(&mut after).await;
        drop(before);
    }

    #[tokio::test]
    async fn events_that_were_lost_are_told_as_such() {
        let node = Node::new();
        let dir = node.volume("one");
        let mut watch = node.watch(&dir).await.unwrap();
        let overflow = || tell(&mut node.watches.watched().senders, -1, AddWatchFlags::IN_Q_OVERFLOW);
        overflow();
        assert_eq!(soon(&mut watch).await, Change::Lost);
        overflow();
        let wd = *node.watches.watched().senders.keys().next().unwrap();
        tell(&mut node.watches.watched().senders, wd, AddWatchFlags::IN_CREATE);
        assert_eq!(soon(&mut watch).await, Change::Seen, "both");
    }

    #[tokio::test]
    async fn watches_that_nobody_holds_are_given_back() {
        let node = Node::new();
        let dirs = ["a", "b", "c"].map(|name| node.volume(name));
        for dir in &dirs {
            drop(node.watch(dir).await.unwrap());
        }
        let _watch = node.watch(&dirs[0]).await.unwrap();
        assert_eq!(node.watches.watched().senders.len(), 1);
    }
}
