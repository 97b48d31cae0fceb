//! What stands behind a container's bind mounts, and so how its guest gets to see it.
//!
//! ```text
//! bind mount ──kubelet──▶ a place in a kubelet's tree ──host──▶ what is there ──▶ Kind
//! ```

mod bound;
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
use sandboxer_base::{Code, digest::hex};
use sandboxer_protocol::{
    VOLUMES_DIR,
    id::{Id, SandboxId},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use self::{
    kubelet::{InVolume, Place, Plugin},
    space::Spaces,
    tree::TreeError,
    watch::Watches,
};
use super::{
    helper::{HelperError, Helpers},
    rootfs::BuildError,
};

pub use self::{
    bound::{Bound, FileMeta},
    space::make_disk,
    watch::Watch,
};

/// Files that CRI may bind from the host and that mean the same inside.
const COPIED: [&str; 3] = ["/etc/hostname", "/etc/hosts", "/etc/resolv.conf"];

/// Options of a bind mount that are as good in a guest.
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
    /// Where the container finds it.
    pub at: PathBuf,
    /// Where it is on the host.
    pub source: PathBuf,
    /// What is there.
    pub kind: Kind,
    /// The container can't write to it.
    pub read_only: bool,
    /// Mounts that the host makes below it later should be seen (HostToContainer).
    pub follows_host_mounts: bool,
    /// Options for the guest's own bind mount, without any that names the host.
    pub options: Vec<String>,
}

/// How a guest gets to see what a bind mount shows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// A small file, copied when the container is made.
    File,
    /// A file that the container writes and kubelet reads when it has ended.
    TerminationMessage,
    /// A directory that kubelet writes: copied, and again whenever kubelet replaces its content.
    Projected,
    /// What a directory of that kind held when the container was made: a subPath is never updated.
    ProjectedPart,
    /// Space for the pod, in its guest.
    EmptyDir(EmptyDir),
    /// A file or directory that containers and the host have in common.
    Live,
}

/// Space that a pod's containers share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmptyDir {
    /// The volume's directory on the host.
    pub root: PathBuf,
    /// The part of it that is mounted; empty: all of it.
    pub sub_path: PathBuf,
    /// Where its content is.
    pub medium: Medium,
}

/// Where an emptyDir's content is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Medium {
    /// In memory, at most so many bytes.
    Memory {
        /// The bound.
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
    /// What is in it.
    pub content: Content,
}

/// What is in a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Content {
    /// The files of a host directory.
    Files {
        /// The directory.
        dir: PathBuf,
        /// They are sent again when they change.
        follow: bool,
    },
    /// Space in guest memory.
    Memory {
        /// The emptyDir's directory on the host.
        dir: PathBuf,
        /// Most bytes.
        bytes: u64,
    },
    /// Space on a disk.
    Disk {
        /// The emptyDir's directory on the host.
        dir: PathBuf,
    },
    /// A block device of the host, which containers see as a device.
    Device {
        /// The host's device.
        path: PathBuf,
        /// The guest can't write to it.
        read_only: bool,
    },
}

impl Needed {
    /// Returns a volume named after what is in it.
    pub fn new(content: Content) -> Self {
        let (path, kind) = match &content {
            Content::Files { dir, .. } => (dir, "f"),
            Content::Memory { dir, .. } | Content::Disk { dir } => (dir, "e"),
            Content::Device { path, read_only: false } => (path, "w"),
            Content::Device { path, read_only: true } => (path, "r"),
        };
        let hash = Sha256::digest(path.as_os_str().as_encoded_bytes());
        // A letter and hexadecimal digits, so that nothing is refused; 20 of them are a disk's longest serial.
        let text = format!("v{kind}{}", hex(&hash[..8]));
        let id = text.parse().unwrap_or_else(|_| unreachable!("{text} is an identifier"));
        Self { id, content }
    }

    /// Returns where the guest has it.
    pub fn guest_path(&self) -> PathBuf {
        Path::new(VOLUMES_DIR).join(&self.id)
    }
}

impl Volume {
    /// Returns what the guest must have for it, and where in the guest it then is; none for what is not shared.
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

/// What all pods' volumes share.
#[derive(Debug)]
pub struct VolumeStore {
    /// Touch what is the pods' in the daemon's place.
    pub helpers: Helpers,
    watches: Watches,
    spaces: Spaces,
}

impl VolumeStore {
    /// Opens the store in `dir`, which is made. Needs a runtime.
    pub fn open(dir: &Path, disk_bytes: u64, helpers: Helpers) -> io::Result<Self> {
        std::fs::create_dir_all(dir)?;
        let spaces = Spaces::new(dir.to_owned(), disk_bytes);
        Ok(Self { watches: Watches::new(helpers.clone())?, spaces, helpers })
    }

    /// Watches a directory of files of `pod`.
    pub async fn watch(&self, pod: &SandboxId, dir: &Path) -> Result<Watch, VolumeError> {
        self.watches.watch(pod, dir).await
    }

    /// Returns the disk of the emptyDir of `pod` at `dir`; a new one has `bytes`, or the usual size.
    pub async fn disk(
        &self,
        pod: &SandboxId,
        dir: &Path,
        bytes: Option<u64>,
    ) -> Result<PathBuf, VolumeError> {
        self.spaces.disk(&self.helpers, pod, dir, bytes).await
    }
}

/// Why a volume can't be had.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// A pod with a kernel of its own can't offer it.
    #[error("volume {}: {what} is not available in a microVM pod{hint}", at.display())]
    Unsupported {
        /// Where the container would find it.
        at: PathBuf,
        /// What was asked for.
        what: String,
        /// What to do instead, after a colon; or nothing.
        hint: &'static str,
    },
    /// Its source can't be looked at.
    #[error("volume {}: cannot {action} {path:?}", at.display())]
    Host {
        /// Where the container would find it.
        at: PathBuf,
        /// What was attempted.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// It is a file that is too large to be copied.
    #[error("volume {}: {path:?} has more than {most} bytes, which is the most that is copied", at.display())]
    FileTooLarge {
        /// Where the container would find it.
        at: PathBuf,
        /// On the host.
        path: PathBuf,
        /// The bound.
        most: u64,
    },
    /// Its files can't be copied.
    #[error(transparent)]
    Files(#[from] TreeError),
    /// Whoever looked at it for the daemon failed, or did not answer.
    #[error(transparent)]
    Helper(#[from] HelperError),
    /// Its files can't be sent.
    #[error("cannot encode files for a guest")]
    Encode(#[source] protobuf::Error),
    /// It can't be kept up to date.
    #[error("cannot watch {dir:?} for changes{}", too_many(source))]
    Watch {
        /// Its directory on the host.
        dir: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It has no disk.
    #[error("cannot make a disk for an emptyDir")]
    Disk(#[from] BuildError),
    /// Its directory is where no disk of a VM can be.
    #[error(
        "cannot make a disk for an emptyDir in {dir:?}: it is on a network or FUSE file system; \
         keep kubelet's root directory on a local disk"
    )]
    NotLocal {
        /// The directory.
        dir: PathBuf,
    },
}

impl VolumeError {
    /// Returns the code to answer with.
    pub fn code(&self) -> Code {
        match self {
            Self::Unsupported { .. } | Self::Files(TreeError::Kind { .. }) => Code::Unimplemented,
            Self::Files(TreeError::TooLarge { .. }) | Self::FileTooLarge { .. } => Code::InvalidArgument,
            Self::NotLocal { .. } => Code::FailedPrecondition,
            Self::Helper(error) => error.code(),
            _ => Code::Internal,
        }
    }
}

/// Returns what to do if watching failed for want of watches.
fn too_many(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull => " (fs.inotify.max_user_watches is too low)",
        _ => "",
    }
}

/// Tells what a bind mount shows. Looks at its source on the host, changes nothing.
pub fn classify(mount: &Mount) -> Result<Volume, VolumeError> {
    let at = mount.destination().clone();
    let source = mount.source().clone().unwrap_or_default();
    let unsupported =
        |what: &str, hint| VolumeError::Unsupported { at: at.clone(), what: what.to_owned(), hint };
    let failed = |action, path: &Path| {
        let (at, path) = (at.clone(), path.to_owned());
        move |source| VolumeError::Host { at, action, path, source }
    };

    let (mut options, mut follows_host_mounts) = (Vec::new(), false);
    for option in mount.options().iter().flatten() {
        match option.as_str() {
            kept if KEPT_OPTIONS.contains(&kept) => options.push(option.clone()),
            "private" | "rprivate" => {}
            "slave" | "rslave" => follows_host_mounts = true,
            "shared" | "rshared" => {
                let hint = ": what it mounts stays in its guest";
                return Err(unsupported(&format!("mount propagation {option}"), hint));
            }
            other => return Err(unsupported(&format!("mount option {other:?}"), "")),
        }
    }
    let read_only = options.iter().any(|option| option == "ro" || option == "rro");

    let found = host::look(&source).map_err(failed("look at", &source))?;
    let kind = match found {
        host::Found::File if COPIED.iter().any(|copied| at == Path::new(copied)) => Kind::File,
        host::Found::Device => {
            return Err(unsupported(
                &format!("the host's device {source:?} as a mount"),
                ": ask for it as a device (a volume of mode Block)",
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
            Err(source) => {
                Err(VolumeError::Host { at: at.to_owned(), action: "look at", path: root, source })
            }
        },
    }
}

#[cfg(test)]
mod tests;
