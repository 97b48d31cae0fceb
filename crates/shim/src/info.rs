//! `-info`: what this runtime is, and which mounts it wants as they are.

use containerd_shim_protos::{
    protobuf::well_known_types::any::Any,
    types::introspection::{RuntimeInfo, RuntimeVersion},
};

/// The annotation by which containerd 2.x leaves mounts to a runtime.
const ALLOW_MOUNTS: &str = "containerd.io/runtime-allow-mounts";

/// File systems that become disks of a pod's VM instead of mounts on the host, and the steps
/// (`…/*`) that containerd's mount manager would otherwise take to mount them.
///
/// Without effect on snapshotters whose mounts are plain (overlayfs, native): the mount manager
/// takes up only mounts with such a step or with a handler of their own.
const CLAIMED: &str = "erofs,ext4,mkfs/*,format/*,mkdir/*";

/// The type under which containerd knows [`features`]' answer.
const FEATURES: &str = "types.containerd.io/opencontainers/runtime-spec/1/features/Features";

/// OCI features, as of the runtime specification's features.md. What they don't name, such as id-mapped mounts and
/// user namespaces, containerd refuses. (2.4 takes it ill if there are none at all: it goes down at the first
/// container with a recursively read-only mount.)
fn features() -> Any {
    let features = serde_json::json!({
        "ociVersionMin": "1.0.0",
        "ociVersionMax": "1.2.0",
        "mountOptions": [
            "bind", "dev", "exec", "noatime", "nodev", "nodiratime", "noexec", "norelatime", "nosuid", "private",
            "rbind", "relatime", "ro", "rprivate", "rro", "rslave", "rw", "slave", "suid",
        ],
    });
    Any { type_url: FEATURES.to_owned(), value: features.to_string().into_bytes(), ..Default::default() }
}

/// Returns the answer.
pub fn info() -> RuntimeInfo {
    let version = RuntimeVersion { version: env!("CARGO_PKG_VERSION").to_owned(), ..Default::default() };
    RuntimeInfo {
        name: "io.containerd.sandboxer.v1".to_owned(),
        version: Some(version).into(),
        features: Some(features()).into(),
        annotations: [(ALLOW_MOUNTS.to_owned(), CLAIMED.to_owned())].into(),
        ..Default::default()
    }
}
