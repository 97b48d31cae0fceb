//! What has to be undone when a start fails, or when a pod stops: each phase adds its own.

use std::future::Future;

use futures::future::{BoxFuture, FutureExt};

/// A stack of steps, undone last first.
#[derive(Default)]
pub struct Undo {
    steps: Vec<(&'static str, BoxFuture<'static, Result<(), String>>)>,
}

impl Undo {
    /// Adds what undoes the step just taken. `what` completes "cannot …".
    pub fn push<E: std::error::Error>(
        &mut self,
        what: &'static str,
        step: impl Future<Output = Result<(), E>> + Send + 'static,
    ) {
        self.steps.push((what, step.map(|done| done.map_err(|e| sandboxer_base::chain(&e))).boxed()));
    }

    /// Undoes everything. A step that fails is reported and doesn't keep the others from running;
    /// the answer names all that failed.
    pub async fn run(self) -> Result<(), String> {
        let mut failures = Vec::new();
        for (what, step) in self.steps.into_iter().rev() {
            if let Err(error) = step.await {
                failures.push(format!("cannot {what}: {error}"));
            }
        }
        if failures.is_empty() { Ok(()) } else { Err(failures.join("; ")) }
    }

    /// Forgets everything: what was done shall stay.
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
