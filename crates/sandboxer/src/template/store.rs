//! The templates of this node: found, made, kept within bounds.

use std::{
    collections::HashMap,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime},
};

use tokio::time::Instant;

use super::{
    Shape, Template, TemplateError, TemplateKey,
    build::{BuildError, Builder, clear},
    image::{self, Manifest},
    key::{Inputs, Surveyor},
};
use crate::{
    clock,
    config::{Config, TemplateConfig},
    error::chain,
    host::network::Park,
    vmm::Vmm,
};

/// How long after a failure the next attempt is made by itself.
const RETRY: Duration = Duration::from_secs(60);

/// Why there is no template at the moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Missing {
    /// Templates are turned off.
    Off,
    /// It is being made, or read.
    Preparing,
    /// It could not be made; the log says why.
    Failed,
}

impl Missing {
    /// The reason as it is counted.
    pub const fn as_str(self) -> &'static str {
        match self {
            Missing::Off => "off",
            Missing::Preparing => "preparing",
            Missing::Failed => "failed",
        }
    }
}

/// A template on disk, for people.
#[derive(Debug)]
pub struct TemplateView {
    /// Its name.
    pub key: TemplateKey,
    /// What it says of itself, if it can be read.
    pub manifest: Result<Manifest, TemplateError>,
    /// Pods are copies of it from now on.
    pub in_use: bool,
}

/// The templates of a node.
#[derive(Debug)]
pub struct Templates {
    bounds: TemplateConfig,
    builder: Builder,
    surveyor: Surveyor,
    /// Held while one is read or made, for either takes a processor.
    preparing: tokio::sync::Mutex<()>,
    // A plain lock: never held across an await.
    slots: Mutex<HashMap<Shape, Slot>>,
}

#[derive(Debug)]
enum Slot {
    Preparing,
    Ready(Arc<Template>),
    Failed(Instant),
}

impl Templates {
    /// Opens the directory of templates below the state directory, made if it isn't there.
    pub fn open(config: &Config, vmm: Arc<dyn Vmm>, park: Arc<Park>) -> io::Result<Arc<Self>> {
        let root = config.state_dir.join("templates");
        fs::create_dir_all(&root)?;
        for entry in fs::read_dir(&root)?.flatten() {
            // One whose making was cut short.
            if entry.file_name().as_encoded_bytes().starts_with(b".") {
                clear(&entry.path())?;
            }
        }
        Ok(Arc::new(Self {
            bounds: config.templates.clone(),
            builder: Builder { vmm, config: config.vm.clone(), run_dir: run_dir(config), root, park },
            surveyor: Surveyor::default(),
            preparing: tokio::sync::Mutex::default(),
            slots: Mutex::default(),
        }))
    }

    /// The template for machines of this shape, at once; if there is none, it is prepared meanwhile.
    pub fn get(self: &Arc<Self>, shape: Shape) -> Result<Arc<Template>, Missing> {
        if !self.bounds.enabled {
            return Err(Missing::Off);
        }
        if let Some(template) = self.ready(shape) {
            return Ok(template);
        }
        let mut slots = self.slots();
        let missing = match slots.get(&shape) {
            Some(Slot::Preparing) => return Err(Missing::Preparing),
            Some(Slot::Failed(at)) if at.elapsed() < RETRY => return Err(Missing::Failed),
            Some(Slot::Failed(_)) => Missing::Failed,
            Some(Slot::Ready(_)) | None => Missing::Preparing,
        };
        slots.insert(shape, Slot::Preparing);
        drop(slots);
        let templates = self.clone();
        tokio::spawn(async move {
            // Told in the log already.
            let _ = templates.prepare(shape).await;
        });
        Err(missing)
    }

    /// The template for machines of this shape, read or made if there is none.
    pub async fn prepare(self: &Arc<Self>, shape: Shape) -> Result<Arc<Template>, BuildError> {
        let _one = self.preparing.lock().await;
        if let Some(template) = self.ready(shape) {
            return Ok(template);
        }
        let prepared = self.load_or_build(shape).await;
        let slot = match &prepared {
            Ok(template) => Slot::Ready(template.clone()),
            Err(error) => {
                tracing::warn!(%shape, error = chain(error), "no template: pods of this size boot");
                Slot::Failed(Instant::now())
            }
        };
        self.slots().insert(shape, slot);
        prepared
    }

    async fn load_or_build(self: &Arc<Self>, shape: Shape) -> Result<Arc<Template>, BuildError> {
        let templates = self.clone();
        let inputs = tokio::task::spawn_blocking(move || templates.inputs(shape)).await;
        let inputs = inputs.map_err(|panic| {
            TemplateError::host("take the hash of inputs", &self.builder.root)(io::Error::other(panic))
        })??;
        let dir = self.builder.root.join(inputs.key());
        if dir.exists() {
            match load(dir.clone()).await {
                Ok(template) => return Ok(template),
                Err(error) => {
                    tracing::warn!(%shape, error = chain(&error), "a template can't be used and is made anew");
                }
            }
        }
        let began = Instant::now();
        self.builder.build(inputs).await?;
        let template = load(dir).await?;
        tracing::info!(%shape, key = %template.key, took = ?began.elapsed(), "made a template");
        if let Err(error) = self.bound(&template.key) {
            tracing::warn!(%error, "cannot look for templates to remove");
        }
        Ok(template)
    }

    /// Every template on disk.
    pub fn list(&self) -> io::Result<Vec<TemplateView>> {
        let in_use: Vec<TemplateKey> = self
            .slots()
            .values()
            .filter_map(|slot| match slot {
                Slot::Ready(template) => Some(template.key.clone()),
                Slot::Preparing | Slot::Failed(_) => None,
            })
            .collect();
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

    /// Reads a whole template and checks it. Blocks as long as that takes.
    pub fn verify(&self, key: &TemplateKey) -> Result<(), TemplateError> {
        image::load(&self.builder.root.join(key)).map(drop)
    }

    /// Removes a template. Pods that are copies of it keep what they share. Answers whether it was there.
    pub fn remove(&self, key: &TemplateKey) -> io::Result<bool> {
        let dir = self.builder.root.join(key);
        let there = dir.exists();
        clear(&dir)?;
        self.slots().retain(|_, slot| !matches!(slot, Slot::Ready(template) if template.key == *key));
        Ok(there)
    }

    /// Removes the least recently used until what is left keeps within the bounds; never `keep`.
    fn bound(&self, keep: &TemplateKey) -> io::Result<()> {
        let mut by_age: Vec<_> = self
            .list()?
            .into_iter()
            .map(|view| {
                let used = fs::metadata(self.builder.root.join(&view.key)).and_then(|meta| meta.modified());
                let stored: u64 = view.manifest.iter().flat_map(|m| m.files.values()).map(|f| f.stored).sum();
                (used.unwrap_or(SystemTime::UNIX_EPOCH), view.key, stored)
            })
            .collect();
        by_age.sort();
        let (mut count, mut bytes) = (by_age.len(), by_age.iter().map(|(_, _, stored)| stored).sum::<u64>());
        for (_, key, stored) in by_age.iter().filter(|(_, key, _)| key != keep) {
            if count <= self.bounds.most && bytes <= self.bounds.most_bytes {
                break;
            }
            tracing::info!(%key, "removing a template that was not used for long");
            self.remove(key)?;
            count -= 1;
            bytes -= stored;
        }
        Ok(())
    }

    /// The template in use, if nothing that it depends on has changed. Files are looked at without the lock.
    fn ready(&self, shape: Shape) -> Option<Arc<Template>> {
        let template = match self.slots().get(&shape) {
            Some(Slot::Ready(template)) => template.clone(),
            _ => return None,
        };
        self.is_fresh(shape).then_some(template)
    }

    fn inputs(&self, shape: Shape) -> Result<Inputs, TemplateError> {
        let spec = self.builder.spec(shape, Path::new(""));
        self.surveyor.inputs(self.builder.vmm.as_ref(), &spec).map_err(|(path, source)| TemplateError::Host {
            action: "take the hash of an input",
            path,
            source,
        })
    }

    /// Nothing that the shape's template depends on has changed since it was last looked at.
    fn is_fresh(&self, shape: Shape) -> bool {
        let spec = self.builder.spec(shape, Path::new(""));
        self.surveyor.unchanged(self.builder.vmm.as_ref(), &spec)
    }

    fn slots(&self) -> MutexGuard<'_, HashMap<Shape, Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where the machine that is to be frozen keeps its sockets.
pub fn run_dir(config: &Config) -> PathBuf {
    config.run_dir.join("template")
}

/// Reads a template; by its directory's time it is known when it was last used.
async fn load(dir: PathBuf) -> Result<Arc<Template>, TemplateError> {
    let path = dir.clone();
    let loaded = tokio::task::spawn_blocking(move || {
        let touched = File::open(&dir).and_then(|dir| dir.set_modified(clock::now()));
        if let Err(error) = touched {
            tracing::warn!(path = %dir.display(), %error, "cannot note that a template is used");
        }
        image::load(&dir)
    });
    match loaded.await {
        Ok(loaded) => loaded.map(Arc::new),
        Err(panic) => Err(TemplateError::host("read", &path)(io::Error::other(panic))),
    }
}
