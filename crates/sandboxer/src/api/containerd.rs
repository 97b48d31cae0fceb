//! A client for containerd: what it keeps with a container.

use std::{path::Path, time::Duration};

use sandboxer_base::chain;
use sandboxer_protocol::{
    containers::{GetContainerRequest, containers_client::ContainersClient},
    id::ContainerId,
};
use tonic::{Request, Status, transport::Endpoint};

/// Time limit of a request. containerd waits for us meanwhile, so it is idle enough.
const LIMIT: Duration = Duration::from_secs(10);
/// Maximum size of an answer, bytes.
const MAX_ANSWER_BYTES: usize = 4 << 20;
/// What CRI calls its description of a pod.
const DESCRIPTION: &str = "io.cri-containerd.sandbox.metadata";
/// containerd's gRPC header for its namespaces.
const NAMESPACE: &str = "containerd-namespace";

/// Returns CRI's description of a pod, from containerd's record of the pod's sandbox container.
pub async fn description(socket: &Path, namespace: &str, sandbox: &ContainerId) -> Result<Vec<u8>, Status> {
    let path = socket.strip_prefix("unix://").unwrap_or(socket).display();
    let failed = |what: String| {
        Status::unavailable(format!(
            "cannot ask containerd at {path} for its description of pod {sandbox}: {what}"
        ))
    };
    let endpoint = Endpoint::from_shared(format!("unix://{path}")).map_err(|error| failed(chain(&error)))?;
    let channel = endpoint.timeout(LIMIT).connect_lazy();
    let mut client = ContainersClient::new(channel).max_decoding_message_size(MAX_ANSWER_BYTES);
    let mut request = Request::new(GetContainerRequest { id: sandbox.to_string() });
    let header = namespace.parse().map_err(|_| failed(format!("invalid namespace {namespace:?}")))?;
    request.metadata_mut().insert(NAMESPACE, header);
    let answer = client.get(request).await.map_err(|status| failed(status.message().to_owned()))?;
    let kept =
        answer.into_inner().container.and_then(|mut container| container.extensions.remove(DESCRIPTION));
    kept.map(|any| any.value).ok_or_else(|| {
        Status::invalid_argument(format!(
            "sandbox container {sandbox} has no {DESCRIPTION:?}: only CRI makes pods (crictl, kubelet)"
        ))
    })
}
