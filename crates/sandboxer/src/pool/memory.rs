//! Memory of the host, of which pods have a reserve.

use std::path::PathBuf;

/// The reserve, as a part of all there is.
const RESERVE: u64 = 8;

/// Where the kernel tells how much memory there is, and how much of it can be had without swapping.
///
/// This is the whole host's. A limit of the daemon's own control group is not looked at: what is used of it is
/// mostly page cache, which tells nothing of what could still be had.
#[derive(Debug)]
pub struct Meminfo(PathBuf);

impl Meminfo {
    /// This host's.
    pub fn of_host() -> Self {
        Self::at("/proc/meminfo")
    }

    /// Returns a file like `/proc/meminfo`.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// Bytes that can be had besides the reserve; `None` while they would be part of it. A host that doesn't tell
    /// has no end of them.
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
        assert_eq!(meminfo.spare(), Some(u64::MAX), "it is told by nobody");
        for (available, spare) in [(900, Some(100 << 10)), (800, Some(0)), (799, None), (0, None)] {
            let text = format!("MemTotal:  6400 kB\nMemFree:  5 kB\nMemAvailable:  {available} kB\n");
            std::fs::write(&meminfo.0, text).unwrap();
            assert_eq!(meminfo.spare(), spare, "of {available} KiB");
        }
        assert!(Meminfo::of_host().spare() < Some(u64::MAX), "the kernel's file is read otherwise");
    }
}
