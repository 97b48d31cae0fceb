//! The configuration as written: TOML, every key optional, unknown keys refused.

use std::{
    fmt, fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use super::{Accelerator, Config, RootfsConfig, VmConfig};

/// The default configuration, every key explained.
pub const DEFAULT: &str = include_str!("../../../../vmm-configs/sandboxer.toml");

/// Why a configuration can't be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file can't be read.
    #[error("cannot read configuration {path:?}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It is no TOML, or has a key or a value that isn't known.
    #[error("configuration {path:?} is refused{hint}\n{source}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// What may have been meant; may be empty.
        hint: Hint,
        /// Where and why.
        source: Box<toml::de::Error>,
    },
    /// A value is out of its bounds.
    #[error("configuration {path:?}: {key} is {found}, it takes {takes}")]
    Value {
        /// The file.
        path: PathBuf,
        /// The key, with its table.
        key: &'static str,
        /// The value.
        found: String,
        /// What it may be.
        takes: &'static str,
    },
}

/// The known key that is nearest to an unknown one.
#[derive(Debug, Default)]
pub struct Hint(Option<String>);

impl fmt::Display for Hint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(key) => write!(f, " (did you mean {key:?}?)"),
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
    drain_timeout: Option<Seconds>,
    metrics_listen: Option<SocketAddr>,
    vm: RawVm,
    rootfs: RawRootfs,
    containerd: RawContainerd,
}

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
struct RawVm {
    qemu: Option<PathBuf>,
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
    console_log_kib: Option<u64>,
    agent_log: Option<String>,
}

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
struct RawRootfs {
    mkfs_erofs: Option<PathBuf>,
    cache_mib: Option<u64>,
    writable_mib: Option<u64>,
}

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
struct RawContainerd {
    ttrpc: Option<PathBuf>,
}

/// A whole or broken number of seconds.
#[derive(Debug, Clone, Copy, Deserialize, Serialize)]
#[serde(transparent)]
struct Seconds(f64);

impl Config {
    /// Reads `path`. What the file doesn't set has its default.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text =
            fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Self::parse(&text, path)
    }

    /// Resolves a configuration's text; `path` names it in errors.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let raw: Raw = toml::from_str(text).map_err(|source| ConfigError::Parse {
            path: path.to_owned(),
            hint: nearest(source.message()),
            source: Box::new(source),
        })?;
        resolve(raw, path)
    }
}

fn resolve(raw: Raw, path: &Path) -> Result<Config, ConfigError> {
    let default = Config::default();
    let (vm, rootfs) = (default.vm, default.rootfs);
    let check = |key, found: String, takes, fine: bool| match fine {
        true => Ok(()),
        false => Err(ConfigError::Value { path: path.to_owned(), key, found, takes }),
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
        check(key, value.to_string(), "a whole number from 1 up", value > 0).map(|()| value)
    };

    let max_vcpus = raw.vm.max_vcpus.unwrap_or(vm.max_vcpus);
    let default_vcpus = raw.vm.default_vcpus.unwrap_or(vm.default_vcpus);
    let fine = (1..=max_vcpus).contains(&default_vcpus);
    check("vm.default_vcpus", default_vcpus.to_string(), "1 to vm.max_vcpus", fine)?;
    let max_memory_mib = raw.vm.max_memory_mib.unwrap_or(vm.max_memory_mib);
    let default_memory_mib = raw.vm.default_memory_mib.unwrap_or(vm.default_memory_mib);
    let fine = (64..=max_memory_mib).contains(&default_memory_mib);
    check("vm.default_memory_mib", default_memory_mib.to_string(), "64 to vm.max_memory_mib", fine)?;
    let starts = raw.concurrent_starts.unwrap_or(default.concurrent_starts);

    Ok(Config {
        run_dir: absolute("run_dir", raw.run_dir, default.run_dir)?,
        state_dir: absolute("state_dir", raw.state_dir, default.state_dir)?,
        concurrent_starts: check(
            "concurrent_starts",
            starts.to_string(),
            "a whole number from 1 up",
            starts > 0,
        )
        .map(|()| starts)?,
        drain_timeout: seconds("drain_timeout", raw.drain_timeout, default.drain_timeout)?,
        metrics_listen: raw.metrics_listen,
        containerd_ttrpc: raw.containerd.ttrpc,
        vm: VmConfig {
            qemu: program("vm.qemu", raw.vm.qemu, vm.qemu)?,
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
            console_log_bytes: match raw.vm.console_log_kib {
                Some(kib) => positive("vm.console_log_kib", kib)?.saturating_mul(1 << 10),
                None => vm.console_log_bytes,
            },
            agent_log: raw.vm.agent_log,
        },
        rootfs: RootfsConfig {
            mkfs_erofs: program("rootfs.mkfs_erofs", raw.rootfs.mkfs_erofs, rootfs.mkfs_erofs)?,
            cache_bytes: match raw.rootfs.cache_mib {
                Some(mib) => positive("rootfs.cache_mib", mib)?.saturating_mul(1 << 20),
                None => rootfs.cache_bytes,
            },
            writable_bytes: raw
                .rootfs
                .writable_mib
                .map_or(rootfs.writable_bytes, |mib| mib.saturating_mul(1 << 20)),
        },
    })
}

/// The parser names an unknown key and all that it would have taken; the nearest of them may have
/// been meant.
fn nearest(message: &str) -> Hint {
    let mut quoted = message.split('`').skip(1).step_by(2);
    let unknown = quoted.next().filter(|_| message.starts_with("unknown "));
    let Some(unknown) = unknown else {
        return Hint::default();
    };
    let near = quoted
        .map(|known| (strsim::damerau_levenshtein(unknown, known), known))
        .filter(|&(distance, known)| distance <= known.len().max(unknown.len()) / 2)
        .min_by_key(|&(distance, _)| distance);
    Hint(near.map(|(_, known)| known.to_owned()))
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
        // The one default that depends on the machine stands commented out in the file.
        let built = Config { concurrent_starts: written.concurrent_starts, ..Config::default() };
        assert_eq!(format!("{written:?}"), format!("{built:?}"));
        // And it sets or mentions every key there is.
        let keys = toml::Table::try_from(Raw::default()).unwrap();
        for table in keys.keys() {
            assert!(DEFAULT.contains(table.as_str()), "{table} is not explained");
        }
    }

    #[test]
    fn an_unknown_key_is_an_error_that_suggests_the_nearest() {
        let text = parse("[vm]\nkernal = \"/k\"\n").unwrap_err().to_string();
        assert!(text.contains("kernal") && text.contains("did you mean \"kernel\"?"), "{text}");
        assert!(text.contains("line 2"), "{text}");
        let text = parse("[vm]\naccelerator = \"tgc\"\n").unwrap_err().to_string();
        assert!(text.contains("did you mean \"tcg\"?"), "{text}");
        assert!(!parse("[vm]\nzzzzzzzz = 1\n").unwrap_err().to_string().contains("did you mean"));
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
            ("[rootfs]\ncache_mib = 0", "rootfs.cache_mib"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(&format!("{key} is ")), "{text}: {error}");
        }
    }
}
