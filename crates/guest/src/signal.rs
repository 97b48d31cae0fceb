//! What is sent to a process in a guest.

/// A signal, and who asks for it.
#[derive(Debug, Clone, Default)]
pub struct Signal {
    /// Its number.
    pub number: u32,
    /// To every process of the container.
    pub all: bool,
    /// Names the request, so that the agent delivers it once; empty: it is asked once.
    pub request: String,
    /// An earlier worker may have delivered it.
    pub again: bool,
}

impl Signal {
    /// SIGKILL, a container's end whatever its guest does about it.
    pub const KILL: u32 = 9;
}
