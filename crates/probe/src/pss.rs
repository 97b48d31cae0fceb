//! Proportional set size: a page that n processes share counts 1/n for each of them, so that sums over processes count
//! no page twice.

use procfs::process::{MMPermissions, MMapPath, MemoryMap, Process};

/// Minimum size of guest memory, bytes: a readable, writable, non-executable mapping. A VMM's own mappings are smaller.
const GUEST_MEMORY: u64 = 16 << 20;

/// Why a process's memory is unknown.
#[derive(Debug, thiserror::Error)]
pub enum PssError {
    /// The process has ended.
    #[error("process {0} has ended")]
    Gone(i32),
    /// There is no permission: only its owner and root may read a process's memory.
    #[error("no permission to read the memory of process {0}: run as root, or the sum lacks its PSS")]
    Denied(i32),
    /// The memory cannot be read for another reason.
    #[error("cannot read the memory of process {pid}")]
    Other {
        /// Process id.
        pid: i32,
        /// The error of `/proc`.
        source: procfs::ProcError,
    },
}

/// PSS of a VMM by role, KiB.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Split {
    /// The VMM's own memory.
    pub own: u64,
    /// The guest's memory.
    pub guest: u64,
    /// The VMM's share of unchanged template pages, which it maps privately as guest memory.
    pub template: u64,
}

/// Returns the PSS of a process, KiB, from its `smaps_rollup`.
pub fn total(pid: i32) -> Result<u64, PssError> {
    let process = Process::new(pid).map_err(|error| failed(pid, error))?;
    let maps = process.smaps_rollup().map_err(|error| failed(pid, error))?.memory_map_rollup;
    Ok(maps.into_iter().map(|map| bytes(&map, "Pss")).sum::<u64>() >> 10)
}

/// Returns the PSS of a VMM, from its `smaps`. The parts add up to [`total`] at the same moment.
pub fn split(pid: i32) -> Result<Split, PssError> {
    let process = Process::new(pid).map_err(|error| failed(pid, error))?;
    let maps = process.smaps().map_err(|error| failed(pid, error))?;
    let (mut own, mut guest, mut template) = (0, 0, 0);
    for map in maps {
        let pss = bytes(&map, "Pss");
        // Private copies; the kernel includes their PSS only in sums.
        let written = bytes(&map, "Anonymous").min(pss);
        let private_file =
            matches!(map.pathname, MMapPath::Path(_)) && map.perms.contains(MMPermissions::PRIVATE);
        // A running guest has written to its memory. A kernel image that a VMM mapped to load it is never written to.
        if !is_guest_memory(&map) || (private_file && written == 0) {
            own += pss;
        } else if private_file {
            guest += written;
            template += pss - written;
        } else {
            guest += pss;
        }
    }
    Ok(Split { own: own >> 10, guest: guest >> 10, template: template >> 10 })
}

fn is_guest_memory(map: &MemoryMap) -> bool {
    let writable = MMPermissions::READ | MMPermissions::WRITE;
    map.address.1 - map.address.0 >= GUEST_MEMORY
        && map.perms.contains(writable)
        && !map.perms.contains(MMPermissions::EXECUTE)
        && !matches!(map.pathname, MMapPath::Heap | MMapPath::Stack)
}

fn bytes(map: &MemoryMap, field: &str) -> u64 {
    map.extension.map.get(field).copied().unwrap_or_default()
}

fn failed(pid: i32, source: procfs::ProcError) -> PssError {
    match source {
        procfs::ProcError::NotFound(_) => PssError::Gone(pid),
        procfs::ProcError::PermissionDenied(_) => PssError::Denied(pid),
        // Reading an ending process fails with ESRCH.
        procfs::ProcError::Io(ref error, _) if error.raw_os_error() == Some(3) => PssError::Gone(pid),
        source => PssError::Other { pid, source },
    }
}

/// Returns the memory available without swapping, KiB.
pub fn available() -> procfs::ProcResult<u64> {
    use procfs::Current;
    let memory = procfs::Meminfo::current()?;
    Ok(memory.mem_available.unwrap_or(memory.mem_free) >> 10)
}
