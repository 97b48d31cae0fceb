//! A client for containerd: reads the metadata of a container, and checks whether the container has a task.

use std::{path::Path, time::Duration};

use sandboxer_base::chain;
use sandboxer_protocol::{
    containers::{GetContainerRequest, containers_client::ContainersClient},
    id::ContainerId,
    tasks::{self, tasks_client::TasksClient},
};
use tokio::net::UnixStream;
use tonic::{
    Code, Request, Status,
    transport::{Channel, Endpoint},
};

/// Time limit of a request. containerd waits for us meanwhile, so it is not busy.
const LIMIT: Duration = Duration::from_secs(10);
/// Maximum size of a response, bytes.
const MAX_ANSWER_BYTES: usize = 4 << 20;
/// Key of CRI's description of a pod.
const DESCRIPTION: &str = "io.cri-containerd.sandbox.metadata";
/// gRPC header with containerd's namespace.
const NAMESPACE: &str = "containerd-namespace";

/// Returns the PID of containerd, if it can be determined.
pub async fn pid(socket: &Path) -> Option<i32> {
    let path = socket.strip_prefix("unix://").unwrap_or(socket);
    let connected = tokio::time::timeout(LIMIT, UnixStream::connect(path)).await.ok()?;
    connected.ok()?.peer_cred().ok()?.pid()
}

/// Returns CRI's description of a pod, from containerd's record of the pod's sandbox container.
pub async fn description(socket: &Path, namespace: &str, sandbox: &ContainerId) -> Result<Vec<u8>, Status> {
    let failed = |what: String| {
        let socket = socket.display();
        Status::unavailable(format!(
            "cannot ask containerd at {socket} for its description of pod {sandbox}: {what}"
        ))
    };
    let channel = connect(socket).map_err(&failed)?;
    let mut client = ContainersClient::new(channel).max_decoding_message_size(MAX_ANSWER_BYTES);
    let request =
        in_namespace(GetContainerRequest { id: sandbox.to_string() }, namespace).map_err(&failed)?;
    let answer = client.get(request).await.map_err(|status| failed(status.message().to_owned()))?;
    let kept =
        answer.into_inner().container.and_then(|mut container| container.extensions.remove(DESCRIPTION));
    kept.map(|any| any.value).ok_or_else(|| {
        Status::invalid_argument(format!(
            "sandbox container {sandbox} has no {DESCRIPTION:?}: only CRI makes pods (crictl, kubelet)"
        ))
    })
}

/// Returns whether containerd has a task of this container.
pub async fn has_task(socket: &Path, namespace: &str, container: &ContainerId) -> Result<bool, String> {
    let mut client = TasksClient::new(connect(socket)?).max_decoding_message_size(MAX_ANSWER_BYTES);
    let request = in_namespace(tasks::GetRequest { container_id: container.to_string() }, namespace)?;
    match client.get(request).await {
        Ok(_) => Ok(true),
        Err(status) if status.code() == Code::NotFound => Ok(false),
        Err(status) => Err(format!("containerd at {}: {}", socket.display(), status.message())),
    }
}

/// Returns a channel that connects with the first request.
fn connect(socket: &Path) -> Result<Channel, String> {
    let path = socket.strip_prefix("unix://").unwrap_or(socket).display();
    let endpoint = Endpoint::from_shared(format!("unix://{path}")).map_err(|error| chain(&error))?;
    Ok(endpoint.timeout(LIMIT).connect_lazy())
}

/// Returns a request in this namespace of containerd.
fn in_namespace<T>(message: T, namespace: &str) -> Result<Request<T>, String> {
    let mut request = Request::new(message);
    let header = namespace.parse().map_err(|_| format!("invalid namespace {namespace:?}"))?;
    request.metadata_mut().insert(NAMESPACE, header);
    Ok(request)
}
