//! Errors of CRI calls.

use std::path::PathBuf;

use tonic::Code;

/// Why a CRI call failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RuntimeError {
    /// The endpoint is invalid.
    #[error("cannot use CRI endpoint '{endpoint}': {reason}; use unix:///path/to/containerd.sock")]
    Endpoint {
        /// The endpoint as given.
        endpoint: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// No runtime responds.
    #[error(
        "cannot reach a CRI runtime at {endpoint}: {reason}; is containerd running, and is this its socket?"
    )]
    Unreachable {
        /// Path of the socket.
        endpoint: PathBuf,
        /// The system's error, as text.
        reason: String,
    },
    /// The runtime returned an error.
    #[error("{call} of {subject} failed ({code:?}): {message}")]
    Refused {
        /// CRI's name of the call.
        call: &'static str,
        /// The pod, container or image.
        subject: String,
        /// Code of the gRPC status.
        code: Code,
        /// The runtime's message.
        message: String,
    },
    /// The response lacks a field that CRI requires.
    #[error("the answer to {call} of {subject} lacks {lacking}")]
    Incomplete {
        /// CRI's name of the call.
        call: &'static str,
        /// The pod, container or image.
        subject: String,
        /// Name of the missing field.
        lacking: &'static str,
    },
}

impl RuntimeError {
    /// Returns the gRPC code, if the runtime responded.
    pub fn code(&self) -> Option<Code> {
        match self {
            RuntimeError::Refused { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// Returns whether the pod, container or image does not exist.
    pub fn is_not_found(&self) -> bool {
        self.code() == Some(Code::NotFound)
    }
}
