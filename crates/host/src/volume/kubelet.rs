//! The layout of a pod's volumes in kubelet's directory.
//!
//! ```text
//! …/pods/<uid>/volumes/kubernetes.io~<plugin>/<volume>/          a volume
//! …/pods/<uid>/volume-subpaths/<volume>/<container>/<n>          a part of one, bound there
//! …/pods/<uid>/containers/<container>/<hex>                      a container's termination message
//! ```
//!
//! Only parses paths; [`super::host`] accesses the file system.

use std::path::{Component, Path, PathBuf};

/// Prefix of the directories of volume plugins that come with Kubernetes.
const PLUGIN: &str = "kubernetes.io~";

/// What a path in kubelet's directory is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// A volume, or a path inside it.
    Volume(InVolume),
    /// A part of a volume, bind-mounted at its own path.
    SubPath {
        /// `…/pods/<uid>/volumes`.
        volumes: PathBuf,
        /// Name of the volume.
        name: String,
    },
    /// A file that belongs to one container: its termination message.
    ContainerFile,
}

/// A path in a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InVolume {
    /// The volume's plugin.
    pub plugin: Plugin,
    /// The volume's directory.
    pub root: PathBuf,
    /// Path below the root; empty: the whole volume.
    pub sub_path: PathBuf,
}

/// The kind of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plugin {
    /// Files that kubelet writes and replaces: configMap, secret, projected, downwardAPI.
    Projected,
    /// Space for the pod, empty at first.
    EmptyDir,
    /// Any other storage.
    Other,
}

/// Classifies `path`; `None` if it is not kubelet's.
pub fn place(path: &Path) -> Option<Place> {
    let parts: Vec<&str> = path.components().map(plain).collect::<Option<_>>()?;
    if !path.is_absolute() {
        return None;
    }
    // The last one: kubelet's directory may be below another directory of that name.
    let at = parts.iter().rposition(|part| *part == "pods")?;
    let upto = |count: usize| parts[..count].iter().collect::<PathBuf>();
    match parts[at + 1..] {
        [_, "volumes", plugin, _, ..] => {
            let plugin = match plugin.strip_prefix(PLUGIN) {
                Some("configmap" | "secret" | "projected" | "downward-api") => Plugin::Projected,
                Some("empty-dir") => Plugin::EmptyDir,
                _ => Plugin::Other,
            };
            let root = upto(at + 5);
            let sub_path = parts[at + 5..].iter().collect();
            Some(Place::Volume(InVolume { plugin, root, sub_path }))
        }
        [_, "volume-subpaths", name, _, _] => {
            Some(Place::SubPath { volumes: upto(at + 2).join("volumes"), name: name.to_owned() })
        }
        [_, "containers", _, _] => Some(Place::ContainerFile),
        _ => None,
    }
}

/// Returns a component of a path as text; `None` for `.` and `..`.
fn plain(part: Component<'_>) -> Option<&str> {
    match part {
        Component::RootDir | Component::Normal(_) => part.as_os_str().to_str(),
        Component::Prefix(_) | Component::CurDir | Component::ParentDir => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(plugin: Plugin, root: &str, sub_path: &str) -> Option<Place> {
        Some(Place::Volume(InVolume { plugin, root: root.into(), sub_path: sub_path.into() }))
    }

    #[test]
    fn a_kubelets_paths_say_what_they_are() {
        let pod = "/var/lib/kubelet/pods/0f6a";
        for (plugin, is) in [
            ("configmap", Plugin::Projected),
            ("secret", Plugin::Projected),
            ("projected", Plugin::Projected),
            ("downward-api", Plugin::Projected),
            ("empty-dir", Plugin::EmptyDir),
            ("csi", Plugin::Other),
        ] {
            let root = format!("{pod}/volumes/kubernetes.io~{plugin}/v");
            assert_eq!(place(Path::new(&root)), volume(is, &root, ""));
            assert_eq!(place(&Path::new(&root).join("..data/x")), volume(is, &root, "..data/x"));
        }
        assert_eq!(
            place(Path::new("/var/lib/kubelet/pods/0f6a/volume-subpaths/cache/web/0")),
            Some(Place::SubPath {
                volumes: "/var/lib/kubelet/pods/0f6a/volumes".into(),
                name: "cache".into()
            })
        );
        assert_eq!(place(&Path::new(pod).join("containers/web/1a2b3c4d")), Some(Place::ContainerFile));
    }

    #[test]
    fn the_innermost_directory_of_pods_counts_and_other_paths_are_nobodys() {
        let root = "/pods/x/kubelet/pods/u/volumes/kubernetes.io~empty-dir/v";
        assert_eq!(place(Path::new(root)), volume(Plugin::EmptyDir, root, ""));
        for other in [
            "/srv/data",
            "pods/u/volumes/kubernetes.io~secret/v",
            "/pods/u/volumes/kubernetes.io~secret",
            "/pods/u/volumes/kubernetes.io~secret/../../x",
            "/pods/u/etc-hosts",
            "/pods",
        ] {
            assert_eq!(place(Path::new(other)), None, "{other}");
        }
    }
}
