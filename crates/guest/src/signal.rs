//! A signal for a process in a guest.

/// A signal and its options.
#[derive(Debug, Clone, Default)]
pub struct Signal {
    /// Its number.
    pub number: u32,
    /// Send it to every process of the container.
    pub all: bool,
    /// Identifier of the request, so that the agent delivers it once; empty: it is requested once.
    pub request: String,
    /// An earlier worker may have delivered it.
    pub again: bool,
}

impl Signal {
    /// SIGKILL: ends a container whatever its guest does.
    pub const KILL: u32 = 9;
}
