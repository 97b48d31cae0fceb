//! Errors of requests about pods.

use std::{
    io,
    path::{Path, PathBuf},
};

use sandboxer_base::Code;
use sandboxer_guest::{ConnectError, GuestError};
use sandboxer_host::{network::NetworkError, rootfs::RootfsError, volume::VolumeError};
use sandboxer_protocol::id::{ContainerId, ExecId, InvalidId, SandboxId};
use sandboxer_vmm::VmmError;

use crate::share::ShareError;

/// An error of a request about a pod.
#[derive(Debug, thiserror::Error)]
pub enum PodError {
    /// An invalid identifier.
    #[error("{what} is invalid")]
    Id {
        /// Kind of the identifier: "sandbox id", "container id" or "exec id".
        what: &'static str,
        /// The defect of the identifier.
        source: InvalidId,
    },
    /// The pod is unknown.
    #[error("pod {0} is not known")]
    NoPod(SandboxId),
    /// The pod already exists.
    #[error("pod {0} exists already")]
    PodExists(SandboxId),
    /// The container is unknown.
    #[error("container {0} is not known")]
    NoContainer(ContainerId),
    /// The container already exists.
    #[error("container {0} exists already")]
    ContainerExists(ContainerId),
    /// The exec is unknown.
    #[error("exec {exec} of container {container} is not known")]
    NoExec {
        /// The exec's container.
        container: ContainerId,
        /// The exec's id.
        exec: ExecId,
    },
    /// The exec already exists.
    #[error("exec {exec} of container {container} exists already")]
    ExecExists {
        /// The exec's container.
        container: ContainerId,
        /// The exec's id.
        exec: ExecId,
    },
    /// The process has exited.
    #[error("process of container {0} has ended already")]
    ProcessEnded(ContainerId),
    /// The subject's state does not allow the action.
    #[error("cannot {action} while {subject} is {state}")]
    State {
        /// The requested action.
        action: &'static str,
        /// The pod, container or process that the request concerns.
        subject: String,
        /// The state of the subject.
        state: String,
    },
    /// The pod is an earlier daemon's, and its VMM or agent has not responded to this one yet.
    #[error(
        "cannot {action}: {subject} has not answered since sandboxer was started: {reason}; this is tried again"
    )]
    Unreached {
        /// The requested action.
        action: &'static str,
        /// The pod, container or process that the request concerns.
        subject: String,
        /// The error of the last attempt.
        reason: String,
    },
    /// An error shared by all waiters of one operation.
    #[error(transparent)]
    Shared(std::sync::Arc<PodError>),
    /// The pod was stopped while it started.
    #[error("start of pod {0} was cancelled: the pod was stopped")]
    Cancelled(SandboxId),
    /// The request is invalid.
    #[error("{subject}: {reason}")]
    Invalid {
        /// The subject of the request.
        subject: String,
        /// The problem, and what to do about it.
        reason: String,
    },
    /// The request failed for a reason that was also logged in full.
    #[error("{subject}: {reason}")]
    Failed {
        /// The subject of the request.
        subject: String,
        /// What happened.
        reason: String,
    },
    /// The guest does not respond, and has not reported statistics before.
    #[error(
        "guest of pod {pod} did not answer within {limit:?} how much it uses, and has not told it before"
    )]
    NoReadings {
        /// The pod's id.
        pod: SandboxId,
        /// The time limit for the statistics.
        limit: std::time::Duration,
    },
    /// The pod cannot be moved to another NUMA node.
    #[error("cannot move pod {pod}: {reason}")]
    Unmovable {
        /// The pod's id.
        pod: SandboxId,
        /// The reason why the pod cannot be moved.
        reason: String,
    },
    /// The requested feature does not exist for a pod with its own kernel.
    #[error("{0}")]
    Unsupported(String),
    /// The agent was not ready in time.
    #[error("agent of pod {pod} was not ready within {limit:?}; the console's last lines: {console}")]
    NotReady {
        /// The pod's id.
        pod: SandboxId,
        /// The time limit for the agent.
        limit: std::time::Duration,
        /// The last output of the guest's console.
        console: String,
    },
    /// The VMM exited unexpectedly.
    #[error("VMM of pod {pod} {how}; last lines: {last_lines}")]
    VmEnded {
        /// The pod's id.
        pod: SandboxId,
        /// The way in which the VMM exited.
        how: String,
        /// The VMM's last output.
        last_lines: String,
    },
    /// A VMM failed.
    #[error(transparent)]
    Vmm(#[from] VmmError),
    /// An agent failed.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// A root file system cannot be created.
    #[error(transparent)]
    Rootfs(#[from] RootfsError),
    /// A volume cannot be provided.
    #[error(transparent)]
    Volume(#[from] VolumeError),
    /// The pod's network cannot be set up.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// A live share cannot be provided.
    #[error(transparent)]
    Share(#[from] ShareError),
    /// An operation on a path of the host failed.
    #[error("cannot {action} {path:?} for pod {pod}")]
    Path {
        /// The pod's id.
        pod: SandboxId,
        /// The attempted operation.
        action: &'static str,
        /// The path on the host.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The front did not store an entry that the next worker needs.
    #[error("cannot store {what} of pod {pod} at the front")]
    Front {
        /// The pod's id.
        pod: SandboxId,
        /// The name of the entry at the front.
        what: Box<str>,
        /// The system's error.
        source: std::io::Error,
    },
    /// A checkpoint cannot be made or used.
    #[error("checkpoint {namespace}/{name}: {reason}")]
    Checkpoint {
        /// Namespace of the checkpoint.
        namespace: String,
        /// Name of the checkpoint.
        name: String,
        /// What is wrong, and what to do about it.
        reason: String,
        /// The gRPC code.
        code: Code,
    },
    /// The pod's task has ended: the pod is being removed, or the daemon exits.
    #[error("pod {0} no longer takes requests: it is being removed")]
    Gone(SandboxId),
}

impl PodError {
    /// Returns the gRPC code of the error.
    pub fn code(&self) -> Code {
        match self {
            Self::NoPod(_) | Self::NoContainer(_) | Self::NoExec { .. } | Self::ProcessEnded(_) => {
                Code::NotFound
            }
            Self::PodExists(_) | Self::ContainerExists(_) | Self::ExecExists { .. } => Code::AlreadyExists,
            Self::Id { .. } | Self::Invalid { .. } => Code::InvalidArgument,
            Self::State { .. } | Self::Unmovable { .. } | Self::Vmm(VmmError::HugePages { .. }) => {
                Code::FailedPrecondition
            }
            Self::Cancelled(_) => Code::Cancelled,
            Self::Unsupported(_) => Code::Unimplemented,
            Self::NotReady { .. } | Self::NoReadings { .. } | Self::Vmm(VmmError::Hung { .. }) => {
                Code::DeadlineExceeded
            }
            Self::VmEnded { .. } | Self::Gone(_) | Self::Unreached { .. } => Code::Unavailable,
            Self::Checkpoint { code, .. } => *code,
            Self::Shared(error) => error.code(),
            Self::Guest(error) => error.code(),
            Self::Rootfs(error) => error.code(),
            Self::Volume(error) => error.code(),
            Self::Network(error) => error.code(),
            Self::Share(error) => error.code(),
            Self::Vmm(_) | Self::Path { .. } | Self::Front { .. } | Self::Failed { .. } => Code::Internal,
        }
    }
}

impl From<ConnectError> for PodError {
    fn from(error: ConnectError) -> Self {
        match error {
            ConnectError::Vmm(error) => error.into(),
            ConnectError::Guest(error) => error.into(),
        }
    }
}

/// Logs the failure of a change that is not urgent.
pub(crate) fn tolerate(action: &'static str, path: &Path, done: io::Result<()>) {
    if let Err(error) = done {
        tracing::warn!(?path, %error, "cannot {action} it now; a later daemon does");
    }
}
