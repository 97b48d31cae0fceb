//! The events of pods, for subscribers.

use sandboxer_protocol::id::{ContainerId, SandboxId};
use tokio::sync::broadcast;

use sandboxer_base::clock::now_ns;

/// Events a slow listener may lag behind before it loses the oldest.
const KEPT: usize = 1024;

/// An event.
#[derive(Debug, Clone)]
pub struct Event {
    /// Time, ns since 1970.
    pub at_ns: u64,
    /// Its pod.
    pub pod: SandboxId,
    /// Its container; `None`: the pod itself.
    pub container: Option<ContainerId>,
    /// Its kind.
    pub kind: Kind,
    /// Details, for people; may be empty.
    pub detail: String,
}

/// The kinds of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Kind {
    PodCreated,
    PodStarting,
    PodReady,
    PodRecovered,
    PodStopped,
    PodRemoved,
    ContainerCreated,
    ContainerStarted,
    ContainerOutOfMemory,
    ContainerExited,
    ContainerDeleted,
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
            Kind::PodStopped => "pod-stopped",
            Kind::PodRemoved => "pod-removed",
            Kind::ContainerCreated => "container-created",
            Kind::ContainerStarted => "container-started",
            Kind::ContainerOutOfMemory => "container-out-of-memory",
            Kind::ContainerExited => "container-exited",
            Kind::ContainerDeleted => "container-deleted",
            Kind::ExecStarted => "exec-started",
            Kind::ExecExited => "exec-exited",
        }
    }
}

/// The channel of events.
#[derive(Debug, Clone)]
pub struct Events(broadcast::Sender<Event>);

impl Default for Events {
    fn default() -> Self {
        Self(broadcast::Sender::new(KEPT))
    }
}

impl Events {
    /// Publishes an event of a pod.
    pub fn pod(&self, pod: &SandboxId, kind: Kind, detail: impl Into<String>) {
        self.tell(pod, None, kind, detail.into());
    }

    /// Publishes an event of a container.
    pub fn container(&self, pod: &SandboxId, container: &ContainerId, kind: Kind, detail: impl Into<String>) {
        self.tell(pod, Some(container), kind, detail.into());
    }

    /// Subscribes to events from now on.
    pub fn listen(&self) -> broadcast::Receiver<Event> {
        self.0.subscribe()
    }

    fn tell(&self, pod: &SandboxId, container: Option<&ContainerId>, kind: Kind, detail: String) {
        tracing::info!(%pod, container = container.map(ContainerId::as_str), detail, "{}", kind.as_str());
        // No listener is no error.
        let _ = self.0.send(Event {
            at_ns: now_ns(),
            pod: pod.clone(),
            container: container.cloned(),
            kind,
            detail,
        });
    }
}
