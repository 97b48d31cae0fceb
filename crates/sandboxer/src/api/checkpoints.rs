//! Requests of the admin service about checkpoints.

use std::sync::Arc;

use sandboxer_protocol::admin::{
    Checkpoint, CreateCheckpointRequest, ListCheckpointsResponse, SavedContainer,
};
use tonic::Status;

use crate::{
    checkpoint::{Checkpoints, View},
    error::PodError,
    pod::DaemonState,
};

/// Saves a pod. The pod is looked up at once, and the answer follows when it is saved.
pub fn create(
    node: &Arc<DaemonState>,
    request: CreateCheckpointRequest,
) -> Result<impl Future<Output = Result<Checkpoint, Status>> + Send + use<>, Status> {
    let pod = node.registry.pod_by_prefix(&request.pod)?;
    Ok(async move {
        let manifest = *pod.checkpoint(request.name).await?;
        let (namespace, name) = (manifest.namespace.to_string(), manifest.name.to_string());
        Ok(message(View { namespace, name, manifest: Ok(manifest) }))
    })
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
