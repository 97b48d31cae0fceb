//! Private items for the targets in `fuzz/`, compiled for them only.

pub use crate::rootfs::mounts::{Lower, Wanted, WantedWritable, read as rootfs_mounts};
pub use crate::volume::kubelet::{Kubelet, Own, Place, Plugin};
