//! A pod's VM and the agent in it.

use std::sync::Arc;

use sandboxer_guest::Agent;
use sandboxer_vmm::{DiskLimits, DiskSpec, Vm, VmmError};

/// The VM of a running pod, with its agent.
#[derive(Debug, Clone)]
pub struct RunningVm {
    /// The pod's VM.
    pub vm: Arc<dyn Vm>,
    /// The agent in the VM.
    pub agent: Agent,
    /// Limits of each disk of the VM.
    pub disk_limits: DiskLimits,
}

impl RunningVm {
    /// Returns the VM and the agent.
    pub fn guest(&self) -> (&dyn Vm, &Agent) {
        (self.vm.as_ref(), &self.agent)
    }

    /// Attaches a disk with the pod's limits.
    pub async fn attach_disk(&self, disk: &DiskSpec) -> Result<(), VmmError> {
        self.vm.attach_disk(&DiskSpec { limits: self.disk_limits, ..disk.clone() }).await
    }
}
