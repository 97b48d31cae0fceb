//! The daemon's configuration, as written in TOML and as resolved.

pub mod raw;
pub mod resolved;

pub use raw::{ConfigError, DEFAULT, DEFAULT_PATH};
pub use resolved::{
    Accelerator, CheckpointsConfig, Config, ContainersConfig, DISK_BPS, DISK_IOPS, ForeignRules, Handler,
    LimitsConfig, NET_BPS, NetworkConfig, PlacementConfig, PlacementPolicy, PoolConfig, RLIMITS,
    RootfsConfig, StartPath, TemplateConfig, TracesConfig, VhostNet, VmConfig, VmmChoice, VmmName,
    VolumeConfig, WritableTo,
};
