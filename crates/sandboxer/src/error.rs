//! Errors of requests about pods.

use std::path::PathBuf;

use sandboxer_base::Code;
use sandboxer_guest::{ConnectError, GuestError};
use sandboxer_host::{network::NetworkError, rootfs::RootfsError, volume::VolumeError};
use sandboxer_protocol::id::{ContainerId, ExecId, InvalidId, SandboxId};
use sandboxer_vmm::VmmError;

use crate::{share::ShareError, state::PodState};

/// An error of a request about a pod.
#[derive(Debug, thiserror::Error)]
pub enum PodError {
    /// An invalid identifier.
    #[error("{what} is invalid")]
    Id {
        /// "sandbox id", "container id", "exec id".
        what: &'static str,
        /// What is wrong with it.
        source: InvalidId,
    },
    /// The pod is unknown.
    #[error("pod {0} is not known")]
    NoPod(SandboxId),
    /// The pod is known already.
    #[error("pod {0} exists already")]
    PodExists(SandboxId),
    /// The container is unknown.
    #[error("container {0} is not known")]
    NoContainer(ContainerId),
    /// The container is known already.
    #[error("container {0} exists already")]
    ContainerExists(ContainerId),
    /// The exec is unknown.
    #[error("exec {exec} of container {container} is not known")]
    NoExec {
        /// The container.
        container: ContainerId,
        /// The process.
        exec: ExecId,
    },
    /// The exec is known already.
    #[error("exec {exec} of container {container} exists already")]
    ExecExists {
        /// The container.
        container: ContainerId,
        /// The process.
        exec: ExecId,
    },
    /// The process has ended.
    #[error("process of container {0} has ended already")]
    ProcessEnded(ContainerId),
    /// The state does not allow it.
    #[error("cannot {action} while {subject} is {state}")]
    State {
        /// The requested action.
        action: &'static str,
        /// The subject.
        subject: String,
        /// The subject's state.
        state: String,
    },
    /// An earlier daemon's pod, whose VMM or agent has not answered this one yet.
    #[error(
        "cannot {action}: {subject} has not answered since sandboxer was started: {reason}; this is tried again"
    )]
    Unreached {
        /// The requested action.
        action: &'static str,
        /// The subject.
        subject: String,
        /// The error of the last attempt.
        reason: String,
    },
    /// The pod's task attempted an illegal state transition: a bug.
    #[error("pod {pod} is {from} and cannot become {to}: this is a fault of sandboxer, please report it")]
    Transition {
        /// The pod.
        pod: SandboxId,
        /// Its state.
        from: PodState,
        /// The rejected next state.
        to: PodState,
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
        /// The problem and what to do.
        reason: String,
    },
    /// It failed for a reason that was also logged in full.
    #[error("{subject}: {reason}")]
    Failed {
        /// The subject of the request.
        subject: String,
        /// What happened.
        reason: String,
    },
    /// The guest does not answer, and has not reported statistics before.
    #[error(
        "guest of pod {pod} did not answer within {limit:?} how much it uses, and has not told it before"
    )]
    NoReadings {
        /// The pod.
        pod: SandboxId,
        /// The time limit.
        limit: std::time::Duration,
    },
    /// The pod cannot be moved to another NUMA node.
    #[error("cannot move pod {pod}: {reason}")]
    Unmovable {
        /// The pod.
        pod: SandboxId,
        /// Why.
        reason: String,
    },
    /// A feature that a pod with its own kernel does not have.
    #[error("{0}")]
    Unsupported(String),
    /// The agent was not ready in time.
    #[error("agent of pod {pod} was not ready within {limit:?}; the console's last lines: {console}")]
    NotReady {
        /// The pod.
        pod: SandboxId,
        /// The time limit.
        limit: std::time::Duration,
        /// The last output of the guest.
        console: String,
    },
    /// The VMM exited unexpectedly.
    #[error("VMM of pod {pod} {how}; last lines: {last_lines}")]
    VmEnded {
        /// The pod.
        pod: SandboxId,
        /// How.
        how: String,
        /// Its last output.
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
    /// An action on a path of the host failed.
    #[error("cannot {action} {path:?} for pod {pod}")]
    Path {
        /// The pod.
        pod: SandboxId,
        /// The action.
        action: &'static str,
        /// The path.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The front did not store something that the next worker needs.
    #[error("cannot store {what} of pod {pod} at the front")]
    Front {
        /// The pod.
        pod: SandboxId,
        /// Its name at the front.
        what: Box<str>,
        /// The system's error.
        source: std::io::Error,
    },
    /// The pod's task has ended: the pod is being removed, or the daemon exits.
    #[error("pod {0} no longer takes requests: it is being removed")]
    Gone(SandboxId),
}

impl PodError {
    /// Returns the gRPC code.
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
            Self::Shared(error) => error.code(),
            Self::Guest(error) => error.code(),
            Self::Rootfs(error) => error.code(),
            Self::Volume(error) => error.code(),
            Self::Network(error) => error.code(),
            Self::Share(error) => error.code(),
            Self::Vmm(_)
            | Self::Path { .. }
            | Self::Front { .. }
            | Self::Failed { .. }
            | Self::Transition { .. } => Code::Internal,
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
