//! What a request about a pod can end in.

use std::path::PathBuf;

use sandboxer_base::Code;
use sandboxer_guest::{ConnectError, GuestError};
use sandboxer_host::{network::NetworkError, rootfs::RootfsError, volume::VolumeError};
use sandboxer_protocol::id::{ContainerId, ExecId, InvalidId, SandboxId};
use sandboxer_vmm::VmmError;

use crate::{pod::state::PodState, share::ShareError};

/// Why a request about a pod failed.
#[derive(Debug, thiserror::Error)]
pub enum PodError {
    /// An identifier that can't be one.
    #[error("{what} is refused")]
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
    /// The state doesn't allow it.
    #[error("cannot {action} while {subject} is {state}")]
    State {
        /// What was asked.
        action: &'static str,
        /// Of what.
        subject: String,
        /// Which is.
        state: String,
    },
    /// An earlier daemon's pod, whose VMM or agent has not answered this one yet.
    #[error(
        "cannot {action}: {subject} has not answered since sandboxer was started: {reason}; this is tried again"
    )]
    Unreached {
        /// What was asked.
        action: &'static str,
        /// Of what.
        subject: String,
        /// What came of the last attempt.
        reason: String,
    },
    /// The pod's own task would have broken the order of its states: a bug.
    #[error("pod {pod} is {from} and cannot become {to}: this is a fault of sandboxer, please report it")]
    Transition {
        /// The pod.
        pod: SandboxId,
        /// Its state.
        from: PodState,
        /// The one that was next.
        to: PodState,
    },
    /// What several wait for has failed for all of them.
    #[error(transparent)]
    Shared(std::sync::Arc<PodError>),
    /// The pod was stopped while it started.
    #[error("start of pod {0} was cancelled: the pod was stopped")]
    Cancelled(SandboxId),
    /// The request itself is wrong.
    #[error("{subject}: {reason}")]
    Invalid {
        /// What the request is about.
        subject: String,
        /// What is wrong and what to do.
        reason: String,
    },
    /// It failed for a reason that has been told in full elsewhere, too.
    #[error("{subject}: {reason}")]
    Failed {
        /// What the request is about.
        subject: String,
        /// What happened.
        reason: String,
    },
    /// The guest tells nothing of itself, and has not before.
    #[error(
        "guest of pod {pod} did not answer within {limit:?} how much it uses, and has not told it before"
    )]
    NoReadings {
        /// The pod.
        pod: SandboxId,
        /// How long it had.
        limit: std::time::Duration,
    },
    /// Something that a pod with a kernel of its own doesn't offer.
    #[error("{0}")]
    Unsupported(String),
    /// The agent didn't say ready in time.
    #[error("agent of pod {pod} was not ready within {limit:?}; the console's last lines: {console}")]
    NotReady {
        /// The pod.
        pod: SandboxId,
        /// How long was waited.
        limit: std::time::Duration,
        /// What the guest printed last.
        console: String,
    },
    /// The VM ended under the pod.
    #[error("VMM of pod {pod} {how}; last lines: {last_lines}")]
    VmEnded {
        /// The pod.
        pod: SandboxId,
        /// How.
        how: String,
        /// Its last words.
        last_lines: String,
    },
    /// A VMM failed.
    #[error(transparent)]
    Vmm(#[from] VmmError),
    /// An agent failed.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// A root file system can't be made.
    #[error(transparent)]
    Rootfs(#[from] RootfsError),
    /// A volume can't be had.
    #[error(transparent)]
    Volume(#[from] VolumeError),
    /// The pod's network can't be had.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// A live share can't be had.
    #[error(transparent)]
    Share(#[from] ShareError),
    /// A file or directory of the host is in the way.
    #[error("cannot {action} {path:?} for pod {pod}")]
    Host {
        /// The pod.
        pod: SandboxId,
        /// What was attempted.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The pod's own task is gone: a bug, or the daemon is ending.
    #[error("pod {0} no longer takes requests: it is being removed")]
    Gone(SandboxId),
}

impl PodError {
    /// Returns the code to answer with.
    pub fn code(&self) -> Code {
        match self {
            Self::NoPod(_) | Self::NoContainer(_) | Self::NoExec { .. } | Self::ProcessEnded(_) => {
                Code::NotFound
            }
            Self::PodExists(_) | Self::ContainerExists(_) | Self::ExecExists { .. } => Code::AlreadyExists,
            Self::Id { .. } | Self::Invalid { .. } => Code::InvalidArgument,
            Self::State { .. } => Code::FailedPrecondition,
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
            Self::Vmm(_) | Self::Host { .. } | Self::Failed { .. } | Self::Transition { .. } => {
                Code::Internal
            }
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
