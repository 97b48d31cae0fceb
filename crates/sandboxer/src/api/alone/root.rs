//! The root file system of a container that its caller has mounted itself, as docker does: the specification names the
//! directory, and the request has no mounts.
//!
//! The container and the host share this directory: its caller reads and writes it beside the container (`docker cp`,
//! `docker diff`, `docker commit`), and gives it to the container again after a restart.

use std::path::{Path, PathBuf};

use oci_spec::runtime::Spec;
use sandboxer_protocol::id::ContainerId;

use crate::error::PodError;

/// Returns the directory with the root file system of a container. `bundle`: the directory to which a relative path
/// refers.
pub fn of(id: &ContainerId, spec: &Spec, bundle: &Path) -> Result<PathBuf, PodError> {
    let root = spec.root().as_ref().map(|root| bundle.join(root.path()));
    let root = root.ok_or_else(|| PodError::Invalid {
        subject: format!("container {id}"),
        reason: "its specification names no root file system".to_owned(),
    })?;
    root.canonicalize().map_err(|source| PodError::Path {
        pod: id.clone(),
        action: "find the root file system",
        path: root,
        source,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_root_is_found_below_the_bundle_and_a_missing_one_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let bundle = dir.path().canonicalize().unwrap();
        std::fs::create_dir(bundle.join("rootfs")).unwrap();
        let root = |path: &str| {
            let json = json!({"ociVersion": "1.2.0", "root": {"path": path}});
            of(&"c1".parse().unwrap(), &serde_json::from_value(json).unwrap(), &bundle)
        };
        assert_eq!(root("rootfs").unwrap(), bundle.join("rootfs"));
        assert_eq!(root(bundle.to_str().unwrap()).unwrap(), bundle);
        let error = root("/is/gone").unwrap_err().to_string();
        assert!(error.contains("root file system") && error.contains("/is/gone"), "{error}");
    }
}
