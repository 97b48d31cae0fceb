//! The disks of a VM whose VMM cannot hotplug any. The VM boots with drives on an empty file, its slots, which are
//! pointed to the files of disks later.
//!
//! ```text
//! /dev/vda    the index: which disk is in which slot (sandboxer_protocol::disk_index)
//! /dev/vdb …  the slots, in order: those that the guest can only read, then the writable ones
//! ```
//!
//! The VMM chooses the drives' serial numbers, so the guest finds a disk by its name in the index. A drive's size
//! shows that the drive was pointed to the disk. The index is the daemon's: a file that the VMM can only read.

use std::{io, path::Path, sync::Arc};

use sandboxer_protocol::disk_index::{self, Entry};

use super::wire::{Cache, Drive, DrivePatch};
use crate::{
    DiskSpec, VmmError,
    jail_dir::{self, JailDir, disk_path},
    jailed::Jailed,
    rate::RateLimiter,
    run_dir::path_error,
};

/// Slots for disks that the guest can only read.
const READ_ONLY: usize = 12;
/// Slots for disks that the guest can write to.
const WRITABLE: usize = 8;
/// Name of the index in the VMM's jail directory.
const INDEX: &str = "index";
/// Name of the empty file in the VMM's jail directory.
const EMPTY: &str = "empty";
/// Size of the empty file, bytes. The guest would not be notified of a change from or to 0.
const EMPTY_BYTES: usize = disk_index::SECTOR;

/// The slots of one VM.
#[derive(Debug)]
pub struct Slots {
    jail_dir: Arc<JailDir>,
    taken: Vec<Option<Entry>>,
}

/// The reason why a disk gets no slot.
#[derive(Debug, thiserror::Error)]
pub enum SlotError {
    /// The VM already has a disk of this name.
    #[error("the VM has a disk with this serial")]
    Duplicate,
    /// All slots are taken.
    #[error(
        "the VM has {most} {kind} disks, the most that a VM of Firecracker can have: use fewer containers and volumes, or another VMM"
    )]
    Full {
        /// Number of slots of this kind.
        most: usize,
        /// The kind of slot: "read-only" or "writable".
        kind: &'static str,
    },
    /// The disk has no content.
    #[error("the disk has {0} bytes, fewer than two sectors")]
    Small(u64),
    /// The index cannot be written.
    #[error("cannot write the VM's index of disks")]
    Index(#[from] io::Error),
}

impl Slots {
    /// Creates the index and the empty file of a VM that is about to start.
    pub fn create(jail_dir: Arc<JailDir>) -> io::Result<Self> {
        jail_dir.write(EMPTY, &[0; EMPTY_BYTES], 0o666)?;
        let slots = Self { jail_dir, taken: vec![None; READ_ONLY + WRITABLE] };
        slots.store()?;
        Ok(slots)
    }

    /// Reads the index of a VM that an earlier daemon started.
    pub fn open(jail_dir: Arc<JailDir>) -> io::Result<Self> {
        let index = jail_dir.read(".", INDEX, disk_index::BYTES as u64)?;
        let malformed = || io::Error::new(io::ErrorKind::InvalidData, "malformed index of disks");
        let mut taken = vec![None; READ_ONLY + WRITABLE];
        for entry in disk_index::parse(&index).ok_or_else(malformed)? {
            let place = taken.get_mut(entry.slot).ok_or_else(malformed)?;
            *place = Some(entry);
        }
        Ok(Self { jail_dir, taken })
    }

    /// Returns the drives with which the VM boots.
    pub fn drives(&self) -> Vec<Drive> {
        let drive = |drive_id, file, is_read_only| Drive {
            drive_id,
            path_on_host: Path::new(jail_dir::PATH).join(file),
            is_root_device: false,
            is_read_only,
            cache_type: Cache::Writeback,
        };
        let slots = (0..self.taken.len()).map(|slot| drive(drive_id(slot), EMPTY, slot < READ_ONLY));
        [drive(INDEX.to_owned(), INDEX, true)].into_iter().chain(slots).collect()
    }

    /// Enters `disk` into a free slot. Returns the patch that points the slot's drive to it.
    ///
    /// If a disk has no limits, its slot keeps those of the slot's last disk: all disks of a pod have the same limits.
    pub fn take(&mut self, vm: &Jailed, disk: &DiskSpec) -> Result<DrivePatch, VmmError> {
        let bytes = disk.file.bytes();
        let bytes = bytes.map_err(path_error(vm.pod(), "attach", disk.file.name().to_owned()))?;
        self.enter(disk, bytes).map_err(|error| refused(vm, &disk.attaching(), error))
    }

    /// Enters the disks with which a VM starts, as [`Slots::take`] does.
    pub fn fill(&mut self, vm: &Jailed, disks: &[DiskSpec]) -> Result<Vec<DrivePatch>, VmmError> {
        disks.iter().map(|disk| self.take(vm, disk)).collect()
    }

    fn enter(&mut self, disk: &DiskSpec, bytes: u64) -> Result<DrivePatch, SlotError> {
        let sectors = bytes / disk_index::SECTOR as u64;
        if sectors < 2 {
            return Err(SlotError::Small(bytes));
        }
        if self.slot_of(&disk.serial).is_some() {
            return Err(SlotError::Duplicate);
        }
        let (slots, kind) = if disk.read_only {
            (0..READ_ONLY, "read-only")
        } else {
            (READ_ONLY..READ_ONLY + WRITABLE, "writable")
        };
        let most = slots.len();
        let Some(slot) = slots.into_iter().find(|slot| self.taken[*slot].is_none()) else {
            return Err(SlotError::Full { most, kind });
        };
        self.taken[slot] = Some(Entry { slot, sectors, serial: disk.serial.clone() });
        // The index comes before the patch of the drive: only the patch notifies the guest.
        self.store()?;
        let rate_limiter = RateLimiter::from_limits(disk.limits);
        Ok(DrivePatch { drive_id: drive_id(slot), path_on_host: disk_path(&disk.serial), rate_limiter })
    }

    /// Returns the slot of the disk `serial`.
    pub fn slot_of(&self, serial: &str) -> Option<usize> {
        self.taken.iter().flatten().find(|entry| entry.serial == serial).map(|entry| entry.slot)
    }

    /// Returns the patch that points the drive of `slot` to the empty file.
    pub fn emptied(slot: usize) -> DrivePatch {
        DrivePatch {
            drive_id: drive_id(slot),
            path_on_host: Path::new(jail_dir::PATH).join(EMPTY),
            rate_limiter: None,
        }
    }

    /// Removes the disk in `slot`, whose drive already points to the empty file.
    pub fn free(&mut self, slot: usize) -> io::Result<()> {
        if let Some(taken) = self.taken.get_mut(slot) {
            *taken = None;
        }
        self.store()
    }

    fn store(&self) -> io::Result<()> {
        self.jail_dir.write(INDEX, &disk_index::format(self.taken.iter().flatten()), 0o644)
    }
}

/// Returns the error of a disk that gets no slot.
pub fn refused(vm: &Jailed, call: &str, error: SlotError) -> VmmError {
    vm.refused(call, sandboxer_base::chain(&error))
}

fn drive_id(slot: usize) -> String {
    format!("slot{slot}")
}

/// Returns the number of slots of each kind, as an input of templates.
pub fn layout() -> String {
    format!("{READ_ONLY} read-only slots, {WRITABLE} writable slots")
}
