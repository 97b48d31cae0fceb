//! The daemon's connection to a guest: a greeting, then calls to its agent.

pub mod bounds;
mod client;
mod connect;
mod outbox;
mod pace;
mod signal;
mod timing;

pub use client::{Agent, GuestError};
pub use connect::{ConnectError, connect};
pub use pace::Pace;
pub use signal::Signal;
