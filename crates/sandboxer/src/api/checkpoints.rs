//! Requests of the admin service about checkpoints.

use std::{
    io::{self, BufWriter, Read, Write},
    sync::Arc,
};

use futures::{Stream, StreamExt};
use sandboxer_base::{Code, chain};
use sandboxer_protocol::admin::{
    Checkpoint, CheckpointPart, CreateCheckpointRequest, ImportCheckpointRequest, ListCheckpointsResponse,
    SavedContainer,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::convert::optional_id;
use crate::{
    checkpoint::{self, Checkpoints, Manifest, View, archive},
    error::PodError,
    pod::DaemonState,
};

/// Maximum bytes of an archive in one message.
const PART: usize = 256 << 10;
/// Number of such messages that may wait.
const PARTS: usize = 4;

/// Saves a pod. The pod is looked up at once, and the answer follows when it is saved, and has stopped if it was to.
pub fn create(
    node: &Arc<DaemonState>,
    request: CreateCheckpointRequest,
) -> Result<impl Future<Output = Result<Checkpoint, Status>> + Send + use<>, Status> {
    let pod = node.registry.pod_by_prefix(&request.pod)?;
    Ok(async move {
        let CreateCheckpointRequest { name, stop, .. } = request;
        let saved = if stop { pod.checkpoint_last(name).await } else { pod.checkpoint(name).await };
        let manifest = *saved?;
        if stop && let Err(error) = pod.stop().await {
            let (pod, error) = (pod.id(), chain(&error));
            return Err(Status::internal(format!("pod {pod} is saved, but has not stopped: {error}")));
        }
        Ok(message(made(manifest)))
    })
}

fn made(manifest: Manifest) -> View {
    let (namespace, name) = (manifest.namespace.to_string(), manifest.name.to_string());
    View { namespace, name, manifest: Ok(manifest) }
}

/// Lists all checkpoints.
pub async fn list(node: &DaemonState) -> Result<ListCheckpointsResponse, Status> {
    let checkpoints = node.checkpoints.clone();
    let listed = tokio::task::spawn_blocking(move || checkpoints.list()).await;
    let listed = listed.map_err(|panic| Status::internal(panic.to_string()))?;
    let listed = listed.map_err(|error| Status::internal(format!("cannot list the checkpoints: {error}")))?;
    Ok(ListCheckpointsResponse { checkpoints: listed.into_iter().map(message).collect() })
}

/// Reads a whole checkpoint and checks it.
pub async fn inspect(node: &DaemonState, namespace: String, name: String) -> Result<Checkpoint, Status> {
    blocking(node, move |all| all.verify(&namespace, &name)).await
}

/// Removes a checkpoint.
pub async fn remove(node: &DaemonState, namespace: String, name: String) -> Result<Checkpoint, Status> {
    blocking(node, move |all| all.remove(&namespace, &name)).await
}

/// Sends a checkpoint as an archive.
pub fn export(
    node: &DaemonState,
    namespace: String,
    name: String,
) -> Result<ReceiverStream<Result<CheckpointPart, Status>>, Status> {
    let held = node.checkpoints.hold(&namespace, &name)?;
    let (parts, receiver) = mpsc::channel(PARTS);
    tokio::task::spawn_blocking(move || {
        let exported = archive::export(&held, &mut BufWriter::with_capacity(PART, ToClient(&parts)));
        if let Err(error) = exported {
            let reason = format!("cannot export it: {error}");
            let error = checkpoint::refused(&namespace, &name, Code::FailedPrecondition, reason);
            // A client that is gone needs none.
            let _ = parts.blocking_send(Err(error.into()));
        }
    });
    Ok(ReceiverStream::new(receiver))
}

/// Makes a checkpoint of an archive.
pub async fn import(
    node: Arc<DaemonState>,
    mut requests: impl Stream<Item = Result<ImportCheckpointRequest, Status>> + Send + Unpin + 'static,
) -> Result<Checkpoint, Status> {
    let first = requests.next().await.transpose()?.unwrap_or_default();
    let namespace = optional_id("namespace", &first.namespace)?;
    let name = optional_id("checkpoint", &first.name)?;
    let (parts, receiver) = mpsc::channel(PARTS);
    let checkpoints = node.checkpoints.clone();
    let importing = tokio::task::spawn_blocking(move || {
        archive::import(
            &checkpoints,
            namespace,
            name,
            FromClient { parts: receiver, part: first.data, at: 0 },
        )
    });
    // An archive whose client is gone is cut off.
    while let Some(Ok(request)) = requests.next().await {
        if parts.send(request.data).await.is_err() {
            break;
        }
    }
    drop(parts);
    let imported = importing.await.map_err(|panic| Status::internal(panic.to_string()))?;
    Ok(message(made(imported?)))
}

/// Sends what is written.
struct ToClient<'a>(&'a mpsc::Sender<Result<CheckpointPart, Status>>);

impl Write for ToClient<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let part = CheckpointPart { data: bytes[..bytes.len().min(PART)].to_vec() };
        let length = part.data.len();
        let sent = self.0.blocking_send(Ok(part));
        sent.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe)).map(|()| length)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads what is sent.
struct FromClient {
    parts: mpsc::Receiver<Vec<u8>>,
    part: Vec<u8>,
    at: usize,
}

impl Read for FromClient {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        while self.at == self.part.len() {
            match self.parts.blocking_recv() {
                Some(part) => (self.part, self.at) = (part, 0),
                None => return Ok(0),
            }
        }
        let read = (&self.part[self.at..]).read(to)?;
        self.at += read;
        Ok(read)
    }
}

async fn blocking(
    node: &DaemonState,
    work: impl FnOnce(&Checkpoints) -> Result<View, PodError> + Send + 'static,
) -> Result<Checkpoint, Status> {
    let checkpoints = node.checkpoints.clone();
    let done = tokio::task::spawn_blocking(move || work(&checkpoints)).await;
    Ok(message(done.map_err(|panic| Status::internal(panic.to_string()))??))
}

fn message(view: View) -> Checkpoint {
    let View { namespace, name, manifest } = view;
    let manifest = match manifest {
        Ok(manifest) => manifest,
        Err(problem) => return Checkpoint { namespace, name, problem, ..Default::default() },
    };
    let shape = manifest.shape();
    Checkpoint {
        namespace,
        name,
        pod: manifest.pod.to_string(),
        stored_bytes: manifest.stored_bytes(),
        pod_name: manifest.pod_name,
        made_at_ns: manifest.made_at_ns,
        paused_ns: manifest.paused_ns,
        vcpus: shape.vcpus,
        memory_mib: shape.memory_mib,
        interfaces: shape.nics.into(),
        vmm: manifest.inputs.vmm.vmm,
        vmm_version: manifest.inputs.vmm.version,
        accelerator: manifest.inputs.vmm.accelerator,
        containers: manifest
            .containers
            .into_iter()
            .map(|saved| SavedContainer {
                name: saved.identity.name,
                image: saved.identity.image,
                args: saved.identity.args,
            })
            .collect(),
        problem: String::new(),
    }
}
