//! Where a pod that starts gets its VM from.

use std::{convert::Infallible, mem, sync::Arc};

use sandboxer_config::StartPath;
use sandboxer_protocol::id::SandboxId;

use super::phases::{PooledResources, end};
use crate::{
    checkpoint::Restoring,
    pod::{
        daemon_state::DaemonState,
        place::Place,
        placer::Placement,
        pool::{self, Warm},
        spec::PodSpec,
        undo::Undo,
    },
    template::{Kind, Missing, Template},
};

/// A VM for a pod, and its place.
pub(super) struct Source {
    pub vm: SourceVm,
    pub place: Place,
}

/// The VM of a [`Source`].
pub(super) enum SourceVm {
    Pool(Box<Warm>),
    Template(Arc<Template>),
    Boot,
    Checkpoint(Box<Restoring>),
}

impl Source {
    /// Returns a source of a VM of this kind on this start path, or the reason why there is none. A VM of the pool may
    /// be on another node than `preferred`.
    pub fn take(
        node: &DaemonState,
        spec: &PodSpec,
        kind: Kind,
        preferred: &Place,
        start_path: StartPath,
    ) -> Result<Self, &'static str> {
        let vm = match start_path {
            StartPath::Pool => {
                let warm = node.pool.claim(kind, preferred.placement.node(), &node.templates)?;
                let place = place_of(node, spec, preferred, &warm);
                return Ok(Self { vm: SourceVm::Pool(Box::new(warm)), place });
            }
            StartPath::Template => SourceVm::Template(node.templates.get(kind).map_err(Missing::as_str)?),
            StartPath::Boot => SourceVm::Boot,
        };
        Ok(Self { vm, place: preferred.clone() })
    }
}

impl SourceVm {
    /// Returns the host's resources for the VM, if it is a pooled one. Whatever fails from here on, none of them is
    /// left behind, including the VM's directory if it has not become the pod's yet.
    pub fn resources(&mut self, pod: &SandboxId, undo: &mut Undo) -> Option<PooledResources> {
        let Self::Pool(warm) = self else { return None };
        let (doomed, ended) = (warm.vm.clone(), end(pod, warm.vm.clone()));
        undo.push("end the VMM", async move {
            ended.await?;
            pool::end(doomed.as_ref()).await;
            Ok::<_, Infallible>(())
        });
        Some(PooledResources { taps: mem::take(&mut warm.taps), vm: warm.vm.clone() })
    }
}

/// Returns the place of a pod that gets a VM from the pool, which already has memory on its node.
fn place_of(node: &DaemonState, spec: &PodSpec, preferred: &Place, warm: &Warm) -> Place {
    let node_before = preferred.placement.node();
    let Some(seat) = warm.seat.clone().filter(|seat| Some(seat.node()) != node_before) else {
        return preferred.clone();
    };
    let instead = node_before.map_or_else(String::new, |node| format!(", none on node {node}"));
    let placement = Placement { reason: format!("a VM of the pool waited there{instead}"), seat: Some(seat) };
    tracing::info!(pod = %spec.id, node = placement.node(), reason = placement.reason, "the pod is placed where its VM is");
    Place::new(&node.placer, placement)
}
