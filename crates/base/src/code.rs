//! gRPC codes of errors.

/// The gRPC codes that this daemon returns; containerd acts on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Code {
    /// No such pod, container or process.
    NotFound,
    /// It already exists.
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
    /// Not implemented.
    Unimplemented,
    /// A fault of the daemon or the host.
    Internal,
}
