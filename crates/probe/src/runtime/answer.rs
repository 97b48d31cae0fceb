//! What CRI calls return.

use std::collections::HashMap;
use std::path::PathBuf;

/// Name and versions of the runtime.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version {
    /// "containerd", ….
    pub name: String,
    /// Its version.
    pub version: String,
    /// "v1".
    pub api: String,
}

/// Status of a pod.
#[derive(Debug, Clone, PartialEq)]
pub struct PodState {
    /// Sandbox id.
    pub id: String,
    /// Its name.
    pub name: String,
    /// Kubernetes namespace.
    pub namespace: String,
    /// SANDBOX_READY.
    pub ready: bool,
    /// Handler that it runs on.
    pub handler: String,
    /// Its IP addresses; none with the node's network.
    pub addresses: Vec<String>,
    /// Labels.
    pub labels: HashMap<String, String>,
    /// Creation, ns since 1970, by the runtime's clock.
    pub created_at: i64,
    /// Verbose information of the runtime, usually JSON; empty unless requested.
    pub info: HashMap<String, String>,
}

/// State of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Not yet started.
    Created,
    /// Runs.
    Running,
    /// Has ended.
    Exited,
    /// The runtime does not know.
    Unknown,
}

/// Status of a container.
#[derive(Debug, Clone, PartialEq)]
pub struct ContainerState {
    /// Container id.
    pub id: String,
    /// Its name.
    pub name: String,
    /// Its state.
    pub phase: Phase,
    /// Valid when it has exited.
    pub exit_code: i32,
    /// CamelCase word for why it is in this state.
    pub reason: String,
    /// A sentence about it.
    pub message: String,
    /// Digest or id of its image.
    pub image: String,
    /// Path of its log.
    pub log_path: PathBuf,
    /// Times, ns since 1970, 0 when it did not happen yet.
    pub started_at: i64,
    /// As above.
    pub finished_at: i64,
    /// Verbose information of the runtime; empty unless requested.
    pub info: HashMap<String, String>,
}

/// An item of a list of pods or containers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Sandbox or container id.
    pub id: String,
    /// Sandbox that a container is in; of a pod its own id.
    pub pod: String,
    /// Its name.
    pub name: String,
    /// Handler; empty for containers.
    pub handler: String,
    /// Ready or running.
    pub running: bool,
    /// Labels.
    pub labels: HashMap<String, String>,
}

/// Result of a command run in a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecOutput {
    /// Bytes of stdout.
    pub stdout: Vec<u8>,
    /// Bytes of stderr.
    pub stderr: Vec<u8>,
    /// Its exit code.
    pub exit_code: i32,
}

/// Resource usage of a container, if known.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Usage {
    /// CPU time since its start, ns.
    pub cpu_ns: Option<u64>,
    /// Working set, bytes.
    pub memory_bytes: Option<u64>,
}

/// An image on the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// Its id: digest of its configuration.
    pub id: String,
    /// `name@sha256:…` of its manifest.
    pub digests: Vec<String>,
    /// Size, bytes.
    pub size: u64,
}
