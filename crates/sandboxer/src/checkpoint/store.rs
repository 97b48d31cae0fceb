//! The checkpoints of this node.
//!
//! ```text
//! state_dir/checkpoints/<namespace>/<name>/checkpoint.json    manifest, with the checksums of the other files
//! state_dir/checkpoints/<namespace>/<name>/disk-<serial>      a disk; that of an image is a further name of the image's file
//! state_dir/checkpoints/<namespace>/<name>/…                  the VMM's files, under its names
//! state_dir/checkpoints/<namespace>/.new.<name>/              while it is written
//! state_dir/checkpoints/<namespace>/.old.<name>/              while it is removed
//! ```

use std::{
    collections::{BTreeMap, HashMap},
    fs::{self, DirBuilder, File},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

use sandboxer_base::{
    Code, chain,
    clock::now_ns,
    failpoint::{fail, pass},
};
use sandboxer_config::CheckpointsConfig;
use sandboxer_protocol::id::Id;
use sandboxer_vmm::Frozen;

use super::{Manifest, counts::Counts, disk_file, refused};
use crate::{
    error::{PodError, tolerate},
    template::{
        Stamp,
        pages::{self, Checksum},
    },
};

pub const MANIFEST: &str = "checkpoint.json";
/// Maximum size of a manifest, bytes.
pub const MAX_MANIFEST: u64 = 4 << 20;

/// The most checkpoints that a refusal names.
const NAMED: usize = 3;

/// A checkpoint on disk, for people.
#[derive(Debug)]
pub struct View {
    /// Namespace of the checkpoint.
    pub namespace: String,
    /// Name of the checkpoint.
    pub name: String,
    /// The manifest, or why it cannot be used.
    pub manifest: Result<Manifest, String>,
}

/// A checkpoint that is checked and in memory.
#[derive(Debug)]
pub struct Saved {
    /// The manifest.
    pub manifest: Manifest,
    /// The files that the VMM restores.
    pub frozen: Frozen,
    dir: PathBuf,
    stamps: BTreeMap<String, Stamp>,
}

/// What a checkpoint takes.
#[derive(Debug, Clone, Copy)]
struct Stored {
    bytes: u64,
    /// Time at which it came to be here, ns since 1970; `None`: it is being made.
    since_ns: Option<u64>,
}

/// The checkpoints of a node.
#[derive(Debug)]
pub struct Checkpoints {
    root: PathBuf,
    config: CheckpointsConfig,
    /// What was saved and restored since the daemon's start.
    pub counts: Counts,
    // Plain locks: held for a look-up, never across an await or while a file is read.
    /// The one that was restored last, so that copies that start one after the other share its memory.
    last: Mutex<Option<Arc<Saved>>>,
    /// Number of readers, by directory.
    in_use: Mutex<HashMap<PathBuf, usize>>,
    /// What each takes, by directory.
    stored: Mutex<BTreeMap<PathBuf, Stored>>,
}

/// A checkpoint that is being read: until this is dropped, it cannot be removed.
#[derive(Debug)]
pub struct InUse {
    /// The checkpoint's directory.
    pub dir: PathBuf,
    of: Arc<Checkpoints>,
}

impl Drop for InUse {
    fn drop(&mut self) {
        let mut in_use = lock(&self.of.in_use);
        if let Some(count) = in_use.get_mut(&self.dir) {
            *count -= 1;
            if *count == 0 {
                in_use.remove(&self.dir);
            }
        }
    }
}

impl InUse {
    /// Reads the checkpoint into sealed memory and checks it, unless it is there unchanged. Blocks.
    fn load(self, namespace: &str, name: &str) -> Result<Restoring, PodError> {
        let known = lock(&self.of.last).clone().filter(|saved| {
            saved.dir == self.dir
                && stamps(&self.dir, saved.manifest.files.keys()).is_ok_and(|now| now == saved.stamps)
        });
        let saved = match known {
            Some(saved) => saved,
            None => {
                let read = read(&self.dir);
                let read = read.map_err(|reason| refused(namespace, name, Code::FailedPrecondition, reason));
                let saved = Arc::new(read?);
                *lock(&self.of.last) = Some(saved.clone());
                saved
            }
        };
        Ok(Restoring { saved, _in_use: self })
    }
}

/// A checkpoint from which a pod is being restored.
#[derive(Debug)]
pub struct Restoring {
    /// The checkpoint.
    pub saved: Arc<Saved>,
    _in_use: InUse,
}

impl Restoring {
    /// Opens the content of a disk.
    pub fn disk(&self, serial: &str) -> io::Result<(File, PathBuf)> {
        let path = self.saved.dir.join(disk_file(serial));
        Ok((File::open(&path)?, path))
    }
}

/// A checkpoint that is being written. Its directory is removed when this is dropped, unless it is finished.
#[derive(Debug)]
pub struct Draft {
    /// Name of the checkpoint.
    pub name: Id,
    /// Namespace of the checkpoint.
    pub namespace: Id,
    /// The directory for its files.
    pub dir: PathBuf,
    /// The directory that this one becomes.
    pub target: PathBuf,
    /// The checksums that its files must have; `None`: those that they have.
    pub expected: Option<BTreeMap<String, Checksum>>,
    of: Arc<Checkpoints>,
    is_finished: bool,
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.is_finished {
            lock(&self.of.stored).remove(&self.target);
            tolerate("remove", &self.dir, fs::remove_dir_all(&self.dir));
        }
    }
}

impl Draft {
    /// Writes the manifest, with the checksums of all files, and makes the checkpoint available. Blocks.
    pub fn finish(mut self, mut manifest: Manifest) -> Result<Manifest, PodError> {
        let failed = |action: &str, path: &Path| {
            let (namespace, name) = (self.namespace.clone(), self.name.clone());
            let (action, path) = (action.to_owned(), path.to_owned());
            move |error: io::Error| {
                let reason = format!("cannot {action} {}: {error}", path.display());
                refused(namespace.as_str(), name.as_str(), Code::Internal, reason)
            }
        };
        let mut files = BTreeMap::new();
        for entry in fs::read_dir(&self.dir).map_err(failed("read", &self.dir))? {
            let path = entry.map_err(failed("read", &self.dir))?.path();
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
            let file = File::open(&path).map_err(failed("open", &path))?;
            let checksum = pages::checksum(&file).map_err(failed("read", &path))?;
            let synced = fail(format_args!("a saved file is synced: {}", path.display()));
            synced.and_then(|()| file.sync_all()).map_err(failed("write", &path))?;
            files.insert(name.to_owned(), checksum);
        }
        match &self.expected {
            Some(expected) if *expected != files => {
                let differs = expected.iter().find(|(name, of)| files.get(*name) != Some(of));
                let name = differs.map_or("", |(name, _)| name);
                let reason = format!("its file {name:?} is damaged: checksum mismatch");
                return Err(refused(
                    self.namespace.as_str(),
                    self.name.as_str(),
                    Code::InvalidArgument,
                    reason,
                ));
            }
            _ => manifest.files = files,
        }
        self.of.reserve(
            self.namespace.as_str(),
            self.name.as_str(),
            &self.target,
            manifest.stored_bytes(),
        )?;
        let path = self.dir.join(MANIFEST);
        let written = || {
            fail(format_args!("a checkpoint is written: {}", path.display()))?;
            let mut file = File::options().write(true).create_new(true).mode(0o600).open(&path)?;
            file.write_all(&manifest.to_text()?)?;
            file.sync_all()?;
            File::open(&self.dir)?.sync_all()
        };
        pass(format_args!("a checkpoint has its files"));
        written().map_err(failed("write", &path))?;
        pass(format_args!("a checkpoint has its manifest"));
        let renamed = fail(format_args!("a checkpoint gets its name: {}", self.target.display()))
            .and_then(|()| fs::rename(&self.dir, &self.target));
        renamed.map_err(failed("rename to", &self.target))?;
        if let Some(stored) = lock(&self.of.stored).get_mut(&self.target) {
            stored.since_ns = Some(now_ns());
        }
        pass(format_args!("a checkpoint has its name"));
        let parent = self.target.parent().unwrap_or(&self.target).to_owned();
        let synced = File::open(&parent).and_then(|dir| dir.sync_all());
        self.is_finished = true;
        synced.map_err(failed("write", &parent))?;
        Ok(manifest)
    }
}

impl Checkpoints {
    /// Opens the directory of checkpoints below the state directory, and removes what an earlier daemon did not finish.
    pub fn open(state_dir: &Path, config: &CheckpointsConfig) -> io::Result<Arc<Self>> {
        let root = state_dir.join("checkpoints");
        DirBuilder::new().recursive(true).mode(0o700).create(&root)?;
        let mut stored = BTreeMap::new();
        for namespace in fs::read_dir(&root)?.flatten() {
            for entry in fs::read_dir(namespace.path()).into_iter().flatten().flatten() {
                if entry.file_name().as_encoded_bytes().starts_with(b".") {
                    tolerate("remove", &entry.path(), fs::remove_dir_all(entry.path()));
                } else {
                    stored.insert(entry.path(), Stored::of(&entry.path()));
                }
            }
        }
        Ok(Arc::new(Self {
            root,
            config: config.clone(),
            counts: Counts::default(),
            last: Mutex::default(),
            in_use: Mutex::default(),
            stored: Mutex::new(stored),
        }))
    }

    /// Returns the number of checkpoints, and their bytes on disk.
    pub fn size(&self) -> (usize, u64) {
        let stored = lock(&self.stored);
        let complete = stored.values().filter(|stored| stored.since_ns.is_some());
        complete.fold((0, 0), |(count, bytes), stored| (count + 1, bytes + stored.bytes))
    }

    /// Removes the checkpoints that are too old at this time, unless they are in use. Blocks.
    pub fn remove_aged(&self, now_ns: u64) {
        let Some(max_age) = self.config.max_age else { return };
        let before = now_ns.saturating_sub(u64::try_from(max_age.as_nanos()).unwrap_or(u64::MAX));
        let is_aged = |stored: &Stored| stored.since_ns.is_some_and(|since| since < before);
        let aged: Vec<PathBuf> = lock(&self.stored)
            .iter()
            .filter(|(_, stored)| is_aged(stored))
            .map(|(dir, _)| dir.clone())
            .collect();
        for dir in aged {
            let [namespace, name] = names(&dir);
            match self.remove(&namespace, &name) {
                Ok(_) => tracing::info!(namespace, name, "removed a checkpoint of checkpoints.max_age_hours"),
                // It is tried again.
                Err(error) => {
                    tracing::debug!(error = chain(&error), "cannot remove a checkpoint that is too old");
                }
            }
        }
    }

    /// Reserves space for a checkpoint, in place of what was reserved for it before.
    fn reserve(&self, namespace: &str, name: &str, dir: &Path, bytes: u64) -> Result<(), PodError> {
        let (mut stored, most) = (lock(&self.stored), self.config.most_bytes);
        let others = stored.iter().filter(|(of, _)| *of != dir);
        let taken: u64 = others.clone().map(|(_, stored)| stored.bytes).sum();
        if taken.saturating_add(bytes) <= most {
            stored.insert(dir.to_owned(), Stored { bytes, since_ns: None });
            return Ok(());
        }
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        let mut oldest: Vec<_> =
            others.filter_map(|(dir, stored)| Some((stored.since_ns?, names(dir), stored.bytes))).collect();
        oldest.sort_unstable();
        let named: Vec<String> = oldest
            .iter()
            .take(NAMED)
            .map(|(_, [namespace, name], bytes)| format!("{namespace}/{name} ({} MiB)", mib(*bytes)))
            .collect();
        let remedy = match named.as_slice() {
            [] => "raise checkpoints.max_mib".to_owned(),
            named => format!("remove checkpoints, the oldest are {}", named.join(", ")),
        };
        let reason = format!(
            "it may take {} MiB, and {} of at most {} MiB (checkpoints.max_mib) are taken: {remedy}",
            mib(bytes),
            mib(taken),
            most >> 20
        );
        Err(refused(namespace, name, Code::FailedPrecondition, reason))
    }

    /// Begins a checkpoint that takes about so many bytes, unless there is one of this name or no room.
    pub fn draft(self: &Arc<Self>, namespace: &str, name: &str, bytes: u64) -> Result<Draft, PodError> {
        let target = self.dir(namespace, name)?;
        // `dir` accepts nothing else.
        let parse =
            |text: &str| text.parse::<Id>().map_err(|source| PodError::Id { what: "checkpoint", source });
        let ids = (parse(namespace)?, parse(name)?);
        let parent = self.root.join(namespace);
        let dir = parent.join(format!(".new.{name}"));
        let failed = |error: io::Error| {
            let reason = format!("cannot create {}: {error}", dir.display());
            refused(namespace, name, Code::Internal, reason)
        };
        fail(format_args!("a checkpoint begins: {}", dir.display())).map_err(failed)?;
        DirBuilder::new().recursive(true).mode(0o700).create(&parent).map_err(failed)?;
        match DirBuilder::new().mode(0o700).create(&dir) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let reason = "one of this name is being made: wait for its end";
                return Err(refused(namespace, name, Code::FailedPrecondition, reason));
            }
            made => made.map_err(failed)?,
        }
        // While this directory exists, nobody else makes one of this name.
        if target.exists() {
            tolerate("remove", &dir, fs::remove_dir(&dir));
            let there = "there is one of this name already: remove it, or choose another name";
            return Err(refused(namespace, name, Code::AlreadyExists, there));
        }
        let (namespace, name) = ids;
        let draft =
            Draft { name, namespace, dir, target, expected: None, of: self.clone(), is_finished: false };
        self.reserve(draft.namespace.as_str(), draft.name.as_str(), &draft.target, bytes)?;
        pass(format_args!("a checkpoint has its directory"));
        Ok(draft)
    }

    /// Lists all checkpoints.
    pub fn list(&self) -> io::Result<Vec<View>> {
        let mut all = Vec::new();
        for namespace in fs::read_dir(&self.root)? {
            let namespace = namespace?;
            for entry in fs::read_dir(namespace.path())? {
                let entry = entry?;
                let names = (namespace.file_name().into_string(), entry.file_name().into_string());
                let (Ok(namespace), Ok(name)) = names else { continue };
                if !name.starts_with('.') {
                    all.push(View { manifest: manifest(&entry.path()), namespace, name });
                }
            }
        }
        all.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
        Ok(all)
    }

    /// Returns one checkpoint.
    pub fn view(&self, namespace: &str, name: &str) -> Result<View, PodError> {
        let dir = self.existing(namespace, name)?;
        Ok(View { manifest: manifest(&dir), namespace: namespace.to_owned(), name: name.to_owned() })
    }

    /// Returns one checkpoint, after all its files were read and checked. Blocks.
    pub fn verify(&self, namespace: &str, name: &str) -> Result<View, PodError> {
        let (view, dir) = (self.view(namespace, name)?, self.dir(namespace, name)?);
        let manifest = view.manifest.and_then(|manifest| read(&dir).map(|_| manifest));
        Ok(View { manifest, ..view })
    }

    /// Removes a checkpoint, unless a pod is being restored from it. Restored pods go on.
    pub fn remove(&self, namespace: &str, name: &str) -> Result<View, PodError> {
        let (view, dir) = (self.view(namespace, name)?, self.dir(namespace, name)?);
        let doomed = self.root.join(namespace).join(format!(".old.{name}"));
        let failed = |error: io::Error| {
            let reason = format!("cannot remove {}: {error}", dir.display());
            refused(namespace, name, Code::Internal, reason)
        };
        // Renamed first, so that no part of it is taken for a whole, and no start waits for the rest.
        {
            let mut last = lock(&self.last);
            if lock(&self.in_use).contains_key(&dir) {
                let reason = "it is being restored or exported: try again when that has ended";
                return Err(refused(namespace, name, Code::FailedPrecondition, reason));
            }
            if last.as_ref().is_some_and(|saved| saved.dir == dir) {
                *last = None;
            }
            fs::rename(&dir, &doomed).map_err(failed)?;
            lock(&self.stored).remove(&dir);
        }
        pass(format_args!("a checkpoint has lost its name"));
        fs::remove_dir_all(&doomed).map_err(failed)?;
        Ok(view)
    }

    /// Reads a checkpoint into sealed memory and checks it, unless it is there unchanged.
    pub async fn load(self: &Arc<Self>, namespace: &str, name: &str) -> Result<Restoring, PodError> {
        let in_use = self.hold(namespace, name)?;
        let (of_namespace, of_name) = (namespace.to_owned(), name.to_owned());
        let loading = tokio::task::spawn_blocking(move || in_use.load(&of_namespace, &of_name));
        loading.await.unwrap_or_else(|panic| Err(refused(namespace, name, Code::Internal, panic.to_string())))
    }

    /// Finds a checkpoint that then cannot be removed.
    pub fn hold(self: &Arc<Self>, namespace: &str, name: &str) -> Result<InUse, PodError> {
        let dir = self.dir(namespace, name)?;
        *lock(&self.in_use).entry(dir.clone()).or_default() += 1;
        let in_use = InUse { dir, of: self.clone() };
        self.existing(namespace, name).map(|_| in_use)
    }

    fn existing(&self, namespace: &str, name: &str) -> Result<PathBuf, PodError> {
        let dir = self.dir(namespace, name)?;
        match dir.exists() {
            true => Ok(dir),
            false => {
                Err(refused(namespace, name, Code::NotFound, "there is none of this name in this namespace"))
            }
        }
    }

    fn dir(&self, namespace: &str, name: &str) -> Result<PathBuf, PodError> {
        for text in [namespace, name] {
            if let Err(error) = text.parse::<Id>() {
                return Err(refused(namespace, name, Code::InvalidArgument, error.to_string()));
            }
        }
        Ok(self.root.join(namespace).join(name))
    }
}

impl Stored {
    /// Returns what a checkpoint of an earlier daemon takes.
    fn of(dir: &Path) -> Self {
        let on_disk = || {
            let files = fs::read_dir(dir).into_iter().flatten().flatten();
            files.filter_map(|file| Some(file.metadata().ok()?.blocks() * 512)).sum()
        };
        let bytes = manifest(dir).map_or_else(|_| on_disk(), |manifest| manifest.stored_bytes());
        let meta = fs::metadata(dir.join(MANIFEST)).or_else(|_| fs::metadata(dir));
        let since = meta.ok().and_then(|meta| meta.modified().ok());
        let since = since.and_then(|since| since.duration_since(SystemTime::UNIX_EPOCH).ok());
        Self {
            bytes,
            since_ns: Some(since.map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))),
        }
    }
}

/// Returns the namespace and the name of the checkpoint in a directory.
fn names(dir: &Path) -> [String; 2] {
    let text = |path: Option<&Path>| {
        path.and_then(Path::file_name).unwrap_or_default().to_string_lossy().into_owned()
    };
    [text(dir.parent()), text(Some(dir))]
}

/// Reads a manifest, or returns what is wrong with it.
fn manifest(dir: &Path) -> Result<Manifest, String> {
    Manifest::parse(&manifest_text(dir)?, dir)
}

/// Reads the text of a manifest.
pub fn manifest_text(dir: &Path) -> Result<Vec<u8>, String> {
    let path = dir.join(MANIFEST);
    let mut text = Vec::new();
    let read = File::open(&path).and_then(|file| file.take(MAX_MANIFEST).read_to_end(&mut text));
    read.map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    Ok(text)
}

/// Reads a whole checkpoint and checks it, or returns what is wrong with it.
fn read(dir: &Path) -> Result<Saved, String> {
    let manifest = manifest(dir)?;
    let stamps = stamps(dir, manifest.files.keys())?;
    let disks: Vec<String> = manifest.disks.iter().map(|disk| disk_file(&disk.serial)).collect();
    if let Some(missing) = disks.iter().find(|disk| !manifest.files.contains_key(*disk)) {
        return Err(format!("its manifest is damaged: no file {missing:?}"));
    }
    let mut files = BTreeMap::new();
    for (name, written) in &manifest.files {
        let path = dir.join(name);
        let failed = |error: io::Error| format!("cannot read {}: {error}", path.display());
        let file = File::open(&path).map_err(failed)?;
        let found = match disks.contains(name) {
            true => pages::checksum(&file).map_err(failed)?,
            false => {
                let (sealed, found) = pages::seal(&file, name).map_err(failed)?;
                files.insert(name.clone(), sealed);
                found
            }
        };
        check(&path, written, &found)?;
    }
    Ok(Saved { frozen: Frozen::new(dir.to_owned(), files), manifest, dir: dir.to_owned(), stamps })
}

fn check(path: &Path, written: &Checksum, found: &Checksum) -> Result<(), String> {
    if found.bytes != written.bytes {
        return Err(format!(
            "{} is damaged: it has {} bytes, expected {}",
            path.display(),
            found.bytes,
            written.bytes
        ));
    }
    match found == written {
        true => Ok(()),
        false => Err(format!("{} is damaged: checksum mismatch", path.display())),
    }
}

/// Returns what changes when one of the files is written to.
fn stamps<'a>(
    dir: &Path,
    files: impl Iterator<Item = &'a String>,
) -> Result<BTreeMap<String, Stamp>, String> {
    let stamp = |name: &str| {
        let path = dir.join(name);
        let stamp = File::open(&path).and_then(|file| Stamp::of(&file));
        stamp.map_err(|error| format!("cannot read {}: {error}", path.display()))
    };
    let mut all = BTreeMap::from([(MANIFEST.to_owned(), stamp(MANIFEST)?)]);
    for name in files {
        all.insert(name.clone(), stamp(name)?);
    }
    Ok(all)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
