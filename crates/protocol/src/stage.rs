//! Names of the steps of a start.
//!
//! Spans, metrics, reports and benches use the same names, in the order of a start.

use serde::{Deserialize, Serialize};

/// One step from `RunPodSandbox` to a running container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Reading the pod's network namespace.
    Netns,
    /// Creating the run directory, and connecting taps to the pod's network interfaces.
    Network,
    /// Waiting in the queue for a VM or a container.
    Queue,
    /// Assigning a VM of the pool to the pod and resuming it.
    Claim,
    /// Restoring a VM from a template and resuming it.
    Restore,
    /// Starting the VMM's process, until it responds on its control socket.
    VmmSpawn,
    /// Booting the guest, until its agent's first byte arrives.
    Boot,
    /// Greeting the agent and giving the guest its identity.
    AgentReady,
    /// Creating a disk image of a container's root file system, or finding it in the cache.
    Rootfs,
    /// Hotplugging the container's disks.
    Disks,
    /// Sharing live host files of the container with the guest.
    Shares,
    /// Creating the container in the agent; its init waits.
    ContainerCreate,
    /// Starting the container's init.
    ContainerStart,
}

impl Stage {
    /// Every stage, in order.
    pub const ALL: [Stage; 13] = [
        Stage::Netns,
        Stage::Network,
        Stage::Queue,
        Stage::Claim,
        Stage::Restore,
        Stage::VmmSpawn,
        Stage::Boot,
        Stage::AgentReady,
        Stage::Rootfs,
        Stage::Disks,
        Stage::Shares,
        Stage::ContainerCreate,
        Stage::ContainerStart,
    ];

    /// Returns the stage's name.
    pub const fn as_str(self) -> &'static str {
        match self {
            Stage::Netns => "netns",
            Stage::Network => "network",
            Stage::Queue => "queue",
            Stage::Claim => "claim",
            Stage::Restore => "restore",
            Stage::VmmSpawn => "vmm_spawn",
            Stage::Boot => "boot",
            Stage::AgentReady => "agent_ready",
            Stage::Rootfs => "rootfs",
            Stage::Disks => "disks",
            Stage::Shares => "shares",
            Stage::ContainerCreate => "container_create",
            Stage::ContainerStart => "container_start",
        }
    }
}

impl std::fmt::Display for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_are_in_order_and_uniquely_named() {
        assert!(Stage::ALL.windows(2).all(|pair| pair[0] < pair[1]));
        let names: std::collections::HashSet<_> = Stage::ALL.iter().map(|s| s.as_str()).collect();
        assert_eq!(names.len(), Stage::ALL.len());
    }
}
