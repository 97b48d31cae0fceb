//! Errors of CRI calls.

use std::path::PathBuf;

use tonic::Code;

/// Why a call failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RuntimeError {
    /// The endpoint is invalid.
    #[error("cannot use CRI endpoint '{endpoint}': {reason}; use unix:///path/to/containerd.sock")]
    Endpoint {
        /// As given.
        endpoint: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// No runtime answers.
    #[error(
        "cannot reach a CRI runtime at {endpoint}: {reason}; is containerd running, and is this its socket?"
    )]
    Unreachable {
        /// The socket.
        endpoint: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// The runtime returned an error.
    #[error("{call} of {subject} failed ({code:?}): {message}")]
    Refused {
        /// CRI's name of the call.
        call: &'static str,
        /// The pod, container or image.
        subject: String,
        /// gRPC's code.
        code: Code,
        /// The runtime's message.
        message: String,
    },
    /// The answer lacks a field that CRI requires.
    #[error("the answer to {call} of {subject} lacks {lacking}")]
    Incomplete {
        /// CRI's name of the call.
        call: &'static str,
        /// The pod, container or image.
        subject: String,
        /// The missing field.
        lacking: &'static str,
    },
}

impl RuntimeError {
    /// Returns gRPC's code, if the runtime answered.
    pub fn code(&self) -> Option<Code> {
        match self {
            RuntimeError::Refused { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// Returns whether there is no such pod, container or image.
    pub fn is_not_found(&self) -> bool {
        self.code() == Some(Code::NotFound)
    }
}
