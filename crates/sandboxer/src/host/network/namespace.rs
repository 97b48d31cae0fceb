//! Work in another network namespace.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    thread,
};

use nix::sched::{CloneFlags, setns, unshare};

/// The network namespace that is bound to `path`.
pub fn open(path: &Path) -> io::Result<OwnedFd> {
    Ok(File::open(path)?.into())
}

/// One of nobody's, with nothing in it. It lives as long as the descriptor, or anything opened in it.
pub fn fresh() -> io::Result<OwnedFd> {
    in_a_thread(|| {
        unshare(CloneFlags::CLONE_NEWNET)?;
        open(Path::new("/proc/thread-self/ns/net"))
    })
}

/// Does `work` in `namespace`; blocks for as long as that takes.
///
/// A thread is entered into the namespace and ends with the work: one of the runtime's would take other tasks
/// there.
pub fn within<T: Send>(
    namespace: impl AsFd + Sync,
    work: impl FnOnce() -> io::Result<T> + Send,
) -> io::Result<T> {
    in_a_thread(|| {
        setns(namespace.as_fd(), CloneFlags::CLONE_NEWNET)?;
        work()
    })
}

fn in_a_thread<T: Send>(work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("netns".to_owned()).spawn_scoped(scope, work)?;
        thread
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("the thread in the network namespace panicked")))
    })
}
