//! Moves a pooled VMM into its pod's control group.

use std::{convert::Infallible, io, path::PathBuf, sync::Arc};

use sandboxer_base::failpoint::pass;
use sandboxer_vmm::Vm;
use tokio::{sync::oneshot, task::JoinHandle};

use super::{DaemonState, spec::PodSpec, undo::Undo};
use crate::error::PodError;

/// The move of a pooled VMM into its pod's control group; other VMMs are created there. The kernel waits for an RCU grace period,
/// 5 to 17 ms on two cores, so the move runs in parallel. A container's start waits for it, and so does the VMM's end, after
/// which another process may have its PID.
#[derive(Debug)]
pub struct CgroupAttach(JoinHandle<Result<(), (PathBuf, io::Error)>>);

impl CgroupAttach {
    /// Same as [`CgroupAttach::begin`], for a VMM that an earlier daemon may have moved already.
    pub fn go_on(node: &DaemonState, spec: &PodSpec, vm: &Arc<dyn Vm>) -> Option<Self> {
        let cgroup = node.cgroups.of(&spec.cgroup_parent, &spec.id)?;
        if cgroup.holds(vm.record().pid) { None } else { Self::begin(node, spec, vm, oneshot::channel().0) }
    }

    /// Starts to move the VMM; returns none if the pod has no control group. Drops `over` at the end.
    fn begin(
        node: &DaemonState,
        spec: &PodSpec,
        vm: &Arc<dyn Vm>,
        over: oneshot::Sender<Infallible>,
    ) -> Option<Self> {
        let cgroup = node.cgroups.of(&spec.cgroup_parent, &spec.id)?;
        let vm = vm.clone();
        let moved = tokio::task::spawn_blocking(move || {
            let _over = over;
            pass(format_args!("before the VMM is counted"));
            // The VMM comes last: where it is tells the next daemon that all are there.
            vm.helpers().into_iter().chain([vm.record().pid]).try_for_each(|pid| cgroup.enter(pid))
        });
        Some(Self(moved))
    }

    /// Waits until the VMM is in the control group.
    pub async fn done(self, spec: &PodSpec) -> Result<(), PodError> {
        match self.0.await.unwrap_or_else(|ended| Err((PathBuf::new(), io::Error::other(ended)))) {
            // It has exited; the task that watches it reports that.
            Err((_, error)) if error.raw_os_error() == Some(libc::ESRCH) => Ok(()),
            moved => moved.map_err(|(path, source)| PodError::Path {
                pod: spec.id.clone(),
                action: "move the VMM into control group",
                path,
                source,
            }),
        }
    }
}

/// Starts to move a VMM into the pod's control group.
pub fn counted(
    node: &DaemonState,
    spec: &PodSpec,
    vm: &Arc<dyn Vm>,
    undo: &mut Undo,
) -> Option<CgroupAttach> {
    let (over, ended) = oneshot::channel();
    let counting = CgroupAttach::begin(node, spec, vm, over);
    undo.push("wait for the control group", async move {
        let _ = ended.await;
        Ok::<_, Infallible>(())
    });
    counting
}
