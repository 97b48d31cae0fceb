//! A frozen VM, as its VMM has written it.

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::{OpenOptionsExt, fchown},
    },
    path::{Path, PathBuf},
    time::Duration,
};

use sandboxer_protocol::id::SandboxId;

use super::{DiskRecord, VmmError, run_dir::path_error};

/// Name of the file with the guest's memory in a frozen VM, for a VMM that keeps it in
/// [`VmSpec::memory_file`](super::VmSpec::memory_file).
pub const MEMORY: &str = "memory";

/// Minimum age of a VM on KVM before it is frozen.
///
/// The CPU of a copy is created with a time stamp counter of 0 and then gets the template's. If the written value
/// differs by less than a second from the expected one, KVM before Linux 6.7 assumes a synchronization with the other
/// CPUs and keeps the old value. Then the copy's time, or only its timers, stop until the counter reaches the
/// template's value. The remaining seconds are for the time that a copy may take until its counter is written.
pub const FREEZABLE: Duration = Duration::from_secs(3);

/// The place of a running VM's files in [`Vm::checkpoint`](super::Vm::checkpoint).
#[derive(Debug)]
pub struct Destination {
    /// Empty directory, which only root can enter.
    pub dir: PathBuf,
    /// Size of the guest's memory, MiB.
    pub memory_mib: u64,
}

/// A disk of a VM that is being saved.
#[derive(Debug)]
pub struct SavedDisk {
    /// The record of the disk.
    pub record: DiskRecord,
    /// The disk's content, open for reading. A writable disk changes when the guest is resumed.
    pub file: File,
}

/// The files of a frozen VM, checked and sealed: no process can change them any more.
#[derive(Debug)]
pub struct Frozen {
    dir: PathBuf,
    files: BTreeMap<String, File>,
}

impl Frozen {
    /// Returns the frozen VM of `files`, which were read from `dir`.
    pub fn new(dir: PathBuf, files: BTreeMap<String, File>) -> Self {
        Self { dir, files }
    }

    /// Returns the directory that the files were read from, for messages.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Opens the file `name` at its beginning, for `pod`'s VMM.
    pub(crate) fn open(&self, pod: &SandboxId, name: &str) -> Result<OwnedFd, VmmError> {
        self.file(name).map_err(path_error(pod, "open template file", self.dir.join(name)))
    }

    /// Opens the file `name` at its beginning.
    pub fn file(&self, name: &str) -> io::Result<OwnedFd> {
        let file = self.files.get(name).ok_or(io::ErrorKind::NotFound)?;
        // Reopened, because a duplicate would share its position with all others.
        Ok(File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))?.into())
    }
}

/// Creates the file at `path` for the memory of a VM that is to be frozen, of `bytes` bytes, which `owner` can open.
pub(crate) fn create_memory(path: &Path, owner: Option<u32>, bytes: u64) -> io::Result<OwnedFd> {
    let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(path)?;
    file.set_len(bytes)?;
    fchown(&file, owner, owner)?;
    Ok(file.into())
}
