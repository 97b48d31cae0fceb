//! What a pod takes of the host.

pub mod helper;
pub mod network;
pub mod rootfs;
pub mod volume;
