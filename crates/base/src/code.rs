//! The gRPC codes that errors are answered with.

/// What containerd acts on: the gRPC codes this daemon answers with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Code {
    /// There is no such pod, container or process.
    NotFound,
    /// It is there already.
    AlreadyExists,
    /// The request can't be right, whatever the state.
    InvalidArgument,
    /// The request can't be served in this state.
    FailedPrecondition,
    /// Another request won.
    Cancelled,
    /// It took too long.
    DeadlineExceeded,
    /// The peer is not there; worth trying again.
    Unavailable,
    /// Known, and not offered.
    Unimplemented,
    /// Our or the host's fault.
    Internal,
}
