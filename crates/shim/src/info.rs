//! `-info`: what this runtime is, and which mounts it wants as they are.

use containerd_shim_protos::types::introspection::{RuntimeInfo, RuntimeVersion};

/// The annotation by which containerd 2.x leaves mounts to a runtime.
const ALLOW_MOUNTS: &str = "containerd.io/runtime-allow-mounts";

/// File systems that become disks of a pod's machine instead of mounts on the host, and the steps
/// (`…/*`) that containerd's mount manager would otherwise take to mount them.
///
/// Without effect on snapshotters whose mounts are plain (overlayfs, native): the mount manager
/// takes up only mounts with such a step or with a handler of their own.
const CLAIMED: &str = "erofs,ext4,mkfs/*,format/*,mkdir/*";

/// The answer. It names no OCI features: what depends on them, such as id-mapped mounts, containerd
/// then refuses.
pub fn info() -> RuntimeInfo {
    let version = RuntimeVersion { version: env!("CARGO_PKG_VERSION").to_owned(), ..Default::default() };
    RuntimeInfo {
        name: "io.containerd.sandboxer.v1".to_owned(),
        version: Some(version).into(),
        annotations: [(ALLOW_MOUNTS.to_owned(), CLAIMED.to_owned())].into(),
        ..Default::default()
    }
}
