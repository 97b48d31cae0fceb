//! The API: converts wire types to typed requests, and errors to the status codes that callers expect.

pub mod admin;
mod alone;
mod bundle;
mod checkpoints;
pub(crate) mod convert;
pub mod cri_checkpoints;
mod cri_metadata;
mod cri_o;
pub mod events;
mod host_ports;
mod huge_pages;
mod limits;
pub mod metrics;
pub mod peers;
mod places;
pub mod preflight;
mod quarantine;
pub mod sandbox;
pub mod sandbox_container;
mod size;
pub mod task;
mod templates;
mod traced;
mod traffic;
pub mod ttrpc_server;
