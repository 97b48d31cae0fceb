//! Classifies a container's bind mounts, and so decides how the guest gets their content.
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
    path::{Path, PathBuf},
};

use oci_spec::runtime::Mount;
use sandboxer_base::digest::hex;
use sandboxer_protocol::{
    VOLUMES_DIR,
    id::{Id, SandboxId},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use self::{
    kubelet::{InVolume, Place, Plugin},
    space::Spaces,
    watch::Watches,
};
use super::helper::Helpers;

pub use self::{
    bound::{Bound, FileMeta},
    error::VolumeError,
    space::make_disk,
    watch::Watch,
};

/// Files that CRI may bind-mount from the host and that mean the same in the guest.
const COPIED: [&str; 3] = ["/etc/hostname", "/etc/hosts", "/etc/resolv.conf"];

/// Options of a bind mount that work the same in a guest.
const KEPT_OPTIONS: [&str; 17] = [
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
    /// Path in the container.
    pub at: PathBuf,
    /// Path on the host.
    pub source: PathBuf,
    /// Its kind.
    pub kind: Kind,
    /// The container cannot write to it.
    pub read_only: bool,
    /// Later mounts of the host below it should become visible (HostToContainer).
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
    /// Part of such a directory, copied when the container is created: a subPath is never updated.
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
    /// The part of it that is mounted; empty: all of it.
    pub sub_path: PathBuf,
    /// Where its content is.
    pub medium: Medium,
}

/// The medium of an emptyDir.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Medium {
    /// In memory, at most this many bytes.
    Memory {
        /// The limit.
        bytes: u64,
    },
    /// On a disk.
    Disk,
}

/// A volume that a guest must have before a container can use it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Needed {
    /// Unique in the guest; the serial of its disk, too, if it has one.
    pub id: Id,
    /// Its content.
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
        /// They are sent again after a change.
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
        /// The guest cannot write to it.
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
        // Starts with a letter, followed by hexadecimal digits: a valid identifier, and short enough for a
        // disk's serial (20).
        let text = format!("v{kind}{}", hex(&hash[..8]));
        let id = text.parse().unwrap_or_else(|_| unreachable!("{text} is an identifier"));
        Self { id, content }
    }

    /// Returns its path in the guest.
    pub fn guest_path(&self) -> PathBuf {
        Path::new(VOLUMES_DIR).join(&self.id)
    }
}

impl Volume {
    /// Returns the volume that the guest needs for it, and its path in the guest; `None` if it is not shared.
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

/// State that all pods' volumes share.
#[derive(Debug)]
pub struct VolumeStore {
    /// Access the pods' files on behalf of the daemon.
    pub helpers: Helpers,
    watches: Watches,
    spaces: Spaces,
}

impl VolumeStore {
    /// Opens the store in `dir`, creating it. Needs a runtime.
    pub fn open(dir: &Path, disk_bytes: u64, helpers: Helpers) -> io::Result<Self> {
        std::fs::create_dir_all(dir)?;
        let spaces = Spaces::new(dir.to_owned(), disk_bytes);
        Ok(Self { watches: Watches::new(helpers.clone())?, spaces, helpers })
    }

    /// Watches a directory of files of `pod`.
    pub async fn watch(&self, pod: &SandboxId, dir: &Path) -> Result<Watch, VolumeError> {
        self.watches.watch(pod, dir).await
    }

    /// Returns the disk of the emptyDir of `pod` at `dir`; a new one has `bytes`, or the default size.
    pub async fn disk(
        &self,
        pod: &SandboxId,
        dir: &Path,
        bytes: Option<u64>,
    ) -> Result<PathBuf, VolumeError> {
        self.spaces.disk(&self.helpers, pod, dir, bytes).await
    }
}

/// Classifies a bind mount. Reads its source on the host, changes nothing.
pub fn classify(mount: &Mount) -> Result<Volume, VolumeError> {
    let at = mount.destination().clone();
    let source = mount.source().clone().unwrap_or_default();
    let unsupported =
        |what: &str, hint| VolumeError::Unsupported { at: at.clone(), what: what.to_owned(), hint };
    let failed = |action, path: &Path| {
        let (at, path) = (at.clone(), path.to_owned());
        move |source| VolumeError::Path { at, action, path, source }
    };

    let (mut options, mut follows_host_mounts) = (Vec::new(), false);
    for option in mount.options().iter().flatten() {
        match option.as_str() {
            kept if KEPT_OPTIONS.contains(&kept) => options.push(option.clone()),
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

    let found = host::look(&source).map_err(failed("stat", &source))?;
    let kind = match found {
        host::Found::File if COPIED.iter().any(|copied| at == Path::new(copied)) => Kind::File,
        host::Found::Device => {
            return Err(unsupported(
                &format!("the host's device {source:?} as a mount"),
                ": request it as a device (a volume of mode Block)",
            ));
        }
        host::Found::Other => {
            return Err(unsupported(&format!("the host's socket or pipe {source:?}"), ""));
        }
        host::Found::File | host::Found::Directory => match kubelet::place(&source) {
            Some(Place::ContainerFile) if found == host::Found::File => Kind::TerminationMessage,
            Some(Place::Volume(place)) => in_volume(place, &at)?,
            Some(Place::SubPath { volumes, name }) => {
                match host::origin(&source, &volumes, &name).map_err(failed("find the origin of", &source))? {
                    Some(place) => in_volume(place, &at)?,
                    None => Kind::Live,
                }
            }
            Some(Place::ContainerFile) | None => Kind::Live,
        },
    };
    Ok(Volume { at, source, kind, read_only, follows_host_mounts, options })
}

fn in_volume(place: InVolume, at: &Path) -> Result<Kind, VolumeError> {
    let InVolume { plugin, root, sub_path } = place;
    match plugin {
        Plugin::Other => Ok(Kind::Live),
        Plugin::Projected if sub_path.as_os_str().is_empty() => Ok(Kind::Projected),
        Plugin::Projected => Ok(Kind::ProjectedPart),
        Plugin::EmptyDir => match host::medium(&root) {
            Ok(Some(medium)) => Ok(Kind::EmptyDir(EmptyDir { root, sub_path, medium })),
            Ok(None) => Err(VolumeError::Unsupported {
                at: at.to_owned(),
                what: "an emptyDir of huge pages".to_owned(),
                hint: "",
            }),
            Err(source) => Err(VolumeError::Path { at: at.to_owned(), action: "stat", path: root, source }),
        },
    }
}

#[cfg(test)]
mod tests;
