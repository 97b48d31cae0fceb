//! Names of the steps of a start.
//!
//! Spans, metrics, reports and benches use the same names, in the order of a start.

use serde::{Deserialize, Serialize};

/// One step from `RunPodSandbox` to a running container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Reads the pod's network namespace.
    Netns,
    /// Creates the run directory, and connects taps to the pod's network interfaces.
    Network,
    /// Waits in the queue for a VM or a container.
    Queue,
    /// Assigns a VM of the pool to the pod and resumes it.
    Claim,
    /// Restores a VM from a template and resumes it.
    Restore,
    /// Starts the VMM's process, until it answers on its control socket.
    VmmSpawn,
    /// Boots the guest, until its agent's first byte arrives.
    Boot,
    /// Greets the agent and gives the guest its identity.
    AgentReady,
    /// Makes a disk image of a container's root file system, or finds it in the cache.
    Rootfs,
    /// Hotplugs the container's disks.
    Disks,
    /// Shares live host files of the container with the guest.
    Shares,
    /// The agent creates the container; its init waits.
    ContainerCreate,
    /// Starts the container's init.
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
