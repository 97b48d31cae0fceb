//! The daemon's configuration: as written in TOML, and as resolved.

pub mod raw;
pub mod resolved;

pub use raw::{ConfigError, DEFAULT};
pub use resolved::{Accelerator, Config, RootfsConfig, VmConfig, VmmChoice};
