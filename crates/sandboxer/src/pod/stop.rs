//! One pod's way down.

use std::{io, time::Duration};

use super::{Node, spec::PodSpec};
use crate::{
    container::start::Live,
    error::{PodError, chain},
    failpoint::pass,
    host::{cgroup::PodCgroup, share::Shares},
    vmm::VmmError,
};
use sandboxer_protocol::id::SandboxId;

/// How long a guest may take to sync its disks and power off before it is ended.
const GRACE: Duration = Duration::from_secs(2);

/// Asks the guest to power off, then ends the machine in any case, and what served its shares: until then its
/// processes may wait for them.
pub async fn stop(node: &Node, pod: &PodSpec, live: &Live, shares: &Shares) -> Result<(), VmmError> {
    let gone = async {
        // The answer races with the power-off; only the machine's end counts.
        tokio::join!(live.agent.power_off(), live.machine.exited())
    };
    if tokio::time::timeout(GRACE, gone).await.is_err() {
        tracing::debug!(machine = ?live.machine, "the guest did not power off by itself");
    }
    pass(format_args!("the guest was asked to power off"));
    live.machine.kill().await?;
    pass(format_args!("the machine has ended"));
    shares.end().await;
    // Now and not when the pod is removed: a manager removes the parent as soon as the pod has stopped.
    if let Some(cgroup) = node.cgroups.of(&pod.cgroup_parent, &pod.id)
        && let Err(error) = leave(&pod.id, &cgroup).await
    {
        tracing::warn!(pod = %pod.id, error = chain(&error), "the control group stays until the pod is removed");
    }
    Ok(())
}

/// Removes a pod's control group, when its VMM has ended.
pub async fn leave(pod: &SandboxId, cgroup: &PodCgroup) -> Result<(), PodError> {
    cgroup.remove().await.map_err(|(path, source)| PodError::Host {
        pod: pod.clone(),
        action: "remove control group",
        path,
        source,
    })
}

/// Removes what a pod without a machine holds on the host.
pub async fn clear(node: &Node, pod: &PodSpec) -> Result<(), PodError> {
    if let Some(cgroup) = node.cgroups.of(&pod.cgroup_parent, &pod.id) {
        leave(&pod.id, &cgroup).await?;
    }
    pass(format_args!("before a run directory is removed"));
    let path = node.run_dir(&pod.id);
    match tokio::fs::remove_dir_all(&path).await {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(PodError::Host { pod: pod.id.clone(), action: "remove run directory", path, source })
        }
        _ => Ok(()),
    }
}
