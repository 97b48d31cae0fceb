//! What the targets in `fuzz/` reach of what is private. Compiled for them alone.

pub use crate::rootfs::mounts::{Lower, Wanted, WantedWritable, read as rootfs_mounts};
