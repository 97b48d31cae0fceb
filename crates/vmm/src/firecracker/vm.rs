//! A running Firecracker.

use std::{
    io,
    os::fd::RawFd,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use async_trait::async_trait;
use tokio::{sync::Mutex, time::Instant};

use super::{
    api::Api,
    slots::Slots,
    template,
    wire::{DrivePatch, InstanceState, MemoryRequest, Net, VmState},
};
use crate::{
    Destination, DiskRecord, DiskSpec, HotpluggedMemory, SavedDisk, VmmError,
    http::ApiError,
    jailed::{Jailed, VmDriver},
    process::process_error,
    spec::first_mac_text,
};

/// The calls of a VM run by Firecracker.
#[derive(Debug, Clone)]
pub struct FirecrackerVm {
    api: Api,
    // Held across a call on purpose: the index and the drives change together.
    slots: Arc<Mutex<Slots>>,
    /// The VMM's descriptor of the file for the guest's memory, if the VM is to be frozen.
    memory: Option<RawFd>,
    /// Whether the VM may have been started with memory that it can get later. The VMM logs each request that it
    /// refuses.
    may_grow: bool,
    /// Whether the process is stopped: see [`FirecrackerVm::pause`].
    stopped: Arc<AtomicBool>,
}

#[async_trait]
impl VmDriver for FirecrackerVm {
    const FILES: &'static [&'static str] = &[];
    const SNAPSHOT: &'static [(&'static str, u64)] = &[(template::STATE, template::MAX_STATE)];
    const VERSION_CALL: &'static str = "GET /";

    async fn version(&self) -> Result<String, ApiError> {
        Ok(self.api.instance().await?.vmm_version)
    }

    fn assigned(&self, _: &Path) -> Self {
        self.clone()
    }

    async fn attach_disk(&self, vm: &Jailed, disk: &DiskSpec, call: &str) -> Result<(), VmmError> {
        let mut slots = self.slots.lock().await;
        let patch = slots.take(vm, disk)?;
        let attached = self.point(vm, disk, call, &patch).await;
        if attached.is_err()
            && let Some(slot) = slots.slot_of(&disk.serial)
            && let Err(error) = slots.free(slot)
        {
            tracing::warn!(pod = %vm.pod(), disk = disk.serial, %error, "cannot remove a disk from a VM's index");
        }
        attached
    }

    async fn detach_disk(&self, vm: &Jailed, serial: &str, call: &str) -> Result<(), VmmError> {
        let mut slots = self.slots.lock().await;
        let Some(slot) = slots.slot_of(serial) else { return Ok(()) };
        vm.process.call(call, self.api.patch_drive(&Slots::emptied(slot))).await?;
        slots.free(slot).map_err(|error| super::slots::refused(vm, call, error.into()))
    }

    async fn hotplugged_memory(&self, vm: &Jailed) -> Result<Option<HotpluggedMemory>, VmmError> {
        if !self.may_grow {
            return Ok(None);
        }
        match vm.process.call("GET /hotplug/memory", self.api.memory()).await {
            Ok(memory) => Ok(Some(HotpluggedMemory {
                plugged_mib: memory.plugged_size_mib,
                requested_mib: memory.requested_size_mib,
                max_mib: memory.total_size_mib,
            })),
            // The VM was started with a fixed memory size.
            Err(VmmError::Refused { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn request_memory(&self, vm: &Jailed, mib: u64, call: &str) -> Result<(), VmmError> {
        vm.process.call(call, self.api.request_memory(&MemoryRequest { requested_size_mib: mib })).await
    }

    /// Stops the VMM process instead of the CPUs. After v1.16 has resumed a VM, it delivers nothing to the VM's vsock,
    /// because it waits for the guest to acknowledge a reset. Only a restored guest is notified of that reset.
    async fn pause(&self, vm: &Jailed) -> Result<(), VmmError> {
        let process = &vm.process.handle;
        process.stop().map_err(process_error(vm.pod(), "stop", process.pid()))?;
        self.stopped.store(true, Ordering::Release);
        Ok(())
    }

    async fn resume(&self, vm: &Jailed) -> Result<(), VmmError> {
        let process = &vm.process.handle;
        if self.stopped.swap(false, Ordering::AcqRel) {
            return process.go_on().map_err(process_error(vm.pod(), "continue", process.pid()));
        }
        // The process is not stopped, so the VM was restored, or runs: see [`FirecrackerVm::pause`].
        const CALL: &str = "resuming the guest";
        match vm.process.call(CALL, self.api.instance()).await?.state {
            InstanceState::Running => Ok(()),
            _ => vm.process.call(CALL, self.api.set_state(VmState::Resumed)).await,
        }
    }

    async fn snapshot(&self, vm: &Jailed, dir: &Path) -> Result<(), VmmError> {
        const CALL: &str = "freezing the guest";
        let no_memory = || vm.refused(CALL, "the VM was booted without a file for its memory");
        let snapshot = template::snapshot(dir, self.memory.ok_or_else(no_memory)?);
        vm.process.call("pausing the guest", self.api.set_state(VmState::Paused)).await?;
        vm.process.call(CALL, self.api.snapshot(&snapshot)).await
    }

    /// Refuses. After a snapshot the VMM sends nothing to the guest's vsock until the guest has acknowledged that its connections
    /// ended. That a guest that goes on does so was read in v1.16, and not tried.
    async fn checkpoint(
        &self,
        vm: &Jailed,
        _: &Destination,
        _: &[DiskRecord],
        _: Instant,
    ) -> Result<Vec<SavedDisk>, VmmError> {
        Err(vm.refused(
            "a checkpoint",
            "VMs of Firecracker cannot be saved while they run: their link to the agent may not go on",
        ))
    }

    fn compact_memory(memory: &Path) -> io::Result<()> {
        template::dig_holes(memory)
    }
}

impl FirecrackerVm {
    /// Returns the calls of a VM with these `slots`.
    pub(super) fn new(api: Api, slots: Slots, memory: Option<RawFd>, may_grow: bool) -> Self {
        Self { api, slots: Arc::new(Mutex::new(slots)), memory, may_grow, stopped: Arc::default() }
    }

    /// Points a slot's drive to `disk`, which the VMM can open during the call.
    async fn point(
        &self,
        vm: &Jailed,
        disk: &DiskSpec,
        call: &str,
        patch: &DrivePatch,
    ) -> Result<(), VmmError> {
        let _mounted = vm.mount(call, std::slice::from_ref(disk)).await?;
        vm.process.call(call, self.api.patch_drive(patch)).await
    }
}

/// Returns the API's description of a network interface.
pub(super) fn nic(nic: u8, tap: &str) -> Net {
    Net { iface_id: nic_id(nic), guest_mac: first_mac_text(nic), host_dev_name: tap.to_owned() }
}

/// Returns the ID of a network interface.
pub(super) fn nic_id(nic: u8) -> String {
    format!("nic{nic}")
}
