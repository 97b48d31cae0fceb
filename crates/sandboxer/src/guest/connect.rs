//! From a machine to an agent that answers.

use sandboxer_protocol::{
    agent::{AgentClient, Ready},
    id::SandboxId,
    link::{self, LinkError, LinkKey},
};
use ttrpc::asynchronous::{Client, transport::Socket};

use super::{
    Agent, GuestError,
    bounds::{Bounded, plain},
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
    let stream = Bounded::new(stream);
    let violation = stream.violation();
    let client = AgentClient::new(Client::new(Socket::new(stream)));
    Ok((Agent::new(pod.clone(), client, violation, config.agent_timeout), ready))
}
