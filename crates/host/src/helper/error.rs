//! Errors of a helper's requests.

use std::{io, path::PathBuf, time::Duration};

use sandboxer_base::Code;
use sandboxer_protocol::id::SandboxId;

use super::work::Refusal;

/// Why a helper's request failed.
#[derive(Debug, thiserror::Error)]
pub enum HelperError {
    /// The path's file server does not respond.
    #[error(
        "cannot {action} {path:?} for pod {pod}: the server of this volume does not answer (waited {elapsed:?}); \
         check the server, or unmount the volume with umount -f"
    )]
    Silent {
        /// The pod.
        pod: SandboxId,
        /// The failed operation.
        action: &'static str,
        /// The path of the operation.
        path: PathBuf,
        /// How long this request or an earlier one waited for the operation.
        elapsed: Duration,
    },
    /// Too many helpers are waiting.
    #[error(
        "cannot {action} {path:?} for pod {pod}: {most} helpers of {whose} are waiting for volumes; check their servers"
    )]
    TooMany {
        /// The pod.
        pod: SandboxId,
        /// The failed operation.
        action: &'static str,
        /// The path of the operation.
        path: PathBuf,
        /// The limit.
        most: usize,
        /// The scope of the limit: "this pod", "this pod's namespace", "this node".
        whose: &'static str,
    },
    /// The operation failed.
    #[error("{text}")]
    Refused {
        /// The gRPC code of the response.
        code: Code,
        /// The error with its causes.
        text: String,
    },
    /// The helper itself failed.
    #[error("cannot {action} {path:?} for pod {pod}: the helper process failed")]
    Broken {
        /// The pod.
        pod: SandboxId,
        /// The failed operation.
        action: &'static str,
        /// The path of the operation.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The daemon is stopping.
    #[error("the daemon is stopping")]
    Stopped,
}

impl HelperError {
    /// Returns the gRPC code of the response.
    pub fn code(&self) -> Code {
        match self {
            Self::Silent { .. } | Self::TooMany { .. } => Code::DeadlineExceeded,
            Self::Refused { code, .. } => *code,
            Self::Broken { .. } | Self::Stopped => Code::Internal,
        }
    }
}

impl From<Refusal> for HelperError {
    fn from(Refusal { code, text }: Refusal) -> Self {
        Self::Refused { code, text }
    }
}
