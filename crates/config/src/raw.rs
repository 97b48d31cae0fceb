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
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, ConfigError> {
        Config::parse(text, Path::new("c.toml"))
    }

    #[test]
    fn the_explained_default_is_the_default() {
        let written = parse(DEFAULT).unwrap();
        // The defaults that depend on the VM stand commented out in the file.
        let built = Config {
            concurrent_starts: written.concurrent_starts,
            concurrent_containers: written.concurrent_containers,
            ..Config::default()
        };
        assert_eq!(format!("{written:?}"), format!("{built:?}"));
    }

    #[test]
    fn the_explained_default_has_every_key() {
        // With what is commented out taken in, too; the parser itself names all keys that it knows.
        let set = DEFAULT.replace("\n# ", "\n");
        let tables = ["vm", "templates", "pool", "handlers", "rootfs", "volumes", "network", "containerd"];
        for table in ["", "vm", "templates", "pool", "rootfs", "volumes", "network", "containerd"] {
            let header = if table.is_empty() { String::new() } else { format!("[{table}]\n") };
            let error = toml::from_str::<Raw>(&format!("{header}zz = 1")).unwrap_err();
            let mut known = error.message().split('`').skip(3).step_by(2).peekable();
            assert!(known.peek().is_some(), "{error}");
            let section = &set[set.find(&header).unwrap() + header.len()..];
            let section = section.split("\n[").next().unwrap();
            for key in known.filter(|key| !tables.contains(key)) {
                let explained = section.lines().any(|line| line.starts_with(&format!("{key} = ")));
                assert!(explained, "{table}.{key} is not in the explained default");
            }
        }
    }

    #[test]
    fn the_configurations_of_one_vmm_are_right_and_explain_each_line() {
        for (text, vmm) in [
            (include_str!("../../../vmm-configs/cloud-hypervisor.toml"), VmmChoice::CloudHypervisor),
            (include_str!("../../../vmm-configs/qemu.toml"), VmmChoice::Qemu),
        ] {
            let config = parse(text).unwrap();
            assert_eq!(config.vm.vmm, vmm);
            let lines: Vec<_> = text.lines().collect();
            for pair in lines.windows(2).filter(|pair| pair[1].contains(" = ")) {
                // Keys of one comment stand together.
                let of_one = ["default_vcpus", "max =", "min ="];
                let explained =
                    pair[0].starts_with("# ") || of_one.iter().any(|key| pair[0].starts_with(key));
                assert!(explained, "{vmm:?}: `{}` is not explained", pair[1]);
            }
        }
    }

    #[test]
    fn a_default_beyond_the_node_and_a_bound_below_it_go_together() {
        let vm = parse("[vm]\ndefault_vcpus = 4000\ndefault_memory_mib = 100000000").unwrap().vm;
        assert_eq!((vm.default_vcpus, vm.max_vcpus), (4000, 4000));
        assert_eq!((vm.default_memory_mib, vm.max_memory_mib), (100_000_000, 100_000_000));
        let vm = parse("[vm]\nmax_vcpus = 1\nmax_memory_mib = 128").unwrap().vm;
        assert_eq!((vm.default_vcpus, vm.default_memory_mib), (1, 128));
    }

    #[test]
    fn an_unknown_key_is_an_error_that_suggests_the_nearest() {
        let text = parse("[vm]\nkernal = \"/k\"\n").unwrap_err().to_string();
        assert!(text.contains("kernal") && text.contains("did you mean \"kernel\"?"), "{text}");
        assert!(text.contains("line 2"), "{text}");
        let text = parse("[vm]\nvmm = \"cloud-hypervizor\"\n").unwrap_err().to_string();
        assert!(text.contains("did you mean \"cloud-hypervisor\"?"), "{text}");
        let text = parse("[vm]\naccelerator = \"tgc\"\n").unwrap_err().to_string();
        assert!(text.contains("did you mean \"tcg\"?"), "{text}");
        assert!(!parse("[vm]\nzzzzzzzz = 1\n").unwrap_err().to_string().contains("did you mean"));
    }

    #[test]
    fn a_value_of_another_kind_is_told_in_words_of_the_file() {
        for (text, says) in [
            (
                "\ndrain_timeout = \"5s\"",
                "line 2, column 17: invalid type: string \"5s\", expected a number of seconds, in `drain_timeout = \"5s\"`",
            ),
            ("[vm]\ndefault_vcpus = -1", "expected a whole number, in `default_vcpus"),
            ("run_dir = 5", "expected a path in quotes"),
            ("[vm", "line 1, column 4: unclosed table"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn there_is_no_pool_without_templates() {
        assert!(
            !parse("[templates]\nenabled = false").unwrap().templates.enabled,
            "there is no pool by default"
        );
        let error = parse("[templates]\nenabled = false\n[pool]\nmin = 1").unwrap_err().to_string();
        assert!(error.contains("pool.max is 1, expected 0 while templates.enabled is false"), "{error}");
        assert!(parse("[vm]\njail = true").unwrap().vm.jail);
        let error = parse("[vm]\njail = false").unwrap_err().to_string();
        assert!(error.contains("vm.jail is false, expected only true: every VMM is jailed"), "{error}");
    }

    #[test]
    fn values_out_of_bounds_name_their_key_and_what_it_takes() {
        for (text, key) in [
            ("run_dir = \"run\"", "run_dir"),
            ("concurrent_starts = 0", "concurrent_starts"),
            ("[vm]\ndefault_vcpus = 0", "vm.default_vcpus"),
            ("[vm]\ndefault_memory_mib = 8", "vm.default_memory_mib"),
            ("[vm]\nboot_timeout = -1.0", "vm.boot_timeout"),
            ("[vm]\nboot_timeout = nan", "vm.boot_timeout"),
            ("[templates]\nmax = 0", "templates.max"),
            ("[pool]\nmax = 2\nmin = 3", "pool.min"),
            ("[templates]\nenabled = false\n[pool]\nmax = 8", "pool.max"),
            ("[rootfs]\ncache_mib = 0", "rootfs.cache_mib"),
            ("[rootfs]\nwritable_mib = 1", "rootfs.writable_mib"),
            ("[volumes]\nempty_dir_mib = 1", "volumes.empty_dir_mib"),
            ("[containerd]\nttrpc = \"ttrpc.sock\"", "containerd.ttrpc"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(&format!("{key} is ")), "{text}: {error}");
            let line = text.lines().count();
            assert!(error.contains(&format!("\"c.toml\", line {line}, column ")), "{text}: {error}");
        }
    }
}
