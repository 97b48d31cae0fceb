//! The host's available memory, with a reserve for pods.

use std::path::PathBuf;

/// The reserve, as a divisor of the total memory.
const RESERVE: u64 = 8;

/// The file in which the kernel reports total memory, and memory available without swapping.
///
/// The figures cover the whole host. The limit of the daemon's own cgroup is ignored: most of its usage is page cache,
/// which does not show how much is still available.
#[derive(Debug)]
pub struct Meminfo(PathBuf);

impl Meminfo {
    /// Returns the memory information of this host.
    pub fn of_host() -> Self {
        Self::at("/proc/meminfo")
    }

    /// Returns the memory information of a file like `/proc/meminfo`.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// Returns the bytes available beyond the reserve; `None` if there are none. If the host does not report its
    /// memory, there is no limit.
    pub fn spare(&self) -> Option<u64> {
        let text = std::fs::read_to_string(&self.0).unwrap_or_default();
        let kib = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.and_then(|line| line.split_ascii_whitespace().next()?.parse::<u64>().ok())
        };
        match (kib("MemAvailable"), kib("MemTotal")) {
            (Some(available), Some(total)) => {
                available.checked_sub(total / RESERVE).map(|kib| kib.saturating_mul(1 << 10))
            }
            _ => Some(u64::MAX),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_keep_an_eighth_of_all_memory() {
        let dir = tempfile::tempdir().unwrap();
        let meminfo = Meminfo::at(dir.path().join("meminfo"));
        assert_eq!(meminfo.spare(), Some(u64::MAX), "the host does not report it");
        for (available, spare) in [(900, Some(100 << 10)), (800, Some(0)), (799, None), (0, None)] {
            let text = format!("MemTotal:  6400 kB\nMemFree:  5 kB\nMemAvailable:  {available} kB\n");
            std::fs::write(&meminfo.0, text).unwrap();
            assert_eq!(meminfo.spare(), spare, "of {available} KiB");
        }
        assert!(Meminfo::of_host().spare() < Some(u64::MAX), "the kernel's file is read otherwise");
    }
}
