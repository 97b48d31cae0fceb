//! The memory and the vCPUs of a fake VM: its guest plugs and unplugs at once.

use sandboxer_vmm::{HotpluggedMemory, Vcpus, VmSpec};
use tokio::sync::watch;

use crate::Fault;

/// The memory of a VM.
#[derive(Debug)]
pub(crate) struct Memory {
    boot_mib: u64,
    max_mib: u64,
    requested_mib: watch::Sender<u64>,
    /// The guest's total memory, MiB.
    pub(crate) total_mib: watch::Sender<u64>,
}

impl Memory {
    pub(crate) fn of(spec: &VmSpec) -> Self {
        Self {
            boot_mib: spec.memory_mib,
            max_mib: spec.growth_mib,
            requested_mib: watch::Sender::new(0),
            total_mib: watch::Sender::new(spec.memory_mib),
        }
    }

    pub(crate) fn now(&self) -> Option<HotpluggedMemory> {
        (self.max_mib > 0).then(|| HotpluggedMemory {
            plugged_mib: *self.total_mib.borrow() - self.boot_mib,
            requested_mib: *self.requested_mib.borrow(),
            max_mib: self.max_mib,
        })
    }

    /// Returns whether the VM can have `mib` MiB beside those of its boot, and lets the guest have them.
    pub(crate) fn request(&self, mib: u64, fault: Fault) -> bool {
        if mib > self.max_mib {
            return false;
        }
        self.requested_mib.send_replace(mib);
        self.total_mib.send_modify(|total| {
            let plugged = match fault {
                Fault::PlugsAtMost(most) => mib.min(most).max(*total - self.boot_mib),
                _ => mib,
            };
            *total = self.boot_mib + plugged;
        });
        true
    }
}

/// The vCPUs of a VM.
#[derive(Debug)]
pub(crate) struct Processors {
    boot: u32,
    max: u32,
    requested: watch::Sender<u32>,
    /// The guest's total number of vCPUs.
    pub(crate) plugged: watch::Sender<u32>,
}

impl Processors {
    pub(crate) fn of(spec: &VmSpec) -> Self {
        Self {
            boot: spec.vcpus,
            max: spec.vcpus + spec.growth_vcpus,
            requested: watch::Sender::new(spec.vcpus),
            plugged: watch::Sender::new(spec.vcpus),
        }
    }

    pub(crate) fn now(&self) -> Vcpus {
        Vcpus { plugged: *self.plugged.borrow(), requested: *self.requested.borrow(), max: self.max }
    }

    /// Returns whether the VM can have `count` vCPUs, and lets the guest have them.
    pub(crate) fn request(&self, count: u32, fault: Fault) -> bool {
        let pending = *self.plugged.borrow() > *self.requested.borrow();
        if count > self.max || count < self.boot || pending {
            return false;
        }
        self.requested.send_replace(count);
        self.plugged.send_modify(|plugged| {
            *plugged = if fault == Fault::KeepsVcpus { count.max(*plugged) } else { count };
        });
        true
    }
}
