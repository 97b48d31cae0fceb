//! Keeps the clocks of all guests in step with the host's.
//!
//! One timer serves all guests, so an idle guest is woken once a minute, and the daemon with it. Guests that follow a
//! clock of their VMM are compared once.

use std::{collections::HashSet, sync::Arc, time::Duration};

use futures::StreamExt;
use sandboxer_base::chain;
use sandboxer_protocol::id::SandboxId;

use super::{daemon_state::DaemonState, handle::PodHandle};
use crate::state::PodState;

/// Interval of comparisons. The agent's time constant assumes it (`timekeeper.rs` there).
const INTERVAL: Duration = Duration::from_secs(64);
/// Maximum number of guests compared in parallel.
const AT_ONCE: usize = 4;
/// Time limit per guest. A guest that does not respond delays only those behind it.
const LIMIT: Duration = Duration::from_secs(2);

/// Compares the clocks of all guests forever.
pub async fn keep(node: Arc<DaemonState>) {
    let mut done = HashSet::new();
    loop {
        tokio::time::sleep(INTERVAL).await;
        round(node.registry.pods(), &mut done).await;
    }
}

/// Compares the clocks of all ready pods, except for those in `done`, which follow another clock.
async fn round(pods: Vec<PodHandle>, done: &mut HashSet<SandboxId>) {
    done.retain(|id| pods.iter().any(|pod| pod.id() == id));
    let comparisons: Vec<_> = pods
        .into_iter()
        .filter(|pod| pod.status().state == PodState::Ready && !done.contains(pod.id()))
        .map(compare)
        .collect();
    let finished: Vec<_> = futures::stream::iter(comparisons).buffer_unordered(AT_ONCE).collect().await;
    done.extend(finished.into_iter().flatten());
}

/// Compares one clock; returns the pod's id if no further comparison is needed.
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
