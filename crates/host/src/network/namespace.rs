//! Runs code in another network namespace.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    thread,
};

use nix::sched::{CloneFlags, setns, unshare};

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
