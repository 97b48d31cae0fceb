//! Keeps the clocks of all guests at the host's.
//!
//! One timer for all: a guest that is idle is woken once a minute, and the daemon with it. Guests that keep the time by a
//! clock of their VMM's are asked once.

use std::{collections::HashSet, sync::Arc, time::Duration};

use futures::StreamExt;
use sandboxer_base::chain;
use sandboxer_protocol::id::SandboxId;

use super::{DaemonState, PodHandle, state::PodState};

/// How often clocks are compared: the agent's time constant is made for it (`timekeeper.rs` there).
const INTERVAL: Duration = Duration::from_secs(64);
/// How many guests are asked at the same time.
const AT_ONCE: usize = 4;
/// How long one guest may take. One that does not answer delays nobody but those behind it, by this.
const LIMIT: Duration = Duration::from_secs(2);

/// Compares clocks for ever.
pub async fn keep(node: Arc<DaemonState>) {
    let mut done = HashSet::new();
    loop {
        tokio::time::sleep(INTERVAL).await;
        round(node.registry.pods(), &mut done).await;
    }
}

/// Compares the clocks of those that are ready, except for those in `done`, which take care of themselves.
async fn round(pods: Vec<PodHandle>, done: &mut HashSet<SandboxId>) {
    done.retain(|id| pods.iter().any(|pod| pod.id() == id));
    let asked: Vec<_> = pods
        .into_iter()
        .filter(|pod| pod.status().state == PodState::Ready && !done.contains(pod.id()))
        .map(compare)
        .collect();
    let finished: Vec<_> = futures::stream::iter(asked).buffer_unordered(AT_ONCE).collect().await;
    done.extend(finished.into_iter().flatten());
}

/// Compares one; returns its id if that need not be done again.
async fn compare(pod: PodHandle) -> Option<SandboxId> {
    match tokio::time::timeout(LIMIT, pod.sync_clock()).await {
        Ok(Ok(again)) => (!again).then(|| pod.id().clone()),
        Ok(Err(error)) => {
            tracing::debug!(pod = %pod.id(), error = chain(&error), "cannot compare the guest's clock");
            None
        }
        Err(_) => {
            tracing::debug!(pod = %pod.id(), "the guest did not tell its clock within {LIMIT:?}");
            None
        }
    }
}
