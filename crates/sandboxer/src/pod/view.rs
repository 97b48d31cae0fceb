//! What a pod's task answers about the pod.

use std::{path::PathBuf, time::Duration};

use sandboxer_process::cgroup::Bounds;
use sandboxer_protocol::id::{ContainerId, ExecId};
use sandboxer_vmm::Shape;
use tokio::sync::watch;

use super::{
    container::{Phase, StdioPaths},
    spec::PodSpec,
    stages::Step,
};
use crate::state::PodStatus;

/// The state of a process, with a channel to watch it.
#[derive(Debug)]
pub struct ProcessView {
    /// The bundle of the container.
    pub bundle: PathBuf,
    /// FIFOs of the process.
    pub stdio: StdioPaths,
    /// Whether the container is paused.
    pub paused: bool,
    /// The phase of the process.
    pub phase: watch::Receiver<Phase>,
}

/// Everything about a pod, for `inspect`.
#[derive(Debug)]
pub struct PodView {
    /// The requested pod, with the size of its VM at its start.
    pub spec: PodSpec,
    /// The current size of the VM.
    pub size: Shape,
    /// The pod's state.
    pub status: PodStatus,
    /// Name of the pod's VMM; empty while there is none.
    pub vmm: String,
    /// The placement of the VMM.
    pub place: PlaceView,
    /// The steps of the pod's start.
    pub steps: Vec<Step>,
    /// The pod's containers, by id.
    pub containers: Vec<ContainerView>,
}

/// The placement of a pod's VMM.
#[derive(Debug, Default)]
pub struct PlaceView {
    /// The pod's NUMA node; `None`: not placed.
    pub node: Option<u32>,
    /// The CPUs and memory nodes that the VMM is restricted to; empty: all of its cgroup's parent.
    pub bounds: Bounds,
    /// Whether CRI set the bounds.
    pub by_cri: bool,
    /// The reason for the placement, or why there is none; may be empty.
    pub reason: String,
}

/// The result and cost of a move to another NUMA node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moved {
    /// The NUMA node of the pod before the move.
    pub from: Option<u32>,
    /// The memory that was moved, bytes.
    pub bytes: u64,
    /// The memory that is still on other nodes, bytes: pages that other processes use, too, or that were in use.
    pub left_bytes: u64,
    /// The duration of the move.
    pub took: Duration,
}

/// Everything about a container, for `inspect`.
#[derive(Debug)]
pub struct ContainerView {
    /// The container's id.
    pub id: ContainerId,
    /// PID of the container's init in the guest.
    pub pid: u32,
    /// The phase of the container's init.
    pub phase: Phase,
    /// Whether the container is paused.
    pub paused: bool,
    /// Images and devices that are the container's disks.
    pub disks: Vec<PathBuf>,
    /// The steps of the container's start.
    pub steps: Vec<Step>,
    /// The container's execs: id, guest PID, phase.
    pub execs: Vec<(ExecId, u32, Phase)>,
}
