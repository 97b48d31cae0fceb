//! Errors of calls to an agent.

use std::time::Duration;

use sandboxer_base::Code;
use sandboxer_protocol::{
    id::{ContainerId, SandboxId},
    link::LinkError,
};

use crate::bounds::Violation;

/// Why a call to an agent failed.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// The session could not be established.
    #[error("cannot reach the agent of pod {pod}")]
    Greeting {
        /// The pod.
        pod: SandboxId,
        /// The cause.
        source: LinkError,
    },
    /// The agent returned an error.
    #[error("agent of pod {pod} failed {call}: {message}")]
    Refused {
        /// The pod.
        pod: SandboxId,
        /// The call.
        call: &'static str,
        /// The gRPC code of the error.
        code: Code,
        /// The agent's message.
        message: String,
    },
    /// The agent is of an earlier release, which does not know a part of the call.
    #[error(
        "the agent of pod {pod} speaks protocol {version} and cannot {call} with {what}: a guest keeps the agent that it \
         was started with, so start the pod anew, with the initramfs of this daemon's version"
    )]
    TooOld {
        /// The pod.
        pod: SandboxId,
        /// The call.
        call: &'static str,
        /// The version of the session.
        version: u32,
        /// The unknown part, in words.
        what: &'static str,
    },
    /// There was no response, or an unreadable one.
    #[error("agent of pod {pod} did not respond to {call}")]
    Failed {
        /// The pod.
        pod: SandboxId,
        /// The call.
        call: &'static str,
        /// The transport's error.
        source: ttrpc::Error,
    },
    /// A container is still running after SIGKILL.
    #[error("guest of pod {pod} did not kill container {container} within {limit:?}; killing its VMM")]
    KeptAlive {
        /// The pod.
        pod: SandboxId,
        /// The container.
        container: ContainerId,
        /// The time limit.
        limit: Duration,
    },
    /// The guest violated the protocol.
    #[error("ended the session with the guest of pod {pod}; killing its VMM")]
    Violated {
        /// The pod.
        pod: SandboxId,
        /// The violation.
        source: Violation,
    },
}

impl GuestError {
    /// Returns the gRPC code of the response.
    pub fn code(&self) -> Code {
        match self {
            Self::Refused { code, .. } => *code,
            Self::TooOld { .. }
            | Self::Greeting { source: LinkError::Version { .. } | LinkError::Refused(_), .. } => {
                Code::FailedPrecondition
            }
            Self::Failed { source, .. } if is_late(source) => Code::DeadlineExceeded,
            Self::Greeting { .. } | Self::Failed { .. } | Self::KeptAlive { .. } | Self::Violated { .. } => {
                Code::Unavailable
            }
        }
    }
}

/// The error text of a call whose time is over. ttrpc has no variant for it.
pub(crate) const TIME_IS_OVER: &str = "Request deadline elapsed";

/// The error text of a call whose guest has not read the earlier ones in time.
pub(crate) const NOT_READ: &str = "the guest does not read calls";

/// Returns whether a call failed because the guest did not respond in time, and not because its session ended.
fn is_late(error: &ttrpc::Error) -> bool {
    matches!(error, ttrpc::Error::Others(text) if text == TIME_IS_OVER || text == NOT_READ)
}
