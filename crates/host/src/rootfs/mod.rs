//! Converts a container's snapshot to disks of its pod's VM.
//!
//! ```text
//! mounts of Task.Create ──mounts──▶ Wanted ─┬─ image: attached after a check of its superblock
//!                                           ├─ tree:  ──cache──▶ build ──▶ EROFS image, one per chain of layers
//!                                           └─ scratch: ──ext4──▶ file system, created if it does not exist
//! only read-only disks ──scratch──▶ a further disk, deleted with the container
//! ```

mod build;
mod cache;
mod cell;
mod error;
pub(crate) mod ext4;
pub(crate) mod mounts;
mod program;
mod scratch;
mod superblock;
mod tree;

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

use sandboxer_base::digest::hex;
use sandboxer_config::{RootfsConfig, WritableTo};
use sandboxer_protocol::id::{ContainerId, SandboxId};
use sandboxer_vmm::{DiskLimits, DiskSpec};
use sha2::{Digest, Sha256};

use self::{
    cache::Cache,
    mounts::{Lower, Wanted, WantedWritable},
    scratch::Scratches,
};
use super::helper::{Helpers, Request};

pub use self::{
    cache::{Lease, key_of},
    error::{BuildError, RootfsError},
    mounts::Chain,
    scratch::{EmptyScratch, Scratch},
    superblock::check as check_image,
};

/// A mount from containerd's request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// "overlay", "bind", "erofs", "ext4", "format/mkdir/overlay", ….
    pub fstype: String,
    /// Path, device, or a meaningless name.
    pub source: String,
    /// As in fstab.
    pub options: Vec<String>,
}

/// A file system that a guest mounts from a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum FsType {
    /// Read-only, created by this daemon or by the erofs snapshotter.
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

/// A disk and its file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// The disk.
    pub disk: DiskSpec,
    /// The file system on it.
    pub fstype: FsType,
}

/// The writable part of a root file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Writable {
    /// Guest memory, at most this many bytes; 0: half of it.
    Tmpfs {
        /// The limit.
        bytes: u64,
    },
    /// A disk that is deleted with the container, over the layers.
    Scratch(DiskSpec),
    /// A disk of the snapshotter, over the layers.
    Overlay(Layer),
    /// The disk with the whole root file system; there are no layers.
    Whole(Layer),
}

/// A container's root file system, as disks.
#[derive(Debug)]
pub struct RootfsPlan {
    /// Read-only layers, uppermost first.
    pub lower: Vec<Layer>,
    /// The writable part.
    pub writable: Writable,
    /// Serial for a further disk.
    pub next_serial: String,
    /// Keep the cached images among the layers.
    pub leases: Vec<Lease>,
}

/// Converts snapshots to disks, and caches the images.
#[derive(Debug)]
pub struct RootfsStore {
    cache: Cache,
    scratches: Scratches,
    config: RootfsConfig,
    helpers: Helpers,
}

impl RootfsStore {
    /// Opens the store in `dir`; removes unfinished files of an earlier daemon.
    pub fn open(dir: &Path, config: &RootfsConfig, helpers: Helpers) -> Result<Arc<Self>, RootfsError> {
        let cache = Cache::open(dir, config)?;
        let usual_bytes = match config.writable {
            WritableTo::Disk => config.writable_bytes,
            WritableTo::Memory => 0,
        };
        let scratches = Scratches::open(dir.join("scratch"), usual_bytes)?;
        Ok(Arc::new(Self { cache, scratches, config: config.clone(), helpers }))
    }

    /// Creates a scratch disk for a container, of `bytes` or the default size; `None` if containers write to
    /// memory.
    pub async fn scratch(
        &self,
        pod: &SandboxId,
        container: &ContainerId,
        bytes: Option<u64>,
    ) -> Result<Option<Scratch>, RootfsError> {
        if self.config.writable == WritableTo::Memory {
            return Ok(None);
        }
        let made = self.scratches.make(container.as_str(), bytes).await;
        made.map(Some).map_err(|source| RootfsError::Scratch {
            pod: pod.clone(),
            container: container.clone(),
            source: Box::new(source),
        })
    }

    /// Returns the empty file system that scratch disks of the default size are copies of; `None` if containers write to
    /// memory.
    pub async fn empty_scratch(&self) -> Result<Option<EmptyScratch>, BuildError> {
        match self.config.writable {
            WritableTo::Memory => Ok(None),
            WritableTo::Disk => self.scratches.empty().await.map(Some),
        }
    }

    /// Creates the disks for a container from its snapshot's `mounts`.
    ///
    /// May be dropped at any time: unfinished work for this container only is undone; an image that others
    /// may need is completed.
    pub async fn prepare(
        &self,
        pod: &SandboxId,
        container: &ContainerId,
        mounts: &[Mount],
    ) -> Result<RootfsPlan, RootfsError> {
        let wanted = mounts::read(mounts).map_err(|refusal| RootfsError::Mount {
            pod: pod.clone(),
            container: container.clone(),
            refusal,
        })?;
        self.plan(pod, container, wanted).await.map_err(|source| RootfsError::Build {
            pod: pod.clone(),
            container: container.clone(),
            source,
        })
    }

    /// Leases an image that a container of an earlier daemon uses; `None` if it is not in the cache.
    pub fn lease(&self, image: &Path) -> Option<Lease> {
        self.cache.lease(image)
    }

    /// Marks the leases of an earlier daemon's containers as complete: unused images may be removed from now
    /// on.
    pub fn settle(&self) {
        self.cache.settle();
    }

    async fn plan(
        &self,
        pod: &SandboxId,
        container: &ContainerId,
        wanted: Wanted,
    ) -> Result<RootfsPlan, Arc<BuildError>> {
        let helpers = &self.helpers;
        let mut disks = Disks::new(container);
        let mut lower = Vec::with_capacity(wanted.lower.len());
        let mut leases = Vec::new();
        for layer in wanted.lower {
            let (path, fstype) = match layer {
                Lower::Image { path, fstype } => {
                    helpers.check_image(pod, path.clone(), fstype).await.map_err(BuildError::from)?;
                    (path, fstype)
                }
                Lower::Chain(tree) => {
                    let key = helpers.layers_key(pod, tree.clone()).await.map_err(BuildError::from)?;
                    let lease = self.cache.shared_image(key, tree).await?;
                    let path = lease.path();
                    leases.push(lease);
                    (path, FsType::Erofs)
                }
                Lower::Upper(dir)
                    if helpers.is_layer_empty(pod, dir.clone()).await.map_err(BuildError::from)? =>
                {
                    continue;
                }
                Lower::Upper(dir) | Lower::Directory(dir) => {
                    let lease = self.cache.private_image(dir).await?;
                    let path = lease.path();
                    leases.push(lease);
                    (path, FsType::Erofs)
                }
            };
            lower.push(disks.next(path, fstype, true));
        }
        let writable = match wanted.writable {
            WantedWritable::Memory => Writable::Tmpfs { bytes: self.memory_bytes() },
            WantedWritable::Scratch { path, size } => {
                let request = Request::Scratch { path: path.clone(), bytes: size };
                let ((), _) = helpers.ask(pod, request).await.map_err(BuildError::from)?;
                Writable::Overlay(disks.next(path, FsType::Ext4, false))
            }
            WantedWritable::Whole { path } => {
                helpers.check_image(pod, path.clone(), FsType::Ext4).await.map_err(BuildError::from)?;
                Writable::Whole(disks.next(path, FsType::Ext4, false))
            }
        };
        Ok(RootfsPlan { lower, writable, next_serial: disks.next_serial(), leases })
    }

    /// Returns the most bytes that a container may write to memory; 0: half of its guest's.
    fn memory_bytes(&self) -> u64 {
        match self.config.writable {
            WritableTo::Memory => self.config.writable_bytes,
            WritableTo::Disk => 0,
        }
    }
}

/// More disks than a container usually has: a snapshot's chain is one.
const LIKELY_DISKS: usize = 16;

/// Returns the serials that a container's disks may have, if only the container is known.
pub fn serials(container: &ContainerId) -> Vec<String> {
    let mut disks = Disks::new(container);
    (0..LIKELY_DISKS).map(|_| disks.next_serial()).collect()
}

/// Serials of one container's disks: `c`, 48 bits of the id's hash, the disk's number.
#[derive(Debug)]
struct Disks {
    prefix: String,
    count: usize,
}

impl Disks {
    fn new(container: &ContainerId) -> Self {
        let hash = hex(&Sha256::digest(container.as_str())[..6]);
        Self { prefix: format!("c{hash}"), count: 0 }
    }

    fn next(&mut self, path: PathBuf, fstype: FsType, read_only: bool) -> Layer {
        Layer {
            disk: DiskSpec { serial: self.next_serial(), path, read_only, limits: DiskLimits::default() },
            fstype,
        }
    }

    fn next_serial(&mut self) -> String {
        let serial = format!("{}-{}", self.prefix, self.count);
        self.count += 1;
        serial
    }
}

/// Runs blocking operations on the daemon's own files in their own thread.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, BuildError> + Send + 'static,
) -> Result<T, BuildError> {
    tokio::task::spawn_blocking(work).await.unwrap_or(Err(BuildError::Stopped))
}

#[cfg(test)]
mod tests;
