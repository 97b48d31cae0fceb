//! Keeps a session with the agent of a pod that is ready.
//!
//! A session may end while both sides live on: a VMM closes its socket, or a frame cannot be read. The agent is then
//! greeted again, as by a daemon that adopts a pod, and pending calls resume: output by its offset, exits of processes,
//! signals by their request id ([`Agent::resume`](sandboxer_guest::Agent::resume)).

use std::{sync::Arc, time::Duration};

use sandboxer_base::chain;
use sandboxer_protocol::{id::SandboxId, link::LinkKey};
use tokio::time::{Instant, sleep, timeout};

use super::daemon_state::DaemonState;
use crate::{error::PodError, pod::running_vm::RunningVm};

/// Delay before the first greeting. If the VM has exited, this is noticed by then.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// Maximum delay; it doubles from greeting to greeting, because a guest may end every session immediately.
const MAX_PAUSE: Duration = Duration::from_secs(5);
/// Length of a session after which the delay starts from the minimum again.
const LASTING: Duration = Duration::from_secs(10);

/// Creates a new session whenever one ends, until the returned future is dropped. Returns the guest's fault if it broke
/// a session.
pub async fn keep(node: Arc<DaemonState>, pod: SandboxId, key: LinkKey, live: RunningVm) -> PodError {
    let mut pause = FIRST_PAUSE;
    loop {
        let since = Instant::now();
        if let Some(broken) = live.agent.violated().await {
            return broken.into();
        }
        if since.elapsed() >= LASTING {
            pause = FIRST_PAUSE;
        }
        loop {
            sleep(pause).await;
            pause = (2 * pause).min(MAX_PAUSE);
            // Boxed: it is rare, and larger than the future that waits for it.
            match Box::pin(resume(&node, &pod, &key, &live)).await {
                Ok(()) => break,
                Err(error) => {
                    tracing::debug!(%pod, error = chain(&error), "cannot greet the agent again");
                }
            }
        }
        tracing::warn!(%pod, "reconnected to the agent after its session ended");
    }
}

async fn resume(
    node: &DaemonState,
    pod: &SandboxId,
    key: &LinkKey,
    live: &RunningVm,
) -> Result<(), PodError> {
    let limit = node.config.vm.agent_timeout;
    let greeting = sandboxer_guest::connect(pod, live.vm.as_ref(), key, node.config.vm.agent_timeout);
    let greeted = timeout(limit, greeting).await;
    let late = |_| PodError::NotReady { pod: pod.clone(), limit, console: String::new() };
    let (next, _) = greeted.map_err(late)??;
    live.agent.resume(&next);
    Ok(())
}
