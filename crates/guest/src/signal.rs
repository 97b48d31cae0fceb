//! A signal for a process in a guest.

/// A signal and its options.
#[derive(Debug, Clone, Default)]
pub struct Signal {
    /// The signal's number.
    pub number: u32,
    /// Whether to send it to every process of the container.
    pub all: bool,
    /// The identifier of the request, so that the agent delivers the signal once; empty: it is requested only once.
    pub request: String,
    /// Whether an earlier worker may have delivered it.
    pub again: bool,
}

impl Signal {
    /// SIGKILL, which ends a container whatever its guest does.
    pub const KILL: u32 = 9;
}
