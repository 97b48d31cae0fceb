//! What CRI calls return.

use std::collections::HashMap;
use std::path::PathBuf;

/// Name and versions of the runtime.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version {
    /// Name of the runtime, such as "containerd".
    pub name: String,
    /// Version of the runtime.
    pub version: String,
    /// Version of CRI, such as "v1".
    pub api: String,
}

/// Status of a pod.
#[derive(Debug, Clone, PartialEq)]
pub struct PodState {
    /// The sandbox's id.
    pub id: String,
    /// Name of the pod.
    pub name: String,
    /// Kubernetes namespace of the pod.
    pub namespace: String,
    /// Whether the sandbox is in state SANDBOX_READY.
    pub ready: bool,
    /// Handler on which the pod runs.
    pub handler: String,
    /// IP addresses of the pod; none with the node's network.
    pub addresses: Vec<String>,
    /// Labels of the pod.
    pub labels: HashMap<String, String>,
    /// Time of creation, ns since 1970, by the runtime's clock.
    pub created_at: i64,
    /// Verbose information of the runtime, usually JSON; empty unless requested.
    pub info: HashMap<String, String>,
}

/// State of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The container has not been started.
    Created,
    /// The container runs.
    Running,
    /// The container has ended.
    Exited,
    /// The runtime does not know the state.
    Unknown,
}

/// Status of a container.
#[derive(Debug, Clone, PartialEq)]
pub struct ContainerState {
    /// The container's id.
    pub id: String,
    /// Name of the container.
    pub name: String,
    /// State of the container.
    pub phase: Phase,
    /// Exit code; valid once the container has exited.
    pub exit_code: i32,
    /// CamelCase word for the reason of this state.
    pub reason: String,
    /// Sentence on the reason of this state.
    pub message: String,
    /// Digest or id of the container's image.
    pub image: String,
    /// Path of the container's log.
    pub log_path: PathBuf,
    /// Time of the start, ns since 1970; 0 if the container has not been started.
    pub started_at: i64,
    /// Time of the exit, ns since 1970; 0 if the container has not ended.
    pub finished_at: i64,
    /// Verbose information of the runtime; empty unless requested.
    pub info: HashMap<String, String>,
}

/// An item of a list of pods or containers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Id of the sandbox or container.
    pub id: String,
    /// Sandbox of a container; for a pod, its own id.
    pub pod: String,
    /// Name of the pod or container.
    pub name: String,
    /// Runtime handler; empty for containers.
    pub handler: String,
    /// Whether the pod is ready or the container running.
    pub running: bool,
    /// Labels of the pod or container.
    pub labels: HashMap<String, String>,
}

/// Result of a command run in a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecOutput {
    /// Bytes that the command wrote to stdout.
    pub stdout: Vec<u8>,
    /// Bytes that the command wrote to stderr.
    pub stderr: Vec<u8>,
    /// Exit code of the command.
    pub exit_code: i32,
}

/// Resource usage of a container, as far as known.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Usage {
    /// CPU time since the container's start, ns.
    pub cpu_ns: Option<u64>,
    /// Working set, bytes.
    pub memory_bytes: Option<u64>,
}

/// An image on the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// Id of the image: the digest of its configuration.
    pub id: String,
    /// References of the image's manifest: `name@sha256:…`.
    pub digests: Vec<String>,
    /// Size of the image, bytes.
    pub size: u64,
}
