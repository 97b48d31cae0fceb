//! Settings that a pod takes from its node, as under a runtime that shares the node's kernel: resource limits and
//! sysctls.

use std::{collections::BTreeMap, fs, path::Path};

use sandboxer_config::ContainersConfig;
use sandboxer_process::rlimits::{self, Rlimits};

/// Resource limits of a containerd whose own cannot be read: those of its service under systemd.
const OF_THE_SERVICE: [(&str, [u64; 2]); 4] = [
    ("RLIMIT_CORE", [u64::MAX; 2]),
    ("RLIMIT_MEMLOCK", [8 << 20; 2]),
    ("RLIMIT_NOFILE", [NR_OPEN; 2]),
    ("RLIMIT_NPROC", [u64::MAX; 2]),
];

/// Default resource limits of a process in the guest: the kernel's, as far as they do not depend on memory.
const OF_THE_GUEST: [(&str, [u64; 2]); 13] = [
    ("RLIMIT_AS", [u64::MAX; 2]),
    ("RLIMIT_CORE", [0, u64::MAX]),
    ("RLIMIT_CPU", [u64::MAX; 2]),
    ("RLIMIT_DATA", [u64::MAX; 2]),
    ("RLIMIT_FSIZE", [u64::MAX; 2]),
    ("RLIMIT_LOCKS", [u64::MAX; 2]),
    ("RLIMIT_MSGQUEUE", [819_200; 2]),
    ("RLIMIT_NICE", [0; 2]),
    ("RLIMIT_NOFILE", [1024, 4096]),
    ("RLIMIT_RSS", [u64::MAX; 2]),
    ("RLIMIT_RTPRIO", [0; 2]),
    ("RLIMIT_RTTIME", [u64::MAX; 2]),
    ("RLIMIT_STACK", [8 << 20, u64::MAX]),
];

/// The sysctl with the maximum number of files that a process can be allowed to open, and the kernel's default.
const NR_OPEN_NAME: &str = "fs.nr_open";
const NR_OPEN: u64 = 1 << 20;

/// The sysctl with the number of process ids. Since Linux 6.14 each PID namespace has its own, which begins at the maximum.
const PID_MAX_NAME: &str = "kernel.pid_max";
const PID_MAX: &str = "4194304";
const PID_MAX_OF_NAMESPACES: (u32, u32) = (6, 14);

/// Maximum length of a sysctl's value, bytes.
const MAX_VALUE: usize = 4096;

/// Returns the node's values of the sysctls that guests are configured to have, as its containers see them.
pub fn sysctls(config: &ContainersConfig) -> BTreeMap<String, String> {
    sysctls_in(Path::new("/proc/sys"), &config.node_sysctls)
}

fn sysctls_in(dir: &Path, names: &[String]) -> BTreeMap<String, String> {
    let value = |name: &String| {
        let text = fs::read_to_string(dir.join(name.replace('.', "/"))).ok()?;
        Some(text.trim().to_owned()).filter(|text| !text.is_empty() && text.len() <= MAX_VALUE)
    };
    let values = names.iter().filter_map(|name| Some((name.clone(), value(name)?)));
    // Strict accounting concerns the node's memory: half of a small guest's would not be enough for a program.
    let mut values: BTreeMap<_, _> =
        values.filter(|(name, value)| name != "vm.overcommit_memory" || value != "2").collect();
    let release = fs::read_to_string(dir.join("kernel/osrelease")).ok().and_then(|text| version(&text));
    if release >= Some(PID_MAX_OF_NAMESPACES)
        && let Some(of_node) = values.get_mut(PID_MAX_NAME)
    {
        *of_node = PID_MAX.to_owned();
    }
    values
}

/// Returns the version in a kernel's release.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|character: char| !character.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Returns the resource limits of containers created by process `containerd`, in a guest with these sysctls of the
/// node. Limits that equal the guest's defaults are left out.
pub fn rlimits(
    containerd: Option<i32>,
    config: &ContainersConfig,
    sysctls: &BTreeMap<String, String>,
) -> Rlimits {
    let named = |limits: &[(&str, [u64; 2])]| -> Rlimits {
        limits.iter().map(|(name, limit)| ((*name).to_owned(), *limit)).collect()
    };
    let mut limits = containerd
        .filter(|pid| *pid > 0)
        .and_then(|pid| rlimits::read(pid).ok())
        .unwrap_or_else(|| named(&OF_THE_SERVICE));
    limits.extend(config.rlimits.clone());
    // The guest's kernel rejects larger values.
    let most = sysctls.get(NR_OPEN_NAME).and_then(|most| most.parse().ok()).unwrap_or(NR_OPEN);
    if let Some(files) = limits.get_mut("RLIMIT_NOFILE") {
        *files = files.map(|files| files.min(most));
    }
    let anyway = named(&OF_THE_GUEST);
    limits.retain(|name, limit| anyway.get(name) != Some(&*limit));
    limits
}

#[cfg(test)]
mod tests {
    use sandboxer_config::Config;

    use super::*;

    #[test]
    fn a_guest_has_the_sysctls_that_the_node_has() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("vm")).unwrap();
        fs::write(dir.path().join("vm/max_map_count"), "262144\n").unwrap();
        fs::write(dir.path().join("vm/overcommit_memory"), "2\n").unwrap();
        let names = ["vm.max_map_count", "vm.overcommit_memory", "vm.nothing"].map(str::to_owned);
        let found = sysctls_in(dir.path(), &names);
        assert_eq!(found, [("vm.max_map_count".to_owned(), "262144".to_owned())].into());

        fs::create_dir(dir.path().join("kernel")).unwrap();
        fs::write(dir.path().join("kernel/pid_max"), "32768\n").unwrap();
        for (release, expected) in [("6.1.0-50-amd64", "32768"), ("6.18.44-fc", PID_MAX), ("7.0", PID_MAX)] {
            fs::write(dir.path().join("kernel/osrelease"), release).unwrap();
            let found = sysctls_in(dir.path(), &[PID_MAX_NAME.to_owned()]);
            assert_eq!(found[PID_MAX_NAME], expected, "{release}");
        }
    }

    #[test]
    fn containers_have_the_limits_of_their_containerd_within_what_their_guest_can_have() {
        let mut config = Config::default().containers;
        let own = rlimits::read(std::process::id().cast_signed()).unwrap();
        let this = Some(std::process::id().cast_signed());
        let unbounded = [(NR_OPEN_NAME.to_owned(), u64::MAX.to_string())].into();
        let limits = rlimits(this, &config, &unbounded);
        let anyway: BTreeMap<_, _> = OF_THE_GUEST.into();
        for (name, limit) in &own {
            let expected = Some(limit).filter(|limit| anyway.get(name.as_str()) != Some(*limit));
            assert_eq!(limits.get(name), expected, "{name}");
        }
        config.rlimits.insert("RLIMIT_NOFILE".to_owned(), [64, 1 << 30]);
        assert_eq!(rlimits(this, &config, &BTreeMap::new())["RLIMIT_NOFILE"], [64, NR_OPEN]);
        config.rlimits.clear();
        let of_the_service = rlimits(None, &config, &BTreeMap::new());
        assert_eq!(of_the_service["RLIMIT_NOFILE"], [NR_OPEN; 2]);
        assert_eq!(of_the_service["RLIMIT_CORE"], [u64::MAX; 2]);
    }
}
