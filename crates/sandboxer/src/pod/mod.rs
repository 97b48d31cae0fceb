//! Pods. Each pod is owned by one task; other code holds a [`PodHandle`] and sends it requests.

pub mod admission;
mod cgroup_attach;
pub mod clocks;
pub mod container;
mod driver;
mod forward;
mod host_ports;
pub mod journal;
pub mod limits;
pub mod memory;
pub(crate) mod of_node;
mod place;
pub mod placer;
pub mod pool;
pub mod quantity;
pub mod quarantine;
mod readings;
pub mod recover;
pub mod registry;
pub mod rehearsal;
mod resize;
mod session;
pub mod spare;
pub mod spec;
pub mod stage_times;
pub mod stages;
mod start;
pub mod start_paths;
pub mod starts;
mod stop;
pub mod undo;
mod vcpus;
pub mod volumes;

use std::{
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use sandboxer_config::Config;
use sandboxer_guest::Signal;
use sandboxer_host::{network::TapPool, rootfs::RootfsStore, volume::VolumeStore};
use sandboxer_process::cgroup::{Bounds, Cgroup, Hierarchies};
use sandboxer_protocol::{
    agent::StatsResponse,
    id::{ContainerId, ExecId, SandboxId},
};
use sandboxer_vmm::{Shape, Vmms};
use tokio::sync::{mpsc, oneshot, watch};

use crate::{
    error::PodError,
    events::{Events, PodName},
    front::Front,
    pod::container::{Exit, KILLED, NewContainer, Phase, StdioPaths},
    state::{PodState, PodStatus},
    template::Templates,
    traces::{SpanContext, Traces},
};
use admission::Admission;
pub use driver::spawn;
use journal::Journal;
use placer::Placer;
use pool::Pool;
use registry::Registry;
use rehearsal::Rehearsal;
use spec::{Limits, PodSpec};
use stage_times::StageTimes;
use stages::Step;
use start_paths::StartPaths;

/// Capacity of a pod's request queue; senders wait if it is full.
const QUEUED_REQUESTS: usize = 64;

/// State that all pods of this node share.
#[derive(Debug)]
pub struct DaemonState {
    /// The configuration.
    pub config: Config,
    /// The VMMs that can create VMs.
    pub vmms: Vmms,
    /// The store that builds disks from snapshots.
    pub rootfs: Arc<RootfsStore>,
    /// The hierarchies in which pods' cgroups are created.
    pub cgroups: Hierarchies,
    /// The cgroup of VMs without a pod and without a NUMA node; it exists.
    pub idle_cgroup: Option<Cgroup>,
    /// The placer that chooses NUMA nodes for VMs.
    pub placer: Arc<Placer>,
    /// The store that creates volumes.
    pub volumes: Arc<VolumeStore>,
    /// The journal that records pods on disk.
    pub journal: Journal,
    /// The registry that finds pods.
    pub registry: Registry,
    /// The templates that pods are copied from.
    pub templates: Arc<Templates>,
    /// The rehearsal that prepares guests without a pod.
    pub rehearsal: Arc<Rehearsal>,
    /// The pool of VMs that are ready for pods.
    pub pool: Arc<Pool>,
    /// The pool that holds the taps of VMs without a pod.
    pub tap_pool: Arc<TapPool>,
    /// The counters of start paths.
    pub start_paths: StartPaths,
    /// The gates that bound concurrent starts.
    pub admission: Admission,
    /// The channel that publishes events.
    pub events: Events,
    /// The front, which outlives this process.
    pub front: Arc<Front>,
    /// Histograms of the stages of all starts.
    pub stage_times: Arc<StageTimes>,
    /// Number of statistics calls that returned old values.
    pub old_readings: Arc<AtomicU64>,
    /// The recorder of containerd's requests.
    pub traces: Traces,
}

impl DaemonState {
    /// Returns a pod's directory for sockets and logs.
    pub fn run_dir(&self, pod: &SandboxId) -> PathBuf {
        self.config.run_dir.join("pods").join(pod)
    }
}

/// Receives the result of a request.
type Reply<T> = oneshot::Sender<Result<T, PodError>>;

/// All requests to a pod.
#[derive(Debug)]
enum Request {
    /// Start the pod. Replies as soon as the pod is ready.
    Start { request: SpanContext, reply: Reply<()> },
    /// Stop the pod's VM. Cancels a start in progress. Replies as soon as the pod has stopped.
    Stop { reply: Reply<()> },
    /// Stop and remove the pod: the last request that a pod handles.
    Remove { reply: Reply<()> },
    /// Create a container, up to the point where its init waits.
    CreateContainer { new: NewContainer, request: SpanContext, reply: Reply<()> },
    /// Register an exec.
    CreateExec { of: ContainerId, exec: ExecId, process: Vec<u8>, stdio: StdioPaths, reply: Reply<()> },
    /// Start a container's init or an exec. `again`: whether an earlier worker may have done it.
    StartProcess {
        of: ContainerId,
        exec: Option<ExecId>,
        again: bool,
        request: SpanContext,
        reply: Reply<()>,
    },
    /// Return a process's state.
    Process { of: ContainerId, exec: Option<ExecId>, reply: Reply<ProcessView> },
    /// Signal a process, or all processes of a container.
    Signal { of: ContainerId, exec: Option<ExecId>, signal: Signal, reply: Reply<()> },
    /// Remove a container or an exec that is not running. Returns its exit.
    Delete { of: ContainerId, exec: Option<ExecId>, reply: Reply<Exit> },
    /// Close a process's stdin: nothing more will be written to the FIFO.
    CloseStdin { of: ContainerId, exec: Option<ExecId>, reply: Reply<()> },
    /// Set the size of a process's terminal.
    Resize { of: ContainerId, exec: Option<ExecId>, columns: u32, rows: u32, reply: Reply<()> },
    /// Pause or resume a container.
    SetPaused { of: ContainerId, paused: bool, reply: Reply<()> },
    /// Change a container's limits (OCI `linux.resources`, JSON).
    Update { of: ContainerId, resources: Vec<u8>, reply: Reply<()> },
    /// Change the limits of all containers together.
    UpdatePod { limits: Limits, reply: Reply<()> },
    /// Return the guest PIDs of a container.
    Pids { of: ContainerId, reply: Reply<Vec<u32>> },
    /// Return the statistics of a container, or of the guest.
    Stats { of: Option<ContainerId>, reply: Reply<StatsResponse> },
    /// Compare the guest's clock with the host's.
    SyncClock { reply: Reply<bool> },
    /// Move the pod's VM to a NUMA node.
    Move { node: u32, reply: Reply<Moved> },
    /// Return everything about the pod.
    Inspect { reply: Reply<PodView> },
}

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

/// Returns the exit of the sandbox container of a pod with this status, if it has exited. A pause program does not exit
/// by itself: a stop on request counts as its kill.
pub fn sandbox_exit(status: &PodStatus) -> Option<Exit> {
    let code = if status.exit_status == 0 { KILLED } else { status.exit_status };
    let ended = status.state == PodState::Stopped || status.overdue;
    ended.then(|| Exit { code, at_ns: status.exited_at_ns, reason: status.reason.clone() })
}

/// A handle to a pod. Cheap to clone.
#[derive(Debug, Clone)]
pub struct PodHandle {
    id: SandboxId,
    name: Arc<PodName>,
    bundle: Option<Arc<Path>>,
    /// Boxed: a channel allocates space for 32 requests at once, and keeps it.
    requests: mpsc::Sender<Box<Request>>,
    status: watch::Receiver<PodStatus>,
}

impl PodHandle {
    /// Returns the pod's id.
    pub fn id(&self) -> &SandboxId {
        &self.id
    }

    /// Returns the Kubernetes namespace of the pod.
    pub fn namespace(&self) -> &str {
        &self.name.namespace
    }

    /// Returns the bundle of the pod's sandbox container, if it has one.
    pub fn bundle(&self) -> Option<&Path> {
        self.bundle.as_deref()
    }

    /// Returns the pod's status. Never waits.
    pub fn status(&self) -> PodStatus {
        self.status.borrow().clone()
    }

    /// Waits until the pod has stopped.
    pub async fn stopped(&self) -> Result<PodStatus, PodError> {
        let mut status = self.status.clone();
        // The pod's task may end before the pod does, when this process exits.
        let stopped = status.wait_for(|status| status.state == PodState::Stopped).await;
        stopped.map(|status| status.clone()).map_err(|_| PodError::Gone(self.id.clone()))
    }

    /// Same as [`PodHandle::stopped`], or waits until its state has been unknown for too long.
    pub async fn ended(&self) -> Result<PodStatus, PodError> {
        let mut status = self.status.clone();
        let ended = status.wait_for(|status| status.state == PodState::Stopped || status.overdue).await;
        ended.map(|status| status.clone()).map_err(|_| PodError::Gone(self.id.clone()))
    }

    /// Waits until the state of the pod is known.
    pub async fn resolved(&self) {
        // The pod's task may end before, when this process exits.
        let _ = self.status.clone().wait_for(|status| status.state != PodState::Unknown).await;
    }

    /// Returns the Kubernetes names of the pod.
    pub fn name(&self) -> &PodName {
        &self.name
    }

    /// Starts the pod; returns when its agent is ready.
    pub async fn start(&self) -> Result<(), PodError> {
        let request = SpanContext::current();
        self.ask(|reply| Request::Start { request, reply }).await
    }

    /// Stops the pod's VM.
    pub async fn stop(&self) -> Result<(), PodError> {
        self.ask(|reply| Request::Stop { reply }).await
    }

    /// Stops and removes the pod.
    pub async fn remove(&self) -> Result<(), PodError> {
        self.ask(|reply| Request::Remove { reply }).await
    }

    /// Creates a container; its init waits.
    pub async fn create_container(&self, new: NewContainer) -> Result<(), PodError> {
        let request = SpanContext::current();
        self.ask(|reply| Request::CreateContainer { new, request, reply }).await
    }

    /// Registers an exec. `process` is an OCI process object.
    pub async fn create_exec(
        &self,
        of: ContainerId,
        exec: ExecId,
        process: Vec<u8>,
        stdio: StdioPaths,
    ) -> Result<(), PodError> {
        self.ask(|reply| Request::CreateExec { of, exec, process, stdio, reply }).await
    }

    /// Starts a process.
    pub async fn start_process(&self, of: ContainerId, exec: Option<ExecId>) -> Result<(), PodError> {
        let request = SpanContext::current();
        self.ask(|reply| Request::StartProcess { of, exec, again: false, request, reply }).await
    }

    /// Starts a process, unless an earlier worker has: then returns the result of that start.
    pub async fn start_process_again(&self, of: ContainerId, exec: Option<ExecId>) -> Result<(), PodError> {
        let request = SpanContext::current();
        self.ask(|reply| Request::StartProcess { of, exec, again: true, request, reply }).await
    }

    /// Returns a process's state.
    pub async fn process(&self, of: ContainerId, exec: Option<ExecId>) -> Result<ProcessView, PodError> {
        self.ask(|reply| Request::Process { of, exec, reply }).await
    }

    /// Signals a process, or all processes of a container.
    pub async fn signal(
        &self,
        of: ContainerId,
        exec: Option<ExecId>,
        signal: u32,
        all: bool,
    ) -> Result<(), PodError> {
        self.deliver(of, exec, Signal { number: signal, all, ..Signal::default() }).await
    }

    /// Signals like [`PodHandle::signal`]; repeated requests with the same id signal once.
    pub async fn deliver(
        &self,
        of: ContainerId,
        exec: Option<ExecId>,
        signal: Signal,
    ) -> Result<(), PodError> {
        self.ask(|reply| Request::Signal { of, exec, signal, reply }).await
    }

    /// Removes a container or an exec. Returns its exit.
    pub async fn delete(&self, of: ContainerId, exec: Option<ExecId>) -> Result<Exit, PodError> {
        self.ask(|reply| Request::Delete { of, exec, reply }).await
    }

    /// Closes a process's stdin after the content of its FIFO has been delivered.
    pub async fn close_stdin(&self, of: ContainerId, exec: Option<ExecId>) -> Result<(), PodError> {
        self.ask(|reply| Request::CloseStdin { of, exec, reply }).await
    }

    /// Sets the size of a process's terminal.
    pub async fn resize(
        &self,
        of: ContainerId,
        exec: Option<ExecId>,
        columns: u32,
        rows: u32,
    ) -> Result<(), PodError> {
        self.ask(|reply| Request::Resize { of, exec, columns, rows, reply }).await
    }

    /// Pauses or resumes a container.
    pub async fn set_paused(&self, of: ContainerId, paused: bool) -> Result<(), PodError> {
        self.ask(|reply| Request::SetPaused { of, paused, reply }).await
    }

    /// Changes a container's limits (OCI `linux.resources`, JSON).
    pub async fn update(&self, of: ContainerId, resources: Vec<u8>) -> Result<(), PodError> {
        self.ask(|reply| Request::Update { of, resources, reply }).await
    }

    /// Changes the limits of all containers together; rejected if they exceed the pod's VM.
    pub async fn update_pod(&self, limits: Limits) -> Result<(), PodError> {
        self.ask(|reply| Request::UpdatePod { limits, reply }).await
    }

    /// Returns the guest PIDs of a container.
    pub async fn pids(&self, of: ContainerId) -> Result<Vec<u32>, PodError> {
        self.ask(|reply| Request::Pids { of, reply }).await
    }

    /// Returns the statistics of a container, or of the whole guest.
    pub async fn stats(&self, of: Option<ContainerId>) -> Result<StatsResponse, PodError> {
        self.ask(|reply| Request::Stats { of, reply }).await
    }

    /// Sets the guest's clock by the host's. Returns whether this must be repeated later.
    pub async fn sync_clock(&self) -> Result<bool, PodError> {
        self.ask(|reply| Request::SyncClock { reply }).await
    }

    /// Moves the pod's VM, CPUs and memory, to a NUMA node.
    pub async fn move_to(&self, node: u32) -> Result<Moved, PodError> {
        self.ask(|reply| Request::Move { node, reply }).await
    }

    /// Returns everything about the pod.
    pub async fn inspect(&self) -> Result<PodView, PodError> {
        self.ask(|reply| Request::Inspect { reply }).await
    }

    async fn ask<T>(&self, request: impl FnOnce(Reply<T>) -> Request) -> Result<T, PodError> {
        let gone = || PodError::Gone(self.id.clone());
        let (reply, answer) = oneshot::channel();
        self.requests.send(Box::new(request(reply))).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }
}
