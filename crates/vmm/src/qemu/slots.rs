//! Disks that the guest has from its boot on, and that get their content later: slots.
//!
//! ```text
//! null-co ─┐
//!          ├─ raw ─ virtio-blk     a slot: empty, or with a disk's file
//! file    ─┘
//! ```
//!
//! A container's disk that is plugged in costs the guest 21 SCSI commands, of some 0.2 ms each on KVM. A slot's device was found at the
//! boot; attaching a disk to it changes what QEMU reads.

use serde_json::{Value, json};

use crate::{DiskSpec, FIRST_IMAGE, SPARE, qmp::TopNode};

/// Most network interfaces of a VM with slots: each device needs one of the eight lines of KVM's first interrupt controller.
pub const MOST_NICS: u8 = 2;

/// Size of an empty slot, bytes: that of the largest disk. The guest is not told of a disk's size. What reads or writes beyond the
/// disk's end gets an error.
const EMPTY_BYTES: u64 = 64 << 40;

/// A slot.
#[derive(Debug, PartialEq, Eq)]
pub struct Slot {
    /// Serial of its disk.
    serial: &'static str,
    /// The guest can only read it.
    read_only: bool,
    /// Name of what its device sees. Names are short because QEMU reads its control socket byte by byte.
    top: &'static str,
    /// Name of its content while it is empty.
    empty: &'static str,
    /// Name of its disk's image.
    pub image: &'static str,
    /// QEMU's descriptor set for its disk's file: not among the first, which QEMU gives away itself.
    pub set: u64,
}

/// All slots.
pub const ALL: [Slot; 2] = [
    Slot { serial: FIRST_IMAGE, read_only: true, top: "t8", empty: "e8", image: "f8", set: 8 },
    Slot { serial: SPARE, read_only: false, top: "t9", empty: "e9", image: "f9", set: 9 },
];

/// Returns the slot of the disk with `serial`.
pub fn of(serial: &str) -> Option<&'static Slot> {
    ALL.iter().find(|slot| slot.serial == serial)
}

impl Slot {
    /// Returns what the device sees when the slot has a disk.
    pub fn filled(&self) -> TopNode {
        self.with(self.image)
    }

    /// Returns what the device sees when the slot is empty.
    pub fn emptied(&self) -> TopNode {
        self.with(self.empty)
    }

    fn with(&self, file: &str) -> TopNode {
        TopNode {
            driver: "raw",
            node_name: self.top,
            file: file.to_owned(),
            read_only: self.read_only,
            discard: (!self.read_only).then_some("unmap"),
        }
    }

    /// Returns the content of the slot while it is empty: zeroes. What is written there is gone.
    pub fn empty_node(&self) -> Value {
        json!({
            "driver": "null-co",
            "node-name": self.empty,
            "size": EMPTY_BYTES,
            "read-zeroes": true,
            "read-only": self.read_only,
        })
    }

    /// Returns the slot's node at the start of a VM with `disks`.
    pub fn first_node(&self, disks: &[DiskSpec]) -> TopNode {
        if disks.iter().any(|disk| disk.serial == self.serial) { self.filled() } else { self.emptied() }
    }

    /// Returns the slot's device. Errors are reported to the guest, as for other disks.
    pub fn device(&self, id: &str) -> String {
        format!("virtio-blk-device,id={id},drive={},serial={},werror=report", self.top, self.serial)
    }

    /// Returns the serial of its disk.
    pub fn serial(&self) -> &'static str {
        self.serial
    }

    /// Returns whether QEMU refused to change the slot because its VM has none: it has many network interfaces, or an earlier daemon
    /// started it.
    pub fn is_missing(&self, reason: &str) -> bool {
        reason.contains(&format!("node-name='{}'", self.top))
    }
}
