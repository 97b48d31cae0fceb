//! Establishes a session with a VM's agent.

use std::time::Duration;

use sandboxer_protocol::{
    agent::Ready,
    id::SandboxId,
    link::{self, LinkError, LinkKey},
};
use sandboxer_vmm::{Vm, VmmError};

use super::{Agent, GuestError, bounds::plain, calls::Calls};

/// Why a session with an agent cannot be established.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The VMM provides no stream.
    #[error(transparent)]
    Vmm(#[from] VmmError),
    /// The agent did not respond, or is not the expected one.
    #[error(transparent)]
    Guest(#[from] GuestError),
}

/// Greets the agent and waits until it is ready. The caller sets the deadline and watches the VM meanwhile. `timeout`
/// applies to each short call to the agent afterwards.
pub async fn connect(
    pod: &SandboxId,
    vm: &dyn Vm,
    key: &LinkKey,
    timeout: Duration,
) -> Result<(Agent, Ready), ConnectError> {
    let mut stream = vm.agent_stream().await?;
    let (mut ready, version) = link::greet(&mut stream, key).await.map_err(|source| {
        let source = match source {
            LinkError::Refused(words) => LinkError::Refused(plain(&words)),
            other => other,
        };
        ConnectError::Guest(GuestError::Greeting { pod: pod.clone(), source })
    })?;
    ready.kernel_release = plain(&ready.kernel_release);
    Ok((Agent::new(pod.clone(), Calls::over(stream), version, timeout), ready))
}
