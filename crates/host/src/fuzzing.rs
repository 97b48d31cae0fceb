//! Private items for the targets in `fuzz/`. Compiled for them only.

pub use crate::rootfs::mounts::{Lower, Wanted, WantedWritable, read as rootfs_mounts};
