//! gRPC codes of errors.

/// The gRPC codes that this daemon returns, on which containerd acts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Code {
    /// There is no such pod, container or process.
    NotFound,
    /// The object already exists.
    AlreadyExists,
    /// The request is invalid in any state.
    InvalidArgument,
    /// The request is not possible in this state.
    FailedPrecondition,
    /// Another request came first.
    Cancelled,
    /// The deadline expired.
    DeadlineExceeded,
    /// The peer is unavailable; a retry may help.
    Unavailable,
    /// The request is not implemented.
    Unimplemented,
    /// The daemon or the host has failed.
    Internal,
}
