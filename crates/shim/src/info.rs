//! `-info`: describes this runtime, and the mounts that it handles itself.

use containerd_shim_protos::{
    protobuf::well_known_types::any::Any,
    types::introspection::{RuntimeInfo, RuntimeVersion},
};

/// The annotation by which containerd 2.x passes mounts to a runtime unmounted.
const ALLOW_MOUNTS: &str = "containerd.io/runtime-allow-mounts";

/// File systems that become disks of a pod's VM instead of mounts on the host, and the transformations
/// (`…/*`) that containerd's mount manager would otherwise do to mount them.
///
/// Has no effect on snapshotters with plain mounts (overlayfs, native): the mount manager handles only mounts with a
/// transformation or with a handler of their own.
const CLAIMED: &str = "erofs,ext4,mkfs/*,format/*,mkdir/*";

/// The type of the value of [`features`] in containerd.
const FEATURES: &str = "types.containerd.io/opencontainers/runtime-spec/1/features/Features";

/// Returns the OCI features as JSON, as in the runtime specification's features.md. containerd rejects features that
/// are not listed, such as id-mapped mounts and user namespaces. (2.4 needs the list: without it, it crashes
/// at the first container with a recursively read-only mount.)
pub fn features_json() -> String {
    let features = serde_json::json!({
        "ociVersionMin": "1.0.0",
        "ociVersionMax": "1.2.0",
        "mountOptions": [
            "bind", "dev", "exec", "noatime", "nodev", "nodiratime", "noexec", "norelatime", "nosuid", "private",
            "rbind", "relatime", "ro", "rprivate", "rro", "rslave", "rw", "slave", "suid",
        ],
    });
    features.to_string()
}

fn features() -> Any {
    Any { type_url: FEATURES.to_owned(), value: features_json().into_bytes(), ..Default::default() }
}

/// Returns the description of this runtime.
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
