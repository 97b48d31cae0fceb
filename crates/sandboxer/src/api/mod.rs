//! The API: wire types in, typed requests inside; errors with the status code that callers expect.

pub mod admin;
pub(crate) mod convert;
pub mod events;
mod host_ports;
mod limits;
pub mod metrics;
pub mod peers;
mod places;
mod quarantine;
pub mod sandbox;
mod size;
pub mod task;
mod templates;
mod traced;
mod traffic;
