//! Cached images in a directory: created once per chain of layers, kept while in use, and then while there is
//! space.
//!
//! ```text
//!  requested ──▶ building ──▶ kept, leased ──last lease dropped──▶ kept, unused ──lack of space──▶ removed
//!                   ╰─ failed: forgotten, the next request builds again
//! ```
//!
//! A name is never reused, so a removed image cannot be confused with its successor.

mod state;

use std::{
    fmt,
    fs::{self, DirBuilder, File},
    io,
    os::unix::{ffi::OsStrExt, fs::DirBuilderExt, fs::MetadataExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use futures::{
    FutureExt,
    future::{BoxFuture, Shared},
};
use sandboxer_base::{clock, digest::hex};
use sandboxer_config::RootfsConfig;
use sha2::{Digest, Sha256};
use tokio::sync::Semaphore;

use self::state::{Image, State};
use super::{
    BuildError, FsType, blocking,
    build::{self, Content, Job},
    mounts::Chain,
    superblock,
};

/// The version of the image format. Images of another version are not found, and are removed as unused.
const FORMAT: &[u8] = b"sandboxer erofs 1";
/// Prefix of images that may be shared: `shared-<key>-<nonce>.erofs`.
const SHARED: &str = "shared-";
/// Prefix of images for one container: `private-<nonce>.erofs`.
const PRIVATE: &str = "private-";
/// Prefix of images that are being created.
const UNFINISHED: &str = "unfinished-";
/// Mount point of merged views, in their own mount namespaces.
const WORK: &str = "work";

/// The hash over a chain's identity, in hex.
pub type Key = String;
type Building = Shared<BoxFuture<'static, Result<Lease, Arc<BuildError>>>>;

/// The cache of a directory. Cheap to clone.
#[derive(Clone)]
pub struct Cache(Arc<Store>);

struct Store {
    dir: PathBuf,
    mkfs: PathBuf,
    most_bytes: u64,
    /// The permits for builds, one per CPU: more would only compete for time and space.
    builds: Arc<Semaphore>,
    /// The state. The plain mutex is held for look-ups in memory only.
    state: Mutex<State>,
}

/// Protects an image of the cache from removal until dropped.
pub struct Lease {
    cache: Cache,
    name: String,
}

impl Lease {
    /// Returns the image's path.
    pub fn path(&self) -> PathBuf {
        self.cache.0.dir.join(&self.name)
    }
}

impl Clone for Lease {
    fn clone(&self) -> Self {
        if let Some(image) = self.cache.state().images.get_mut(&self.name) {
            image.leases += 1;
        }
        Self { cache: self.cache.clone(), name: self.name.clone() }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let last = match self.cache.state().images.get_mut(&self.name) {
            Some(image) => {
                image.leases -= 1;
                image.leases == 0
            }
            None => false,
        };
        if last {
            self.cache.evict(self.cache.0.most_bytes);
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lease").field(&self.name).finish()
    }
}

impl fmt::Debug for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cache").field(&self.0.dir).finish()
    }
}

impl Cache {
    /// Opens the cache in `dir`, creating it. No other daemon may use it.
    pub fn open(dir: &Path, config: &RootfsConfig) -> Result<Self, BuildError> {
        let host =
            |action| move |source: io::Error| BuildError::Path { action, path: dir.to_owned(), source };
        for dir in [dir.to_owned(), dir.join(WORK)] {
            DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(host("create"))?;
        }
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let store = Store {
            dir: dir.to_owned(),
            mkfs: config.mkfs_erofs.clone(),
            most_bytes: config.cache_bytes,
            builds: Arc::new(Semaphore::new(cpus)),
            state: Mutex::new(State::read(dir).map_err(host("read"))?),
        };
        Ok(Self(Arc::new(store)))
    }

    /// Allows the removal of unused images from now on.
    pub fn settle(&self) {
        self.state().settled = true;
        self.evict(self.0.most_bytes);
    }

    /// Leases an image by its path, if it is in the cache.
    pub fn lease(&self, path: &Path) -> Option<Lease> {
        let name = path.strip_prefix(&self.0.dir).ok()?.to_str()?;
        self.lease_by_name(&mut self.state(), name)
    }

    /// Returns whether the image of this path was made of the chain with this key. It may have been removed.
    pub fn is_of(&self, image: &Path, key: &Key) -> bool {
        let name = image.strip_prefix(&self.0.dir).ok().and_then(Path::to_str).unwrap_or_default();
        name.strip_prefix(SHARED)
            .and_then(|rest| rest.strip_prefix(key.as_str()))
            .is_some_and(|rest| rest.starts_with('-'))
    }

    /// Returns the image of a chain's merged view, created once for all callers. `key` is the chain's key, from
    /// [`key_of`].
    pub async fn shared_image(&self, key: Key, chain: Chain) -> Result<Lease, Arc<BuildError>> {
        if let Some(lease) = self.cached(&key).await.map_err(Arc::new)? {
            return Ok(lease);
        }
        let building = {
            let mut state = self.state();
            // Another caller may have finished the image in the meantime.
            if let Some(name) = state.by_key.get(&key).cloned() {
                return self.lease_by_name(&mut state, &name).ok_or(Arc::new(BuildError::Stopped));
            }
            match state.building.get(&key) {
                Some(building) => building.clone(),
                None => {
                    let building = self.clone().build_shared(key.clone(), chain);
                    state.building.insert(key, building.clone());
                    building
                }
            }
        };
        building.await
    }

    /// Creates an image for one container.
    pub async fn private_image(&self, content: Content) -> Result<Lease, Arc<BuildError>> {
        let cache = self.clone();
        // The build completes even if the caller is dropped: the image then has no lease, and is removed.
        let made = tokio::spawn(async move { cache.build(None, content).await });
        made.await.unwrap_or(Err(BuildError::Stopped)).map_err(Arc::new)
    }

    /// Returns an existing, undamaged image.
    async fn cached(&self, key: &Key) -> Result<Option<Lease>, BuildError> {
        let lease = {
            let mut state = self.state();
            let Some(name) = state.by_key.get(key).cloned() else { return Ok(None) };
            self.lease_by_name(&mut state, &name)
        };
        let Some(lease) = lease else { return Ok(None) };
        let path = lease.path();
        let whole = blocking(move || {
            let failed = |action| {
                let path = path.clone();
                move |source| BuildError::Path { action, path, source }
            };
            let file = File::open(&path).map_err(failed("read image"))?;
            superblock::check(&file, &path, FsType::Erofs)?;
            // The modification time tells the next daemon when the image was last used.
            file.set_modified(clock::now()).map_err(failed("touch"))
        });
        match whole.await {
            Ok(()) => Ok(Some(lease)),
            Err(error) => {
                tracing::warn!(
                    error = sandboxer_base::chain(&error),
                    "cached image is damaged; building it again"
                );
                let mut state = self.state();
                if state.by_key.get(key) == Some(&lease.name) {
                    state.by_key.remove(key);
                }
                if let Some(image) = state.images.get_mut(&lease.name) {
                    image.key = None;
                }
                drop(state);
                Ok(None)
            }
        }
    }

    fn build_shared(self, key: Key, chain: Chain) -> Building {
        let made = tokio::spawn(async move {
            let made = self.build(Some(key.clone()), Content::Chain(chain)).await;
            self.state().building.remove(&key);
            made.map_err(Arc::new)
        });
        async move { made.await.unwrap_or_else(|_| Err(Arc::new(BuildError::Stopped))) }.boxed().shared()
    }

    /// Creates and leases an image; removes unused images to make space.
    async fn build(&self, key: Option<Key>, content: Content) -> Result<Lease, BuildError> {
        let permit = self.0.builds.clone().acquire_owned().await;
        let _permit = permit.map_err(|_| BuildError::Stopped)?;
        let unfinished = self.0.dir.join(format!("{UNFINISHED}{}", nonce()));
        let job = |content| Job {
            mkfs: self.0.mkfs.clone(),
            content,
            work: self.0.dir.join(WORK),
            image: unfinished.clone(),
        };
        match build::image(job(content.clone())).await {
            Err(BuildError::Full { needed, .. }) if self.could_fit(needed) && self.evict(0) => {
                build::image(job(content)).await?
            }
            made => made?,
        }
        let name = match &key {
            Some(key) => format!("{SHARED}{key}-{}.erofs", nonce()),
            None => format!("{PRIVATE}{}.erofs", nonce()),
        };
        let lease = self.keep(&unfinished, name, key).map_err(|source| {
            // The file is missing if it already has its final name. The first error is reported.
            let _ = fs::remove_file(&unfinished);
            BuildError::Path { action: "keep image", path: unfinished.clone(), source }
        })?;
        self.evict(self.0.most_bytes);
        Ok(lease)
    }

    /// Gives a finished image its final name.
    fn keep(&self, unfinished: &Path, name: String, key: Option<Key>) -> io::Result<Lease> {
        let path = self.0.dir.join(&name);
        fs::rename(unfinished, &path)?;
        File::open(&self.0.dir)?.sync_all()?;
        let bytes = path.metadata()?.blocks() * 512;
        let mut state = self.state();
        if let Some(key) = &key {
            state.by_key.insert(key.clone(), name.clone());
        }
        state.images.insert(name.clone(), Image { bytes, used: clock::now(), leases: 1, key });
        Ok(Lease { cache: self.clone(), name })
    }

    fn lease_by_name(&self, state: &mut State, name: &str) -> Option<Lease> {
        let image = state.images.get_mut(name)?;
        image.leases += 1;
        image.used = clock::now();
        Some(Lease { cache: self.clone(), name: name.to_owned() })
    }

    /// Returns whether an image of `needed` bytes fits once all unused images are removed. For an image that never
    /// fits, no other image is removed.
    fn could_fit(&self, needed: u64) -> bool {
        build::free_bytes(&self.0.dir)
            .is_none_or(|free| needed <= free.saturating_add(self.state().unused_bytes()))
    }

    /// Removes unused images: all private ones, then shared ones until they take at most `most` bytes.
    /// Returns whether any was removed.
    fn evict(&self, most: u64) -> bool {
        let victims = self.state().victims(most);
        for name in &victims {
            let path = self.0.dir.join(name);
            match fs::remove_file(&path) {
                Ok(()) => tracing::debug!(?path, "removed unused image"),
                Err(error) => tracing::warn!(?path, %error, "cannot remove unused image"),
            }
        }
        !victims.is_empty()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic cannot leave the state half-changed.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns a chain's identity. Committed layers never change; a recreated directory has another inode or change time.
pub fn key_of(chain: &Chain) -> Result<Key, BuildError> {
    let mut hash = Sha256::new();
    let mut add = |field: &[u8]| {
        hash.update((field.len() as u64).to_le_bytes());
        hash.update(field);
    };
    add(FORMAT);
    for option in &chain.options {
        add(option.as_bytes());
    }
    for dir in &chain.dirs {
        let host = |source| BuildError::Path { action: "stat layer", path: dir.clone(), source };
        let meta = dir.metadata().map_err(host)?;
        if !meta.is_dir() {
            return Err(host(io::ErrorKind::NotADirectory.into()));
        }
        add(dir.as_os_str().as_bytes());
        for number in [meta.dev(), meta.ino()] {
            add(&number.to_le_bytes());
        }
        for time in [meta.ctime(), meta.ctime_nsec(), meta.mtime(), meta.mtime_nsec()] {
            add(&time.to_le_bytes());
        }
    }
    Ok(hex(&hash.finalize()))
}

/// Returns a random part of a file name.
pub fn nonce() -> String {
    hex(&rand::random::<u64>().to_be_bytes())
}
