//! What a pod takes of the host.

pub mod cgroup;
pub mod cpus;
pub mod helper;
pub mod network;
pub mod rootfs;
pub mod share;
pub mod volume;
