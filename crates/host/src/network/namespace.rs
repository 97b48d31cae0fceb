//! Runs code in another network namespace.

use std::{
    fs::{self, DirBuilder, File},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{DirBuilderExt, MetadataExt},
    },
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
};

use nix::{
    errno::Errno,
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, setns, unshare},
    unistd::gettid,
};

/// Opens the network namespace at `path`.
pub fn open(path: &Path) -> io::Result<OwnedFd> {
    Ok(File::open(path)?.into())
}

/// Creates an empty network namespace. It exists as long as the descriptor, or a socket or tap in it, is open.
pub fn fresh() -> io::Result<OwnedFd> {
    in_a_thread(|| -> io::Result<_> {
        unshare(CloneFlags::CLONE_NEWNET)?;
        open(Path::new("/proc/thread-self/ns/net"))
    })
}

/// Runs `work` in `namespace`; blocks until it is done.
///
/// Uses a new thread, which ends with `work`: a thread of the runtime would run other tasks in the namespace.
pub fn within<T: Send, E: From<io::Error> + Send>(
    namespace: impl AsFd + Sync,
    work: impl FnOnce() -> Result<T, E> + Send,
) -> Result<T, E> {
    in_a_thread(|| {
        setns(namespace.as_fd(), CloneFlags::CLONE_NEWNET).map_err(io::Error::from)?;
        work()
    })
}

/// A thread of this process in a network namespace, for others that look for the namespace at `/proc/<id>/ns/net`. Ends
/// when dropped, or with this process.
#[derive(Debug)]
pub struct Occupant {
    id: u32,
    _stay: mpsc::Sender<()>,
}

impl Occupant {
    /// Enters `namespace`, or a new one that is empty.
    pub fn enter(namespace: Option<OwnedFd>) -> io::Result<Self> {
        let (stay, until) = mpsc::channel::<()>();
        let (entered, id) = mpsc::sync_channel(1);
        let enter = move || {
            match namespace {
                Some(namespace) => setns(namespace, CloneFlags::CLONE_NEWNET)?,
                None => unshare(CloneFlags::CLONE_NEWNET)?,
            }
            Ok(gettid().as_raw().unsigned_abs())
        };
        thread::Builder::new().name("occupant".to_owned()).stack_size(64 << 10).spawn(move || {
            // The caller waits for the result.
            let _ = entered.send(enter());
            // An error means that the occupant was dropped.
            let _ = until.recv();
        })?;
        let id = id.recv().map_err(|_| io::Error::other("the thread in the network namespace panicked"))?;
        Ok(Self { id: id.map_err(|error: Errno| io::Error::from(error))?, _stay: stay })
    }

    /// Returns the thread's id.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Keeps the namespace at `path` until [`release`], also after this process has ended.
    pub fn keep_at(&self, path: &Path) -> io::Result<()> {
        if let Some(dir) = path.parent() {
            DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        }
        release(path)?;
        File::create_new(path)?;
        let namespace = PathBuf::from(format!("/proc/self/task/{}/ns/net", self.id));
        mount(Some(&namespace), path, None::<&str>, MsFlags::MS_BIND, None::<&str>).map_err(|error| {
            // Nothing is mounted there.
            let _ = fs::remove_file(path);
            error.into()
        })
    }
}

/// Removes the path of a namespace, if it exists.
pub fn release(path: &Path) -> io::Result<()> {
    match umount2(path, MntFlags::MNT_DETACH) {
        // It does not exist, or nothing is mounted there.
        Ok(()) | Err(Errno::ENOENT | Errno::EINVAL) => {}
        Err(error) => return Err(error.into()),
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Returns whether two paths name the same namespace.
pub fn is_same(one: &Path, other: &Path) -> io::Result<bool> {
    let number = |path: &Path| fs::metadata(path).map(|meta| (meta.dev(), meta.ino()));
    Ok(number(one)? == number(other)?)
}

fn in_a_thread<T: Send, E: From<io::Error> + Send>(
    work: impl FnOnce() -> Result<T, E> + Send,
) -> Result<T, E> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("netns".to_owned()).spawn_scoped(scope, work)?;
        thread
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("the thread in the network namespace panicked").into()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_thread(id: u32) -> PathBuf {
        format!("/proc/self/task/{id}/ns/net").into()
    }

    #[test]
    fn an_occupied_namespace_is_found_by_the_occupants_id_and_outlives_it_at_a_path() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("netns/c1");
        let occupant = Occupant::enter(None).unwrap();
        let found = PathBuf::from(format!("/proc/{}/ns/net", occupant.id()));
        assert!(!is_same(&found, Path::new("/proc/self/ns/net")).unwrap(), "it is a new one");
        occupant.keep_at(&path).unwrap();
        let second = Occupant::enter(Some(open(&path).unwrap())).unwrap();
        assert!(is_same(&of_thread(second.id()), &found).unwrap());
        drop((occupant, second));
        let again = Occupant::enter(Some(open(&path).unwrap())).unwrap();
        assert!(is_same(&of_thread(again.id()), &path).unwrap());
        release(&path).unwrap();
        assert!(!path.exists());
        release(&path).unwrap();
    }

    #[test]
    fn what_is_no_namespace_is_not_entered() {
        let file = tempfile::tempfile().unwrap();
        let error = Occupant::enter(Some(file.into())).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
    }
}
