//! The events of pods, for subscribers.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use sandboxer_protocol::id::{ContainerId, ExecId, SandboxId};
use tokio::sync::broadcast;

use sandboxer_base::clock::now_ns;

/// Maximum number of events that a slow subscriber may lag behind before it loses the oldest.
const KEPT: usize = 1024;

/// An event of a pod or container.
#[derive(Debug, Clone)]
pub struct Event {
    /// Time of the event, ns since 1970.
    pub at_ns: u64,
    /// The pod of the event.
    pub pod: SandboxId,
    /// The pod's names.
    pub name: Arc<PodName>,
    /// The container of the event; `None`: the pod itself.
    pub container: Option<ContainerId>,
    /// The kind of the event.
    pub kind: Kind,
    /// Details, for people; may be empty.
    pub detail: String,
    /// Details for containerd, if it knows the subject as a task.
    pub task: Option<TaskDetail>,
}

/// Details that containerd's events contain for a task, besides its id.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TaskDetail {
    /// The exec; `None`: the container's init.
    pub exec: Option<ExecId>,
    /// The PID of the VMM.
    pub pid: u32,
    /// The container's bundle.
    pub bundle: PathBuf,
    /// The exit code, and the time of the exit in ns since 1970.
    pub exit: Option<(u32, u64)>,
}

/// The kinds of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Kind {
    PodCreated,
    PodStarting,
    PodReady,
    PodRecovered,
    PodSaved,
    PodStopped,
    PodRemoved,
    ContainerCreated,
    ContainerStarted,
    ContainerPaused,
    ContainerResumed,
    ContainerOutOfMemory,
    ContainerExited,
    ContainerDeleted,
    ExecCreated,
    ExecStarted,
    ExecExited,
}

impl Kind {
    /// Returns the kind's name.
    pub const fn as_str(self) -> &'static str {
        match self {
            Kind::PodCreated => "pod-created",
            Kind::PodStarting => "pod-starting",
            Kind::PodReady => "pod-ready",
            Kind::PodRecovered => "pod-recovered",
            Kind::PodSaved => "pod-saved",
            Kind::PodStopped => "pod-stopped",
            Kind::PodRemoved => "pod-removed",
            Kind::ContainerCreated => "container-created",
            Kind::ContainerStarted => "container-started",
            Kind::ContainerPaused => "container-paused",
            Kind::ContainerResumed => "container-resumed",
            Kind::ContainerOutOfMemory => "container-out-of-memory",
            Kind::ContainerExited => "container-exited",
            Kind::ContainerDeleted => "container-deleted",
            Kind::ExecCreated => "exec-created",
            Kind::ExecStarted => "exec-started",
            Kind::ExecExited => "exec-exited",
        }
    }
}

/// Kubernetes' names of a pod; each is empty if it is unknown.
#[derive(Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct PodName {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    /// Whether the pod is one container that Kubernetes does not know: `namespace` is containerd's.
    pub alone: bool,
    /// Whether the pod is CRI-O's: containerd does not know it.
    pub of_cri_o: bool,
}

/// The channel of events.
#[derive(Debug, Clone)]
pub struct Events {
    listeners: broadcast::Sender<Event>,
    /// Pods' names, for the log. A plain lock: held for a look-up, never across an await.
    names: Arc<Mutex<HashMap<SandboxId, Arc<PodName>>>>,
}

impl Default for Events {
    fn default() -> Self {
        Self { listeners: broadcast::Sender::new(KEPT), names: Arc::default() }
    }
}

impl Events {
    /// Publishes an event of a pod that containerd does not know as a task.
    pub fn pod(&self, pod: &SandboxId, kind: Kind, detail: impl Into<String>) {
        self.pod_task(pod, kind, detail, None);
    }

    /// Publishes an event of a pod.
    pub fn pod_task(&self, pod: &SandboxId, kind: Kind, detail: impl Into<String>, task: Option<TaskDetail>) {
        self.tell(pod, None, kind, detail.into(), task);
    }

    /// Publishes an event of a container.
    pub fn container(
        &self,
        pod: &SandboxId,
        container: &ContainerId,
        kind: Kind,
        detail: impl Into<String>,
        task: TaskDetail,
    ) {
        self.tell(pod, Some(container), kind, detail.into(), Some(task));
    }

    /// Subscribes to events from now on.
    pub fn listen(&self) -> broadcast::Receiver<Event> {
        self.listeners.subscribe()
    }

    /// Sets the name of a pod, for the log, until [`Kind::PodRemoved`].
    pub fn name(&self, pod: &SandboxId, name: Arc<PodName>) {
        self.names.lock().unwrap_or_else(PoisonError::into_inner).insert(pod.clone(), name);
    }

    fn tell(
        &self,
        pod: &SandboxId,
        container: Option<&ContainerId>,
        kind: Kind,
        detail: String,
        task: Option<TaskDetail>,
    ) {
        let name = {
            let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
            match kind {
                Kind::PodRemoved => names.remove(pod),
                _ => names.get(pod).cloned(),
            }
        }
        .unwrap_or_default();
        tracing::info!(
            %pod,
            namespace = name.namespace,
            name = name.name,
            uid = name.uid,
            container = container.map(ContainerId::as_str),
            event = kind.as_str(),
            detail,
            "{}",
            kind.as_str()
        );
        // An event without a subscriber is not an error.
        let _ = self.listeners.send(Event {
            at_ns: now_ns(),
            pod: pod.clone(),
            name,
            container: container.cloned(),
            kind,
            detail,
            task,
        });
    }
}
