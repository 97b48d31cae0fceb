//! Returns free memory of the allocator to the kernel after a busy period.
//!
//! Measured once, after a burst of 50 pods: 11.5 MB of the worker's PSS before, 8.2 after.

use std::time::Duration;

use tokio::{
    sync::broadcast::{Receiver, error::RecvError},
    time::timeout,
};

use crate::events::Event;

/// Time without pod events that ends a busy period.
const REST: Duration = Duration::from_secs(5);

/// Returns free memory to the kernel after each busy period, until the events end.
pub async fn trim_at_rest(mut events: Receiver<Event>) {
    while let Ok(_) | Err(RecvError::Lagged(_)) = events.recv().await {
        while let Ok(Ok(_) | Err(RecvError::Lagged(_))) = timeout(REST, events.recv()).await {}
        let given_back = tokio::task::spawn_blocking(|| {
            // SAFETY: touches only free memory of the allocator, under its own locks.
            unsafe { libc::malloc_trim(0) }
        });
        let _ = given_back.await;
    }
}
