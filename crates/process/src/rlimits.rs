//! Resource limits (setrlimit(2)) of another process, as containers that it creates would inherit them.

use std::{collections::BTreeMap, fs, io};

/// Limits, soft and hard, by OCI's name. [`u64::MAX`] means no limit.
pub type Rlimits = BTreeMap<String, [u64; 2]>;

/// Names of limits in `/proc/PID/limits`, each with OCI's name.
const NAMES: [(&str, &str); 16] = [
    ("Max cpu time", "RLIMIT_CPU"),
    ("Max file size", "RLIMIT_FSIZE"),
    ("Max data size", "RLIMIT_DATA"),
    ("Max stack size", "RLIMIT_STACK"),
    ("Max core file size", "RLIMIT_CORE"),
    ("Max resident set", "RLIMIT_RSS"),
    ("Max processes", "RLIMIT_NPROC"),
    ("Max open files", "RLIMIT_NOFILE"),
    ("Max locked memory", "RLIMIT_MEMLOCK"),
    ("Max address space", "RLIMIT_AS"),
    ("Max file locks", "RLIMIT_LOCKS"),
    ("Max pending signals", "RLIMIT_SIGPENDING"),
    ("Max msgqueue size", "RLIMIT_MSGQUEUE"),
    ("Max nice priority", "RLIMIT_NICE"),
    ("Max realtime priority", "RLIMIT_RTPRIO"),
    ("Max realtime timeout", "RLIMIT_RTTIME"),
];

/// Reads the limits of process `pid`.
pub fn read(pid: i32) -> io::Result<Rlimits> {
    let text = fs::read_to_string(format!("/proc/{pid}/limits"))?;
    Ok(NAMES.iter().filter_map(|(name, oci)| Some(((*oci).to_owned(), limit(&text, name)?))).collect())
}

/// Returns a limit, soft and hard, from the text of `/proc/PID/limits`.
pub(crate) fn limit(text: &str, name: &str) -> Option<[u64; 2]> {
    let mut values = text.lines().find_map(|line| line.strip_prefix(name))?.split_ascii_whitespace();
    let mut value = || match values.next()? {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    };
    Some([value()?, value()?])
}

#[cfg(test)]
mod tests {
    use rustix::process::{Resource, getrlimit};

    use super::*;

    #[test]
    fn all_limits_of_a_process_are_read() {
        let own = read(std::process::id().cast_signed()).unwrap();
        assert_eq!(own.len(), NAMES.len(), "{own:?}");
        for (resource, name) in [(Resource::Nofile, "RLIMIT_NOFILE"), (Resource::Core, "RLIMIT_CORE")] {
            let limit = getrlimit(resource);
            assert_eq!(own[name], [limit.current, limit.maximum].map(|value| value.unwrap_or(u64::MAX)));
        }
    }
}
