//! The undo steps of a start; each phase adds its own.

use std::future::Future;

use futures::future::{BoxFuture, FutureExt};

/// A stack of undo steps, run in reverse order.
#[derive(Default)]
pub struct Undo {
    steps: Vec<(&'static str, BoxFuture<'static, Result<(), String>>)>,
}

impl Undo {
    /// Adds the undo step for the action just completed. `what` completes "cannot …".
    pub fn push<E: std::error::Error>(
        &mut self,
        what: &'static str,
        step: impl Future<Output = Result<(), E>> + Send + 'static,
    ) {
        self.steps.push((what, step.map(|done| done.map_err(|e| sandboxer_base::chain(&e))).boxed()));
    }

    /// Runs all undo steps. A failed step does not prevent the others; the error names all failed steps.
    pub async fn run(self) -> Result<(), String> {
        let mut failures = Vec::new();
        for (what, step) in self.steps.into_iter().rev() {
            if let Err(error) = step.await {
                failures.push(format!("cannot {what}: {error}"));
            }
        }
        if failures.is_empty() { Ok(()) } else { Err(failures.join("; ")) }
    }

    /// Drops all undo steps: the start succeeded.
    pub fn forget(self) {}
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[tokio::test]
    async fn steps_are_undone_last_first_and_a_failure_stops_none() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let mut undo = Undo::default();
        for n in 1..=3 {
            let seen = seen.clone();
            undo.push("undo it", async move {
                seen.lock().unwrap().push(n);
                if n == 2 { Err(std::io::Error::other("two is stuck")) } else { Ok(()) }
            });
        }
        assert_eq!(undo.run().await.unwrap_err(), "cannot undo it: two is stuck");
        assert_eq!(*seen.lock().unwrap(), [3, 2, 1]);
    }
}
