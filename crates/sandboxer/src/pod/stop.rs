//! One pod's way down.

use std::{io, path::PathBuf, time::Duration};

use crate::{container::start::Live, error::PodError, vmm::VmmError};
use sandboxer_protocol::id::SandboxId;

/// How long a guest may take to sync its disks and power off before it is ended.
const GRACE: Duration = Duration::from_secs(2);

/// Asks the guest to power off, then ends the machine in any case.
pub async fn stop(live: &Live) -> Result<(), VmmError> {
    let gone = async {
        // The answer races with the power-off; only the machine's end counts.
        tokio::join!(live.agent.power_off(), live.machine.exited())
    };
    if tokio::time::timeout(GRACE, gone).await.is_err() {
        tracing::debug!(machine = ?live.machine, "the guest did not power off by itself");
    }
    live.machine.kill().await
}

/// Removes what a pod left in the run directory.
pub async fn clear(pod: &SandboxId, run_dir: PathBuf) -> Result<(), PodError> {
    match tokio::fs::remove_dir_all(&run_dir).await {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(PodError::Host { pod: pod.clone(), action: "remove run directory", path: run_dir, source })
        }
        _ => Ok(()),
    }
}
