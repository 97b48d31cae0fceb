//! The edge: wire types come in, typed requests go on; errors leave with the code that counts.

pub mod admin;
pub(crate) mod convert;
pub mod events;
pub mod metrics;
pub mod peers;
mod quarantine;
pub mod sandbox;
mod size;
pub mod task;
mod templates;
mod traffic;
