//! Shortens the move between control groups that KVM makes for each new VM.
//!
//! KVM moves a thread of a new VM into the VMM's control group. For each move the kernel takes a lock of all forks and
//! exits. The first move in a while waits until all processors know that the lock may be taken: a grace period of RCU,
//! 7 to 12 ms in a node VM, in which a start does nothing. A move soon after another one does not wait. So this
//! process moves itself to the group in which it already is, while the VMM still loads its libraries.

use std::{
    fs::File,
    io::{self, Write},
    path::PathBuf,
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use procfs::process::Process;

use super::PROCESSES;

/// Time from a VMM's start until KVM has created its VM, with a margin. A busy host takes longer, but then there are
/// other moves, too.
const PERIOD: Duration = Duration::from_millis(60);

/// Interval of the moves: shorter than the shortest grace period, after which the kernel forgets the last move. With 5
/// ms it forgot some of them, and every other boot of a VMM waited.
const INTERVAL: Duration = Duration::from_millis(2);

/// Time until which a thread repeats the move; `None`: there is no thread.
static UNTIL: Mutex<Option<Instant>> = Mutex::new(None);

/// Keeps moves short for the next 60 ms. Has no effect if this process is in no group of version 2.
pub fn keep_moves_short() {
    if until(|until| until.replace(Instant::now() + PERIOD)).is_some() {
        return;
    }
    let begun = thread::Builder::new().name("short-moves".into()).spawn(|| {
        if let Err(error) = repeat() {
            tracing::debug!(%error, "cannot shorten moves between control groups");
            until(Option::take);
        }
    });
    if begun.is_err() {
        until(Option::take);
    }
}

/// Moves this process to its own group until the time is over.
#[expect(clippy::disallowed_methods, reason = "no event tells that the kernel is about to forget a move")]
fn repeat() -> io::Result<()> {
    let mut processes = File::options().write(true).open(own_group()?.join(PROCESSES))?;
    while until(|until| until.take_if(|until| *until <= Instant::now()).is_none()) {
        // Zero is the process that writes.
        processes.write_all(b"0")?;
        thread::sleep(INTERVAL);
    }
    Ok(())
}

fn until<T>(change: impl FnOnce(&mut Option<Instant>) -> T) -> T {
    change(&mut UNTIL.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Returns the directory of this process's group in the version 2 hierarchy.
fn own_group() -> io::Result<PathBuf> {
    let none = || io::Error::new(io::ErrorKind::NotFound, "this process is in no control group of version 2");
    let myself = Process::myself().map_err(io::Error::other)?;
    let group = myself.cgroups().map_err(io::Error::other)?.into_iter().find(|group| group.hierarchy == 0);
    let mounts = myself.mountinfo().map_err(io::Error::other)?;
    let root = mounts.into_iter().find(|mount| mount.fs_type == "cgroup2").ok_or_else(none)?.mount_point;
    Ok(root.join(group.ok_or_else(none)?.pathname.trim_start_matches('/')))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::disallowed_methods, reason = "the thread has no handle")]
    fn the_thread_ends_after_the_last_start() {
        keep_moves_short();
        keep_moves_short();
        let begun = Instant::now();
        while until(|until| until.is_some()) {
            assert!(begun.elapsed() < Duration::from_secs(30), "the thread did not end");
            thread::sleep(INTERVAL);
        }
    }
}
