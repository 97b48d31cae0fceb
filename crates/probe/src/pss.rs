//! Proportional set size: each page counted to a process by its share in it, so that sums over processes
//! count no page twice.

use procfs::process::{MMPermissions, MMapPath, MemoryMap, Process};

/// A mapping this large, readable, writable and not executable, is a guest's memory: a VMM itself has no use
/// for one. Bytes.
const GUEST_MEMORY: u64 = 16 << 20;

/// Why a process' memory is not known.
#[derive(Debug, thiserror::Error)]
pub enum PssError {
    /// It has ended.
    #[error("process {0} has ended")]
    Gone(i32),
    /// Only its owner and root may look.
    #[error(
        "not permitted to read the memory of process {0}: run as root, or its PSS is missing from the sum"
    )]
    Denied(i32),
    /// Something else.
    #[error("cannot read the memory of process {pid}")]
    Other {
        /// Its id.
        pid: i32,
        /// What the system said.
        source: procfs::ProcError,
    },
}

/// PSS of a virtual machine monitor, KiB, by what the pages are for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Split {
    /// The monitor's own.
    pub own: u64,
    /// The guest's memory.
    pub guest: u64,
    /// Its share of pages of a file that it maps privately as guest memory: a template not yet written to.
    pub template: u64,
}

/// Returns the PSS of a process, KiB, from its `smaps_rollup`.
pub fn total(pid: i32) -> Result<u64, PssError> {
    let process = Process::new(pid).map_err(|error| failed(pid, error))?;
    let maps = process.smaps_rollup().map_err(|error| failed(pid, error))?.memory_map_rollup;
    Ok(maps.into_iter().map(|map| bytes(&map, "Pss")).sum::<u64>() >> 10)
}

/// Returns the PSS of a VMM, from its `smaps`. The parts add up to [`total`] of the same moment.
pub fn split(pid: i32) -> Result<Split, PssError> {
    let process = Process::new(pid).map_err(|error| failed(pid, error))?;
    let maps = process.smaps().map_err(|error| failed(pid, error))?;
    let (mut own, mut guest, mut template) = (0, 0, 0);
    for map in maps {
        let pss = bytes(&map, "Pss");
        // Copies of its own, shared with nobody; the kernel tells their PSS in sums only.
        let written = bytes(&map, "Anonymous").min(pss);
        let private_file =
            matches!(map.pathname, MMapPath::Path(_)) && map.perms.contains(MMPermissions::PRIVATE);
        // A guest has written to its memory by the time it runs; a kernel image that a monitor has mapped to
        // load it from is never written to.
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
        // A process that is ending answers ESRCH.
        procfs::ProcError::Io(ref error, _) if error.raw_os_error() == Some(3) => PssError::Gone(pid),
        source => PssError::Other { pid, source },
    }
}

/// Returns the memory that is available without swapping, KiB.
pub fn available() -> procfs::ProcResult<u64> {
    use procfs::Current;
    let memory = procfs::Meminfo::current()?;
    Ok(memory.mem_available.unwrap_or(memory.mem_free) >> 10)
}
