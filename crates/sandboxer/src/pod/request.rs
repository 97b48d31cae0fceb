//! The requests that a pod's task handles.

use sandboxer_guest::Signal;
use sandboxer_protocol::{
    agent::StatsResponse,
    id::{ContainerId, ExecId},
};
use tokio::sync::oneshot;

use super::{
    container::{Exit, NewContainer, StdioPaths},
    spec::Limits,
    view::{Moved, PodView, ProcessView},
};
use crate::{checkpoint::Manifest, error::PodError, traces::SpanContext};

/// Receives the result of a request.
pub type Reply<T> = oneshot::Sender<Result<T, PodError>>;

/// All requests to a pod.
#[derive(Debug)]
pub enum Request {
    /// Start the pod. Replies as soon as the pod is ready.
    Start { request: SpanContext, reply: Reply<()> },
    /// Stop the pod's VM. Cancels a start in progress. Replies as soon as the pod has stopped.
    Stop { reply: Reply<()> },
    /// Stop and remove the pod: the last request that a pod handles.
    Remove { reply: Reply<()> },
    /// Create a container, up to the point where its init waits.
    CreateContainer { new: NewContainer, request: SpanContext, reply: Reply<()> },
    /// Register an exec.
    CreateExec { id: ContainerId, exec: ExecId, process: Vec<u8>, stdio: StdioPaths, reply: Reply<()> },
    /// Start a container's init or an exec. `again`: whether an earlier worker may have done it.
    StartProcess {
        id: ContainerId,
        exec: Option<ExecId>,
        again: bool,
        request: SpanContext,
        reply: Reply<()>,
    },
    /// Return a process's state.
    Process { id: ContainerId, exec: Option<ExecId>, reply: Reply<ProcessView> },
    /// Signal a process, or all processes of a container.
    Signal { id: ContainerId, exec: Option<ExecId>, signal: Signal, reply: Reply<()> },
    /// Remove a container or an exec that is not running. Returns its exit.
    Delete { id: ContainerId, exec: Option<ExecId>, reply: Reply<Exit> },
    /// Close a process's stdin: nothing more will be written to the FIFO.
    CloseStdin { id: ContainerId, exec: Option<ExecId>, reply: Reply<()> },
    /// Set the size of a process's terminal.
    Resize { id: ContainerId, exec: Option<ExecId>, columns: u32, rows: u32, reply: Reply<()> },
    /// Pause or resume a container.
    SetPaused { id: ContainerId, paused: bool, reply: Reply<()> },
    /// Change a container's limits (OCI `linux.resources`, JSON).
    Update { id: ContainerId, resources: Vec<u8>, reply: Reply<()> },
    /// Change the limits of all containers together.
    UpdatePod { limits: Limits, reply: Reply<()> },
    /// Return the guest PIDs of a container.
    Pids { id: ContainerId, reply: Reply<Vec<u32>> },
    /// Return the statistics of a container, or of the guest.
    Stats { container: Option<ContainerId>, reply: Reply<StatsResponse> },
    /// Compare the guest's clock with the host's.
    SyncClock { reply: Reply<bool> },
    /// Move the pod's VM to a NUMA node.
    Move { node: u32, reply: Reply<Moved> },
    /// Save the pod under this name. It goes on, or stops if that is asked for.
    Checkpoint { name: String, stop: bool, reply: Reply<Box<Manifest>> },
    /// Return everything about the pod.
    Inspect { reply: Reply<PodView> },
}
