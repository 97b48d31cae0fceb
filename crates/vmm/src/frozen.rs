//! A frozen VM, as its VMM wrote it.

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    time::Duration,
};

/// Name of the guest's memory among the files of a frozen VM, for a VMM that keeps it in
/// [`VmSpec::memory_file`](super::VmSpec::memory_file).
pub const MEMORY: &str = "memory";

/// How old a VM on KVM is when it is frozen, at least.
///
/// A copy's processor is made with a time stamp counter of 0 and then given the template's. KVM before Linux 6.7 takes a counter that is
/// written with less than a second's difference for one that is to be the same as the other processors', and leaves it as it is. Then
/// time stands still in the copy, or only its timers do, until its counter has come to where the template's was. The
/// rest is what a copy may take until its counter is written.
pub const FREEZABLE: Duration = Duration::from_secs(3);

/// The files of a frozen VM, checked, and sealed: nobody can change them any more.
#[derive(Debug)]
pub struct Frozen {
    dir: PathBuf,
    files: BTreeMap<String, File>,
}

impl Frozen {
    /// Returns what was read from `dir`.
    pub fn new(dir: PathBuf, files: BTreeMap<String, File>) -> Self {
        Self { dir, files }
    }

    /// Returns where it was read from, for people.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns one of the files, from the beginning.
    pub fn file(&self, name: &str) -> io::Result<OwnedFd> {
        let file = self.files.get(name).ok_or(io::ErrorKind::NotFound)?;
        // Opened anew: a duplicate would share its position with all others.
        Ok(File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))?.into())
    }
}
