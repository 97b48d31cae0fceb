//! The cache of images: each built once, kept while in use, the least recently used evicted.

use std::{
    collections::HashMap,
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

use sandboxer_protocol::id::{ContainerId, SandboxId};
use sha2::{Digest, Sha256};
use tokio::sync::OnceCell;

use super::{
    FsType, Layer, Mount, RootfsError, RootfsPlan, Writable, image,
    snapshot::{Snapshot, check_image, understand},
};
use crate::{config::RootfsConfig, vmm::DiskSpec};

/// Makes disks of snapshots and keeps them.
#[derive(Debug)]
pub struct RootfsStore {
    /// Images of snapshot chains, `<key>.erofs`.
    images: PathBuf,
    /// Images of what one container alone has, `<container>.erofs`; gone with their lease.
    private: PathBuf,
    /// What is half-made.
    scratch: PathBuf,
    config: RootfsConfig,
    /// Builds under way: whoever else wants the image waits for the same one.
    builds: Mutex<HashMap<PathBuf, Arc<OnceCell<()>>>>,
    // Plain lock: held for a look-up and, in eviction, for unlinking; never across an await.
    leases: Arc<Mutex<HashMap<PathBuf, usize>>>,
}

/// Keeps an image from being evicted, until dropped.
#[derive(Debug)]
pub struct Lease {
    image: PathBuf,
    /// Nobody else will ever want the image.
    private: bool,
    leases: Arc<Mutex<HashMap<PathBuf, usize>>>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut leases = lock(&self.leases);
        if let Some(count) = leases.get_mut(&self.image) {
            *count -= 1;
            if *count == 0 {
                leases.remove(&self.image);
                if self.private
                    && let Err(error) = fs::remove_file(&self.image)
                {
                    tracing::warn!(image = ?self.image, %error, "a container's image stays");
                }
            }
        }
    }
}

impl RootfsStore {
    /// Opens the store in `dir`, clearing what a store that died left half-made.
    pub fn open(dir: &Path, config: &RootfsConfig) -> Result<Arc<Self>, RootfsError> {
        let store = Self {
            images: dir.join("images"),
            private: dir.join("private"),
            scratch: dir.join("scratch"),
            config: config.clone(),
            builds: Mutex::default(),
            leases: Arc::default(),
        };
        for dir in [&store.images, &store.private, &store.scratch] {
            private_dir(dir).map_err(host("make directory", dir))?;
        }
        let scratch = &store.scratch;
        for entry in fs::read_dir(scratch).map_err(host("read", scratch))?.flatten() {
            let path = entry.path();
            match path.extension() {
                Some(extension) if extension == "dir" => image::unmount(&path),
                _ => fs::remove_file(&path).map_err(host("remove half-made image", &path))?,
            }
        }
        Ok(Arc::new(store))
    }

    /// Makes the disks for a container of which `mounts` are the snapshot.
    pub async fn prepare(
        self: &Arc<Self>,
        pod: &SandboxId,
        container: &ContainerId,
        mounts: &[Mount],
    ) -> Result<RootfsPlan, RootfsError> {
        let layer = |index: usize, path: PathBuf, fstype| Layer {
            disk: DiskSpec { serial: serial(container, index), path, read_only: fstype == FsType::Erofs },
            fstype,
        };
        let tmpfs = Writable::Tmpfs { bytes: self.config.writable_bytes };
        match understand(container, mounts)? {
            Snapshot::Directories { dirs, private } => {
                let (image, lease) = self.image_of(pod, container, dirs, private).await?;
                let lower = vec![layer(0, image, FsType::Erofs)];
                Ok(RootfsPlan { lower, writable: tmpfs, leases: vec![lease] })
            }
            Snapshot::Images { layers, upper } => {
                for path in &layers {
                    check_image(container, path, FsType::Erofs)?;
                }
                let count = layers.len();
                let lower = layers.into_iter().enumerate();
                let lower = lower.map(|(index, path)| layer(index, path, FsType::Erofs)).collect();
                let writable = match upper {
                    Some(path) => {
                        check_image(container, &path, FsType::Ext4)?;
                        Writable::Overlay(layer(count, path, FsType::Ext4))
                    }
                    None => tmpfs,
                };
                Ok(RootfsPlan { lower, writable, leases: Vec::new() })
            }
            Snapshot::Whole(path) => {
                check_image(container, &path, FsType::Ext4)?;
                let writable = Writable::Whole(layer(0, path, FsType::Ext4));
                Ok(RootfsPlan { lower: Vec::new(), writable, leases: Vec::new() })
            }
        }
    }

    /// Keeps an image that a container of an earlier daemon uses; none if it is not of this store.
    pub fn lease(&self, image: &Path) -> Option<Lease> {
        let private = image.starts_with(&self.private);
        (private || image.starts_with(&self.images)).then(|| self.take_lease(image.to_owned(), private))
    }

    async fn image_of(
        self: &Arc<Self>,
        pod: &SandboxId,
        container: &ContainerId,
        dirs: Vec<PathBuf>,
        private: bool,
    ) -> Result<(PathBuf, Lease), RootfsError> {
        let first = dirs.first().cloned().unwrap_or_default();
        let key = image::key(&dirs).map_err(host("look at snapshot", &first))?;
        let path = match private {
            true => self.private.join(format!("{container}.erofs")),
            false => self.images.join(format!("{key}.erofs")),
        };
        // Leased before it is there: an eviction meanwhile must not take it.
        let lease = self.take_lease(path.clone(), private);
        let build = lock(&self.builds).entry(path.clone()).or_default().clone();
        let built = build
            .get_or_try_init(|| async {
                if touch(&path) {
                    return Ok(());
                }
                tracing::info!(%pod, %container, image = ?path, layers = dirs.len(), "making a rootfs image");
                let store = self.clone();
                let image = path.clone();
                let making = move || image::make(&store.config.mkfs_erofs, &dirs, &image, &store.scratch);
                let made = tokio::task::spawn_blocking(making).await;
                made.unwrap_or_else(|error| Err(host("make image", &path)(io::Error::other(error))))
            })
            .await
            .copied();
        lock(&self.builds).remove(&path);
        built?;
        self.evict();
        Ok((path, lease))
    }

    fn take_lease(&self, image: PathBuf, private: bool) -> Lease {
        *lock(&self.leases).entry(image.clone()).or_default() += 1;
        Lease { image, private, leases: self.leases.clone() }
    }

    /// Removes the least recently used images that nobody uses until the rest fits.
    fn evict(&self) {
        let leases = lock(&self.leases);
        let entries = fs::read_dir(&self.images).into_iter().flatten().flatten();
        let mut images: Vec<(SystemTime, u64, PathBuf)> = entries
            .filter_map(|entry| {
                let meta = entry.metadata().ok()?;
                Some((meta.modified().ok()?, meta.len(), entry.path()))
            })
            .collect();
        images.sort();
        let mut total: u64 = images.iter().map(|(_, length, _)| length).sum();
        for (_, length, path) in images {
            if total <= self.config.cache_bytes {
                return;
            }
            if !leases.contains_key(&path) && fs::remove_file(&path).is_ok() {
                tracing::info!(image = ?path, "evicted a rootfs image");
                total -= length;
            }
        }
    }
}

/// Marks an image as used now. Answers whether it is there.
fn touch(path: &Path) -> bool {
    let used =
        fs::File::options().write(true).open(path).and_then(|file| file.set_modified(SystemTime::now()));
    used.is_ok()
}

/// Unique within a machine, at most 20 characters: `c`, 16 of the container's hash, `-`, a number.
fn serial(container: &ContainerId, index: usize) -> String {
    let hash = Sha256::digest(container.as_str());
    let digits: String = hash.iter().take(7).map(|byte| format!("{byte:02x}")).collect();
    format!("c{digits}-{index}")
}

fn private_dir(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

fn host(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> RootfsError {
    let path = path.to_owned();
    move |source| RootfsError::Host { action, path, source }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
