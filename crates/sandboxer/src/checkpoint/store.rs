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
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use sandboxer_base::{Code, failpoint::fail};
use sandboxer_protocol::id::Id;
use sandboxer_vmm::Frozen;

use super::{Manifest, disk_file, refused};
use crate::{
    error::{PodError, tolerate},
    template::{
        Stamp,
        pages::{self, Checksum},
    },
};

const MANIFEST: &str = "checkpoint.json";
/// Maximum size of a manifest, bytes.
const MAX_MANIFEST: u64 = 4 << 20;

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

/// The checkpoints of a node.
#[derive(Debug)]
pub struct Checkpoints {
    root: PathBuf,
    // Plain locks: held for a look-up, never across an await or while a file is read.
    /// The one that was restored last, so that copies that start one after the other share its memory.
    last: Mutex<Option<Arc<Saved>>>,
    /// Number of restores in progress, by directory.
    restoring: Mutex<HashMap<PathBuf, usize>>,
}

/// A checkpoint from which a pod is being restored: until this is dropped, it cannot be removed.
#[derive(Debug)]
pub struct Restoring {
    /// The checkpoint.
    pub saved: Arc<Saved>,
    of: Arc<Checkpoints>,
}

impl Restoring {
    /// Opens the content of a disk.
    pub fn disk(&self, serial: &str) -> io::Result<(File, PathBuf)> {
        let path = self.saved.dir.join(disk_file(serial));
        Ok((File::open(&path)?, path))
    }
}

impl Drop for Restoring {
    fn drop(&mut self) {
        let mut restoring = lock(&self.of.restoring);
        if let Some(count) = restoring.get_mut(&self.saved.dir) {
            *count -= 1;
            if *count == 0 {
                restoring.remove(&self.saved.dir);
            }
        }
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
    target: PathBuf,
    is_finished: bool,
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.is_finished {
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
        for entry in fs::read_dir(&self.dir).map_err(failed("read", &self.dir))? {
            let path = entry.map_err(failed("read", &self.dir))?.path();
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
            let file = File::open(&path).map_err(failed("open", &path))?;
            let checksum = pages::checksum(&file).map_err(failed("read", &path))?;
            file.sync_all().map_err(failed("write", &path))?;
            manifest.files.insert(name.to_owned(), checksum);
        }
        let path = self.dir.join(MANIFEST);
        let written = || {
            fail(format_args!("a checkpoint is written: {}", path.display()))?;
            let mut file = File::options().write(true).create_new(true).mode(0o600).open(&path)?;
            file.write_all(&manifest.to_text()?)?;
            file.sync_all()?;
            File::open(&self.dir)?.sync_all()
        };
        written().map_err(failed("write", &path))?;
        fs::rename(&self.dir, &self.target).map_err(failed("rename to", &self.target))?;
        let parent = self.target.parent().unwrap_or(&self.target).to_owned();
        let synced = File::open(&parent).and_then(|dir| dir.sync_all());
        self.is_finished = true;
        synced.map_err(failed("write", &parent))?;
        Ok(manifest)
    }
}

impl Checkpoints {
    /// Opens the directory of checkpoints below the state directory, and removes what an earlier daemon did not finish.
    pub fn open(state_dir: &Path) -> io::Result<Arc<Self>> {
        let root = state_dir.join("checkpoints");
        DirBuilder::new().recursive(true).mode(0o700).create(&root)?;
        for namespace in fs::read_dir(&root)?.flatten() {
            for entry in fs::read_dir(namespace.path()).into_iter().flatten().flatten() {
                if entry.file_name().as_encoded_bytes().starts_with(b".") {
                    tolerate("remove", &entry.path(), fs::remove_dir_all(entry.path()));
                }
            }
        }
        Ok(Arc::new(Self { root, last: Mutex::default(), restoring: Mutex::default() }))
    }

    /// Begins a checkpoint, unless there is one of this name.
    pub fn draft(&self, namespace: &str, name: &str) -> Result<Draft, PodError> {
        let target = self.dir(namespace, name)?;
        let parent = self.root.join(namespace);
        let dir = parent.join(format!(".new.{name}"));
        let failed = |error: io::Error| {
            let reason = format!("cannot create {}: {error}", dir.display());
            refused(namespace, name, Code::Internal, reason)
        };
        DirBuilder::new().recursive(true).mode(0o700).create(&parent).map_err(failed)?;
        let there = "there is one of this name already: remove it, or choose another name";
        if target.exists() {
            return Err(refused(namespace, name, Code::AlreadyExists, there));
        }
        match DirBuilder::new().mode(0o700).create(&dir) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let reason = "one of this name is being made: wait for its end";
                return Err(refused(namespace, name, Code::FailedPrecondition, reason));
            }
            made => made.map_err(failed)?,
        }
        // `dir` accepts nothing else.
        let parse =
            |text: &str| text.parse::<Id>().map_err(|source| PodError::Id { what: "checkpoint", source });
        let (name, namespace) = (parse(name)?, parse(namespace)?);
        Ok(Draft { name, namespace, dir, target, is_finished: false })
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
            if lock(&self.restoring).contains_key(&dir) {
                let reason = "a pod is being restored from it: try again when that has started";
                return Err(refused(namespace, name, Code::FailedPrecondition, reason));
            }
            if last.as_ref().is_some_and(|saved| saved.dir == dir) {
                *last = None;
            }
            fs::rename(&dir, &doomed).map_err(failed)?;
        }
        fs::remove_dir_all(&doomed).map_err(failed)?;
        Ok(view)
    }

    /// Reads a checkpoint into sealed memory and checks it, unless it is there unchanged.
    pub async fn load(self: &Arc<Self>, namespace: &str, name: &str) -> Result<Restoring, PodError> {
        let dir = self.existing(namespace, name)?;
        // Counted first: from here on it cannot be removed.
        *lock(&self.restoring).entry(dir.clone()).or_default() += 1;
        let all = self.clone();
        let (of_namespace, of_name) = (namespace.to_owned(), name.to_owned());
        let loading = tokio::task::spawn_blocking(move || all.load_now(&dir, &of_namespace, &of_name));
        loading.await.unwrap_or_else(|panic| Err(refused(namespace, name, Code::Internal, panic.to_string())))
    }

    fn load_now(self: &Arc<Self>, dir: &Path, namespace: &str, name: &str) -> Result<Restoring, PodError> {
        let counted = Counted { of: self, dir };
        let known = lock(&self.last).clone().filter(|saved| {
            saved.dir == dir && stamps(dir, saved.manifest.files.keys()).is_ok_and(|now| now == saved.stamps)
        });
        let saved = match known {
            Some(saved) => saved,
            None => {
                let read =
                    read(dir).map_err(|reason| refused(namespace, name, Code::FailedPrecondition, reason));
                let saved = Arc::new(read?);
                *lock(&self.last) = Some(saved.clone());
                saved
            }
        };
        std::mem::forget(counted);
        Ok(Restoring { saved, of: self.clone() })
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

/// A restore that is counted, until it is a [`Restoring`].
struct Counted<'a> {
    of: &'a Arc<Checkpoints>,
    dir: &'a Path,
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        let mut restoring = lock(&self.of.restoring);
        if let Some(count) = restoring.get_mut(self.dir) {
            *count -= 1;
            if *count == 0 {
                restoring.remove(self.dir);
            }
        }
    }
}

/// Reads a manifest, or returns what is wrong with it.
fn manifest(dir: &Path) -> Result<Manifest, String> {
    let path = dir.join(MANIFEST);
    let mut text = Vec::new();
    let read = File::open(&path).and_then(|file| file.take(MAX_MANIFEST).read_to_end(&mut text));
    read.map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    Manifest::parse(&text, dir)
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
