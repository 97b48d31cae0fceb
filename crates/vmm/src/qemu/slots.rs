//! Slots: disks that the guest has from its boot on, and whose content is attached later.
//!
//! ```text
//! null-co ─┐
//!          ├─ raw ─ virtio-blk     a slot: empty, or with a disk's file
//! file    ─┘
//! ```
//!
//! Hotplugging a container's disk costs the guest 21 SCSI commands, of about 0.2 ms each on KVM. The guest finds a
//! slot's device when it boots; attaching a disk to the slot changes what QEMU reads.

use serde_json::{Value, json};

use crate::{DiskSpec, FIRST_IMAGE, SPARE, qmp::TopNode};

/// Maximum number of network interfaces of a VM with slots: each device needs one of the eight lines of KVM's first
/// interrupt controller.
pub const MOST_NICS: u8 = 2;

/// Size of an empty slot, bytes: the size of the largest disk. The guest is not notified of a disk's size. Reads and
/// writes beyond the disk's end fail.
const EMPTY_BYTES: u64 = 64 << 40;

/// A slot of a VM.
#[derive(Debug, PartialEq, Eq)]
pub struct Slot {
    /// Serial of the slot's disk.
    serial: &'static str,
    /// Whether the guest can only read the slot.
    read_only: bool,
    /// Name of the node that the slot's device sees. Names are short because QEMU reads its control socket byte by
    /// byte.
    top: &'static str,
    /// Name of the slot's content while it is empty.
    empty: &'static str,
    /// Name of the image of the slot's disk.
    pub image: &'static str,
    /// Number of QEMU's descriptor set for the disk's file; not among the first, which QEMU assigns itself.
    pub set: u64,
}

/// All slots.
pub const ALL: [Slot; 2] = [
    Slot { serial: FIRST_IMAGE, read_only: true, top: "t8", empty: "e8", image: "f8", set: 8 },
    Slot { serial: SPARE, read_only: false, top: "t9", empty: "e9", image: "f9", set: 9 },
];

/// Returns the slot of the disk `serial`.
pub fn of(serial: &str) -> Option<&'static Slot> {
    ALL.iter().find(|slot| slot.serial == serial)
}

impl Slot {
    /// Returns the node that the device sees while the slot has a disk.
    pub fn filled(&self) -> TopNode {
        self.with(self.image)
    }

    /// Returns the node that the device sees while the slot is empty.
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

    /// Returns the content of the slot while it is empty: zeroes, and writes are lost.
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

    /// Returns the slot's device, which reports errors to the guest, like other disks.
    pub fn device(&self, id: &str) -> String {
        format!("virtio-blk-device,id={id},drive={},serial={},werror=report", self.top, self.serial)
    }

    /// Returns the serial of the slot's disk.
    pub fn serial(&self) -> &'static str {
        self.serial
    }

    /// Returns whether QEMU refused to change the slot because the VM has none: it has many network interfaces, or an
    /// earlier daemon started it.
    pub fn is_missing(&self, reason: &str) -> bool {
        reason.contains(&format!("node-name='{}'", self.top))
    }
}
