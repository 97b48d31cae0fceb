//! Establishes a session with a VM's agent.

use std::time::Duration;

use sandboxer_protocol::{
    agent::{AgentClient, Ready},
    id::SandboxId,
    link::{self, LinkError, LinkKey},
};
use sandboxer_vmm::{Vm, VmmError};
use tokio::io::{AsyncRead, AsyncWrite};
use ttrpc::asynchronous::{Client, transport::Socket};

use super::{
    Agent, GuestError,
    bounds::{Bounded, plain},
    outbox::Outbox,
};

/// Why a session with an agent cannot be established.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The VMM provides no stream.
    #[error(transparent)]
    Vmm(#[from] VmmError),
    /// The agent did not respond, or is another one than expected.
    #[error(transparent)]
    Guest(#[from] GuestError),
}

/// Greets the agent and waits until it is ready. The caller sets the deadline and watches the VM meanwhile.
/// `timeout` is for each short call to the agent afterwards.
pub async fn connect(
    pod: &SandboxId,
    vm: &dyn Vm,
    key: &LinkKey,
    timeout: Duration,
) -> Result<(Agent, Ready), ConnectError> {
    let mut stream = vm.agent_stream().await?;
    let mut ready = link::greet(&mut stream, key).await.map_err(|source| {
        let source = match source {
            LinkError::Refused(words) => LinkError::Refused(plain(&words)),
            other => other,
        };
        ConnectError::Guest(GuestError::Greeting { pod: pod.clone(), source })
    })?;
    ready.kernel_release = plain(&ready.kernel_release);
    Ok((speak_over(pod, stream, timeout), ready))
}

/// Creates a session over `stream`, after the greeting.
fn speak_over(
    pod: &SandboxId,
    stream: impl AsyncRead + AsyncWrite + Send + Sync + Unpin + 'static,
    timeout: Duration,
) -> Agent {
    let stream = Outbox::new(stream);
    let room = stream.room();
    let stream = Bounded::new(stream);
    let violation = stream.violation();
    let client = AgentClient::new(Client::new(Socket::new(stream)));
    Agent::new(pod.clone(), client, room, violation, timeout)
}
