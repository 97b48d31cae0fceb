//! A client for containerd: reads the metadata of a container, and checks whether the container has a task.

use std::{
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
    time::Duration,
};

use sandboxer_base::chain;
use sandboxer_protocol::{
    containers::{GetContainerRequest, containers_client::ContainersClient},
    id::ContainerId,
    tasks::{self, tasks_client::TasksClient},
};
use serde::Deserialize;
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
/// Key of CRI's metadata of a container.
const METADATA: &str = "io.cri-containerd.container.metadata";
/// containerd's namespace for objects of CRI.
const OF_CRI: &str = "k8s.io";
/// Name of the launcher's file in a bundle.
pub const LAUNCHED: &str = "sandboxer.json";
/// Maximum size of the launcher's file, bytes.
const MAX_LAUNCHED: u64 = 4096;
/// What containerd appends to the path of its gRPC socket for that of its ttrpc socket, unless it is configured otherwise.
const TTRPC: &str = "ttrpc";
/// gRPC header with containerd's namespace.
const NAMESPACE: &str = "containerd-namespace";

/// Returns the socket of the containerd that had the launcher start the container with this bundle; empty: CRI-O had.
pub fn launched_by(bundle: &Path) -> io::Result<PathBuf> {
    #[derive(Deserialize)]
    struct Launched {
        containerd: PathBuf,
    }
    let mut text = Vec::new();
    File::open(bundle.join(LAUNCHED))?.take(MAX_LAUNCHED).read_to_end(&mut text)?;
    Ok(serde_json::from_slice::<Launched>(&text)?.containerd)
}

/// Returns the socket of the containerd that made a pod: of this sandbox container, if it has one, else the one whose ttrpc socket is
/// configured; `None`: it is not known.
pub fn socket(sandbox: Option<&Path>, ttrpc: Option<&Path>) -> Option<PathBuf> {
    match sandbox {
        Some(bundle) => launched_by(bundle).ok().filter(|socket| !socket.as_os_str().is_empty()),
        None => ttrpc
            .filter(|path| path.extension().is_some_and(|last| last == TTRPC))
            .map(|path| path.with_extension("")),
    }
}

/// Returns the digest of the image of a container of CRI, or what is in the way. It is that of the image's configuration, so the same on
/// all nodes, whatever name was used.
pub async fn image(socket: &Path, container: &ContainerId) -> Result<String, String> {
    /// Go's message as JSON, as far as it is read.
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Versioned {
        metadata: Metadata,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Metadata {
        image_ref: String,
    }
    let mut client = ContainersClient::new(connect(socket)?).max_decoding_message_size(MAX_ANSWER_BYTES);
    let request = in_namespace(GetContainerRequest { id: container.to_string() }, OF_CRI)?;
    let answer = client.get(request).await;
    let answer =
        answer.map_err(|status| format!("containerd at {}: {}", socket.display(), status.message()))?;
    let kept = answer.into_inner().container.and_then(|mut all| all.extensions.remove(METADATA));
    let kept = kept.ok_or_else(|| format!("containerd has no {METADATA:?} of it"))?;
    let Versioned { metadata } = serde_json::from_slice(&kept.value)
        .map_err(|error| format!("cannot read {METADATA:?} of it: {error}"))?;
    match metadata.image_ref.contains(':') {
        true => Ok(metadata.image_ref),
        false => Err(format!("containerd calls its image {:?}, which is no digest", metadata.image_ref)),
    }
}

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
    connect_for(socket, LIMIT)
}

/// Returns a channel that connects with the first request. Each request has this time limit.
pub fn connect_for(socket: &Path, limit: Duration) -> Result<Channel, String> {
    let path = socket.strip_prefix("unix://").unwrap_or(socket).display();
    let endpoint = Endpoint::from_shared(format!("unix://{path}")).map_err(|error| chain(&error))?;
    Ok(endpoint.timeout(limit).connect_lazy())
}

/// Returns a request in this namespace of containerd.
fn in_namespace<T>(message: T, namespace: &str) -> Result<Request<T>, String> {
    let mut request = Request::new(message);
    let header = namespace.parse().map_err(|_| format!("invalid namespace {namespace:?}"))?;
    request.metadata_mut().insert(NAMESPACE, header);
    Ok(request)
}
