//! The templates of this node: load, build, keep within bounds.

use std::{
    collections::HashMap,
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime},
};

use sandboxer_base::{chain, clock};
use sandboxer_config::{Config, TemplateConfig};
use sandboxer_host::network::TapPool;
use sandboxer_process::cgroup::Cgroup;
use sandboxer_vmm::{Vmm, VmmError, Vmms};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    Kind, Missing, Preparation, ScratchDisks, Shape, Template, TemplateError, TemplateKey,
    bounds::{self, StoredTemplate},
    build::{BuildError, Builder, clear},
    image::{self, Manifest},
    key::{InputDigest, InputHasher, Inputs},
    slot::{Slot, State},
};
use crate::error::tolerate;

/// Time after its last use for which a template is not removed for another one. With more sizes in use than the bounds
/// allow, each build would otherwise remove the template that is needed next.
const SPARED: Duration = Duration::from_secs(60);

/// A template ready for use.
struct Prepared {
    template: Arc<Template>,
    /// The template's inputs.
    survey: Arc<InputDigest>,
    /// Whether this daemon built the template.
    made: bool,
}

/// A template on disk, for people.
#[derive(Debug)]
pub struct TemplateView {
    /// The template's name.
    pub key: TemplateKey,
    /// The template's manifest, if it can be read.
    pub manifest: Result<Manifest, TemplateError>,
    /// Whether new pods are copies of the template.
    pub in_use: bool,
}

/// The templates of a node.
#[derive(Debug)]
pub struct Templates {
    bounds: TemplateConfig,
    builder: Builder,
    surveyor: InputHasher,
    /// Held while a template is loaded or built: either takes a CPU.
    preparing: tokio::sync::Mutex<()>,
    // A plain lock: never held across an await.
    slots: Mutex<HashMap<Kind, Slot>>,
}

impl Templates {
    /// Opens the directory of templates below the state directory, creates it if it is missing, and removes surplus
    /// templates. VMs that become templates start in `cgroup`, and `preparation` prepares their guests.
    pub fn open(
        config: &Config,
        vmms: Vmms,
        tap_pool: Arc<TapPool>,
        cgroup: Option<Cgroup>,
        preparation: Arc<dyn Preparation>,
    ) -> io::Result<Arc<Self>> {
        let root = config.state_dir.join("templates");
        fs::create_dir_all(&root)?;
        for entry in fs::read_dir(&root)?.flatten() {
            // An unfinished template.
            if entry.file_name().as_encoded_bytes().starts_with(b".") {
                tolerate("remove", &entry.path(), clear(&entry.path()));
            }
        }
        let templates = Self {
            bounds: config.templates.clone(),
            builder: Builder {
                vmms,
                config: config.vm.clone(),
                run_dir: run_dir(config),
                root,
                tap_pool,
                cgroup,
                preparation,
                stopping: CancellationToken::new(),
            },
            surveyor: InputHasher::default(),
            preparing: tokio::sync::Mutex::default(),
            slots: Mutex::default(),
        };
        tolerate("bound", &templates.builder.root, templates.keep_within_bounds(None).map(drop));
        Ok(Arc::new(templates))
    }

    /// Returns the template for VMs of this kind, without waiting; if there is none, starts its preparation.
    pub fn get(self: &Arc<Self>, kind: impl Into<Kind>) -> Result<Arc<Template>, Missing> {
        let kind = kind.into();
        if !self.bounds.enabled {
            return Err(Missing::Off);
        }
        if let Some(template) = self.ready(kind) {
            return Ok(template);
        }
        let missing = self.slots().entry(kind).or_default().request()?;
        self.spawn_prepare(kind);
        Err(missing)
    }

    /// Prepares a template in the background.
    fn spawn_prepare(self: &Arc<Self>, kind: Kind) {
        let templates = self.clone();
        tokio::spawn(async move {
            // An error was logged already.
            let _ = templates.prepare(kind).await;
        });
    }

    /// Returns the template for VMs of this kind; loads or builds it if there is none.
    pub async fn prepare(self: &Arc<Self>, kind: impl Into<Kind>) -> Result<Arc<Template>, BuildError> {
        let kind = kind.into();
        // A template that exists needs no wait for the preparation of others.
        if let Some(template) = self.ready(kind) {
            return Ok(template);
        }
        let _one = self.preparing.lock().await;
        if let Some(template) = self.ready(kind) {
            return Ok(template);
        }
        if self.builder.stopping.is_cancelled() {
            return Err(BuildError::Stopping);
        }
        let prepared = self.load_or_build(kind).await;
        let mut slots = self.slots();
        let slot = slots.entry(kind).or_default();
        match prepared {
            Ok(Prepared { template, survey, made }) => {
                slot.settle(template.clone(), survey, made);
                Ok(template)
            }
            Err(error) => {
                if !matches!(error, BuildError::Stopping) && slot.fail(&error) {
                    let error = chain(&error);
                    let (shape, vmm) = (kind.shape, self.vmm(kind).info().name);
                    tracing::warn!(%shape, vmm, error, "no template: pods of this size boot; retrying, logged once");
                }
                Err(error)
            }
        }
    }

    /// Ends the preparation of templates, for good. On return, unfinished work has been undone.
    pub async fn stop(&self) {
        self.builder.stopping.cancel();
        drop(self.preparing.lock().await);
    }

    async fn load_or_build(self: &Arc<Self>, kind: Kind) -> Result<Prepared, BuildError> {
        let scratch = self.builder.preparation.scratch_disks().await?;
        let survey = Arc::new(self.blocking(move |all| all.survey(kind, scratch)).await?);
        let key = survey.inputs.key();
        let (template, made) = match self.load(kind, &key).await? {
            Some(template) => (template, false),
            None => (self.build(kind, &survey).await?, true),
        };
        let (dir, keep) = (self.builder.root.join(&key), key.clone());
        let (fits, bytes) = self
            .blocking(move |all| {
                let bounded = all.keep_within_bounds(Some(&keep));
                Ok((bounded.map_err(TemplateError::path("remove other templates than", &dir))?, taken(&dir)))
            })
            .await?;
        self.slots().entry(kind).or_default().bytes = bytes;
        if !fits {
            self.discard(key).await?;
            return Err(self.no_space(kind.shape));
        }
        Ok(Prepared { template, survey, made })
    }

    /// Returns the template of this name, if it is on disk; removes it if it is damaged or refused.
    async fn load(
        self: &Arc<Self>,
        kind: Kind,
        key: &TemplateKey,
    ) -> Result<Option<Arc<Template>>, TemplateError> {
        let dir = self.builder.root.join(key);
        if !dir.exists() {
            return Ok(None);
        }
        if self.slots().get(&kind).is_some_and(Slot::is_refused) {
            return self.discard(key.clone()).await.map(|()| None);
        }
        match self.blocking(move |_| load(&dir)).await {
            Ok(template) => Ok(Some(template)),
            // Another VM would not help a host that is short of something, and the template may be intact. This is
            // retried.
            Err(error) if !error.is_damage() => Err(error),
            Err(error) => {
                let (shape, vmm) = (kind.shape, self.vmm(kind).info().name);
                tracing::warn!(%shape, vmm, error = chain(&error), "cannot use a template; building a new one");
                self.slots().entry(kind).or_default().state = State::Preparing(Missing::Damaged);
                self.discard(key.clone()).await.map(|()| None)
            }
        }
    }

    async fn build(
        self: &Arc<Self>,
        kind: Kind,
        survey: &Arc<InputDigest>,
    ) -> Result<Arc<Template>, BuildError> {
        // The template will need as much space as the last time.
        let bytes = self.slots().entry(kind).or_default().bytes;
        let fits = self.blocking(move |all| {
            let stored = all.stored(None).map_err(TemplateError::path("list", &all.builder.root))?;
            Ok(bounds::doomed(stored, Some(bytes), &all.bounds).is_some())
        });
        if !fits.await? {
            return Err(self.no_space(kind.shape));
        }
        let began = Instant::now();
        self.builder.build(self.vmm(kind), survey).await?;
        let dir = self.builder.root.join(survey.inputs.key());
        let template = self.blocking(move |_| load(&dir)).await?;
        let (shape, vmm) = (kind.shape, self.vmm(kind).info().name);
        tracing::info!(%shape, vmm, key = %template.key, took = ?began.elapsed(), "built a template");
        Ok(template)
    }

    fn no_space(&self, shape: Shape) -> BuildError {
        let TemplateConfig { most, most_bytes, .. } = self.bounds;
        BuildError::NoRoom { shape, spared: SPARED, most, most_mib: most_bytes >> 20 }
    }

    async fn discard(self: &Arc<Self>, key: TemplateKey) -> Result<(), TemplateError> {
        let dir = self.builder.root.join(&key);
        self.blocking(move |all| all.remove(&key).map(drop).map_err(TemplateError::path("remove", &dir)))
            .await
    }

    /// Runs work that reads or writes files.
    async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> Result<T, TemplateError> + Send + 'static,
    ) -> Result<T, TemplateError> {
        let templates = self.clone();
        tokio::task::spawn_blocking(move || work(&templates)).await.unwrap_or_else(|panic| {
            Err(TemplateError::path("use", &self.builder.root)(io::Error::other(panic)))
        })
    }

    /// Records that a VM could not be restored from this template. If the VMM refuses it although its inputs match, a
    /// template of an earlier daemon is built again, once.
    pub fn not_restored(self: &Arc<Self>, kind: Kind, template: &Template, error: &VmmError) {
        // QEMU exits when it refuses a template. Errors of the host are not the template's.
        if !matches!(error, VmmError::Died { .. } | VmmError::Refused { .. } | VmmError::Malformed { .. }) {
            return;
        }
        let key = template.key.clone();
        if !self.slots().entry(kind).or_default().refuse(&key) {
            return;
        }
        let (shape, vmm) = (kind.shape, self.vmm(kind).info().name);
        tracing::warn!(%shape, vmm, %key, "the VMM refuses a template; building a new one");
        self.spawn_prepare(kind);
    }

    /// Returns what a VM of this kind depends on, without a scratch disk.
    pub async fn inputs(self: &Arc<Self>, kind: Kind) -> Result<Inputs, TemplateError> {
        self.blocking(move |all| all.survey(kind, None)).await.map(|survey| survey.inputs)
    }

    /// Lists all templates on disk.
    pub fn list(&self) -> io::Result<Vec<TemplateView>> {
        let in_use: Vec<TemplateKey> =
            self.slots().values().filter_map(Slot::ready).map(|ready| ready.template.key.clone()).collect();
        let mut views = Vec::new();
        for entry in fs::read_dir(&self.builder.root)? {
            let entry = entry?;
            let Some(key) = entry.file_name().to_str().and_then(TemplateKey::parse) else { continue };
            let in_use = in_use.contains(&key);
            views.push(TemplateView { manifest: image::manifest(&entry.path()), key, in_use });
        }
        views.sort_by(|a, b| a.key.cmp(&b.key));
        Ok(views)
    }

    /// Reads a whole template and checks it. Blocks meanwhile.
    pub fn verify(&self, key: &TemplateKey) -> Result<(), TemplateError> {
        image::load(&self.builder.root.join(key)).map(drop)
    }

    /// Removes a template. Pods that are copies of it keep the shared memory. Returns whether the template existed.
    pub fn remove(&self, key: &TemplateKey) -> io::Result<bool> {
        let dir = self.builder.root.join(key);
        let there = dir.exists();
        clear(&dir)?;
        self.slots().retain(|_, slot| slot.ready().is_none_or(|ready| ready.template.key != *key));
        Ok(there)
    }

    /// Removes the least recently used templates until the rest keeps within the bounds. Never removes `keep` or a
    /// template that was used just now. Returns `false` if these do not fit.
    fn keep_within_bounds(&self, keep: Option<&TemplateKey>) -> io::Result<bool> {
        let Some(doomed) = bounds::doomed(self.stored(keep)?, None, &self.bounds) else { return Ok(false) };
        for key in doomed {
            tracing::info!(%key, "removing the least recently used template");
            self.remove(&key)?;
        }
        Ok(true)
    }

    /// Lists the templates on disk, whatever their content.
    fn stored(&self, keep: Option<&TemplateKey>) -> io::Result<Vec<StoredTemplate>> {
        let spared: Vec<TemplateKey> = self
            .slots()
            .values()
            .filter_map(Slot::ready)
            .filter(|ready| ready.used.elapsed() < SPARED)
            .map(|ready| ready.template.key.clone())
            .collect();
        let mut stored = Vec::new();
        for entry in fs::read_dir(&self.builder.root)? {
            let path = entry?.path();
            let Some(key) = path.file_name().and_then(|name| TemplateKey::parse(name.to_str()?)) else {
                continue;
            };
            let used = fs::metadata(&path).and_then(|meta| meta.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
            let spared = keep == Some(&key) || spared.contains(&key);
            stored.push(StoredTemplate { used, bytes: taken(&path), spared, key });
        }
        Ok(stored)
    }

    /// Returns the template in use, if its inputs have not changed. Files are checked without the lock.
    fn ready(self: &Arc<Self>, kind: Kind) -> Option<Arc<Template>> {
        let survey = self.slots().get(&kind)?.ready()?.survey.clone();
        let spec = self.builder.spec(kind.shape, Path::new(""));
        if !survey.is_current(self.vmm(kind), &spec) {
            return None;
        }
        let mut slots = self.slots();
        let State::Ready(ready) = &mut slots.get_mut(&kind)?.state else { return None };
        // If another template has replaced it meanwhile, that one is newer still.
        let template = ready.template.clone();
        if ready.touch() {
            let dir = self.builder.root.join(&template.key);
            tokio::task::spawn_blocking(move || note_use(&dir));
        }
        Some(template)
    }

    fn survey(&self, kind: Kind, scratch: Option<ScratchDisks>) -> Result<InputDigest, TemplateError> {
        let spec = self.builder.spec(kind.shape, Path::new(""));
        self.surveyor.survey(self.vmm(kind), &spec, scratch).map_err(|(path, source)| TemplateError::Path {
            action: "hash the input",
            path,
            source,
        })
    }

    fn vmm(&self, kind: Kind) -> &dyn Vmm {
        self.builder.vmms.get(kind.vmm).as_ref()
    }

    fn slots(&self) -> MutexGuard<'_, HashMap<Kind, Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the directory for sockets of VMs that become templates.
pub fn run_dir(config: &Config) -> PathBuf {
    config.run_dir.join(sandboxer_process::strays::TEMPLATE)
}

/// Loads a template.
fn load(dir: &Path) -> Result<Arc<Template>, TemplateError> {
    note_use(dir);
    image::load(dir).map(Arc::new)
}

/// Records that a template was used, in the modification time of its directory.
fn note_use(dir: &Path) {
    match File::open(dir).and_then(|dir| dir.set_modified(clock::now())) {
        // The template was removed meanwhile.
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(path = %dir.display(), %error, "cannot note the use of a template");
        }
        _ => {}
    }
}

/// Returns the size of a template's files on disk, bytes; 0 if it cannot be read.
fn taken(dir: &Path) -> u64 {
    let files = fs::read_dir(dir).into_iter().flatten().flatten();
    files.filter_map(|file| file.metadata().ok()).map(|file| file.blocks() * 512).sum()
}
