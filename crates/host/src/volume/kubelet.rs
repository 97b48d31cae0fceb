//! The layout of a pod's volumes in kubelet's directory.
//!
//! ```text
//! ROOT/pods/<uid>/volumes/kubernetes.io~<plugin>/<volume>/          a volume
//! ROOT/pods/<uid>/volume-subpaths/<volume>/<container>/<n>          a part of one, bound there
//! ROOT/pods/<uid>/containers/<container>/<hex>                      a container's termination message
//! ```
//!
//! ROOT and the uid are not chosen by the pod's author; names of volumes and containers, and everything below a volume,
//! are. So a path is classified by the place of ROOT and of the uid, and by exactly the components after them, never by
//! a word that occurs somewhere in it. This module only parses paths; [`super::host`] accesses the file system.

use std::{
    ffi::OsStr,
    io,
    path::{Component, Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::beneath::Dir;

/// The prefix of the directories of volume plugins that come with Kubernetes.
const PLUGIN: &str = "kubernetes.io~";
/// The directory of all pods in kubelet's root directory.
const PODS: &str = "pods";

/// The properties by which the paths of one pod are recognized.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kubelet {
    /// kubelet's root directory, as configured.
    pub root: PathBuf,
    /// The pod's uid from CRI; empty: no path is the pod's own.
    pub uid: String,
}

/// A path of a pod's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Own<'a> {
    /// The pod's directory, `ROOT/pods/<uid>`.
    pub pod: PathBuf,
    /// Whether ROOT is the configured one. Otherwise the uid alone shows that the path is the pod's.
    pub is_configured: bool,
    /// The components below it, each a plain name.
    pub below: Vec<&'a OsStr>,
}

/// The meaning of a path of a pod's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place<'a> {
    /// A whole volume, or what another vendor's plugin has mounted below it.
    Volume {
        /// The volume's plugin.
        plugin: Plugin,
        /// The volume's directory, below the pod's.
        root: PathBuf,
    },
    /// A part of a volume, bind-mounted at its own path.
    SubPath {
        /// The name of the volume.
        name: &'a OsStr,
    },
    /// A file that belongs to one container: its termination message.
    ContainerFile,
    /// A path that kubelet does not mount.
    Unknown,
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

impl Plugin {
    /// Returns the plugin whose volumes are in the directory `name`.
    pub fn from_dir_name(name: &OsStr) -> Self {
        match name.to_str().and_then(|name| name.strip_prefix(PLUGIN)) {
            Some("configmap" | "secret" | "projected" | "downward-api") => Self::Projected,
            Some("empty-dir") => Self::EmptyDir,
            _ => Self::Other,
        }
    }
}

impl Kubelet {
    /// Splits a path of the pod's own; `None` if it is not the pod's.
    pub fn split<'a>(&self, path: &'a Path) -> Option<Own<'a>> {
        let parts = plain(path)?;
        let root = plain(&self.root).unwrap_or_default();
        let uid = Path::new(&self.uid);
        // A uid that is not a plain name is no pod's.
        if !matches!(uid.components().next(), Some(Component::Normal(part)) if part == uid) {
            return None;
        }
        let is_pods = |at: usize| {
            parts.get(at).is_some_and(|part| *part == PODS)
                && parts.get(at + 1).is_some_and(|part| *part == uid)
        };
        let in_root = !root.is_empty()
            && parts.starts_with(&root)
            && parts.get(root.len()).is_some_and(|part| *part == PODS);
        let at = if in_root {
            // A pod's directory below ROOT is not another ROOT.
            is_pods(root.len()).then_some(root.len())?
        } else {
            // The first match counts: the author may have chosen what follows.
            (0..parts.len()).find(|at| is_pods(*at))?
        };
        let pod = Path::new("/").join(parts[..at + 2].iter().collect::<PathBuf>());
        Some(Own { pod, is_configured: in_root, below: parts[at + 2..].to_vec() })
    }
}

impl<'a> Own<'a> {
    /// Returns the meaning of the path.
    pub fn place(&self) -> Place<'a> {
        let first = self.below.first().and_then(|first| first.to_str()).unwrap_or_default();
        match (first, &self.below[..]) {
            ("volumes", [_, plugin, _, inside @ ..]) => match Plugin::from_dir_name(plugin) {
                // kubelet mounts these volumes whole; a part of one is bound elsewhere.
                Plugin::EmptyDir | Plugin::Projected if !inside.is_empty() => Place::Unknown,
                plugin => Place::Volume { plugin, root: self.below[..3].iter().collect() },
            },
            ("volume-subpaths", [_, name, _, _]) => Place::SubPath { name },
            ("containers", [_, _, _]) => Place::ContainerFile,
            _ => Place::Unknown,
        }
    }

    /// Opens the directory at the path.
    pub fn open(&self) -> io::Result<Dir> {
        Dir::host(&self.pod)?.dir(self.path())
    }

    /// Returns the path below the pod's directory.
    pub fn path(&self) -> PathBuf {
        self.below.iter().collect()
    }
}

/// Returns the components of an absolute path; `None` if the path is not absolute, or contains `..`.
fn plain(path: &Path) -> Option<Vec<&OsStr>> {
    let mut parts = path.components();
    if parts.next() != Some(Component::RootDir) {
        return None;
    }
    parts
        .map(|part| match part {
            Component::Normal(part) => Some(part),
            Component::Prefix(_) | Component::RootDir | Component::CurDir | Component::ParentDir => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "0f6a";

    fn kubelet() -> Kubelet {
        Kubelet { root: "/var/lib/kubelet".into(), uid: UID.into() }
    }

    fn placed(path: &str) -> Option<(PathBuf, String)> {
        let own = kubelet().split(Path::new(path))?;
        let place = match own.place() {
            Place::Volume { plugin, root } => format!("{plugin:?} {}", root.display()),
            Place::SubPath { name } => format!("part of {}", name.display()),
            Place::ContainerFile => "message".to_owned(),
            Place::Unknown => "unknown".to_owned(),
        };
        Some((own.pod.clone(), place))
    }

    #[test]
    fn a_kubelets_paths_say_what_they_are() {
        for root in ["/var/lib/kubelet", "/data/pods/k", "/pods"] {
            let pod = format!("{root}/pods/{UID}");
            let place_of = |below: &str| {
                let (found, place) = placed(&format!("{pod}/{below}")).unwrap();
                assert_eq!(found, Path::new(&pod));
                place
            };
            for (plugin, kind) in [
                ("configmap", "Projected"),
                ("secret", "Projected"),
                ("projected", "Projected"),
                ("downward-api", "Projected"),
                ("empty-dir", "EmptyDir"),
                ("csi", "Other"),
            ] {
                let below = format!("volumes/kubernetes.io~{plugin}/v");
                assert_eq!(place_of(&below), format!("{kind} {below}"));
            }
            assert_eq!(place_of("volumes/kubernetes.io~csi/v/mount"), "Other volumes/kubernetes.io~csi/v");
            assert_eq!(place_of("volume-subpaths/cache/web/0"), "part of cache");
            assert_eq!(place_of("containers/web/1a2b3c4d"), "message");
        }
    }

    #[test]
    fn what_a_pods_author_wrote_is_a_name_and_no_more() {
        let pod = format!("/var/lib/kubelet/pods/{UID}");
        let place_of = |below: &str| placed(&format!("{pod}/{below}"));
        let own = |place: &str| Some((PathBuf::from(&pod), place.to_owned()));
        assert_eq!(
            place_of("volumes/kubernetes.io~empty-dir/pods"),
            own("EmptyDir volumes/kubernetes.io~empty-dir/pods")
        );
        assert_eq!(place_of("volume-subpaths/pods/pods/0"), own("part of pods"));
        assert_eq!(place_of("containers/pods/0a"), own("message"));
        for inner in ["pods/u", &format!("pods/{UID}")] {
            let below =
                format!("volumes/kubernetes.io~empty-dir/cache/{inner}/volumes/kubernetes.io~secret/v");
            assert_eq!(place_of(&below), own("unknown"));
            let below = format!("volumes/kubernetes.io~csi/c/mount/{inner}/volumes/kubernetes.io~secret/v");
            assert_eq!(place_of(&below), own("Other volumes/kubernetes.io~csi/c"));
        }
    }

    #[test]
    fn other_paths_are_nobodys() {
        let pod_dir = |uid: &str, path: &str| {
            Kubelet { uid: uid.to_owned(), ..kubelet() }.split(Path::new(path)).map(|own| own.pod)
        };
        for other in [
            "/srv/data",
            "/var/lib/kubelet/pods",
            "/var/lib/kubelet/pods/another/volumes/kubernetes.io~secret/v",
            "/var/lib/kubelet/pods/another/volumes/kubernetes.io~csi/v/pods/0f6a/volumes/kubernetes.io~secret/v",
            "/var/lib/kubelet/pods/0f6a/../another/volumes/kubernetes.io~secret/v",
            "pods/0f6a/volumes/kubernetes.io~secret/v",
            "/srv/pods/0f6",
        ] {
            assert_eq!(pod_dir(UID, other), None, "{other}");
        }
        for uid in ["", ".", "..", "a/b", "/"] {
            assert_eq!(pod_dir(uid, &format!("/var/lib/kubelet/pods/{uid}/volumes/x/y")), None, "{uid:?}");
        }
    }
}
