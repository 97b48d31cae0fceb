//! The settings that containerd needs, printed or merged into an existing file.

use std::{
    fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use anyhow::Context;
use sandboxer_base::sockets;
use sandboxer_config::Config;
use sandboxer_doctor::{
    containerd::{CRI_OF_1, CRI_OF_2, HAS_CONTROLLERS, OLDEST, RUNTIME_TYPE, SEEN},
    cri::{self, HANDLER, Reading},
};
use similar::TextDiff;
use toml_edit::{DocumentMut, Item, Table, TableLike};

use super::Args;
use crate::render;

/// First version whose `containerd config default` imports `/etc/containerd/conf.d`.
const READS_CONF_D: (u32, u32) = (2, 2);
/// The version that pulls a pause image for every pod; later ones have a setting to prevent it.
const PULLS_PAUSE: (u32, u32) = (2, 3);
/// First version in which a handler can have its own snapshotter.
const HAS_SNAPSHOTTERS: (u32, u32) = (1, 7);
/// Versions of the file format whose tables are set here: for containerd 2.x, and for 1.6 and 1.7.
const FORMATS_OF_2: std::ops::RangeInclusive<i64> = 3..=4;
const FORMATS_OF_1: std::ops::RangeInclusive<i64> = 2..=2;
/// Maximum size of an accepted file, bytes.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// Why a file cannot be changed.
#[derive(Debug, thiserror::Error)]
enum MergeError {
    /// The file is not valid TOML.
    #[error("{path:?} is not valid TOML: correct it first\n{source}")]
    Syntax { path: PathBuf, source: toml_edit::TomlError },
    /// The file's format has another version.
    #[error("{path:?} has version {found}, the settings are for {}: {advice}", wanted.join(" and "))]
    Format { path: PathBuf, found: String, wanted: Vec<String>, advice: &'static str },
    /// A key is not a table.
    #[error("{key} in {path:?} is not a table: correct it first")]
    NoTable { path: PathBuf, key: String },
}

/// Settings that depend on the running containerd and the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Settings {
    /// Version of containerd: major, minor.
    version: (u32, u32),
    /// Socket of the daemon's sandbox controller.
    controller: PathBuf,
    /// Path of the daemon's configuration; `None` if it is the default one.
    config: Option<PathBuf>,
    /// Whether containerd lacks CAP_SYS_RESOURCE.
    restrict_oom_score_adj: bool,
}

/// Prints the settings, or merges them into a file.
pub(super) async fn run(args: &Args) -> anyhow::Result<()> {
    let config = Config::load_or_default(args.config.as_deref())?;
    // The launcher runs in another directory.
    let own = args.config.as_deref().map(std::path::absolute).transpose();
    let own = own.with_context(|| format!("cannot find {:?}", args.config))?;
    let settings = Settings::for_runtime(&cri::read(&args.endpoint).await, &config, own)?;
    let Some(path) = &args.apply else {
        return Ok(render::print(settings.snippet().trim_end())?);
    };
    let old = read(path)?;
    let new = settings.merge(&old, path)?;
    if old == new {
        eprintln!("{path:?} already has these settings");
        return Ok(());
    }
    render::print(diff(path, &old, &new).trim_end())?;
    if !args.write {
        eprintln!("{path:?} is unchanged; --write changes it");
        return Ok(());
    }
    replace(path, &new).with_context(|| format!("cannot write {path:?}"))?;
    eprintln!("{path:?} is written; restart containerd to apply it");
    Ok(())
}

impl Settings {
    /// Returns the settings for the containerd that responded, or else for the tested version.
    fn for_runtime(reading: &Reading, config: &Config, own: Option<PathBuf>) -> anyhow::Result<Self> {
        let runtime = reading.runtime.as_ref().map_err(|why| {
            eprintln!(
                "{}: {why}; these are the settings for containerd {}.{}",
                reading.endpoint, SEEN.0, SEEN.1
            );
        });
        let version = match runtime {
            Ok(runtime) => sandboxer_doctor::version(&runtime.version)
                .with_context(|| format!("cannot parse containerd's version {:?}", runtime.version))?,
            Err(()) => SEEN,
        };
        anyhow::ensure!(
            version >= OLDEST,
            "containerd {}.{} is older than {}.{}, the oldest version that works: install containerd 2.4",
            version.0,
            version.1,
            OLDEST.0,
            OLDEST.1
        );
        let lacking = runtime.ok().and_then(|runtime| runtime.pid).map(sandboxer_doctor::lacks_sys_resource);
        Ok(Self {
            version,
            controller: config.run_dir.join(sockets::CONTROLLER),
            config: own,
            restrict_oom_score_adj: lacking.unwrap_or_default(),
        })
    }

    /// Returns a whole file for `/etc/containerd/conf.d`.
    fn snippet(&self) -> String {
        let (major, minor) = self.version;
        let mut text = format!("# Makes sandboxer a runtime of containerd {major}.{minor}.\n");
        if !self.has_controllers() {
            text += "# Merge it into /etc/containerd/config.toml itself: `sandboxer-cli check --containerd-config --apply FILE`. Of an\n\
                     # imported file this containerd takes the CRI plugin's whole table, and forgets the rest of your settings.\n\
                     # It pulls its pause image for every pod, also for ours, which do not run it: its registry must be reachable.\n";
            return text + &self.document();
        }
        text += "# Save it as /etc/containerd/conf.d/sandboxer.toml";
        text += match self.version < READS_CONF_D {
            true => {
                ", which this containerd reads only if its config.toml has\n\
                     # imports = [\"/etc/containerd/conf.d/*.toml\"]\n"
            }
            false => {
                ", which containerd reads if its config.toml has\n\
                     # imports = [\"/etc/containerd/conf.d/*.toml\"], as the output of `containerd config default` has.\n\
                     # Without a config.toml it reads no other file.\n"
            }
        };
        if self.version == PULLS_PAUSE {
            text += "# This containerd pulls its pause image for every pod, also for ours, which do not use it: the image's\n# registry must be reachable.\n";
        }
        text + &self.document()
    }

    /// Returns a document with only these settings.
    fn document(&self) -> String {
        let mut document = DocumentMut::new();
        document["version"] = toml_edit::value(*self.formats().start());
        // An empty document has no key of another type.
        if self.set(&mut document).is_ok() { document.to_string() } else { String::new() }
    }

    /// Returns whether this containerd supports sandbox controllers in other processes; else it runs the launcher for
    /// each pod.
    fn has_controllers(&self) -> bool {
        self.version >= HAS_CONTROLLERS
    }

    fn formats(&self) -> std::ops::RangeInclusive<i64> {
        if self.has_controllers() { FORMATS_OF_2 } else { FORMATS_OF_1 }
    }

    /// Merges the needed settings into a configuration; keeps everything else, including comments. `path` is for error
    /// messages.
    fn merge(&self, text: &str, path: &Path) -> Result<String, MergeError> {
        let mut document: DocumentMut =
            text.parse().map_err(|source| MergeError::Syntax { path: path.to_owned(), source })?;
        let version = document.get("version");
        let formats = self.formats();
        if !version.and_then(Item::as_integer).is_some_and(|version| formats.contains(&version)) {
            let found =
                version.map_or_else(|| "none".to_owned(), |version| version.to_string().trim().to_owned());
            let advice = match self.has_controllers() {
                true => "write `containerd config migrate` to a new file, review it, and merge into that",
                false => {
                    "write `containerd config default` to a new file, carry your settings over, and merge into that"
                }
            };
            let wanted = formats.map(|format| format.to_string()).collect();
            return Err(MergeError::Format { path: path.to_owned(), found, wanted, advice });
        }
        self.set(&mut document).map_err(|key| MergeError::NoTable { path: path.to_owned(), key })?;
        Ok(document.to_string())
    }

    /// Sets the keys. Returns as an error the key that is not a table.
    fn set(&self, document: &mut DocumentMut) -> Result<(), String> {
        let controller = self.controller.to_string_lossy().into_owned();
        let root = document.as_table_mut();
        if !self.has_controllers() {
            return self.set_launcher(root);
        }
        let proxy = table(root, &["proxy_plugins", HANDLER])?;
        put(proxy, "type", "sandbox".into());
        put(proxy, "address", controller.into());
        let runtime = table(root, &["plugins", CRI_OF_2, "containerd", "runtimes", HANDLER])?;
        put(runtime, "runtime_type", RUNTIME_TYPE.into());
        put(runtime, "sandboxer", HANDLER.into());
        if !runtime.contains_key("snapshotter") {
            put(runtime, "snapshotter", "overlayfs".into());
        }
        put(runtime, "pod_annotations", toml_edit::Value::from_iter(["io.sandboxer.*"]));
        if self.version > PULLS_PAUSE {
            put(runtime, "disable_pause_image_pull", true.into());
        }
        if self.restrict_oom_score_adj {
            put(table(root, &["plugins", CRI_OF_2])?, "restrict_oom_score_adj", true.into());
        }
        Ok(())
    }

    /// Sets the keys for a containerd that runs the launcher for each pod.
    fn set_launcher(&self, root: &mut Table) -> Result<(), String> {
        let path = ["plugins", CRI_OF_1, "containerd", "runtimes", HANDLER];
        let runtime = table(root, &path)?;
        put(runtime, "runtime_type", RUNTIME_TYPE.into());
        if self.version >= HAS_SNAPSHOTTERS && !runtime.contains_key("snapshotter") {
            put(runtime, "snapshotter", "overlayfs".into());
        }
        put(runtime, "pod_annotations", toml_edit::Value::from_iter(["io.sandboxer.*"]));
        if let Some(config) = &self.config {
            let options = table(root, &[&path[..], &["options"]].concat())?;
            put(options, "ConfigPath", config.to_string_lossy().into_owned().into());
        }
        if self.restrict_oom_score_adj {
            put(table(root, &["plugins", CRI_OF_1])?, "restrict_oom_score_adj", true.into());
        }
        Ok(())
    }
}

/// Returns the table at this path; creates it if it is missing.
fn table<'a>(root: &'a mut Table, path: &[&str]) -> Result<&'a mut dyn TableLike, String> {
    let mut at: &mut dyn TableLike = root;
    for (depth, key) in path.iter().enumerate() {
        let new = || {
            let mut table = Table::new();
            // A header for the innermost table only.
            table.set_implicit(depth + 1 < path.len());
            Item::Table(table)
        };
        at = at
            .entry(key)
            .or_insert_with(new)
            .as_table_like_mut()
            .ok_or_else(|| format!("{:?}", path[..=depth].join(".")))?;
    }
    Ok(at)
}

/// Sets a value unless it is equal; keeps the comment beside it.
fn put(table: &mut dyn TableLike, key: &str, value: toml_edit::Value) {
    match table.get_mut(key).and_then(Item::as_value_mut) {
        Some(old) if same(old, &value) => {}
        Some(old) => {
            let decor = old.decor().clone();
            *old = value;
            *old.decor_mut() = decor;
        }
        None => drop(table.insert(key, Item::Value(value))),
    }
}

/// Returns whether two values are equal, regardless of formatting.
fn same(a: &toml_edit::Value, b: &toml_edit::Value) -> bool {
    match (a.as_array(), b.as_array()) {
        (Some(a), Some(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        _ => match (a.as_str(), b.as_str()) {
            (Some(a), Some(b)) => a == b,
            _ => a.as_bool().is_some() && a.as_bool() == b.as_bool(),
        },
    }
}

fn read(path: &Path) -> anyhow::Result<String> {
    let size = fs::metadata(path).map(|metadata| metadata.len());
    let size = size.with_context(|| {
        format!("cannot read {path:?}; if it does not exist, --containerd-config without --apply prints one")
    })?;
    anyhow::ensure!(size <= MAX_FILE_BYTES, "{path:?} has {size} bytes: too large for a configuration");
    fs::read_to_string(path).with_context(|| format!("cannot read {path:?}"))
}

fn diff(path: &Path, old: &str, new: &str) -> String {
    let name = path.display().to_string();
    TextDiff::from_lines(old, new).unified_diff().header(&name, &format!("{name} (merged)")).to_string()
}

/// Writes a new file with the old one's mode and renames it, so that readers see the old or the new file.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    // A symbolic link is kept: its target is written.
    let path = fs::canonicalize(path)?;
    let dir = path.parent().unwrap_or(Path::new("/"));
    let mut file = tempfile::Builder::new().prefix(".sandboxer-").tempfile_in(dir)?;
    file.write_all(text.as_bytes())?;
    file.as_file().set_permissions(fs::metadata(&path)?.permissions())?;
    file.as_file().sync_all()?;
    file.persist(&path)?;
    Ok(())
}

#[cfg(test)]
mod tests;
