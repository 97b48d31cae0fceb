//! The handle to a pod, through which all other code uses it.

use std::{path::Path, sync::Arc};

use sandboxer_guest::Signal;
use sandboxer_protocol::{
    agent::StatsResponse,
    id::{ContainerId, ExecId, SandboxId},
};
use tokio::sync::{mpsc, oneshot, watch};

use super::{
    container::{Exit, NewContainer, StdioPaths},
    request::{Reply, Request},
    spec::{Limits, PodSpec},
    view::{Moved, PodView, ProcessView},
};
use crate::{
    checkpoint::Manifest,
    error::PodError,
    events::PodName,
    state::{PodState, PodStatus},
    traces::SpanContext,
};

/// Capacity of a pod's request queue; senders wait if it is full.
const QUEUED_REQUESTS: usize = 64;

/// A handle to a pod. Cheap to clone.
#[derive(Debug, Clone)]
pub struct PodHandle {
    id: SandboxId,
    name: Arc<PodName>,
    bundle: Option<Arc<Path>>,
    netns: Option<Arc<Path>>,
    is_alone: bool,
    /// Boxed: a channel allocates space for 32 requests at once, and keeps it.
    requests: mpsc::Sender<Box<Request>>,
    status: watch::Receiver<PodStatus>,
}

impl PodHandle {
    /// Returns a handle to the pod, and the queue of its requests.
    pub fn new(
        spec: &PodSpec,
        name: Arc<PodName>,
        status: watch::Receiver<PodStatus>,
    ) -> (Self, mpsc::Receiver<Box<Request>>) {
        let (requests, receiver) = mpsc::channel(QUEUED_REQUESTS);
        let [bundle, netns] = [&spec.bundle, &spec.netns].map(|path| path.as_deref().map(Into::into));
        let (id, is_alone) = (spec.id.clone(), spec.alone);
        (Self { id, name, bundle, netns, is_alone, requests, status }, receiver)
    }

    /// Returns the pod's id.
    pub fn id(&self) -> &SandboxId {
        &self.id
    }

    /// Returns the Kubernetes namespace of the pod.
    pub fn namespace(&self) -> &str {
        &self.name.namespace
    }

    /// Returns the bundle of the container that stands for the pod, if there is one.
    pub fn bundle(&self) -> Option<&Path> {
        self.bundle.as_deref()
    }

    /// Returns the path of the pod's network namespace, if it has one.
    pub fn netns(&self) -> Option<&Path> {
        self.netns.as_deref()
    }

    /// Returns whether the pod is one container that no pod of CRI has.
    pub fn is_alone(&self) -> bool {
        self.is_alone
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
        id: ContainerId,
        exec: ExecId,
        process: Vec<u8>,
        stdio: StdioPaths,
    ) -> Result<(), PodError> {
        self.ask(|reply| Request::CreateExec { id, exec, process, stdio, reply }).await
    }

    /// Starts a process.
    pub async fn start_process(&self, id: ContainerId, exec: Option<ExecId>) -> Result<(), PodError> {
        let request = SpanContext::current();
        self.ask(|reply| Request::StartProcess { id, exec, again: false, request, reply }).await
    }

    /// Starts a process, unless an earlier worker has: then returns the result of that start.
    pub async fn start_process_again(&self, id: ContainerId, exec: Option<ExecId>) -> Result<(), PodError> {
        let request = SpanContext::current();
        self.ask(|reply| Request::StartProcess { id, exec, again: true, request, reply }).await
    }

    /// Returns a process's state.
    pub async fn process(&self, id: ContainerId, exec: Option<ExecId>) -> Result<ProcessView, PodError> {
        self.ask(|reply| Request::Process { id, exec, reply }).await
    }

    /// Signals a process, or all processes of a container.
    pub async fn signal(
        &self,
        id: ContainerId,
        exec: Option<ExecId>,
        signal: u32,
        all: bool,
    ) -> Result<(), PodError> {
        self.deliver(id, exec, Signal { number: signal, all, ..Signal::default() }).await
    }

    /// Signals like [`PodHandle::signal`]; repeated requests with the same id signal once.
    pub async fn deliver(
        &self,
        id: ContainerId,
        exec: Option<ExecId>,
        signal: Signal,
    ) -> Result<(), PodError> {
        self.ask(|reply| Request::Signal { id, exec, signal, reply }).await
    }

    /// Removes a container or an exec. Returns its exit.
    pub async fn delete(&self, id: ContainerId, exec: Option<ExecId>) -> Result<Exit, PodError> {
        self.ask(|reply| Request::Delete { id, exec, reply }).await
    }

    /// Closes a process's stdin after the content of its FIFO has been delivered.
    pub async fn close_stdin(&self, id: ContainerId, exec: Option<ExecId>) -> Result<(), PodError> {
        self.ask(|reply| Request::CloseStdin { id, exec, reply }).await
    }

    /// Sets the size of a process's terminal.
    pub async fn resize(
        &self,
        id: ContainerId,
        exec: Option<ExecId>,
        columns: u32,
        rows: u32,
    ) -> Result<(), PodError> {
        self.ask(|reply| Request::Resize { id, exec, columns, rows, reply }).await
    }

    /// Pauses or resumes a container.
    pub async fn set_paused(&self, id: ContainerId, paused: bool) -> Result<(), PodError> {
        self.ask(|reply| Request::SetPaused { id, paused, reply }).await
    }

    /// Changes a container's limits (OCI `linux.resources`, JSON).
    pub async fn update(&self, id: ContainerId, resources: Vec<u8>) -> Result<(), PodError> {
        self.ask(|reply| Request::Update { id, resources, reply }).await
    }

    /// Changes the limits of all containers together; rejected if they exceed the pod's VM.
    pub async fn update_pod(&self, limits: Limits) -> Result<(), PodError> {
        self.ask(|reply| Request::UpdatePod { limits, reply }).await
    }

    /// Returns the guest PIDs of a container.
    pub async fn pids(&self, id: ContainerId) -> Result<Vec<u32>, PodError> {
        self.ask(|reply| Request::Pids { id, reply }).await
    }

    /// Returns the statistics of a container, or of the whole guest.
    pub async fn stats(&self, container: Option<ContainerId>) -> Result<StatsResponse, PodError> {
        self.ask(|reply| Request::Stats { container, reply }).await
    }

    /// Sets the guest's clock by the host's. Returns whether this must be repeated later.
    pub async fn sync_clock(&self) -> Result<bool, PodError> {
        self.ask(|reply| Request::SyncClock { reply }).await
    }

    /// Moves the pod's VM, CPUs and memory, to a NUMA node.
    pub async fn move_to(&self, node: u32) -> Result<Moved, PodError> {
        self.ask(|reply| Request::Move { node, reply }).await
    }

    /// Saves the pod, which goes on, under this name in its namespace.
    pub async fn checkpoint(&self, name: String) -> Result<Box<Manifest>, PodError> {
        self.ask(|reply| Request::Checkpoint { name, stop: false, reply }).await
    }

    /// Saves the pod as [`PodHandle::checkpoint`] does. If it was saved it then stops, without having run again; the
    /// stop is not awaited.
    pub async fn checkpoint_last(&self, name: String) -> Result<Box<Manifest>, PodError> {
        self.ask(|reply| Request::Checkpoint { name, stop: true, reply }).await
    }

    /// Returns everything about the pod.
    pub async fn inspect(&self) -> Result<PodView, PodError> {
        self.ask(|reply| Request::Inspect { reply }).await
    }

    async fn ask<T>(&self, request: impl FnOnce(Reply<T>) -> Request) -> Result<T, PodError> {
        let pod_gone = || PodError::Gone(self.id.clone());
        let (reply, answer) = oneshot::channel();
        self.requests.send(Box::new(request(reply))).await.map_err(|_| pod_gone())?;
        answer.await.map_err(|_| pod_gone())?
    }
}
