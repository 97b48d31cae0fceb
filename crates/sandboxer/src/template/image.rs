//! A template on disk.
//!
//! ```text
//! <key>/template.json    manifest, with the checksums of the other files
//! <key>/…                the VMM's files, under its names
//! ```
//!
//! A template is written to a temporary directory, synced and renamed: a directory of that name is complete, unless it
//! was damaged later.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use sandboxer_base::{digest::hex, failpoint::fail};
use sandboxer_protocol::{id::Id, link::LinkKey};
use sandboxer_vmm::Frozen;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{
    Template, TemplateKey,
    key::Inputs,
    pages::{self, Checksum},
};

/// Version of the format described above.
pub const FORMAT: u32 = 3;

const MANIFEST: &str = "template.json";
/// Maximum size of a manifest, bytes.
const MAX_MANIFEST: u64 = 1 << 20;

/// The manifest of a template.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The inputs of the template.
    pub inputs: Inputs,
    /// Key of the link to the template's agent.
    pub link_key: LinkKey,
    /// Time of the build, ns since 1970.
    pub made_at_ns: u64,
    /// Checksums of the other files, by name.
    pub files: BTreeMap<String, Checksum>,
}

/// The manifest on disk.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sealed {
    /// SHA-256 of `manifest` as compact JSON.
    sha256: String,
    manifest: Manifest,
}

/// A reason why a template cannot be used, or built.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// An operation on a file or directory of the template failed.
    #[error("cannot {action} {path:?} of a template")]
    Path {
        /// The attempted operation.
        action: &'static str,
        /// The path of the file or directory.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A file's content is not what was written.
    #[error("template {path:?} is damaged: {reason}")]
    Damaged {
        /// The path of the damaged file.
        path: PathBuf,
        /// The defect of the file.
        reason: String,
    },
    /// The template's content belongs to another name.
    #[error("template {dir:?} has the content of another one, {key}")]
    Foreign {
        /// The directory of the template.
        dir: PathBuf,
        /// The name that belongs to the content.
        key: TemplateKey,
    },
}

impl TemplateError {
    /// Returns whether the template itself is damaged. Otherwise its files could not be read now: descriptors or memory
    /// are short, or the disk fails.
    pub fn is_damage(&self) -> bool {
        use io::ErrorKind::{IsADirectory, NotADirectory, NotFound};
        match self {
            Self::Damaged { .. } | Self::Foreign { .. } => true,
            Self::Path { source, .. } => matches!(source.kind(), NotFound | NotADirectory | IsADirectory),
        }
    }

    pub(super) fn path(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Path { action, path: path.to_owned(), source }
    }
}

/// Writes the manifest for the files that a VMM wrote to `dir`, and syncs everything.
pub fn write(dir: &Path, inputs: Inputs, link_key: LinkKey, made_at_ns: u64) -> Result<(), TemplateError> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(dir).map_err(TemplateError::path("read", dir))? {
        let entry = entry.map_err(TemplateError::path("read", dir))?;
        let path = entry.path();
        let file = File::open(&path).map_err(TemplateError::path("open", &path))?;
        let checksum = pages::checksum(&file).map_err(TemplateError::path("read", &path))?;
        file.sync_all().map_err(TemplateError::path("sync", &path))?;
        files.insert(entry.file_name().to_string_lossy().into_owned(), checksum);
    }
    let manifest = Manifest { inputs, link_key, made_at_ns, files };
    let path = dir.join(MANIFEST);
    let write = || {
        let text = serde_json::to_vec(&Sealed { sha256: sha256(&manifest), manifest })?;
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(&path)?;
        file.write_all(&text)?;
        file.sync_all()?;
        File::open(dir)?.sync_all()
    };
    write().map_err(TemplateError::path("write", &path))
}

/// Reads the manifest of a template; the other files are checked only when they are read.
pub fn manifest(dir: &Path) -> Result<Manifest, TemplateError> {
    let path = dir.join(MANIFEST);
    let mut text = Vec::new();
    let file = open(&path)?;
    file.take(MAX_MANIFEST).read_to_end(&mut text).map_err(TemplateError::path("read", &path))?;
    parse(&text, dir)
}

fn open(path: &Path) -> Result<File, TemplateError> {
    let opened =
        fail(format_args!("a template is opened: {}", path.display())).and_then(|()| File::open(path));
    opened.map_err(TemplateError::path("open", path))
}

/// Parses the manifest of the template in `dir`.
pub(crate) fn parse(text: &[u8], dir: &Path) -> Result<Manifest, TemplateError> {
    let damaged = |reason: String| TemplateError::Damaged { path: dir.join(MANIFEST), reason };
    let sealed: Sealed = serde_json::from_slice(text).map_err(|error| damaged(error.to_string()))?;
    // A fuzzer cannot find checksums.
    if !cfg!(fuzzing) && sha256(&sealed.manifest) != sealed.sha256 {
        return Err(damaged("checksum mismatch".into()));
    }
    let key = sealed.manifest.inputs.key();
    if dir.file_name().is_none_or(|name| name != key.as_ref().as_os_str()) {
        return Err(TemplateError::Foreign { dir: dir.to_owned(), key });
    }
    if let Some(name) = sealed.manifest.files.keys().find(|name| name.parse::<Id>().is_err()) {
        return Err(damaged(format!("its file name {name:?} is not allowed")));
    }
    Ok(sealed.manifest)
}

/// Loads a template into sealed memory; fails if it differs from what was written.
pub fn load(dir: &Path) -> Result<Template, TemplateError> {
    let manifest = manifest(dir)?;
    let mut files = BTreeMap::new();
    for (name, written) in &manifest.files {
        let path = dir.join(name);
        let file = open(&path)?;
        let sealed = fail(format_args!("a template is read: {}", path.display()))
            .and_then(|()| pages::seal(&file, name));
        let (sealed, found) = sealed.map_err(TemplateError::path("read", &path))?;
        if found.bytes != written.bytes {
            let reason = format!("it has {} bytes, expected {}", found.bytes, written.bytes);
            return Err(TemplateError::Damaged { path, reason });
        }
        if found != *written {
            return Err(TemplateError::Damaged { path, reason: "checksum mismatch".into() });
        }
        files.insert(name.clone(), sealed);
    }
    Ok(Template {
        key: manifest.inputs.key(),
        shape: manifest.inputs.shape,
        link_key: manifest.link_key,
        scratch_limits: manifest.inputs.scratch.map(|scratch| scratch.limits),
        frozen: Frozen::new(dir.to_owned(), files),
    })
}

fn sha256(manifest: &Manifest) -> String {
    let text = serde_json::to_vec(manifest).unwrap_or_default();
    hex(&Sha256::digest(text))
}
