//! From a machine to an agent that answers.

use std::time::Duration;

use sandboxer_protocol::{
    agent::{AgentClient, Ready},
    id::SandboxId,
    link::{self, LinkError, LinkKey},
};
use tokio::io::{AsyncRead, AsyncWrite};
use ttrpc::asynchronous::{Client, transport::Socket};

use super::{
    Agent, GuestError,
    bounds::{Bounded, plain},
    outbox::Outbox,
};
use crate::{config::VmConfig, error::PodError, vmm::Machine};

/// Greets the agent and waits until it says ready, by event. The caller sets the deadline and
/// watches the machine meanwhile.
pub async fn connect(
    pod: &SandboxId,
    machine: &dyn Machine,
    key: &LinkKey,
    config: &VmConfig,
) -> Result<(Agent, Ready), PodError> {
    let mut stream = machine.agent_stream().await?;
    let mut ready = link::greet(&mut stream, key).await.map_err(|source| {
        let source = match source {
            LinkError::Refused(words) => LinkError::Refused(plain(&words)),
            other => other,
        };
        GuestError::Greeting { pod: pod.clone(), source }
    })?;
    ready.kernel_release = plain(&ready.kernel_release);
    Ok((speak_over(pod, stream, config.agent_timeout), ready))
}

/// A session over `stream`, on which both have greeted.
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
