//! Classifies a container's bind mounts, which decides how the guest gets their content.
//!
//! ```text
//! bind mount ──kubelet──▶ a place in kubelet's directory ──host──▶ its type ──▶ Kind
//! ```

mod bound;
mod error;
mod host;
pub mod kubelet;
mod space;
pub mod tree;
mod watch;

use std::{
    io,
    path::{Component, Path, PathBuf},
};

use oci_spec::runtime::Mount;
use sandboxer_base::digest::hex;
use sandboxer_protocol::{
    VOLUMES_DIR,
    id::{Id, SandboxId},
};
use sandboxer_vmm::DiskFile;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use self::{
    host::Origin,
    kubelet::{Own, Place, Plugin},
    space::Spaces,
    watch::Watches,
};
use super::{
    beneath::{self, Dir, Found},
    helper::Helpers,
};

pub(crate) use self::space::{DISK, make_disk};
pub use self::{
    bound::{Bound, FileMeta, Looked},
    error::VolumeError,
    kubelet::Kubelet,
    watch::{Change, Watch},
};

/// Files that CRI may bind-mount from the host, and that mean the same in the guest.
const COPIED: [&str; 3] = ["/etc/hostname", "/etc/hosts", "/etc/resolv.conf"];

/// Advice about a path of a pod's own that is not a volume.
const USE_VOLUMES: &str = ": mount a whole volume or a subPath of one";
/// Advice about a kubelet whose root directory is unknown.
const SET_ROOT: &str = ": set volumes.kubelet_root to kubelet's root directory";

/// Options of a bind mount that work the same in a guest.
const SUPPORTED_OPTIONS: [&str; 17] = [
    "bind",
    "rbind",
    "ro",
    "rw",
    "rro",
    "nosuid",
    "suid",
    "nodev",
    "dev",
    "noexec",
    "exec",
    "noatime",
    "relatime",
    "rnosuid",
    "rnodev",
    "rnoexec",
    "nosymfollow",
];

/// A bind mount of a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Volume {
    /// The path in the container.
    pub at: PathBuf,
    /// The path on the host.
    pub source: PathBuf,
    /// How the guest gets the content.
    pub kind: Kind,
    /// Whether the container cannot write to it.
    pub read_only: bool,
    /// Whether later mounts of the host below the source should become visible (HostToContainer).
    pub follows_host_mounts: bool,
    /// Options for the guest's own bind mount, without those that refer to the host.
    pub options: Vec<String>,
}

/// How a guest gets the content of a bind mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// A small file, copied when the container is created.
    File,
    /// A file that the container writes and kubelet reads after its exit.
    TerminationMessage,
    /// A directory that kubelet writes: copied, and copied again whenever kubelet replaces its content.
    Projected,
    /// A part of such a directory, copied when the container is created: a subPath is never updated.
    ProjectedPart,
    /// Storage of the pod, in its guest.
    EmptyDir(EmptyDir),
    /// A file or directory that containers and the host share.
    Live,
}

/// Storage that a pod's containers share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmptyDir {
    /// The volume's directory on the host.
    pub root: PathBuf,
    /// The mounted part of the directory; empty: all of it.
    pub sub_path: PathBuf,
    /// The medium of its content.
    pub medium: Medium,
}

/// The medium of an emptyDir.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Medium {
    /// Memory, with a limit.
    Memory {
        /// The limit, bytes.
        bytes: u64,
    },
    /// A disk.
    Disk,
}

/// A volume that a guest must have before a container can use it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Needed {
    /// The identifier, unique in the guest. It is also the serial of the volume's disk, if there is one.
    pub id: Id,
    /// The volume's content.
    pub content: Content,
}

/// The content of a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Content {
    /// The files of a host directory.
    Files {
        /// The directory.
        dir: PathBuf,
        /// Whether they are sent again after a change.
        follow: bool,
    },
    /// Storage in guest memory.
    Memory {
        /// The emptyDir's directory on the host.
        dir: PathBuf,
        /// Most bytes.
        bytes: u64,
    },
    /// Storage on a disk.
    Disk {
        /// The emptyDir's directory on the host.
        dir: PathBuf,
    },
    /// A block device of the host, which containers get as a device.
    Device {
        /// The host's device.
        path: PathBuf,
        /// Whether the guest cannot write to it.
        read_only: bool,
    },
}

impl Needed {
    /// Creates a volume with an id derived from its content.
    pub fn new(content: Content) -> Self {
        let (path, kind) = match &content {
            Content::Files { dir, .. } => (dir, "f"),
            Content::Memory { dir, .. } | Content::Disk { dir } => (dir, "e"),
            Content::Device { path, read_only: false } => (path, "w"),
            Content::Device { path, read_only: true } => (path, "r"),
        };
        let hash = Sha256::digest(path.as_os_str().as_encoded_bytes());
        // A letter and hexadecimal digits: a valid identifier, and short enough for a disk's serial (20).
        let text = format!("v{kind}{}", hex(&hash[..8]));
        let id = text.parse().unwrap_or_else(|_| unreachable!("{text} is an identifier"));
        Self { id, content }
    }

    /// Returns the volume's path in the guest.
    pub fn guest_path(&self) -> PathBuf {
        Path::new(VOLUMES_DIR).join(&self.id)
    }
}

impl Volume {
    /// Returns the volume that the guest needs for this mount, and the mount's source in the guest; `None` if the mount
    /// has no volume that containers share.
    pub fn needed(&self) -> Option<(Needed, PathBuf)> {
        let dir = self.source.clone();
        match &self.kind {
            Kind::Projected => Some((Content::Files { dir, follow: true }, Path::new(""))),
            Kind::ProjectedPart => Some((Content::Files { dir, follow: false }, Path::new(""))),
            Kind::EmptyDir(EmptyDir { root, sub_path, medium }) => {
                let dir = root.clone();
                let content = match medium {
                    Medium::Memory { bytes } => Content::Memory { dir, bytes: *bytes },
                    Medium::Disk => Content::Disk { dir },
                };
                Some((content, sub_path.as_path()))
            }
            Kind::File | Kind::TerminationMessage | Kind::Live => None,
        }
        .map(|(content, sub_path)| {
            let needed = Needed::new(content);
            let at = needed.guest_path().join(sub_path);
            (needed, at)
        })
    }
}

/// The state that all pods' volumes share.
#[derive(Debug)]
pub struct VolumeStore {
    /// The helpers that access the pods' files.
    pub helpers: Helpers,
    watches: Watches,
    spaces: Spaces,
}

impl VolumeStore {
    /// Opens the store in `dir`, creating it. Needs a runtime.
    pub fn open(dir: &Path, disk_bytes: u64, helpers: Helpers) -> io::Result<Self> {
        std::fs::create_dir_all(dir)?;
        let spaces = Spaces::new(dir.to_owned(), disk_bytes);
        Ok(Self { watches: Watches::new()?, spaces, helpers })
    }

    /// Watches a directory of files of `pod`, with the pod's `helpers`.
    pub async fn watch(&self, helpers: &Helpers, pod: &SandboxId, dir: &Path) -> Result<Watch, VolumeError> {
        self.watches.watch(helpers, pod, dir).await
    }

    /// Returns the disk of the emptyDir of `pod` at `dir`; a new one has `bytes`, or the default size.
    pub async fn disk(
        &self,
        helpers: &Helpers,
        pod: &SandboxId,
        dir: &Path,
        bytes: Option<u64>,
    ) -> Result<DiskFile, VolumeError> {
        self.spaces.disk(helpers, pod, dir, bytes).await
    }
}

/// Classifies a bind mount of the pod of `kubelet`, and finds its source on the host. Changes nothing.
pub(crate) fn classify(mount: &Mount, kubelet: &Kubelet) -> Result<(Volume, Found), VolumeError> {
    let at = mount.destination().clone();
    let source = mount.source().clone().unwrap_or_default();
    let unsupported =
        |what: &str, hint| VolumeError::Unsupported { at: at.clone(), what: what.to_owned(), hint };
    let failed = |action| {
        let (at, path) = (at.clone(), source.clone());
        move |source| VolumeError::Path { at, action, path, source }
    };

    let (mut options, mut follows_host_mounts) = (Vec::new(), false);
    for option in mount.options().iter().flatten() {
        match option.as_str() {
            supported if SUPPORTED_OPTIONS.contains(&supported) => options.push(option.clone()),
            "private" | "rprivate" => {}
            "slave" | "rslave" => follows_host_mounts = true,
            "shared" | "rshared" => {
                let hint = ": mounts of a container stay in its guest";
                return Err(unsupported(&format!("mount propagation {option}"), hint));
            }
            other => return Err(unsupported(&format!("mount option {other:?}"), "")),
        }
    }
    let read_only = options.iter().any(|option| option == "ro" || option == "rro");
    if !source.is_absolute() || source.components().any(|part| part == Component::ParentDir) {
        return Err(unsupported(&format!("the path {source:?}"), ": it must be absolute, without \"..\""));
    }

    let own = match kubelet.split(&source) {
        Some(own) => Some((Dir::host(&own.pod).map_err(failed("open the pod's directory of"))?, own)),
        None => None,
    };
    let found = match &own {
        Some((dir, own)) => dir.find(own.path()),
        None => beneath::host(&source),
    }
    .map_err(failed("find"))?;
    match found.kind() {
        beneath::Kind::File | beneath::Kind::Directory => {}
        beneath::Kind::Device => {
            return Err(unsupported(
                &format!("the host's device {source:?} as a mount"),
                ": request it as a device (a volume of mode Block)",
            ));
        }
        beneath::Kind::Link | beneath::Kind::Other => {
            return Err(unsupported(&format!("the host's socket or pipe {source:?}"), ""));
        }
    }
    let is_file = found.kind() == beneath::Kind::File;
    let kind = match &own {
        _ if is_file && COPIED.iter().any(|copied| at == Path::new(copied)) => Kind::File,
        None => Kind::Live,
        Some((dir, own)) => {
            // A directory of that name that another user created is no pod's.
            if !own.is_configured && !host::is_of_root(dir).map_err(failed("stat the pod's directory of"))? {
                return Err(unsupported(
                    &format!("{source:?}, below a directory that is not kubelet's own"),
                    SET_ROOT,
                ));
            }
            own_kind(dir, own, &found).map_err(|why| match why {
                NotOwn::Failed(error) => failed("find the origin of")(error),
                NotOwn::HugePages => unsupported("an emptyDir of huge pages", ""),
                NotOwn::Unknown => unsupported(
                    &format!("{source:?}, a path of the pod's that kubelet does not mount"),
                    USE_VOLUMES,
                ),
            })?
        }
    };
    Ok((Volume { at, source, kind, read_only, follows_host_mounts, options }, found))
}

/// The reason why a path of a pod's own has no kind.
enum NotOwn {
    /// The path cannot be examined.
    Failed(io::Error),
    /// The path is not one that kubelet mounts.
    Unknown,
    /// The volume has huge pages, which a guest does not.
    HugePages,
}

impl From<io::Error> for NotOwn {
    fn from(error: io::Error) -> Self {
        Self::Failed(error)
    }
}

/// Returns the kind of `found`, a path of a pod's own.
fn own_kind(dir: &Dir, own: &Own<'_>, found: &Found) -> Result<Kind, NotOwn> {
    let is_file = found.kind() == beneath::Kind::File;
    let (plugin, root, sub_path) = match own.place() {
        Place::ContainerFile if is_file => return Ok(Kind::TerminationMessage),
        Place::ContainerFile | Place::Unknown => return Err(NotOwn::Unknown),
        Place::Volume { plugin, root } => (plugin, root, PathBuf::new()),
        Place::SubPath { name } => match host::origin(dir, found, name)? {
            Origin::Volume { plugin, root, sub_path } => (plugin, root, sub_path),
            Origin::Elsewhere => return Ok(Kind::Live),
            Origin::Unclear => return Err(NotOwn::Unknown),
        },
    };
    match plugin {
        Plugin::Other => Ok(Kind::Live),
        Plugin::Projected if !sub_path.as_os_str().is_empty() => Ok(Kind::ProjectedPart),
        Plugin::Projected | Plugin::EmptyDir if is_file && sub_path.as_os_str().is_empty() => {
            Err(NotOwn::Unknown)
        }
        Plugin::Projected => Ok(Kind::Projected),
        Plugin::EmptyDir => {
            let medium = host::medium(dir, &root)?.ok_or(NotOwn::HugePages)?;
            Ok(Kind::EmptyDir(EmptyDir { root: own.pod.join(root), sub_path, medium }))
        }
    }
}

#[cfg(test)]
mod tests;
