//! Images in a directory: made once per chain of layers, kept while in use and then as long as there is room.
//!
//! ```text
//!  asked for ──▶ building ──▶ kept, leased ──last lease dropped──▶ kept, unused ──too little room──▶ gone
//!                   ╰─ failed: forgotten, the next to ask builds again
//! ```
//!
//! A name is never used twice, so an image that goes can't be mistaken for its successor.

use std::{
    collections::HashMap,
    fmt,
    fs::{self, DirBuilder, File},
    io,
    os::unix::{ffi::OsStrExt, fs::DirBuilderExt, fs::MetadataExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

use futures::{
    FutureExt,
    future::{BoxFuture, Shared},
};
use sandboxer_base::{clock, digest::hex};
use sandboxer_config::RootfsConfig;
use sha2::{Digest, Sha256};
use tokio::sync::Semaphore;

use super::{
    BuildError, FsType, blocking,
    build::{self, Content, Job},
    mounts::Chain,
    superblock,
};

/// Rises when images are made otherwise than before; older ones are then no longer found, and go as unused.
const FORMAT: &[u8] = b"sandboxer erofs 1";
/// Of images that may be shared: `shared-<key>-<nonce>.erofs`.
const SHARED: &str = "shared-";
/// Of images for one container: `private-<nonce>.erofs`.
const PRIVATE: &str = "private-";
/// Of images that are being made.
const UNFINISHED: &str = "unfinished-";
/// Directory under which views are mounted, in namespaces of their own.
const WORK: &str = "work";

/// Hash over a chain's identity, in hex.
pub type Key = String;
type Building = Shared<BoxFuture<'static, Result<Lease, Arc<BuildError>>>>;

/// The directory and what is in it. Cheap to clone.
#[derive(Clone)]
pub struct Cache(Arc<Store>);

struct Store {
    dir: PathBuf,
    mkfs: PathBuf,
    most_bytes: u64,
    /// One build per CPU: more would only take each other's time and room.
    builds: Arc<Semaphore>,
    /// A plain mutex: held for look-ups in memory only.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    images: HashMap<String, Image>,
    by_key: HashMap<Key, String>,
    building: HashMap<Key, Building>,
    /// Images of an earlier daemon may be in use by VMs that have not been looked at yet.
    settled: bool,
}

#[derive(Debug)]
struct Image {
    bytes: u64,
    used: SystemTime,
    leases: usize,
    /// None: for one container alone, gone with its last lease.
    key: Option<Key>,
}

/// Keeps an image of the cache from being evicted, until dropped.
pub struct Lease {
    cache: Cache,
    name: String,
}

impl Lease {
    /// Returns the image.
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
    /// Opens the cache in `dir`, made if it isn't there. Its daemon is the only one to use it.
    pub fn open(dir: &Path, config: &RootfsConfig) -> Result<Self, BuildError> {
        let host =
            |action| move |source: io::Error| BuildError::Host { action, path: dir.to_owned(), source };
        for dir in [dir.to_owned(), dir.join(WORK)] {
            DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(host("make"))?;
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

    /// From now on images that nobody has leased may go.
    pub fn settle(&self) {
        self.state().settled = true;
        self.evict(self.0.most_bytes);
    }

    /// Leases an image by its path, if it is one of these.
    pub fn lease(&self, path: &Path) -> Option<Lease> {
        let name = path.strip_prefix(&self.0.dir).ok()?.to_str()?;
        self.lease_by_name(&mut self.state(), name)
    }

    /// Returns the image of a chain's merged view; made once, however many ask. `key` is the chain's, see [`key_of`].
    pub async fn shared_image(&self, key: Key, chain: Chain) -> Result<Lease, Arc<BuildError>> {
        if let Some(lease) = self.kept(&key).await.map_err(Arc::new)? {
            return Ok(lease);
        }
        let building = {
            let mut state = self.state();
            // It may have been finished since.
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

    /// Returns an image of a directory, for one container.
    pub async fn private_image(&self, dir: PathBuf) -> Result<Lease, Arc<BuildError>> {
        let cache = self.clone();
        // Made to its end also when nobody waits any more: then nobody leases it, and it goes.
        let made = tokio::spawn(async move { cache.build(None, Content::Directory(dir)).await });
        made.await.unwrap_or(Err(BuildError::Stopped)).map_err(Arc::new)
    }

    /// Returns an image that is there already and still whole.
    async fn kept(&self, key: &Key) -> Result<Option<Lease>, BuildError> {
        let lease = {
            let mut state = self.state();
            let Some(name) = state.by_key.get(key).cloned() else { return Ok(None) };
            self.lease_by_name(&mut state, &name)
        };
        let Some(lease) = lease else { return Ok(None) };
        let path = lease.path();
        let whole = blocking(move || {
            superblock::check(&path, FsType::Erofs)?;
            // Tells the next daemon how lately it was used.
            let touched = File::open(&path).and_then(|file| file.set_modified(clock::now()));
            touched.map_err(|source| BuildError::Host { action: "touch", path, source })
        });
        match whole.await {
            Ok(()) => Ok(Some(lease)),
            Err(error) => {
                tracing::warn!(
                    error = sandboxer_base::chain(&error),
                    "a cached image is damaged: it is made again"
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

    /// Makes an image and leases it; room is made by what is unused.
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
            Err(BuildError::Full { .. }) if self.evict(0) => build::image(job(content)).await?,
            made => made?,
        }
        let name = match &key {
            Some(key) => format!("{SHARED}{key}-{}.erofs", nonce()),
            None => format!("{PRIVATE}{}.erofs", nonce()),
        };
        let lease = self.keep(&unfinished, name, key).map_err(|source| {
            // Gone already if it has its name; what failed is what is told.
            let _ = fs::remove_file(&unfinished);
            BuildError::Host { action: "keep image", path: unfinished.clone(), source }
        })?;
        self.evict(self.0.most_bytes);
        Ok(lease)
    }

    /// Gives a finished image its name, for good.
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

    /// Removes what nobody uses: all private images, then shared ones until they take at most `most` bytes.
    /// Returns whether any went.
    fn evict(&self, most: u64) -> bool {
        let victims = self.state().victims(most);
        for name in &victims {
            let path = self.0.dir.join(name);
            match fs::remove_file(&path) {
                Ok(()) => tracing::debug!(?path, "an unused image went"),
                Err(error) => tracing::warn!(?path, %error, "an unused image cannot be removed"),
            }
        }
        !victims.is_empty()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that is done under it leaves it half-done.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Returns what an earlier daemon left in `dir`.
    fn read(dir: &Path) -> io::Result<Self> {
        let mut state = Self::default();
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            if name.starts_with(UNFINISHED) {
                // An image, or what mkfs.erofs kept beside it.
                match entry.file_type()?.is_dir() {
                    true => fs::remove_dir_all(entry.path())?,
                    false => fs::remove_file(entry.path())?,
                }
                continue;
            }
            let key = name
                .strip_prefix(SHARED)
                .and_then(|name| name.split_once('-'))
                .map(|(key, _)| key.to_owned());
            if key.is_none() && !name.starts_with(PRIVATE) {
                continue;
            }
            let file = entry.metadata()?;
            let image = Image { bytes: file.blocks() * 512, used: file.modified()?, leases: 0, key };
            if let Some(key) = &image.key {
                state.by_key.insert(key.clone(), name.clone());
            }
            state.images.insert(name, image);
        }
        Ok(state)
    }

    /// Forgets what is to go and names it.
    fn victims(&mut self, most: u64) -> Vec<String> {
        if !self.settled {
            return Vec::new();
        }
        let mut total: u64 = self.images.values().map(|image| image.bytes).sum();
        let mut unused: Vec<_> = self
            .images
            .iter()
            .filter(|(_, image)| image.leases == 0)
            .map(|(name, image)| (image.key.is_some(), image.used, name.clone()))
            .collect();
        unused.sort();
        let mut victims = Vec::new();
        for (shared, _, name) in unused {
            if shared && total <= most {
                break;
            }
            if let Some(image) = self.images.remove(&name) {
                total -= image.bytes;
                if let Some(key) = image.key.filter(|key| self.by_key.get(key) == Some(&name)) {
                    self.by_key.remove(&key);
                }
            }
            victims.push(name);
        }
        victims
    }
}

/// Returns what makes a chain itself: committed layers never change, and a directory made anew has another inode or
/// another time of change.
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
        let host = |source| BuildError::Host { action: "look at layer", path: dir.clone(), source };
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

/// Returns what tells a file from others of the same name.
pub fn nonce() -> String {
    hex(&rand::random::<u64>().to_be_bytes())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn image() -> impl Strategy<Value = Image> {
        (0_u64..50, 0_u64..20, 0_usize..3, any::<bool>()).prop_map(|(bytes, used, leases, shared)| Image {
            bytes,
            used: SystemTime::UNIX_EPOCH + Duration::from_secs(used),
            leases,
            key: shared.then(String::new),
        })
    }

    proptest! {
        #[test]
        fn what_goes_is_unused_oldest_first_and_no_more_than_needed(
            images in proptest::collection::vec(image(), 0..12),
            most in 0_u64..200,
        ) {
            let images: HashMap<_, _> = images.into_iter().enumerate().map(|(n, i)| (n.to_string(), i)).collect();
            let before: HashMap<_, _> =
                images.iter().map(|(name, i)| (name.clone(), (i.bytes, i.used, i.leases, i.key.is_some()))).collect();
            let mut state = State { images, ..State::default() };
            prop_assert!(state.victims(most).is_empty(), "before it is settled nothing goes");
            state.settled = true;
            let victims = state.victims(most);

            let total = |names: &mut dyn Iterator<Item = &String>| names.map(|name| before[name].0).sum::<u64>();
            for (name, (_, used, leases, shared)) in &before {
                let gone = victims.contains(name);
                prop_assert_ne!(gone, state.images.contains_key(name));
                prop_assert!(!(gone && *leases > 0), "{} was in use", name);
                prop_assert!(gone || *leases > 0 || *shared, "{} is nobody's", name);
                if !gone && *leases == 0 {
                    prop_assert!(total(&mut state.images.keys()) <= most);
                    let newer = victims.iter().filter(|name| before[*name].3).all(|name| before[name].1 <= *used);
                    prop_assert!(newer, "{} was used before one that stays", name);
                }
            }
            if let Some(last) = victims.last().filter(|name| before[*name].3) {
                prop_assert!(total(&mut state.images.keys().chain([last])) > most, "{} went needlessly", last);
            }
        }
    }
}
