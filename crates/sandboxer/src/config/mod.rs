//! The daemon's configuration: as written in TOML, and as resolved.

pub mod resolved;

pub use resolved::{Accelerator, Config, RootfsConfig, VmConfig};
