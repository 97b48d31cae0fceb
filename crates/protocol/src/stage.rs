//! Names of the steps of a start.
//!
//! Spans, metrics, reports and benches all use these, so a bar in a report can be looked up
//! in a log. In the order in which a start passes through them.

use serde::{Deserialize, Serialize};

/// One step on the way from `RunPodSandbox` to a running container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// The pod's network namespace is looked at.
    Netns,
    /// The run directory is made, and taps are joined to the pod's network interfaces.
    Network,
    /// A VM or a container waits for its turn to be made.
    Queue,
    /// A VM that waited in the pool is made the pod's, and goes on.
    Claim,
    /// A VM is made as a copy of a template, and runs.
    Restore,
    /// The VMM's process is started, until it answers its control socket.
    VmmSpawn,
    /// The guest runs, until its agent's first byte arrives.
    Boot,
    /// The agent is greeted and the guest gets its identity.
    AgentReady,
    /// A container's root file system becomes a disk image, or is found in the cache.
    Rootfs,
    /// The container's disks are plugged into the VM.
    Disks,
    /// The host's files that the container has live are shared with the guest.
    Shares,
    /// The agent makes the container; its init waits.
    ContainerCreate,
    /// The container's init is let go.
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

    /// Returns the name under which the stage appears everywhere.
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
