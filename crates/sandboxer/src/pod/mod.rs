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
    /// Create VMs.
    pub vmms: Vmms,
    /// Builds disks from snapshots.
    pub rootfs: Arc<RootfsStore>,
    /// The hierarchies in which pods' control groups are created.
    pub cgroups: Hierarchies,
    /// The control group of VMs without a pod and without a NUMA node. It exists.
    pub idle_cgroup: Option<Cgroup>,
    /// Chooses NUMA nodes for VMs.
    pub placer: Arc<Placer>,
    /// Creates volumes.
    pub volumes: Arc<VolumeStore>,
    /// Records pods on disk.
    pub journal: Journal,
    /// Finds pods.
    pub registry: Registry,
    /// Templates of which pods are copies.
    pub templates: Arc<Templates>,
    /// Prepares guests that have no pod.
    pub rehearsal: Arc<Rehearsal>,
    /// VMs that are ready for pods.
    pub pool: Arc<Pool>,
    /// Holds the taps of VMs without a pod.
    pub tap_pool: Arc<TapPool>,
    /// Counts start paths.
    pub start_paths: StartPaths,
    /// Bounds concurrent starts.
    pub admission: Admission,
    /// Publishes events.
    pub events: Events,
    /// The front, which outlives this process.
    pub front: Arc<Front>,
    /// Histograms of the stages of all starts.
    pub stage_times: Arc<StageTimes>,
    /// Number of statistics calls that were answered with old values.
    pub old_readings: Arc<AtomicU64>,
    /// Records requests of containerd.
    pub traces: Traces,
}

impl DaemonState {
    /// Returns a pod's directory for sockets and logs.
    pub fn run_dir(&self, pod: &SandboxId) -> PathBuf {
        self.config.run_dir.join("pods").join(pod)
    }
}

/// Receives the answer to a request.
type Reply<T> = oneshot::Sender<Result<T, PodError>>;

/// All requests to a pod.
#[derive(Debug)]
enum Request {
    /// Start it. Answered at once if the pod is ready, else when it is ready.
    Start { request: SpanContext, reply: Reply<()> },
    /// Stop its VM. Cancels a start in progress. Answered at once if the pod has stopped.
    Stop { reply: Reply<()> },
    /// Stop and remove it: the last request that a pod answers.
    Remove { reply: Reply<()> },
    /// Create a container, up to the point where its init waits.
    CreateContainer { new: NewContainer, request: SpanContext, reply: Reply<()> },
    /// Register an exec.
    CreateExec { of: ContainerId, exec: ExecId, process: Vec<u8>, stdio: StdioPaths, reply: Reply<()> },
    /// Start a container's init or an exec. `again`: an earlier worker may have done it.
    StartProcess {
        of: ContainerId,
        exec: Option<ExecId>,
        again: bool,
        request: SpanContext,
        reply: Reply<()>,
    },
    /// Return a process's state.
    Process { of: ContainerId, exec: Option<ExecId>, reply: Reply<ProcessView> },
    /// Signal a process, or all of a container.
    Signal { of: ContainerId, exec: Option<ExecId>, signal: Signal, reply: Reply<()> },
    /// Remove a container or an exec that doesn't run. Returns how it ended.
    Delete { of: ContainerId, exec: Option<ExecId>, reply: Reply<Exit> },
    /// Nothing more will be written to a process's stdin FIFO.
    CloseStdin { of: ContainerId, exec: Option<ExecId>, reply: Reply<()> },
    /// Set the size of a process's terminal.
    Resize { of: ContainerId, exec: Option<ExecId>, columns: u32, rows: u32, reply: Reply<()> },
    /// Pause or resume a container.
    SetPaused { of: ContainerId, paused: bool, reply: Reply<()> },
    /// Change a container's limits (OCI `linux.resources`, JSON).
    Update { of: ContainerId, resources: Vec<u8>, reply: Reply<()> },
    /// Change the limits of all containers together.
    UpdatePod { limits: Limits, reply: Reply<()> },
    /// Returns the guest pids of a container.
    Pids { of: ContainerId, reply: Reply<Vec<u32>> },
    /// Statistics of a container, or of the guest.
    Stats { of: Option<ContainerId>, reply: Reply<StatsResponse> },
    /// Compares the guest's clock with the host's.
    SyncClock { reply: Reply<bool> },
    /// Move its VM to a NUMA node.
    Move { node: u32, reply: Reply<Moved> },
    /// Everything about the pod.
    Inspect { reply: Reply<PodView> },
}

/// The state of a process, with a channel to watch it.
#[derive(Debug)]
pub struct ProcessView {
    /// The container's bundle.
    pub bundle: PathBuf,
    /// FIFOs of the process.
    pub stdio: StdioPaths,
    /// The container is paused.
    pub paused: bool,
    /// The phase of the process.
    pub phase: watch::Receiver<Phase>,
}

/// Everything about a pod, for `inspect`.
#[derive(Debug)]
pub struct PodView {
    /// The requested pod, with the size of its VM at its start.
    pub spec: PodSpec,
    /// The size of its VM now.
    pub size: Shape,
    /// Its state.
    pub status: PodStatus,
    /// Name of its VMM; empty while there is none.
    pub vmm: String,
    /// Where its VMM runs.
    pub place: PlaceView,
    /// The steps of its start.
    pub steps: Vec<Step>,
    /// Its containers, by id.
    pub containers: Vec<ContainerView>,
}

/// Where a pod's VMM runs.
#[derive(Debug, Default)]
pub struct PlaceView {
    /// Its NUMA node; none: it is not placed.
    pub node: Option<u32>,
    /// The CPUs and memory nodes that it is restricted to; empty: all of its control group's parent.
    pub bounds: Bounds,
    /// They are CRI's.
    pub by_cri: bool,
    /// Why it is there, or is not placed; may be empty.
    pub reason: String,
}

/// What a move to another NUMA node cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moved {
    /// Where the pod was placed before.
    pub from: Option<u32>,
    /// Memory that was moved, bytes.
    pub bytes: u64,
    /// Memory that is still on other nodes: pages that other processes use, too, or that were in use.
    pub left_bytes: u64,
    /// How long it took.
    pub took: Duration,
}

/// Everything about a container, for `inspect`.
#[derive(Debug)]
pub struct ContainerView {
    /// Its id.
    pub id: ContainerId,
    /// Guest pid of its init.
    pub pid: u32,
    /// The phase of its init.
    pub phase: Phase,
    /// It is paused.
    pub paused: bool,
    /// Images and devices that are its disks.
    pub disks: Vec<PathBuf>,
    /// The steps of its start.
    pub steps: Vec<Step>,
    /// Its execs: id, guest pid, phase.
    pub execs: Vec<(ExecId, u32, Phase)>,
}

/// Returns how the sandbox container of a pod with this status has ended, if it has. A pause program does not exit by itself: a
/// stop on request is its kill.
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
    /// Boxed: a channel allocates space for 32 at once, and keeps it.
    requests: mpsc::Sender<Box<Request>>,
    status: watch::Receiver<PodStatus>,
}

impl PodHandle {
    /// Returns the pod's id.
    pub fn id(&self) -> &SandboxId {
        &self.id
    }

    /// Returns the bundle of its sandbox container, if it has one.
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
        // Its task may end before the pod does: when this process exits.
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
        // Its task may end before: when this process exits.
        let _ = self.status.clone().wait_for(|status| status.state != PodState::Unknown).await;
    }

    /// Returns what Kubernetes calls it.
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

    /// Starts a process, unless an earlier worker has: then returns the result of that.
    pub async fn start_process_again(&self, of: ContainerId, exec: Option<ExecId>) -> Result<(), PodError> {
        let request = SpanContext::current();
        self.ask(|reply| Request::StartProcess { of, exec, again: true, request, reply }).await
    }

    /// Returns a process's state.
    pub async fn process(&self, of: ContainerId, exec: Option<ExecId>) -> Result<ProcessView, PodError> {
        self.ask(|reply| Request::Process { of, exec, reply }).await
    }

    /// Signals a process, or all of a container.
    pub async fn signal(
        &self,
        of: ContainerId,
        exec: Option<ExecId>,
        signal: u32,
        all: bool,
    ) -> Result<(), PodError> {
        self.deliver(of, exec, Signal { number: signal, all, ..Signal::default() }).await
    }

    /// Signals as [`PodHandle::signal`] does; repeated requests with the same id signal once.
    pub async fn deliver(
        &self,
        of: ContainerId,
        exec: Option<ExecId>,
        signal: Signal,
    ) -> Result<(), PodError> {
        self.ask(|reply| Request::Signal { of, exec, signal, reply }).await
    }

    /// Removes a container or an exec. Returns how it ended.
    pub async fn delete(&self, of: ContainerId, exec: Option<ExecId>) -> Result<Exit, PodError> {
        self.ask(|reply| Request::Delete { of, exec, reply }).await
    }

    /// Closes a process's stdin after the content of its FIFO is delivered.
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

    /// Changes the limits of all containers together; rejected if they exceed its VM.
    pub async fn update_pod(&self, limits: Limits) -> Result<(), PodError> {
        self.ask(|reply| Request::UpdatePod { limits, reply }).await
    }

    /// Returns the guest pids of a container.
    pub async fn pids(&self, of: ContainerId) -> Result<Vec<u32>, PodError> {
        self.ask(|reply| Request::Pids { of, reply }).await
    }

    /// Returns the statistics of a container, or of the whole guest.
    pub async fn stats(&self, of: Option<ContainerId>) -> Result<StatsResponse, PodError> {
        self.ask(|reply| Request::Stats { of, reply }).await
    }

    /// Sets the guest's clock by the host's. Returns whether that is to be done again later.
    pub async fn sync_clock(&self) -> Result<bool, PodError> {
        self.ask(|reply| Request::SyncClock { reply }).await
    }

    /// Moves its VM to a NUMA node: CPUs and memory.
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
