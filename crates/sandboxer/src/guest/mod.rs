//! The guest, as far as the daemon talks to it: a greeting, then calls to its agent.

pub mod bounds;
mod client;
mod connect;
mod outbox;
mod pace;
mod timing;

pub use client::{Agent, GuestError};
pub use connect::connect;
pub use pace::Pace;
