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

use sandboxer_process::jail::ROOM;
use sandboxer_protocol::disk_index::{self, Entry};

use super::wire::{Cache, Drive, DrivePatch};
use crate::{
    DiskSpec,
    rate::RateLimiter,
    room::{Room, shown},
};

/// Slots for disks that the guest can only read.
const READ_ONLY: usize = 12;
/// Slots for disks that the guest can write to.
const WRITABLE: usize = 8;
/// Name of the index in the VMM's room.
const INDEX: &str = "index";
/// Name of the empty file in the VMM's room.
const EMPTY: &str = "empty";
/// Size of the empty file, bytes. The guest would not be notified of a change from or to 0.
const EMPTY_BYTES: usize = disk_index::SECTOR;

/// The slots of one VM.
#[derive(Debug)]
pub struct Slots {
    room: Arc<Room>,
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
    pub fn create(room: Arc<Room>) -> io::Result<Self> {
        room.write(EMPTY, &[0; EMPTY_BYTES], 0o666)?;
        let slots = Self { room, taken: vec![None; READ_ONLY + WRITABLE] };
        slots.store()?;
        Ok(slots)
    }

    /// Reads the index of a VM that an earlier daemon started.
    pub fn found(room: Arc<Room>) -> io::Result<Self> {
        let index = room.read(".", INDEX, disk_index::BYTES as u64)?;
        let malformed = || io::Error::new(io::ErrorKind::InvalidData, "malformed index of disks");
        let mut taken = vec![None; READ_ONLY + WRITABLE];
        for entry in disk_index::parse(&index).ok_or_else(malformed)? {
            let place = taken.get_mut(entry.slot).ok_or_else(malformed)?;
            *place = Some(entry);
        }
        Ok(Self { room, taken })
    }

    /// Returns the drives with which the VM boots.
    pub fn drives(&self) -> Vec<Drive> {
        let drive = |drive_id, file, is_read_only| Drive {
            drive_id,
            path_on_host: Path::new(ROOM).join(file),
            is_root_device: false,
            is_read_only,
            cache_type: Cache::Writeback,
        };
        let slots = (0..self.taken.len()).map(|slot| drive(drive_id(slot), EMPTY, slot < READ_ONLY));
        [drive(INDEX.to_owned(), INDEX, true)].into_iter().chain(slots).collect()
    }

    /// Enters `disk`, of `bytes` bytes, into a free slot. Returns the patch that points the slot's drive to it.
    ///
    /// If a disk has no limits, its slot keeps those of the slot's last disk: all disks of a pod have the same limits.
    pub fn take(&mut self, disk: &DiskSpec, bytes: u64) -> Result<DrivePatch, SlotError> {
        let sectors = bytes / disk_index::SECTOR as u64;
        if sectors < 2 {
            return Err(SlotError::Small(bytes));
        }
        if self.of(&disk.serial).is_some() {
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
        let rate_limiter = RateLimiter::of(disk.limits);
        Ok(DrivePatch { drive_id: drive_id(slot), path_on_host: shown(&disk.serial), rate_limiter })
    }

    /// Returns the slot of the disk `serial`.
    pub fn of(&self, serial: &str) -> Option<usize> {
        self.taken.iter().flatten().find(|entry| entry.serial == serial).map(|entry| entry.slot)
    }

    /// Returns the patch that points the drive of `slot` to the empty file.
    pub fn emptied(slot: usize) -> DrivePatch {
        DrivePatch { drive_id: drive_id(slot), path_on_host: Path::new(ROOM).join(EMPTY), rate_limiter: None }
    }

    /// Removes the disk in `slot`, whose drive already points to the empty file.
    pub fn free(&mut self, slot: usize) -> io::Result<()> {
        if let Some(taken) = self.taken.get_mut(slot) {
            *taken = None;
        }
        self.store()
    }

    fn store(&self) -> io::Result<()> {
        self.room.write(INDEX, &disk_index::format(self.taken.iter().flatten()), 0o644)
    }
}

fn drive_id(slot: usize) -> String {
    format!("slot{slot}")
}

/// Returns the number of slots of each kind, as an input of templates.
pub fn layout() -> String {
    format!("{READ_ONLY} read-only slots, {WRITABLE} writable slots")
}
