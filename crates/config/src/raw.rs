//! The configuration as written: TOML in which all keys are optional and unknown keys are errors.

use std::{
    collections::BTreeMap,
    fmt, fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use toml::de::DeTable;

use self::{
    bounds::Bounds, checkpoints::RawCheckpoints, containers::RawContainers, handler::RawHandler,
    placement::RawPlacement, traces::RawTraces,
};
use crate::{
    Accelerator, Config, DISK_BPS, DISK_IOPS, ForeignRules, LimitsConfig, NET_BPS, NetworkConfig, PoolConfig,
    RootfsConfig, TemplateConfig, VhostNet, VmConfig, VmmChoice, VolumeConfig, WritableTo,
    resolved::DEFAULT_SCRATCH,
};

mod bounds;
mod checkpoints;
mod containers;
mod handler;
mod placement;
mod traces;

/// The default configuration, with comments for every key.
pub const DEFAULT: &str = include_str!("../../../vmm-configs/sandboxer.toml");

/// The reason why a configuration is invalid.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read configuration {path:?}")]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file is not TOML, or has an unknown key or value.
    #[error("configuration {place}: {reason}")]
    Parse {
        /// The place of the error.
        place: Place,
        /// The parser's error with the key, and a suggestion.
        reason: String,
    },
    /// A value is out of its bounds.
    #[error("configuration {place}: {key} is {found}, expected {takes}")]
    Value {
        /// The place of the value, without a line if the file does not set the key.
        place: Place,
        /// The key, with its table.
        key: &'static str,
        /// The value, as text.
        found: String,
        /// The accepted values.
        takes: &'static str,
    },
}

/// A place in a file.
#[derive(Debug, PartialEq, Eq)]
pub struct Place {
    /// Path of the file.
    pub path: PathBuf,
    /// Line and column (in characters), counted from 1.
    pub at: Option<(usize, usize)>,
}

impl Place {
    /// Returns the place of byte `offset` of `text`.
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

/// Step in which memory is plugged, MiB.
const HOTPLUG_STEP_MIB: u64 = 128;
/// Maximum memory that a VM can get while it runs, MiB.
const MAX_HOTPLUG_MIB: u64 = 1 << 20;
/// Maximum number of vCPUs that a VM can get while it runs: the guest's kernel supports 64.
const MAX_HOTPLUG_VCPUS: u32 = 63;

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
    checkpoints: RawCheckpoints,
    pool: RawPool,
    handlers: BTreeMap<String, RawHandler>,
    rootfs: RawRootfs,
    volumes: RawVolumes,
    network: RawNetwork,
    placement: RawPlacement,
    limits: RawLimits,
    containers: RawContainers,
    containerd: RawContainerd,
    traces: RawTraces,
}

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
struct RawVm {
    vmm: Option<VmmChoice>,
    qemu: Option<PathBuf>,
    cloud_hypervisor: Option<PathBuf>,
    firecracker: Option<PathBuf>,
    accelerator: Option<Accelerator>,
    kernel: Option<PathBuf>,
    initramfs: Option<PathBuf>,
    default_vcpus: Option<u32>,
    default_memory_mib: Option<u64>,
    max_vcpus: Option<u32>,
    max_memory_mib: Option<u64>,
    hotplug_memory_mib: Option<u64>,
    hotplug_vcpus: Option<u32>,
    boot_timeout: Option<Seconds>,
    call_timeout: Option<Seconds>,
    agent_timeout: Option<Seconds>,
    stop_timeout: Option<Seconds>,
    console_log_kib: Option<u64>,
    vhost_net: Option<VhostNet>,
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
struct RawLimits {
    disk_bps: Option<u64>,
    disk_iops: Option<u64>,
    net_bps_rx: Option<u64>,
    net_bps_tx: Option<u64>,
}

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
struct RawVolumes {
    kubelet_root: Option<PathBuf>,
    empty_dir_mib: Option<u64>,
    timeout: Option<Seconds>,
}

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
struct RawContainerd {
    ttrpc: Option<PathBuf>,
}

/// A number of seconds, possibly a fraction.
#[derive(Debug, Clone, Copy, Deserialize, Serialize)]
#[serde(transparent)]
struct Seconds(f64);

/// Default path of the configuration; the file is optional.
pub const DEFAULT_PATH: &str = "/etc/sandboxer/config.toml";

impl Config {
    /// Reads the given file, or else the one at [`DEFAULT_PATH`] if it exists.
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

    /// Resolves the text of a configuration; `path` is for error messages.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let raw: Raw = toml::from_str(text).map_err(|error| {
            let place = Place::new(path, text, error.span().map(|span| span.start));
            let line = place.at.and_then(|(line, _)| text.lines().nth(line - 1)).unwrap_or_default();
            ConfigError::Parse { reason: reason(error.message(), line.trim()), place }
        })?;
        let value_error = |key, found, takes| {
            let place = Place::new(path, text, offset_of(text, key));
            ConfigError::Value { place, key, found, takes }
        };
        resolve(raw, &Bounds { value_error: &value_error })
    }
}

fn resolve(raw: Raw, bounds: &Bounds<'_>) -> Result<Config, ConfigError> {
    let default = Config::default();
    let (templates, pool) = templates_and_pool(raw.templates, raw.pool, &default, bounds)?;
    Ok(Config {
        run_dir: bounds.absolute("run_dir", raw.run_dir, default.run_dir)?,
        state_dir: bounds.absolute("state_dir", raw.state_dir, default.state_dir)?,
        concurrent_starts: bounds.count(
            "concurrent_starts",
            raw.concurrent_starts,
            default.concurrent_starts,
        )?,
        concurrent_containers: bounds.count(
            "concurrent_containers",
            raw.concurrent_containers,
            default.concurrent_containers,
        )?,
        drain_timeout: bounds.seconds("drain_timeout", raw.drain_timeout, default.drain_timeout)?,
        metrics_listen: raw.metrics_listen,
        containerd_ttrpc: match raw.containerd.ttrpc {
            Some(path) => Some(bounds.absolute("containerd.ttrpc", None, path)?),
            None => None,
        },
        vm: vm(raw.vm, default.vm, bounds)?,
        templates,
        checkpoints: raw.checkpoints.resolve(default.checkpoints, bounds)?,
        pool,
        handlers: raw.handlers.into_iter().map(|(name, handler)| (name, handler.resolve())).collect(),
        rootfs: rootfs(raw.rootfs, default.rootfs, bounds)?,
        network: NetworkConfig {
            foreign_rules: raw.network.foreign_rules.unwrap_or(default.network.foreign_rules),
        },
        placement: raw.placement.resolve(default.placement, &pool, bounds)?,
        limits: limits(&raw.limits, bounds)?,
        containers: raw.containers.resolve(default.containers, bounds)?,
        traces: raw.traces.resolve(bounds)?,
        volumes: VolumeConfig {
            kubelet_root: bounds.absolute(
                "volumes.kubelet_root",
                raw.volumes.kubelet_root,
                default.volumes.kubelet_root,
            )?,
            empty_dir_bytes: match raw.volumes.empty_dir_mib {
                Some(mib) => bounds.disk("volumes.empty_dir_mib", mib, "16 to 16777216")?,
                None => default.volumes.empty_dir_bytes,
            },
            timeout: bounds.seconds("volumes.timeout", raw.volumes.timeout, default.volumes.timeout)?,
        },
        helper_program: default.helper_program,
    })
}

fn vm(raw: RawVm, vm: VmConfig, bounds: &Bounds<'_>) -> Result<VmConfig, ConfigError> {
    // If only one of default and maximum is set, the other, which comes from the node, adapts.
    let max_vcpus = raw.max_vcpus.unwrap_or(vm.max_vcpus.max(raw.default_vcpus.unwrap_or(0)));
    let default_vcpus = raw.default_vcpus.unwrap_or(vm.default_vcpus.min(max_vcpus));
    let fine = (1..=max_vcpus).contains(&default_vcpus);
    bounds.check("vm.default_vcpus", default_vcpus.to_string(), "1 to vm.max_vcpus", fine)?;
    let max_memory_mib =
        raw.max_memory_mib.unwrap_or(vm.max_memory_mib.max(raw.default_memory_mib.unwrap_or(0)));
    let default_memory_mib = raw.default_memory_mib.unwrap_or(vm.default_memory_mib.min(max_memory_mib));
    let fine = (64..=max_memory_mib).contains(&default_memory_mib);
    bounds.check("vm.default_memory_mib", default_memory_mib.to_string(), "64 to vm.max_memory_mib", fine)?;
    let hotplug_memory_mib = raw.hotplug_memory_mib.unwrap_or(vm.hotplug_memory_mib);
    let fine = hotplug_memory_mib.is_multiple_of(HOTPLUG_STEP_MIB) && hotplug_memory_mib <= MAX_HOTPLUG_MIB;
    let takes = "a multiple of 128, at most 1048576, or 0";
    bounds.check("vm.hotplug_memory_mib", hotplug_memory_mib.to_string(), takes, fine)?;
    let hotplug_vcpus = raw.hotplug_vcpus.unwrap_or(vm.hotplug_vcpus);
    let fine = hotplug_vcpus <= MAX_HOTPLUG_VCPUS;
    bounds.check("vm.hotplug_vcpus", hotplug_vcpus.to_string(), "0 to 63", fine)?;
    // Earlier versions accepted false.
    bounds.check("vm.jail", "false".to_owned(), "only true: every VMM is jailed", raw.jail != Some(false))?;
    Ok(VmConfig {
        vmm: raw.vmm.unwrap_or(vm.vmm),
        qemu: raw.qemu.map(|program| bounds.program("vm.qemu", program)).transpose()?.or(vm.qemu),
        cloud_hypervisor: bounds
            .program("vm.cloud_hypervisor", raw.cloud_hypervisor.unwrap_or(vm.cloud_hypervisor))?,
        firecracker: bounds.program("vm.firecracker", raw.firecracker.unwrap_or(vm.firecracker))?,
        accelerator: raw.accelerator.unwrap_or(vm.accelerator),
        kernel: bounds.absolute("vm.kernel", raw.kernel, vm.kernel)?,
        initramfs: bounds.absolute("vm.initramfs", raw.initramfs, vm.initramfs)?,
        default_vcpus,
        default_memory_mib,
        max_vcpus,
        max_memory_mib,
        hotplug_memory_mib,
        hotplug_vcpus,
        boot_timeout: bounds.seconds("vm.boot_timeout", raw.boot_timeout, vm.boot_timeout)?,
        call_timeout: bounds.seconds("vm.call_timeout", raw.call_timeout, vm.call_timeout)?,
        agent_timeout: bounds.seconds("vm.agent_timeout", raw.agent_timeout, vm.agent_timeout)?,
        stop_timeout: bounds.seconds("vm.stop_timeout", raw.stop_timeout, vm.stop_timeout)?,
        console_log_bytes: bounds.size(
            "vm.console_log_kib",
            raw.console_log_kib,
            1 << 10,
            vm.console_log_bytes,
        )?,
        vhost_net: raw.vhost_net.unwrap_or(vm.vhost_net),
        jail: true,
        agent_log: raw.agent_log,
        idle_cgroup: raw.idle_cgroup.unwrap_or(vm.idle_cgroup),
    })
}

fn templates_and_pool(
    templates: RawTemplates,
    pool: RawPool,
    default: &Config,
    bounds: &Bounds<'_>,
) -> Result<(TemplateConfig, PoolConfig), ConfigError> {
    // If only one key is set, the other end of the range adapts.
    let min = pool.min.unwrap_or(default.pool.min);
    let max = pool.max.unwrap_or(default.pool.max.max(min));
    bounds.check("pool.min", min.to_string(), "0 to pool.max", min <= max)?;
    bounds.check("pool.max", max.to_string(), "0 to 1000", max <= 1000)?;
    // The pool's VMs are copies of templates.
    let enabled = templates.enabled.unwrap_or(default.templates.enabled);
    bounds.check("pool.max", max.to_string(), "0 while templates.enabled is false", enabled || max == 0)?;
    let most = bounds.count("templates.max", templates.max, default.templates.most)?;
    let most_bytes =
        bounds.size("templates.max_mib", templates.max_mib, 1 << 20, default.templates.most_bytes)?;
    Ok((TemplateConfig { enabled, most, most_bytes }, PoolConfig { min, max }))
}

fn limits(raw: &RawLimits, bounds: &Bounds<'_>) -> Result<LimitsConfig, ConfigError> {
    let check = |key, value: Option<u64>, range: std::ops::RangeInclusive<u64>, takes| {
        let fine = value.is_none_or(|value| range.contains(&value));
        bounds.check(key, value.unwrap_or_default().to_string(), takes, fine)
    };
    check("limits.disk_bps", raw.disk_bps, DISK_BPS, "bytes per second, 65536 to 1099511627776")?;
    check("limits.disk_iops", raw.disk_iops, DISK_IOPS, "operations per second, 10 to 10000000")?;
    let net = "bytes per second, 16384 to 1099511627776";
    check("limits.net_bps_rx", raw.net_bps_rx, NET_BPS, net)?;
    check("limits.net_bps_tx", raw.net_bps_tx, NET_BPS, net)?;
    let &RawLimits { disk_bps, disk_iops, net_bps_rx, net_bps_tx } = raw;
    Ok(LimitsConfig { disk_bps, disk_iops, net_bps_rx, net_bps_tx })
}

fn rootfs(raw: RawRootfs, rootfs: RootfsConfig, bounds: &Bounds<'_>) -> Result<RootfsConfig, ConfigError> {
    let writable = raw.writable.unwrap_or(rootfs.writable);
    Ok(RootfsConfig {
        mkfs_erofs: bounds.program("rootfs.mkfs_erofs", raw.mkfs_erofs.unwrap_or(rootfs.mkfs_erofs))?,
        cache_bytes: bounds.size("rootfs.cache_mib", raw.cache_mib, 1 << 20, rootfs.cache_bytes)?,
        writable,
        writable_bytes: match (writable, raw.writable_mib.unwrap_or(0)) {
            (WritableTo::Disk, 0) => DEFAULT_SCRATCH,
            (WritableTo::Memory, mib) => mib.saturating_mul(1 << 20),
            (WritableTo::Disk, mib) => bounds.disk("rootfs.writable_mib", mib, "0 and 16 to 16777216")?,
        },
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

/// Returns the parser's message in the terms of the configuration, with the line. Suggests the nearest known name for
/// an unknown key or value.
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
