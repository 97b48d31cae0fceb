//! Resources of the host that a pod uses: volumes, root file systems, network.

pub mod beneath;
#[cfg(fuzzing)]
pub mod fuzzing;
pub mod helper;
pub mod network;
pub mod rootfs;
pub mod volume;
