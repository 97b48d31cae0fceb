//! Which files a VMM has open as its disks.
//!
//! A disk is at a path of the jail only while the VMM opens it, and the VMM does not tell which descriptor it has for it. So what
//! was attached is noted in the jail directory, for this daemon and the next, and looked for among the VMM's descriptors.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::{DiskRecord, DiskSpec, SavedDisk, jail_dir::JailDir};

/// Name of the file in the jail directory.
const FILE: &str = "opened";
/// Size of the file, bytes: a page, so that a reader sees it whole.
const SIZE: usize = 4096;

/// Device and inode of each disk's file, by serial.
type Inodes = BTreeMap<String, (u64, u64)>;

/// The files of a VM's disks. Clones share them.
#[derive(Debug, Clone)]
pub struct Opened {
    jail_dir: Arc<JailDir>,
    /// `None`: an earlier version of the daemon started the VM and noted nothing. A file may then be the VMM's own.
    // The plain lock is held while the file is written, so that the file has the last state.
    inodes: Arc<Mutex<Option<Inodes>>>,
}

impl Opened {
    /// Begins the notes of a VM whose guest does not run yet: from then on, the file is root's.
    pub fn create(jail_dir: Arc<JailDir>) -> io::Result<Self> {
        let opened = Self { jail_dir, inodes: Arc::new(Mutex::new(Some(Inodes::new()))) };
        opened.store(&Inodes::new())?;
        Ok(opened)
    }

    /// Reads the notes of an earlier daemon.
    pub fn open(jail_dir: Arc<JailDir>) -> Self {
        let read = jail_dir.read(".", FILE, SIZE as u64);
        let inodes = read.ok().and_then(|text| serde_json::from_slice(&text).ok());
        Self { jail_dir, inodes: Arc::new(Mutex::new(inodes)) }
    }

    /// Notes disks that were attached. A disk that cannot be noted works, but its VM cannot be saved.
    pub fn add(&self, disks: &[DiskSpec]) {
        self.change(|inodes| {
            for disk in disks {
                inodes.insert(disk.serial.clone(), disk.file.inode()?);
            }
            Ok(())
        });
    }

    /// Forgets a disk that was detached.
    pub fn remove(&self, serial: &str) {
        self.change(|inodes| {
            inodes.remove(serial);
            Ok(())
        });
    }

    /// Opens the files that the VMM `pid` has as `disks`, for reading, or returns the reason why one cannot be opened. Blocks.
    pub fn files(&self, pid: u32, disks: &[DiskRecord]) -> Result<Vec<SavedDisk>, String> {
        let inodes = self.lock().clone().ok_or("it was started by an earlier version of the daemon")?;
        let unlisted = |error: io::Error| format!("cannot list its files: {error}");
        let mut open = BTreeMap::new();
        for fd in fs::read_dir(format!("/proc/{pid}/fd")).map_err(unlisted)?.flatten() {
            // A descriptor may be closed meanwhile.
            if let Ok(meta) = fs::metadata(fd.path()) {
                open.insert((meta.dev(), meta.ino()), fd.path());
            }
        }
        let find = |record: &DiskRecord| {
            let serial = &record.serial;
            let path = inodes.get(serial).and_then(|inode| open.get(inode));
            let path = path.ok_or_else(|| format!("it has no disk {serial}"))?;
            // The guest may have broken into its VMM: nothing that blocks or is endless.
            let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path);
            let file = file.map_err(|error| format!("cannot open the file of disk {serial}: {error}"))?;
            match file.metadata() {
                Ok(meta) if meta.is_file() => Ok(SavedDisk { record: record.clone(), file }),
                _ => Err(format!("disk {serial} is a device or a pipe, of which no copy can be made")),
            }
        };
        disks.iter().map(find).collect()
    }

    fn change(&self, change: impl FnOnce(&mut Inodes) -> io::Result<()>) {
        let mut inodes = self.lock();
        let Some(inodes) = inodes.as_mut() else { return };
        if let Err(error) = change(inodes).and_then(|()| self.store(inodes)) {
            tracing::warn!(%error, "cannot note a VM's disks in its jail: the VM cannot be saved");
        }
    }

    fn store(&self, inodes: &Inodes) -> io::Result<()> {
        let text = serde_json::to_string(inodes)?;
        match text.len() <= SIZE {
            // Always of one size, so that nothing of a longer text remains.
            true => self.jail_dir.write(FILE, format!("{text:SIZE$}").as_bytes(), 0o600),
            false => Err(io::Error::other("the VM has too many disks")),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Inodes>> {
        self.inodes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;
    use crate::{DiskFile, DiskLimits};

    #[test]
    fn the_next_daemon_finds_the_file_of_a_disk_which_has_no_name_any_more() {
        let (dir, pid) = (tempfile::tempdir().unwrap(), std::process::id());
        let disk = |serial: &str| {
            let path = dir.path().join(serial);
            fs::write(&path, serial).unwrap();
            let file = DiskFile::new(File::open(&path).unwrap(), path.clone()).unwrap();
            fs::remove_file(path).unwrap();
            DiskSpec { serial: serial.into(), file, read_only: true, limits: DiskLimits::default() }
        };
        let (first, second) = (disk("first"), disk("second"));
        let jail_dir = JailDir::at(dir.path());
        let opened = Opened::create(jail_dir.clone()).unwrap();
        opened.add(&[first.clone(), second.clone()]);
        opened.remove("second");
        let next = Opened::open(jail_dir.clone());
        let [mut found] = <[_; 1]>::try_from(next.files(pid, &[first.record()]).unwrap()).unwrap();
        let mut content = String::new();
        found.file.read_to_string(&mut content).unwrap();
        assert_eq!((content.as_str(), &found.record), ("first", &first.record()));
        let error = next.files(pid, &[first.record(), second.record()]).unwrap_err();
        assert_eq!(error, "it has no disk second");
        let record = first.record();
        drop((first, found));
        assert_eq!(next.files(pid, std::slice::from_ref(&record)).unwrap_err(), "it has no disk first");

        fs::write(dir.path().join(FILE), "half of it").unwrap();
        let earlier = Opened::open(jail_dir);
        earlier.add(&[second]);
        assert!(earlier.files(pid, &[record]).unwrap_err().contains("an earlier version"));
        assert_eq!(
            fs::read(dir.path().join(FILE)).unwrap(),
            b"half of it",
            "a file that may be the VMM's is written"
        );
    }
}
