//! Fixture of the end-to-end tests. Each run has a stack of its own: containerd and the daemon in a fresh
//! directory, taken down at the end however the run ends, and checked for what it left on the host.
//!
//! The cases speak CRI, as a kubelet does. Those whose subject is a container's behaviour and not how it is
//! isolated run on handler `runc` too: a case that fails there is wrong, whatever it says about us.

pub mod bystander;
pub mod case;
pub mod cri;
pub mod forward;
pub mod insist;
pub mod kubelet;
pub mod ledger;
pub mod stack;
pub mod stream;

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Asks `check` every 20 ms until it answers `Some`, for at most `limit`. Only for what tells nobody when it
/// changes (CRI's status, `/proc`); `what` is what the error says never came.
pub async fn eventually<T, F>(what: &str, limit: Duration, mut check: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<Option<T>>>,
{
    let mut tick = tokio::time::interval(Duration::from_millis(20));
    let deadline = Instant::now() + limit;
    loop {
        tick.tick().await;
        if let Some(answer) = check().await? {
            return Ok(answer);
        }
        if Instant::now() >= deadline {
            bail!("{what}: not within {limit:?}");
        }
    }
}
