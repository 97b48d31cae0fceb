//! The states of a pod and their transitions. `pod/driver/state.rs` says what exists in each.
//!
//! ```text
//!            start             agent ready
//!  Created ────────▶ Starting ─────────────▶ Ready
//!     │               ╱ │                      │ ╲
//!     │ stop         ╱  │ stop            stop │  ╲ the VMM dies, or is killed for what its guest did
//!     │     failure ╱   ▼                      ▼   ╲
//!     │            ╱ Stopping ◀────────────────┘    │
//!     │           ╱     │ all undone                │
//!     ╰──────────┴─▶ Stopped ◀──────────────────────╯
//!                        ▲
//!                        │ the VMM has ended
//!  (an earlier daemon's) Unknown ── VMM and agent answer ──▶ Ready
//!                        ╰───────── stop ──────────────────▶ Stopping
//! ```
//!
//! A pod is Stopped only after the kernel reports that the VMM's process has exited.
//!
//! A removed pod has no state.

use sandboxer_config::StartPath;
use serde::{Deserialize, Serialize};

use sandboxer_host::network::Interface;

/// The state of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PodState {
    /// The pod is created and holds no resources yet.
    Created,
    /// The start of the pod is in progress.
    Starting,
    /// The pod's agent responds.
    Ready,
    /// The stop of the pod is in progress.
    Stopping,
    /// The pod has stopped; only its record is left.
    Stopped,
    /// The pod was ready under an earlier daemon. Its VMM runs, but VMM or agent have not responded to this daemon yet.
    /// Never written to a record.
    Unknown,
}

impl PodState {
    /// Returns the state's name, for messages.
    pub const fn as_str(self) -> &'static str {
        match self {
            PodState::Created => "created",
            PodState::Starting => "starting",
            PodState::Ready => "ready",
            PodState::Stopping => "stopping",
            PodState::Stopped => "stopped",
            PodState::Unknown => "unknown",
        }
    }
}

impl std::fmt::Display for PodState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The status of a pod, readable at any time without a request to the pod's task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodStatus {
    /// The state of the pod.
    pub state: PodState,
    /// Time of the pod's creation, ns since 1970.
    pub created_at_ns: u64,
    /// Time of the pod's stop, ns since 1970; 0 before.
    pub exited_at_ns: u64,
    /// Exit status of the pod; 0 if it was stopped on request.
    pub exit_status: u32,
    /// The reason why the pod stopped without a request, or why its state is unknown; else empty.
    pub reason: String,
    /// The start path of the pod; `None` before the start.
    // The field's name in records of all releases.
    #[serde(default, rename = "way")]
    pub start_path: Option<StartPath>,
    /// PID of the pod's VMM; 0 if there is none.
    pub vmm_pid: u32,
    /// Guest kernel version, once known.
    pub kernel_release: String,
    /// The pod's network interfaces, once it is up.
    #[serde(default)]
    pub interfaces: Vec<Interface>,
    /// Whether this daemon adopted the pod when it started.
    #[serde(skip)]
    pub recovered: bool,
    /// Whether the state has been unknown for so long that the manager should stop the pod.
    #[serde(skip)]
    pub overdue: bool,
}

impl PodStatus {
    /// Returns the status of a new pod, created at this time, ns since 1970.
    pub fn created(created_at_ns: u64) -> Self {
        Self {
            state: PodState::Created,
            created_at_ns,
            exited_at_ns: 0,
            exit_status: 0,
            reason: String::new(),
            start_path: None,
            vmm_pid: 0,
            kernel_release: String::new(),
            interfaces: Vec::new(),
            recovered: false,
            overdue: false,
        }
    }

    /// Returns the status for the record: for an unknown pod, the status read from the record.
    pub fn recorded(&self) -> Self {
        match self.state {
            PodState::Unknown => Self { state: PodState::Ready, reason: String::new(), ..self.clone() },
            _ => self.clone(),
        }
    }
}
