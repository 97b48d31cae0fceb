//! Fixture of the end-to-end tests. Each run has its own stack: containerd and the daemon in a new
//! directory, removed at the end in any case, and checked for leaks on the host.
//!
//! The cases use CRI, like kubelet. Cases on a container's behaviour, not its isolation, also run on handler
//! `runc`: a case that fails there is wrong.

pub mod bystander;
pub mod case;
pub mod containerd;
pub mod cri;
pub mod document;
pub mod failing;
pub mod fifo;
pub mod forward;
pub mod image;
pub mod insist;
pub mod kubelet;
pub mod ledger;
pub mod page;
pub mod stack;
pub mod stream;

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Polls `check` every 20 ms until it returns `Some`, for at most `limit`. Only for state without notifications
/// (CRI's status, `/proc`); `what` names it in the error.
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
