//! What a pod takes of the host.

pub mod rootfs;
pub mod volume;
