//! From a machine to an agent that answers.

use sandboxer_protocol::{
    agent::{AgentClient, Ready},
    id::SandboxId,
    link::{self, LinkKey},
};
use ttrpc::asynchronous::{Client, transport::Socket};

use super::{Agent, GuestError};
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
    let ready = link::greet(&mut stream, key)
        .await
        .map_err(|source| GuestError::Greeting { pod: pod.clone(), source })?;
    let client = AgentClient::new(Client::new(Socket::new(stream)));
    Ok((Agent::new(pod.clone(), client, config.agent_timeout), ready))
}
