//! The configuration as written: TOML, all keys optional, unknown keys are errors.

use std::{
    collections::BTreeMap,
    fmt, fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use toml::de::DeTable;

use crate::{
    Accelerator, Config, ForeignRules, NetworkConfig, PoolConfig, RootfsConfig, StartPath, TemplateConfig,
    VmConfig, VmmChoice, VolumeConfig, WritableTo, resolved::DEFAULT_SCRATCH,
};

/// The default configuration, with comments for every key.
pub const DEFAULT: &str = include_str!("../../../vmm-configs/sandboxer.toml");

/// Why a configuration is invalid.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read configuration {path:?}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// It is not TOML, or has an unknown key or value.
    #[error("configuration {place}: {reason}")]
    Parse {
        /// The place.
        place: Place,
        /// The error with the key, and a suggestion.
        reason: String,
    },
    /// A value is out of its bounds.
    #[error("configuration {place}: {key} is {found}, expected {takes}")]
    Value {
        /// The place; without a line if the file does not set the key.
        place: Place,
        /// The key, with its table.
        key: &'static str,
        /// The value.
        found: String,
        /// The accepted values.
        takes: &'static str,
    },
}

/// A place in a file.
#[derive(Debug, PartialEq, Eq)]
pub struct Place {
    /// The file.
    pub path: PathBuf,
    /// Line and column (characters), from 1.
    pub at: Option<(usize, usize)>,
}

impl Place {
    /// Returns where byte `offset` of `text` is.
    fn new(path: &Path, text: &str, offset: Option<usize>) -> Self {
        let at = offset.and_then(|offset| text.get(..offset)).map(|before| {
            let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
            (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1)
        });
        Self { path: path.to_owned(), at }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.path)?;
        match self.at {
            Some((line, column)) => write!(f, ", line {line}, column {column}"),
            None => Ok(()),
        }
    }
}

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
struct Raw {
    run_dir: Option<PathBuf>,
    state_dir: Option<PathBuf>,
    concurrent_starts: Option<usize>,
    concurrent_containers: Option<usize>,
    drain_timeout: Option<Seconds>,
    metrics_listen: Option<SocketAddr>,
    vm: RawVm,
    templates: RawTemplates,
    pool: RawPool,
    handlers: BTreeMap<String, StartPath>,
    rootfs: RawRootfs,
    volumes: RawVolumes,
    network: RawNetwork,
    containerd: RawContainerd,
}

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
struct RawVm {
    vmm: Option<VmmChoice>,
    qemu: Option<PathBuf>,
    cloud_hypervisor: Option<PathBuf>,
    accelerator: Option<Accelerator>,
    kernel: Option<PathBuf>,
    initramfs: Option<PathBuf>,
    default_vcpus: Option<u32>,
    default_memory_mib: Option<u64>,
    max_vcpus: Option<u32>,
    max_memory_mib: Option<u64>,
    boot_timeout: Option<Seconds>,
    call_timeout: Option<Seconds>,
    agent_timeout: Option<Seconds>,
    stop_timeout: Option<Seconds>,
    console_log_kib: Option<u64>,
    jail: Option<bool>,
    agent_log: Option<String>,
    idle_cgroup: Option<String>,
}

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
struct RawTemplates {
    enabled: Option<bool>,
    max: Option<usize>,
    max_mib: Option<u64>,
}

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
struct RawPool {
    min: Option<usize>,
    max: Option<usize>,
}

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
struct RawRootfs {
    mkfs_erofs: Option<PathBuf>,
    cache_mib: Option<u64>,
    writable: Option<WritableTo>,
    writable_mib: Option<u64>,
}

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
struct RawNetwork {
    foreign_rules: Option<ForeignRules>,
}

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
struct RawVolumes {
    empty_dir_mib: Option<u64>,
    timeout: Option<Seconds>,
}

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
struct RawContainerd {
    ttrpc: Option<PathBuf>,
}

/// A number of seconds, also a fraction.
#[derive(Debug, Clone, Copy, Deserialize, Serialize)]
#[serde(transparent)]
struct Seconds(f64);

/// Default path of the configuration; the file is optional.
pub const DEFAULT_PATH: &str = "/etc/sandboxer/config.toml";

impl Config {
    /// Reads the given file, else the one at [`DEFAULT_PATH`] if it exists.
    pub fn load_or_default(named: Option<&Path>) -> Result<Self, ConfigError> {
        match named {
            Some(path) => Self::load(path),
            None if Path::new(DEFAULT_PATH).exists() => Self::load(DEFAULT_PATH.as_ref()),
            None => Ok(Self::default()),
        }
    }

    /// Reads `path`. Missing keys have their defaults.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text =
            fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Self::parse(&text, path)
    }

    /// Resolves a configuration's text; `path` is for error messages.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let raw: Raw = toml::from_str(text).map_err(|error| {
            let place = Place::new(path, text, error.span().map(|span| span.start));
            let line = place.at.and_then(|(line, _)| text.lines().nth(line - 1)).unwrap_or_default();
            ConfigError::Parse { reason: reason(error.message(), line.trim()), place }
        })?;
        resolve(raw, |key, found, takes| {
            let place = Place::new(path, text, offset_of(text, key));
            ConfigError::Value { place, key, found, takes }
        })
    }
}

fn resolve(
    raw: Raw,
    refused: impl Fn(&'static str, String, &'static str) -> ConfigError,
) -> Result<Config, ConfigError> {
    let default = Config::default();
    let (vm, templates, rootfs) = (default.vm, default.templates, default.rootfs);
    let writable = raw.rootfs.writable.unwrap_or(rootfs.writable);
    let check = |key, found: String, takes, fine: bool| match fine {
        true => Ok(()),
        false => Err(refused(key, found, takes)),
    };
    let absolute = |key, value: Option<PathBuf>, default: PathBuf| {
        let value = value.unwrap_or(default);
        check(key, format!("{value:?}"), "an absolute path", value.is_absolute()).map(|()| value)
    };
    // A program may also be a plain name, looked up in PATH.
    let program = |key, value: Option<PathBuf>, default: PathBuf| {
        let value = value.unwrap_or(default);
        let fine = value.is_absolute() || value.components().count() == 1;
        check(key, format!("{value:?}"), "an absolute path or a plain name", fine).map(|()| value)
    };
    let seconds = |key, value: Option<Seconds>, default: Duration| match value {
        None => Ok(default),
        Some(Seconds(seconds)) => {
            let fine = (0.001..=86_400.0).contains(&seconds);
            check(key, seconds.to_string(), "seconds, from 0.001 to 86400", fine)
                .map(|()| Duration::from_secs_f64(seconds))
        }
    };
    let positive = |key, value: u64| {
        check(key, value.to_string(), "a whole number of at least 1", value > 0).map(|()| value)
    };

    // If only one of default and maximum is set, the other, which comes from the node, adapts.
    let max_vcpus = raw.vm.max_vcpus.unwrap_or(vm.max_vcpus.max(raw.vm.default_vcpus.unwrap_or(0)));
    let default_vcpus = raw.vm.default_vcpus.unwrap_or(vm.default_vcpus.min(max_vcpus));
    let fine = (1..=max_vcpus).contains(&default_vcpus);
    check("vm.default_vcpus", default_vcpus.to_string(), "1 to vm.max_vcpus", fine)?;
    let max_memory_mib =
        raw.vm.max_memory_mib.unwrap_or(vm.max_memory_mib.max(raw.vm.default_memory_mib.unwrap_or(0)));
    let default_memory_mib = raw.vm.default_memory_mib.unwrap_or(vm.default_memory_mib.min(max_memory_mib));
    let fine = (64..=max_memory_mib).contains(&default_memory_mib);
    check("vm.default_memory_mib", default_memory_mib.to_string(), "64 to vm.max_memory_mib", fine)?;
    let at_once = |key, value: Option<usize>, default: usize| {
        let value = value.unwrap_or(default);
        check(key, value.to_string(), "a whole number of at least 1", value > 0).map(|()| value)
    };

    // Earlier versions accepted false.
    check("vm.jail", "false".to_owned(), "only true: every VMM is jailed", raw.vm.jail != Some(false))?;
    // If only one key is set, the other end of the range adapts.
    let min = raw.pool.min.unwrap_or(default.pool.min);
    let max = raw.pool.max.unwrap_or(default.pool.max.max(min));
    check("pool.min", min.to_string(), "0 to pool.max", min <= max)?;
    check("pool.max", max.to_string(), "0 to 1000", max <= 1000)?;
    // The pool's VMs are copies of templates.
    let enabled = raw.templates.enabled.unwrap_or(templates.enabled);
    check("pool.max", max.to_string(), "0 while templates.enabled is false", enabled || max == 0)?;

    Ok(Config {
        run_dir: absolute("run_dir", raw.run_dir, default.run_dir)?,
        state_dir: absolute("state_dir", raw.state_dir, default.state_dir)?,
        concurrent_starts: at_once("concurrent_starts", raw.concurrent_starts, default.concurrent_starts)?,
        concurrent_containers: at_once(
            "concurrent_containers",
            raw.concurrent_containers,
            default.concurrent_containers,
        )?,
        drain_timeout: seconds("drain_timeout", raw.drain_timeout, default.drain_timeout)?,
        metrics_listen: raw.metrics_listen,
        containerd_ttrpc: match raw.containerd.ttrpc {
            Some(path) => Some(absolute("containerd.ttrpc", None, path)?),
            None => None,
        },
        vm: VmConfig {
            vmm: raw.vm.vmm.unwrap_or(vm.vmm),
            qemu: program("vm.qemu", raw.vm.qemu, vm.qemu)?,
            cloud_hypervisor: program("vm.cloud_hypervisor", raw.vm.cloud_hypervisor, vm.cloud_hypervisor)?,
            accelerator: raw.vm.accelerator.unwrap_or(vm.accelerator),
            kernel: absolute("vm.kernel", raw.vm.kernel, vm.kernel)?,
            initramfs: absolute("vm.initramfs", raw.vm.initramfs, vm.initramfs)?,
            default_vcpus,
            default_memory_mib,
            max_vcpus,
            max_memory_mib,
            boot_timeout: seconds("vm.boot_timeout", raw.vm.boot_timeout, vm.boot_timeout)?,
            call_timeout: seconds("vm.call_timeout", raw.vm.call_timeout, vm.call_timeout)?,
            agent_timeout: seconds("vm.agent_timeout", raw.vm.agent_timeout, vm.agent_timeout)?,
            stop_timeout: seconds("vm.stop_timeout", raw.vm.stop_timeout, vm.stop_timeout)?,
            console_log_bytes: match raw.vm.console_log_kib {
                Some(kib) => positive("vm.console_log_kib", kib)?.saturating_mul(1 << 10),
                None => vm.console_log_bytes,
            },
            jail: true,
            agent_log: raw.vm.agent_log,
            idle_cgroup: raw.vm.idle_cgroup.unwrap_or(vm.idle_cgroup),
        },
        templates: TemplateConfig {
            enabled,
            most: at_once("templates.max", raw.templates.max, templates.most)?,
            most_bytes: match raw.templates.max_mib {
                Some(mib) => positive("templates.max_mib", mib)?.saturating_mul(1 << 20),
                None => templates.most_bytes,
            },
        },
        pool: PoolConfig { min, max },
        handlers: raw.handlers,
        rootfs: RootfsConfig {
            mkfs_erofs: program("rootfs.mkfs_erofs", raw.rootfs.mkfs_erofs, rootfs.mkfs_erofs)?,
            cache_bytes: match raw.rootfs.cache_mib {
                Some(mib) => positive("rootfs.cache_mib", mib)?.saturating_mul(1 << 20),
                None => rootfs.cache_bytes,
            },
            writable,
            writable_bytes: match (writable, raw.rootfs.writable_mib.unwrap_or(0)) {
                (WritableTo::Disk, 0) => DEFAULT_SCRATCH,
                (WritableTo::Memory, mib) => mib.saturating_mul(1 << 20),
                (WritableTo::Disk, mib) => {
                    let fine = (16..=16 << 20).contains(&mib);
                    check("rootfs.writable_mib", mib.to_string(), "0 and 16 to 16777216", fine)?;
                    mib << 20
                }
            },
        },
        network: NetworkConfig {
            foreign_rules: raw.network.foreign_rules.unwrap_or(default.network.foreign_rules),
        },
        volumes: VolumeConfig {
            empty_dir_bytes: match raw.volumes.empty_dir_mib {
                Some(mib) => {
                    let fine = (16..=16 << 20).contains(&mib);
                    check("volumes.empty_dir_mib", mib.to_string(), "16 to 16777216", fine)?;
                    mib << 20
                }
                None => default.volumes.empty_dir_bytes,
            },
            timeout: seconds("volumes.timeout", raw.volumes.timeout, default.volumes.timeout)?,
        },
        helper_program: default.helper_program,
    })
}

/// Returns the offset of the value of a key such as `vm.kernel`.
fn offset_of(text: &str, key: &str) -> Option<usize> {
    let document = DeTable::parse(text).ok()?;
    let (tables, name) = key.rsplit_once('.').map_or((None, key), |(tables, name)| (Some(tables), name));
    let table = match tables {
        Some(table) => document.get_ref().get(table)?.get_ref().as_table()?,
        None => document.get_ref(),
    };
    Some(table.get(name)?.span().start)
}

/// Returns the parser's message in the configuration's terms, with the line. For an unknown key or value it suggests
/// the nearest known one.
fn reason(message: &str, line: &str) -> String {
    let message = message
        .replace("unknown field", "unknown key")
        .replace("unknown variant", "unknown value")
        .replace("path string", "a path in quotes")
        .replace("expected f64", "expected a number of seconds")
        .replace("socket address", "an address with a port in quotes");
    let message = ["u32", "u64", "usize"]
        .iter()
        .fold(message, |text, kind| text.replace(&format!("expected {kind}"), "expected a whole number"));
    let hint = nearest(&message).map(|known| format!(" (did you mean {known:?}?)")).unwrap_or_default();
    match line {
        "" => format!("{message}{hint}"),
        _ => format!("{message}{hint}, in `{line}`"),
    }
}

fn nearest(message: &str) -> Option<String> {
    let mut quoted = message.split('`').skip(1).step_by(2);
    let unknown = quoted.next().filter(|_| message.starts_with("unknown "))?;
    let near = quoted
        .map(|known| (strsim::damerau_levenshtein(unknown, known), known))
        .filter(|&(distance, known)| distance <= known.len().max(unknown.len()) / 2)
        .min_by_key(|&(distance, _)| distance)?;
    Some(near.1.to_owned())
}

#[cfg(test)]
mod tests;
