//! The root file system of a container that its caller has mounted itself, as docker does: the specification names the
//! directory, and the request has no mounts.

use std::path::Path;

use oci_spec::runtime::Spec;
use procfs::{
    FromRead,
    process::{MountInfo, MountInfos},
};
use sandboxer_protocol::id::ContainerId;

use crate::error::PodError;

/// Type, source and options of a mount.
pub type Mounted = (String, String, Vec<String>);

/// Returns the mounts of which the root file system of a container consists. `bundle`: the directory to which a relative
/// path refers.
pub fn mounts(id: &ContainerId, spec: &Spec, bundle: &Path) -> Result<Vec<Mounted>, PodError> {
    let invalid = |reason: String| PodError::Invalid { subject: format!("container {id}"), reason };
    let root = spec.root().as_ref().map(|root| bundle.join(root.path()));
    let root = root.ok_or_else(|| invalid("its specification names no root file system".to_owned()))?;
    let root = root.canonicalize().map_err(|source| PodError::Path {
        pod: id.clone(),
        action: "find the root file system",
        path: root,
        source,
    })?;
    let found = MountInfos::from_file("/proc/self/mountinfo");
    let found = found.map_err(|error| invalid(format!("cannot read the mounts of the host: {error}")))?;
    Ok(vec![of(&root, found)])
}

/// Returns the mount at `root` if it is an overlay, whose layers containers share; else the directory.
fn of(root: &Path, mounts: impl IntoIterator<Item = MountInfo>) -> Mounted {
    // The last one at a path is the uppermost.
    let mount = mounts.into_iter().filter(|mount| mount.mount_point == root).last();
    mount.and_then(|mount| overlay(&mount)).unwrap_or_else(|| {
        let options = vec!["rbind".to_owned(), "rw".to_owned()];
        ("bind".to_owned(), root.to_string_lossy().into_owned(), options)
    })
}

/// Returns a mount of an overlay. Its layers may have been named from another directory: then they cannot be found.
fn overlay(mount: &MountInfo) -> Option<Mounted> {
    if mount.fs_type != "overlay" || mount.root != "/" {
        return None;
    }
    let option = |name: &str| mount.super_options.get(name).cloned().flatten();
    let (lower, upper) = (option("lowerdir")?, option("upperdir")?);
    if !lower.split(':').chain([upper.as_str()]).all(|dir| Path::new(dir).is_absolute()) {
        return None;
    }
    let mut options = vec![format!("lowerdir={lower}"), format!("upperdir={upper}")];
    for name in ["workdir", "redirect_dir", "metacopy"] {
        options.extend(option(name).map(|value| format!("{name}={value}")));
    }
    Some(("overlay".to_owned(), "overlay".to_owned(), options))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(lines: &str) -> MountInfos {
        MountInfos::from_read(lines.as_bytes()).unwrap()
    }

    #[test]
    fn an_overlay_is_taken_apart_and_anything_else_is_a_directory() {
        let lines = "30 1 0:41 / /roots/one rw,relatime shared:1 - overlay overlay \
                     rw,lowerdir=/s/2/fs:/s/1/fs,upperdir=/s/3/fs,workdir=/s/3/work,index=off\n\
                     31 1 0:42 / /roots/two rw,relatime - overlay overlay rw,lowerdir=l/A:l/B,upperdir=3/diff,workdir=3/work\n\
                     32 1 0:43 / /roots/three rw,relatime - ext4 /dev/sda rw\n\
                     33 1 0:44 /sub /roots/four rw,relatime - overlay overlay rw,lowerdir=/a,upperdir=/b,workdir=/c\n";
        let at = |path: &str| of(Path::new(path), parsed(lines));
        let (fstype, _, options) = at("/roots/one");
        assert_eq!(fstype, "overlay");
        assert_eq!(options, ["lowerdir=/s/2/fs:/s/1/fs", "upperdir=/s/3/fs", "workdir=/s/3/work"]);
        for other in ["/roots/two", "/roots/three", "/roots/four", "/roots/none"] {
            let (fstype, source, options) = at(other);
            assert_eq!((fstype.as_str(), source.as_str()), ("bind", other));
            assert_eq!(options, ["rbind", "rw"]);
        }
    }
}
