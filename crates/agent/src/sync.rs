//! Small helpers for locks, tasks and descriptors.

use std::{
    io,
    os::fd::OwnedFd,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::io::{Interest, unix::AsyncFd};

use crate::failure::{Failure, Kind};

/// Locks a mutex. Ignores poison: a panic elsewhere ends the whole guest.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `work` to its end even if the caller is dropped: a session may break at any await, and a container must not be
/// left half-created.
pub async fn detached<T: Send + 'static>(
    work: impl Future<Output = Result<T, Failure>> + Send + 'static,
) -> Result<T, Failure> {
    match tokio::spawn(work).await {
        Ok(result) => result,
        Err(error) => Err(Failure::caused(Kind::Internal, "operation was aborted", &error)),
    }
}

/// Makes a non-blocking descriptor usable with await.
pub fn watched(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an owned descriptor stays the same for its lifetime, and it is moved into the result.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}
