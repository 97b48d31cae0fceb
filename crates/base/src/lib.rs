//! Utilities for all crates; depends on none of them.

mod chain;
pub mod clock;
mod code;
mod cpus;
pub mod digest;
pub mod failpoint;
pub mod sockets;

pub use chain::chain;
pub use code::Code;
pub use cpus::Cpus;
