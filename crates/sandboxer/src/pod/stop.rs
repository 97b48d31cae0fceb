//! The stop of a pod.

use std::{
    future::{self, Future},
    io,
    time::Duration,
};

use sandboxer_base::{chain, failpoint::pass};
use sandboxer_process::Written;
use sandboxer_protocol::id::SandboxId;
use sandboxer_vmm::VmmError;
use tokio::time::Instant;

use super::{
    cgroup,
    daemon_state::DaemonState,
    recover::unreached::{self, Unreached},
    spec::PodSpec,
};
use crate::{error::PodError, pod::running_vm::RunningVm, share::Shares, state::PodState};

/// Time without a write after which a guest that powers off counts as stalled (or the agent timeout, if that is
/// shorter).
const STALLED: Duration = Duration::from_secs(10);
/// Interval between two readings of the bytes that a VMM has written.
const LOOK: Duration = Duration::from_millis(100);

/// Requests the guest to power off, then kills the VM in any case, and then the server of its shares, because guest
/// processes may wait for it. Waits for dirty data to reach the disks, as long as that makes progress.
pub async fn stop(
    node: &DaemonState,
    pod: &PodSpec,
    live: &RunningVm,
    shares: &Shares,
) -> Result<(), VmmError> {
    let exit = async {
        // The response races with the power-off. Only the VM's exit counts.
        tokio::join!(live.agent.power_off(), live.vm.exited());
    };
    wait_for_data(node, &pod.id, exit, || live.vm.written()).await;
    pass(format_args!("the guest was asked to power off"));
    live.vm.kill().await?;
    pass(format_args!("the VM has ended"));
    shares.end().await;
    leave_now(node, pod).await;
    Ok(())
}

/// Stops a pod of an earlier daemon that was not adopted. Its guest is requested to power off if that daemon was
/// stopping it. An earlier request may have done so, so this waits for its data in any case.
pub async fn stop_unreached(
    node: &DaemonState,
    pod: &PodSpec,
    unreached: &Unreached,
) -> Result<(), VmmError> {
    let vmm = &unreached.vmm;
    let exit = async {
        let power_off = async {
            if unreached.record.status.state == PodState::Stopping {
                unreached::power_off(node, &unreached.record).await;
            }
            future::pending().await
        };
        tokio::select! {
            _ = vmm.ended() => {}
            () = power_off => {}
        }
    };
    wait_for_data(node, &pod.id, exit, || vmm.written()).await;
    vmm.end().await?;
    unreached.end_shares().await;
    leave_now(node, pod).await;
    Ok(())
}

/// Waits for the `exit` of the VM, as long as its VMM writes data: at most the configured limit, and only a moment after
/// it stops writing.
async fn wait_for_data(
    node: &DaemonState,
    pod: &SandboxId,
    exit: impl Future<Output = ()>,
    written: impl Fn() -> Option<Written>,
) {
    let (stalled, limit) = (STALLED.min(node.config.vm.agent_timeout), node.config.vm.stop_timeout);
    let given_up = async {
        let begun = Instant::now();
        let (mut moved, mut before) = (begun, written());
        loop {
            tokio::time::sleep(LOOK).await;
            let now = written();
            if let (Some(now), Some(earlier)) = (now, before)
                && now.data_since(earlier)
            {
                (moved, before) = (Instant::now(), Some(now));
            }
            if begun.elapsed() >= limit {
                return "vm.stop_timeout is over, and it still writes data, some of which are lost";
            }
            if moved.elapsed() >= stalled {
                return "it has written nothing for too long";
            }
        }
    };
    tokio::select! {
        () = exit => {}
        why = given_up => tracing::warn!(%pod, "killing the VMM of a guest that did not power off: {why}"),
    }
}

/// Removes the cgroup now, not when the pod is removed: a manager removes the parent as soon as the pod has stopped.
async fn leave_now(node: &DaemonState, pod: &PodSpec) {
    if let Some(cgroup) = node.cgroups.for_pod(&pod.cgroup_parent, &pod.id)
        && let Err(error) = cgroup::remove(&pod.id, &cgroup).await
    {
        tracing::warn!(pod = %pod.id, error = chain(&error), "cannot remove the control group before the pod is removed");
    }
}

/// Releases the host resources of a pod without a VM.
pub async fn clear(node: &DaemonState, pod: &PodSpec) -> Result<(), PodError> {
    if let Some(cgroup) = node.cgroups.for_pod(&pod.cgroup_parent, &pod.id) {
        cgroup::remove(&pod.id, &cgroup).await?;
    }
    pass(format_args!("before a run directory is removed"));
    let path = node.run_dir(&pod.id);
    match tokio::fs::remove_dir_all(&path).await {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(PodError::Path { pod: pod.id.clone(), action: "remove run directory", path, source })
        }
        _ => Ok(()),
    }
}
