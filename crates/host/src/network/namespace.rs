//! Work in another network namespace.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    thread,
};

use nix::sched::{CloneFlags, setns, unshare};

/// Opens the network namespace that is bound to `path`.
pub fn open(path: &Path) -> io::Result<OwnedFd> {
    Ok(File::open(path)?.into())
}

/// Makes an empty one. It lives as long as the descriptor, or anything opened in it.
pub fn fresh() -> io::Result<OwnedFd> {
    in_a_thread(|| -> io::Result<_> {
        unshare(CloneFlags::CLONE_NEWNET)?;
        open(Path::new("/proc/thread-self/ns/net"))
    })
}

/// Does `work` in `namespace`; blocks for as long as that takes.
///
/// A thread is entered into the namespace and ends with the work: one of the runtime's would take other tasks
/// there.
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
