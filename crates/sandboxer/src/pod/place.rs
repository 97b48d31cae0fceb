//! Places a pod that starts: takes a new place, or the place of a VM from the pool, and gives its cgroup the CPUs.

use sandboxer_process::cgroup::Bounds;

use super::{DaemonState, placer::Placement, pool::Warm, spec::PodSpec, stop, undo::Undo};
use crate::{error::PodError, template::Kind};

/// Reason why a pod cannot be placed.
pub const NO_PARENT: &str = "CRI named no parent for its control group";

/// Takes a place for the pod's VM.
pub fn take(node: &DaemonState, spec: &PodSpec, kind: Kind) -> Result<Placement, PodError> {
    check_huge_pages(node, spec, kind)?;
    let seat = match spec.huge_pages {
        true => node.placer.seat_in_huge_pages(kind.shape),
        false => node.placer.seat(kind.shape),
    };
    let placement = match seat {
        Ok(_) if node.cgroups.of(&spec.cgroup_parent, &spec.id).is_none() => Placement::none(NO_PARENT),
        Ok(seat) => Placement { seat: Some(seat), reason: "the node with most room at its start".to_owned() },
        Err(why) => Placement::none(why.to_string()),
    };
    if placement.seat.is_none() && !placement.reason.is_empty() {
        tracing::info!(pod = %spec.id, reason = placement.reason, "the pod is not placed on a NUMA node");
    }
    Ok(placement)
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

/// Returns the placement of a pod that gets a VM from the pool, which already has memory on its node.
pub fn of_warm(spec: &PodSpec, wanted: &Placement, warm: &Warm) -> Placement {
    let Some(seat) = warm.seat.clone().filter(|seat| Some(seat.node()) != wanted.node()) else {
        return wanted.clone();
    };
    let instead = wanted.node().map_or_else(String::new, |node| format!(", none on node {node}"));
    let placement = Placement { reason: format!("a VM of the pool waited there{instead}"), seat: Some(seat) };
    tracing::info!(pod = %spec.id, node = placement.node(), reason = placement.reason, "the pod is placed where its VM is");
    placement
}

/// Creates the pod's cgroup, if CRI names a parent, restricted to the CPUs of the pod's place. Returns the placement:
/// none if the cgroup cannot be restricted.
pub fn make_group(
    node: &DaemonState,
    spec: &PodSpec,
    placement: Placement,
    undo: &mut Undo,
) -> Result<Placement, PodError> {
    let Some(cgroup) = node.cgroups.of(&spec.cgroup_parent, &spec.id) else { return Ok(placement) };
    cgroup.make().map_err(|(path, source)| {
        let action = "make control group";
        PodError::Path { pod: spec.id.clone(), action, path, source }
    })?;
    let (of, made) = (spec.id.clone(), cgroup.clone());
    undo.push("remove the control group", async move { stop::leave(&of, &made).await });
    let bounds = node.placer.bounds(placement.seat.as_ref());
    if bounds == Bounds::default() {
        return Ok(placement);
    }
    Ok(match cgroup.restrict(&bounds) {
        Ok(()) => placement,
        Err((path, error)) => {
            tracing::warn!(pod = %spec.id, path = %path.display(), %error,
                "cannot restrict the pod's control group to CPUs: it is not placed");
            Placement::none(format!("cannot restrict {}: {error}", path.display()))
        }
    })
}
