//! The place of a pod's VMM on the host, and its choice at the pod's start.

use sandboxer_process::cgroup::Bounds;

use super::{
    daemon_state::DaemonState,
    placer::{Placement, Placer},
    spec::PodSpec,
};
use crate::{error::PodError, template::Kind};

/// Reason why a pod cannot be placed.
pub const NO_PARENT: &str = "CRI named no parent for its control group";

/// The place of a pod's VMM on the host.
#[derive(Debug, Clone, Default)]
pub struct Place {
    /// The NUMA node, and why.
    pub placement: Placement,
    /// The CPUs and memory nodes that the VMM was last confined to.
    pub bounds: Bounds,
}

impl Place {
    /// Returns the place of a VMM that is confined to its NUMA node.
    pub fn new(placer: &Placer, placement: Placement) -> Self {
        let bounds = placer.bounds(placement.seat.as_ref());
        Self { placement, bounds }
    }
}

/// Chooses the place of the pod's VM.
pub fn choose(node: &DaemonState, spec: &PodSpec, kind: Kind) -> Result<Place, PodError> {
    check_huge_pages(node, spec, kind)?;
    let seat = match spec.huge_pages {
        true => node.placer.seat_in_huge_pages(kind.shape),
        false => node.placer.seat(kind.shape),
    };
    let placement = match seat {
        Ok(_) if node.cgroups.for_pod(&spec.cgroup_parent, &spec.id).is_none() => Placement::none(NO_PARENT),
        Ok(seat) => Placement { seat: Some(seat), reason: "the node with most room at its start".to_owned() },
        Err(why) => Placement::none(why.to_string()),
    };
    if placement.seat.is_none() && !placement.reason.is_empty() {
        tracing::info!(pod = %spec.id, reason = placement.reason, "the pod is not placed on a NUMA node");
    }
    Ok(Place::new(&node.placer, placement))
}

/// Rejects a pod in huge pages with a VMM that cannot reserve them.
fn check_huge_pages(node: &DaemonState, spec: &PodSpec, kind: Kind) -> Result<(), PodError> {
    let vmm = node.vmms.get(kind.vmm);
    if !spec.huge_pages || vmm.has_huge_pages() {
        return Ok(());
    }
    Err(PodError::Unsupported(format!(
        "pod {}: its memory cannot be in huge pages with VMM {}, which does not reserve them: name QEMU or Cloud Hypervisor in \
         [handlers]",
        spec.id,
        vmm.info().name
    )))
}
