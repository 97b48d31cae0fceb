//! The pod's cgroup: made at the start, entered by a VMM of the pool, removed at the end.

use std::{convert::Infallible, io, path::PathBuf, sync::Arc};

use sandboxer_base::failpoint::pass;
use sandboxer_process::cgroup::{Bounds, Cgroup};
use sandboxer_protocol::id::SandboxId;
use sandboxer_vmm::Vm;
use tokio::{sync::oneshot, task::JoinHandle};

use super::{daemon_state::DaemonState, place::Place, placer::Placement, spec::PodSpec, undo::Undo};
use crate::error::PodError;

/// Creates the pod's cgroup, if CRI names a parent, restricted to the CPUs of the pod's place. Returns the place:
/// none if the cgroup cannot be restricted.
pub fn make(node: &DaemonState, spec: &PodSpec, place: Place, undo: &mut Undo) -> Result<Place, PodError> {
    let Some(cgroup) = node.cgroups.for_pod(&spec.cgroup_parent, &spec.id) else { return Ok(place) };
    cgroup.make().map_err(|(path, source)| {
        let action = "make control group";
        PodError::Path { pod: spec.id.clone(), action, path, source }
    })?;
    let (pod, made) = (spec.id.clone(), cgroup.clone());
    undo.push("remove the control group", async move { remove(&pod, &made).await });
    if place.bounds == Bounds::default() {
        return Ok(place);
    }
    Ok(match cgroup.restrict(&place.bounds) {
        Ok(()) => place,
        Err((path, error)) => {
            tracing::warn!(pod = %spec.id, path = %path.display(), %error,
                "cannot restrict the pod's control group to CPUs: it is not placed");
            let reason = format!("cannot restrict {}: {error}", path.display());
            Place::new(&node.placer, Placement::none(reason))
        }
    })
}

/// The move of a pooled VMM into its pod's cgroup; other VMMs are created there. The kernel waits for an RCU grace
/// period, 5 to 17 ms on two cores, so the move runs in parallel. A container's start waits for it. So does the VMM's
/// exit, because another process may have its PID afterwards.
#[derive(Debug)]
pub struct CgroupAttach {
    moved: JoinHandle<Result<(), (PathBuf, io::Error)>>,
    /// Whether the pod is one of an earlier daemon, and runs on if its VMM cannot be moved.
    is_adopted: bool,
}

impl CgroupAttach {
    /// Starts to move the VMM of an adopted pod, unless an earlier daemon has moved it already. The host may have another hierarchy by
    /// now than when the pod was made, where the group is created.
    pub fn go_on(node: &DaemonState, spec: &PodSpec, vm: &Arc<dyn Vm>) -> Option<Self> {
        let cgroup = node.cgroups.for_pod(&spec.cgroup_parent, &spec.id)?;
        let pid = vm.record().pid;
        if cgroup.contains(pid) {
            return None;
        }
        let vm = vm.clone();
        let moved = tokio::task::spawn_blocking(move || {
            cgroup.make()?;
            Self::move_into(&cgroup, &*vm)
        });
        Some(Self { moved, is_adopted: true })
    }

    /// Starts to move the VMM; returns `None` if the pod has no cgroup. Drops `over` at the end.
    fn begin(
        node: &DaemonState,
        spec: &PodSpec,
        vm: &Arc<dyn Vm>,
        over: oneshot::Sender<Infallible>,
    ) -> Option<Self> {
        let cgroup = node.cgroups.for_pod(&spec.cgroup_parent, &spec.id)?;
        let vm = vm.clone();
        let moved = tokio::task::spawn_blocking(move || {
            let _over = over;
            Self::move_into(&cgroup, &*vm)
        });
        Some(Self { moved, is_adopted: false })
    }

    fn move_into(cgroup: &Cgroup, vm: &dyn Vm) -> Result<(), (PathBuf, io::Error)> {
        pass(format_args!("before the VMM is counted"));
        // The VMM is moved last: its cgroup shows the next daemon that all processes have been moved.
        vm.helpers().into_iter().chain([vm.record().pid]).try_for_each(|pid| cgroup.enter(pid))
    }

    /// Waits until the VMM is in the cgroup.
    pub async fn done(self, spec: &PodSpec) -> Result<(), PodError> {
        match self.moved.await.unwrap_or_else(|ended| Err((PathBuf::new(), io::Error::other(ended)))) {
            // The VMM has exited; the task that watches it reports that.
            Err((_, error)) if error.raw_os_error() == Some(libc::ESRCH) => Ok(()),
            Err((path, error)) if self.is_adopted => {
                tracing::error!(pod = %spec.id, path = %path.display(), %error,
                    "cannot move the VMM of an adopted pod into its control group: limits of the node do not hold for it");
                Ok(())
            }
            moved => moved.map_err(|(path, source)| PodError::Path {
                pod: spec.id.clone(),
                action: "move the VMM into control group",
                path,
                source,
            }),
        }
    }
}

/// Starts to move a VMM into the pod's cgroup.
pub fn attach(node: &DaemonState, spec: &PodSpec, vm: &Arc<dyn Vm>, undo: &mut Undo) -> Option<CgroupAttach> {
    let (over, ended) = oneshot::channel();
    let attach = CgroupAttach::begin(node, spec, vm, over);
    undo.push("wait for the control group", async move {
        let _ = ended.await;
        Ok::<_, Infallible>(())
    });
    attach
}

/// Removes a pod's cgroup after its VMM has exited.
pub async fn remove(pod: &SandboxId, cgroup: &Cgroup) -> Result<(), PodError> {
    cgroup.remove().await.map_err(|(path, source)| PodError::Path {
        pod: pod.clone(),
        action: "remove control group",
        path,
        source,
    })
}
