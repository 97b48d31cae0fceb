//! The guest, as far as the daemon talks to it: a greeting, then calls to its agent.

mod client;
mod connect;

pub use client::{Agent, GuestError};
pub use connect::connect;
