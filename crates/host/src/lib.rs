//! What a pod takes of the host.

#[cfg(fuzzing)]
pub mod fuzzing;
pub mod helper;
pub mod network;
pub mod rootfs;
pub mod volume;
