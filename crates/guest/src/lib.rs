//! The daemon's connection to a guest: a greeting, then calls to its agent.

pub mod bounds;
mod calls;
mod client;
mod connect;
mod error;
mod pace;
mod signal;
mod timing;

pub use client::Agent;
pub use connect::{ConnectError, connect};
pub use error::GuestError;
pub use pace::Pace;
pub use signal::Signal;
