//! How many pods start at once; the others wait in the order they came.

use tokio::sync::{Semaphore, SemaphorePermit};

/// A gate with so many places. A start that is dropped while it waits leaves the queue.
#[derive(Debug)]
pub struct Admission {
    // tokio's semaphore is fair: permits are given in the order they were asked for.
    places: Semaphore,
}

impl Admission {
    /// A gate for `places` starts at once, at least one.
    pub fn new(places: usize) -> Self {
        Self { places: Semaphore::new(places.max(1)) }
    }

    /// Waits for a place; it is given back when the answer is dropped.
    pub async fn enter(&self) -> Option<SemaphorePermit<'_>> {
        // The semaphore is never closed; were it, starts would go through ungated.
        self.places.acquire().await.ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[test]
    fn a_start_that_gives_up_frees_its_place_in_the_queue() {
        let gate = Admission::new(1);
        let first = gate.enter().now_or_never().flatten();
        assert!(first.is_some());
        let mut second = Box::pin(gate.enter());
        let mut third = Box::pin(gate.enter());
        assert!(second.as_mut().now_or_never().is_none());
        assert!(third.as_mut().now_or_never().is_none());
        drop(second);
        drop(first);
        assert!(third.now_or_never().is_some(), "the place went to a start that had left");
    }
}
