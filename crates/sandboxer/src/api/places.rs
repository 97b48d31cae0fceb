//! Requests of the admin service about the placement of pods.

use std::{collections::BTreeMap, future::Future, sync::Arc};

use sandboxer_base::Cpus;
use sandboxer_process::residence::Residence;
use sandboxer_protocol::admin::{
    ListPlacesResponse, MovePodRequest, MovePodResponse, NodeMemory, NumaNode, Place,
};
use tonic::Status;

use crate::pod::{DaemonState, PodView};

/// Lists the NUMA nodes, and the places of all pods or of the pod whose id has this prefix.
pub async fn list(node: &Arc<DaemonState>, id: &str) -> Result<ListPlacesResponse, Status> {
    let pods = match id {
        "" => node.registry.pods(),
        id => vec![node.registry.pod_by_prefix(id)?],
    };
    let mut places = Vec::new();
    for pod in pods {
        // A pod that is removed meanwhile does not make the list fail.
        if let Ok(view) = pod.inspect().await {
            let mut place = message(&view);
            add_memory(&mut place).await;
            places.push((view.status.created_at_ns, place));
        }
    }
    places.sort_by(|(a, one), (b, other)| (a, &one.id).cmp(&(b, &other.id)));
    let placer = &node.placer;
    let of = |of: &sandboxer_process::numa::Node| {
        let load = placer.load(of.id);
        NumaNode {
            id: of.id,
            cpus: of.cpus.to_string(),
            memory_bytes: of.memory_bytes,
            available_bytes: placer.topology().available_bytes(of.id).unwrap_or_default(),
            vms: load.vms,
            vcpus: load.vcpus,
            placed_mib: load.memory_mib,
        }
    };
    Ok(ListPlacesResponse {
        policy: placer.policy().as_str().to_owned(),
        active: placer.is_active(),
        nodes: placer.topology().nodes().iter().map(of).collect(),
        places: places.into_iter().map(|(_, place)| place).collect(),
    })
}

/// Moves a pod. The id is checked before this returns.
pub fn move_pod(
    node: &Arc<DaemonState>,
    request: &MovePodRequest,
) -> Result<impl Future<Output = Result<MovePodResponse, Status>> + Send + use<>, Status> {
    let pod = node.registry.pod_by_prefix(&request.id)?;
    let to = request.node;
    Ok(async move {
        let moved = pod.move_to(to).await?;
        let mut place = message(&pod.inspect().await?);
        add_memory(&mut place).await;
        Ok(MovePodResponse {
            from: moved.from,
            place: Some(place),
            moved_bytes: moved.bytes,
            left_bytes: moved.left_bytes,
            took_ns: u64::try_from(moved.took.as_nanos()).unwrap_or(u64::MAX),
        })
    })
}

/// Returns the place of a pod, without its memory.
pub fn message(view: &PodView) -> Place {
    let PodView { spec, size, status, place, .. } = view;
    let list = |set: &Option<Cpus>| set.as_ref().map_or_else(String::new, Cpus::to_string);
    let policy = match (place.by_cri, place.node) {
        (true, _) => "cri",
        (false, Some(_)) => "numa",
        (false, None) => "none",
    };
    Place {
        id: spec.id.to_string(),
        name: spec.name.clone(),
        namespace: spec.namespace.clone(),
        vmm_pid: status.vmm_pid,
        node: place.node,
        cpus: list(&place.bounds.cpus),
        mems: list(&place.bounds.nodes),
        policy: policy.to_owned(),
        reason: place.reason.clone(),
        memory: Vec::new(),
        files: Vec::new(),
        vcpus: size.vcpus,
        memory_mib: size.memory_mib,
    }
}

/// Adds where the memory of the pod's VMM is, if it has one.
pub async fn add_memory(place: &mut Place) {
    let pid = place.vmm_pid;
    if pid == 0 {
        return;
    }
    let listed = |bytes: BTreeMap<u32, u64>| {
        bytes.into_iter().map(|(node, bytes)| NodeMemory { node, bytes }).collect()
    };
    match tokio::task::spawn_blocking(move || Residence::read(pid)).await {
        Ok(Ok(residence)) => {
            (place.memory, place.files) = (listed(residence.memory), listed(residence.files));
        }
        // A process that exits at this moment has no memory.
        failed => tracing::debug!(pod = place.id, pid, ?failed, "cannot read where a VMM's memory is"),
    }
}
