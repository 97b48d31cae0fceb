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
    fs::File,
    path::{Path, PathBuf},
    sync::Arc,
};

use sandboxer_base::digest::hex;
use sandboxer_config::{RootfsConfig, WritableTo};
use sandboxer_protocol::id::{ContainerId, SandboxId};
use sandboxer_vmm::{DiskFile, DiskLimits, DiskRecord, DiskSpec};
use sha2::{Digest, Sha256};

use self::{
    build::Content,
    cache::Cache,
    mounts::{Lower, Wanted, WantedWritable},
    scratch::Scratches,
};
use super::helper::{HelperError, Helpers};

pub(crate) use self::superblock::check as check_image;
pub use self::{
    cache::{Lease, key_of},
    error::{BuildError, RootfsError},
    ext4::copy_data,
    mounts::Chain,
    scratch::{EmptyScratch, Scratch},
};

/// A mount in containerd's request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// The type: "overlay", "bind", "erofs", "ext4", "format/mkdir/overlay", ….
    pub fstype: String,
    /// The source: a path, a device, or a meaningless name.
    pub source: String,
    /// The options, as in fstab.
    pub options: Vec<String>,
}

/// A type of file system that a guest mounts from a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum FsType {
    /// The read-only file system that this daemon or the erofs snapshotter creates.
    Erofs,
    /// The writable file system.
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
#[derive(Debug, Clone)]
pub struct Layer {
    /// The disk.
    pub disk: DiskSpec,
    /// The file system on it.
    pub fstype: FsType,
}

/// The writable part of a root file system.
#[derive(Debug, Clone)]
pub enum Writable {
    /// Guest memory, with a limit.
    Tmpfs {
        /// Most bytes; 0: half of the guest's memory.
        bytes: u64,
    },
    /// A disk that is deleted with the container, over the layers.
    Scratch(DiskSpec),
    /// A scratch disk that the guest already has.
    Spare(DiskRecord),
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
    /// The serial of the next disk, if one is added.
    pub next_serial: String,
    /// The leases that keep the cached images among the layers.
    pub leases: Vec<Lease>,
}

/// A store that converts snapshots to disks, and caches the images.
#[derive(Debug)]
pub struct RootfsStore {
    cache: Cache,
    scratches: Scratches,
    config: RootfsConfig,
    helpers: Helpers,
}

impl RootfsStore {
    /// Opens the store in `dir`; removes the unfinished files of an earlier daemon.
    pub fn open(dir: &Path, config: &RootfsConfig, helpers: Helpers) -> Result<Arc<Self>, RootfsError> {
        let cache = Cache::open(dir, config)?;
        let usual_bytes = match config.writable {
            WritableTo::Disk => config.writable_bytes,
            WritableTo::Memory => 0,
        };
        let scratches = Scratches::open(dir.join("scratch"), usual_bytes)?;
        Ok(Arc::new(Self { cache, scratches, config: config.clone(), helpers }))
    }

    /// Creates a container's scratch disk of `bytes`, or of the default size; `None` if containers write to memory.
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

    /// Creates a disk for `pod` with the content of `from`, a sparse file.
    pub async fn scratch_copy(&self, pod: &SandboxId, from: File) -> Result<Scratch, RootfsError> {
        let copied = self.scratches.copy(pod.as_str(), from).await;
        copied.map_err(|source| RootfsError::Scratch {
            pod: pod.clone(),
            container: pod.clone(),
            source: Box::new(source),
        })
    }

    /// Returns the empty file system from which scratch disks of the default size are copied; `None` if containers
    /// write to memory.
    pub async fn empty_scratch(&self) -> Result<Option<EmptyScratch>, BuildError> {
        match self.config.writable {
            WritableTo::Memory => Ok(None),
            WritableTo::Disk => self.scratches.empty().await.map(Some),
        }
    }

    /// Creates the disks for a container from its snapshot's `mounts`.
    ///
    /// May be dropped at any time: unfinished work for this container only is undone, and an image that others may need
    /// is completed.
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

    /// Returns whether these read-only disks of a container, uppermost first, have what `mounts` name; `false` also if that cannot be
    /// told. Creates nothing.
    pub async fn is_made_of(
        &self,
        pod: &SandboxId,
        container: &ContainerId,
        mounts: &[Mount],
        disks: &[&Path],
    ) -> Result<bool, RootfsError> {
        let refused =
            |refusal| RootfsError::Mount { pod: pod.clone(), container: container.clone(), refusal };
        let failed = |source: HelperError| RootfsError::Build {
            pod: pod.clone(),
            container: container.clone(),
            source: Arc::new(source.into()),
        };
        let mut disks = disks.iter();
        let mut is_any = false;
        for layer in mounts::read(mounts).map_err(refused)?.lower {
            let is_same = match layer {
                Lower::Upper(dir)
                    if self.helpers.is_layer_empty(pod, dir.clone()).await.map_err(failed)? =>
                {
                    continue;
                }
                Lower::Chain(chain) => {
                    let key = self.helpers.layers_key(pod, chain).await.map_err(failed)?;
                    disks.next().is_some_and(|disk| self.cache.is_of(disk, &key))
                }
                Lower::Image { path, .. } => disks.next().is_some_and(|disk| **disk == path),
                // They are a container's own.
                Lower::Upper(_) | Lower::Directory(_) => false,
            };
            if !is_same {
                return Ok(false);
            }
            is_any = true;
        }
        Ok(is_any && disks.next().is_none())
    }

    /// Leases an image that a container of an earlier daemon uses; `None` if it is not in the cache.
    pub fn lease(&self, image: &Path) -> Option<Lease> {
        self.cache.lease(image)
    }

    /// Reports that the containers of an earlier daemon hold all their leases: unused images may be removed from now
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
        let private = async |content, leases: &mut Vec<Lease>| {
            let lease = self.cache.private_image(content).await?;
            let file = cached(lease.path()).await?;
            leases.push(lease);
            Ok::<_, Arc<BuildError>>((file, FsType::Erofs))
        };
        let mut layers = wanted.lower.into_iter().peekable();
        while let Some(layer) = layers.next() {
            let (file, fstype) = match layer {
                Lower::Image { path, fstype } => {
                    (helpers.image(pod, path, fstype, true).await.map_err(BuildError::from)?, fstype)
                }
                Lower::Chain(tree) => {
                    let key = helpers.layers_key(pod, tree.clone()).await.map_err(BuildError::from)?;
                    let lease = self.cache.shared_image(key, tree).await?;
                    let file = cached(lease.path()).await?;
                    leases.push(lease);
                    (file, FsType::Erofs)
                }
                Lower::Upper(dir)
                    if helpers.is_layer_empty(pod, dir.clone()).await.map_err(BuildError::from)? =>
                {
                    continue;
                }
                Lower::Upper(dir) => {
                    let below = layers.next_if(|below| matches!(below, Lower::Chain(_)));
                    let content = match below {
                        // One image holds both: overlayfs resolves overlay's marks, which mkfs.erofs must not see.
                        Some(Lower::Chain(Chain { mut dirs, options })) => {
                            dirs.insert(0, dir);
                            Content::Chain(Chain { dirs, options })
                        }
                        _ => Content::Upper(dir),
                    };
                    private(content, &mut leases).await?
                }
                Lower::Directory(dir) => private(Content::Directory(dir), &mut leases).await?,
            };
            lower.push(disks.next(file, fstype, true));
        }
        let writable = match wanted.writable {
            WantedWritable::Memory => Writable::Tmpfs { bytes: self.memory_bytes() },
            WantedWritable::Scratch { path, size } => {
                let file = helpers.scratch(pod, path, size).await.map_err(BuildError::from)?;
                Writable::Overlay(disks.next(file, FsType::Ext4, false))
            }
            WantedWritable::Whole { path } => {
                let file = helpers.image(pod, path, FsType::Ext4, false).await.map_err(BuildError::from)?;
                Writable::Whole(disks.next(file, FsType::Ext4, false))
            }
        };
        Ok(RootfsPlan { lower, writable, next_serial: disks.next_serial(), leases })
    }

    /// Returns the most bytes that a container may write to memory; 0: half of its guest's memory.
    fn memory_bytes(&self) -> u64 {
        match self.config.writable {
            WritableTo::Memory => self.config.writable_bytes,
            WritableTo::Disk => 0,
        }
    }
}

/// More disks than a container usually has: a snapshot's chain is one disk.
const LIKELY_DISKS: usize = 16;

/// Returns the serials that a container's disks may have, when nothing but the container is known.
pub fn serials(container: &ContainerId) -> Vec<String> {
    let mut disks = Disks::new(container);
    (0..LIKELY_DISKS).map(|_| disks.next_serial()).collect()
}

/// The serials of one container's disks: `c`, 48 bits of the id's hash, the disk's number.
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

    fn next(&mut self, file: DiskFile, fstype: FsType, read_only: bool) -> Layer {
        Layer {
            disk: DiskSpec { serial: self.next_serial(), file, read_only, limits: DiskLimits::default() },
            fstype,
        }
    }

    fn next_serial(&mut self) -> String {
        let serial = format!("{}-{}", self.prefix, self.count);
        self.count += 1;
        serial
    }
}

/// Opens an image of the daemon's own cache.
async fn cached(path: PathBuf) -> Result<DiskFile, BuildError> {
    blocking(move || {
        let opened = File::open(&path).and_then(|file| DiskFile::new(file, path.clone()));
        opened.map_err(|source| BuildError::Path { action: "open", path, source })
    })
    .await
}

/// Runs blocking operations on the daemon's own files in a thread of their own.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, BuildError> + Send + 'static,
) -> Result<T, BuildError> {
    tokio::task::spawn_blocking(work).await.unwrap_or(Err(BuildError::Stopped))
}

#[cfg(test)]
mod tests;
