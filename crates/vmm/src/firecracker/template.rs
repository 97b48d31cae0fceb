//! The files of a frozen VM.
//!
//! ```text
//! memory        of the guest; the VMM writes it when the VM is frozen
//! state         of its CPUs and devices
//! ```
//!
//! The VMM restores a copy from links to the sealed files, which it inherits. It maps the memory privately, so a copy
//! shares the pages that it does not write with all others.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsRawFd, OwnedFd, RawFd},
        unix::fs::FileExt,
    },
    path::Path,
};

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};

use super::{
    vm::nic_id,
    wire::{Backend, MemoryBackend, NetworkOverride, SnapshotCreate, SnapshotLoad},
};
use crate::{Frozen, MEMORY, VmSpec, VmmError, jailed::inherited};

/// Name of the state.
pub const STATE: &str = "state";
/// Maximum size of a state, bytes.
pub const MAX_STATE: u64 = 8 << 20;
/// Size of the blocks of memory that are checked for zeroes, bytes.
const BLOCK: usize = 64 << 10;

/// Returns the request that freezes the VM: the state goes to `dir`, the memory to the VMM's descriptor `memory`.
pub fn snapshot(dir: &Path, memory: RawFd) -> SnapshotCreate {
    SnapshotCreate { snapshot_path: dir.join(STATE), mem_file_path: inherited(memory) }
}

/// Returns the files that a VMM must inherit to restore a copy of `frozen`: the memory and the state.
pub fn source(spec: &VmSpec, frozen: &Frozen) -> Result<[OwnedFd; 2], VmmError> {
    Ok([frozen.open(&spec.pod, MEMORY)?, frozen.open(&spec.pod, STATE)?])
}

/// Returns the request by which a VMM that inherits `memory` and `state` restores the VM, with these taps.
pub fn load([memory, state]: &[OwnedFd; 2], taps: &[String]) -> SnapshotLoad {
    let tap =
        |(nic, tap): (u8, &String)| NetworkOverride { iface_id: nic_id(nic), host_dev_name: tap.clone() };
    SnapshotLoad {
        snapshot_path: inherited(state.as_raw_fd()),
        mem_backend: MemoryBackend {
            backend_type: Backend::File,
            backend_path: inherited(memory.as_raw_fd()),
        },
        network_overrides: (0..).zip(taps).map(tap).collect(),
    }
}

/// Frees the blocks of the file `memory` that hold only zeroes: the VMM writes all boot memory, most of which no guest
/// has touched. Memory that the guest can get later is already a hole.
pub fn dig_holes(memory: &Path) -> io::Result<()> {
    let file = &File::options().read(true).write(true).open(memory)?;
    let mut block = vec![0; BLOCK];
    let mut at = 0;
    loop {
        match seek(file, SeekFrom::Data(at)) {
            Ok(data) => at = data - data % BLOCK as u64,
            Err(rustix::io::Errno::NXIO) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        let read = file.read_at(&mut block, at)?;
        if read == 0 {
            return Ok(());
        }
        if block[..read].iter().all(|byte| *byte == 0) {
            let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            match fallocate(file, how, at, read as u64) {
                // This file system has no holes.
                Err(rustix::io::Errno::OPNOTSUPP) => return Ok(()),
                dug => dug?,
            }
        }
        at += read as u64;
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn memory_that_no_guest_touched_takes_no_space() {
        let dir = tempfile::tempdir().unwrap();
        let mut content = vec![0; 8 * BLOCK + 1];
        content[3 * BLOCK + 5] = 7;
        let path = dir.path().join(MEMORY);
        std::fs::write(&path, &content).unwrap();
        let whole = path.metadata().unwrap().blocks();
        dig_holes(&path).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), content, "the content changed");
        let left = path.metadata().unwrap().blocks();
        assert!(left < whole / 2, "{left} of {whole} blocks");
    }
}
