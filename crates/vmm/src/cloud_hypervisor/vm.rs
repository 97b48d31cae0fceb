//! A running Cloud Hypervisor.

use std::{
    path::Path,
    sync::{Arc, OnceLock},
};

use async_trait::async_trait;
use sandboxer_process::Process;
use tokio::{sync::broadcast, time::Instant};
use tokio_util::task::AbortOnDropHandle;

use super::{
    api::{self, Api},
    checkpoint,
    events::{self, Event, Events},
    opened::Opened,
    template, wire,
};
use crate::{
    Destination, DiskRecord, DiskSpec, HotpluggedMemory, SavedDisk, Vcpus, VmmError, hotplug,
    http::ApiError,
    jail_dir::disk_path,
    jailed::{Jailed, VmDriver, VmmProcess},
    rate::RateLimiter,
    run_dir::path_error,
    spec::first_mac_text,
};

/// Maximum number of events that wait for a subscriber.
const EVENTS: usize = 16;

/// The calls of a VM run by Cloud Hypervisor.
#[derive(Debug)]
pub struct CloudHypervisorVm {
    pub(super) api: Api,
    pub(super) events: EventReader,
    pub(super) opened: Opened,
}

#[async_trait]
impl VmDriver for CloudHypervisorVm {
    const FILES: &'static [&'static str] = &[api::SOCKET, events::FILE];
    const SNAPSHOT: &'static [(&'static str, u64)] =
        &[(template::CONFIG, template::MAX_CONFIG), (template::STATE, template::MAX_STATE)];
    const VERSION_CALL: &'static str = "vmm.ping";

    async fn version(&self) -> Result<String, ApiError> {
        Ok(self.api.ping().await?.version)
    }

    fn assigned(&self, run_dir: &Path) -> Self {
        Self { api: self.api.moved(run_dir), events: self.events.clone(), opened: self.opened.clone() }
    }

    async fn attach_disk(&self, vm: &Jailed, disk: &DiskSpec, call: &str) -> Result<(), VmmError> {
        // The disk stays in the jail until the VMM has responded.
        let _mounted = vm.mount(call, std::slice::from_ref(disk)).await?;
        vm.process.call(call, self.api.add_disk(&self::disk(disk))).await?;
        self.opened.add(std::slice::from_ref(disk));
        Ok(())
    }

    async fn detach_disk(&self, vm: &Jailed, serial: &str, call: &str) -> Result<(), VmmError> {
        let id = device_id(serial);
        // Subscribed before the call, so that the event is not missed.
        let events = self.events.sender.subscribe();
        match vm.process.call(call, self.api.remove_device(&id)).await {
            Err(VmmError::Refused { .. }) if !self.has(vm, &id, call).await? => return Ok(()),
            removed => removed?,
        }
        let limit = vm.call_timeout;
        let released = tokio::time::timeout(limit, self.released(vm, &id, call, events)).await;
        released.unwrap_or_else(|_| {
            Err(VmmError::Hung { pod: vm.pod().clone(), call: call.to_owned(), limit })
        })?;
        self.opened.remove(serial);
        Ok(())
    }

    async fn hotplugged_memory(&self, vm: &Jailed) -> Result<Option<HotpluggedMemory>, VmmError> {
        let info = vm.process.call("vm.info", self.api.info()).await?;
        Ok(zone(&info).map(|(zone, max)| HotpluggedMemory {
            plugged_mib: info.memory_actual_size.saturating_sub(zone.size) >> 20,
            requested_mib: zone.hotplugged_size.unwrap_or(0) >> 20,
            max_mib: max >> 20,
        }))
    }

    async fn request_memory(&self, vm: &Jailed, mib: u64, call: &str) -> Result<(), VmmError> {
        let info = vm.process.call(call, self.api.info()).await?;
        let fixed = || vm.refused(call, "the VM was started with a fixed size");
        let (zone, max) = zone(&info).ok_or_else(fixed)?;
        if mib << 20 > max {
            return Err(vm.refused(call, format!("the VM can get at most {} MiB", max >> 20)));
        }
        // The VMM refuses a request for the size that was requested last.
        if zone.hotplugged_size.unwrap_or(0) == mib << 20 {
            return Ok(());
        }
        let resize = wire::ResizeZone { id: &zone.id, desired_ram: zone.size + (mib << 20) };
        vm.process.call(call, self.api.resize_zone(&resize)).await
    }

    async fn vcpus(&self, vm: &Jailed) -> Result<Option<Vcpus>, VmmError> {
        let info = vm.process.call("vm.info", self.api.info()).await?;
        let pid = vm.process.handle.pid();
        let plugged = hotplug::vcpu_threads(pid).map_err(path_error(
            vm.pod(),
            "count vCPUs in",
            format!("/proc/{pid}/task").into(),
        ))?;
        let wire::InfoCpus { boot_vcpus: requested, max_vcpus: max } = info.config.cpus;
        Ok(Some(Vcpus { plugged, requested, max }))
    }

    async fn request_vcpus(&self, vm: &Jailed, count: u32) -> Result<(), VmmError> {
        let resize = wire::Resize { desired_vcpus: Some(count), ..wire::Resize::default() };
        vm.process.call(&hotplug::call_for_vcpus(count), self.api.resize(&resize)).await
    }

    async fn pause(&self, vm: &Jailed) -> Result<(), VmmError> {
        vm.process.call("pausing the guest", self.api.pause()).await
    }

    async fn resume(&self, vm: &Jailed) -> Result<(), VmmError> {
        const CALL: &str = "resuming the guest";
        match vm.process.call(CALL, self.api.resume()).await {
            // The VMM refuses it if the guest runs.
            Err(refused @ VmmError::Refused { .. }) => {
                match vm.process.call(CALL, self.api.info()).await?.state {
                    wire::VmState::Running => Ok(()),
                    _ => Err(refused),
                }
            }
            resumed => resumed,
        }
    }

    async fn snapshot(&self, vm: &Jailed, dir: &Path) -> Result<(), VmmError> {
        self.pause(vm).await?;
        vm.process.call("freezing the guest", self.api.snapshot(dir)).await
    }

    async fn checkpoint(
        &self,
        vm: &Jailed,
        to: &Destination,
        disks: &[DiskRecord],
        freezable: Instant,
    ) -> Result<Vec<SavedDisk>, VmmError> {
        tokio::time::sleep_until(freezable).await;
        checkpoint::save(vm, &self.api, &self.opened, to, disks).await
    }
}

impl CloudHypervisorVm {
    /// Returns whether the VM still has the device `id`.
    async fn has(&self, vm: &Jailed, id: &str, call: &str) -> Result<bool, VmmError> {
        let info = vm.process.call(call, self.api.info()).await?;
        Ok(info.device_tree.is_some_and(|devices| devices.contains_key(id)))
    }

    /// Waits until the guest has released a device.
    async fn released(
        &self,
        vm: &Jailed,
        id: &str,
        call: &str,
        mut events: broadcast::Receiver<Event>,
    ) -> Result<(), VmmError> {
        loop {
            match events.recv().await {
                Ok(event) if event.is_named("device-removed") && event.device() == Some(id) => return Ok(()),
                Ok(_) => {}
                // The event may be among those that were missed.
                Err(broadcast::error::RecvError::Lagged(_)) if !self.has(vm, id, call).await? => {
                    return Ok(());
                }
                Err(broadcast::error::RecvError::Lagged(_)) => {}
                Err(broadcast::error::RecvError::Closed) => return Err(vm.process.died(call).await),
            }
        }
    }
}

/// Returns the growable zone of a VM's memory, and by how many bytes it can grow.
fn zone(info: &wire::VmInfo) -> Option<(&wire::InfoZone, u64)> {
    let mut zones = info.config.memory.zones.iter().flatten();
    zones.find_map(|zone| Some((zone, zone.hotplug_size.filter(|_| zone.id == template::ZONE)?)))
}

/// Returns the ID of a disk's device.
fn device_id(serial: &str) -> String {
    format!("disk-{serial}")
}

/// Returns the API's description of a disk, at the path at which it is mounted in the jail.
pub(super) fn disk(disk: &DiskSpec) -> wire::Disk {
    wire::Disk {
        id: device_id(&disk.serial),
        serial: disk.serial.clone(),
        path: disk_path(&disk.serial),
        readonly: disk.read_only,
        image_type: wire::ImageType::Raw,
        rate_limiter_config: RateLimiter::from_limits(disk.limits),
    }
}

/// Returns the API's description of a network interface.
pub(super) fn nic(nic: u8) -> wire::Net {
    wire::Net { id: format!("nic{nic}"), mac: first_mac_text(nic), num_queues: 2 }
}

/// The events of a VMM. Clones share them.
#[derive(Debug, Clone)]
pub(super) struct EventReader {
    sender: broadcast::Sender<Event>,
    /// The task that reads the events. It ends with this, because another task reads them after an adoption.
    _task: Arc<AbortOnDropHandle<()>>,
}

impl EventReader {
    /// Starts reading the `events` of a VMM.
    pub(super) fn new(events: Events, process: &VmmProcess) -> Self {
        let (sender, _) = broadcast::channel(EVENTS);
        let (handle, cause) = (process.handle.clone(), process.cause.clone());
        let task = tokio::spawn(forward(events, handle, cause, sender.clone()));
        Self { sender, _task: Arc::new(AbortOnDropHandle::new(task)) }
    }
}

/// Forwards events. Kills a VMM whose guest resets itself, because the VMM would boot it again.
async fn forward(
    mut events: Events,
    process: Arc<Process>,
    cause: Arc<OnceLock<&'static str>>,
    sender: broadcast::Sender<Event>,
) {
    while let Some(event) = events.next().await {
        tracing::debug!(pid = process.pid(), source = event.source, event = event.name, "event of a VMM");
        if event.is_named("rebooting") {
            let _ = cause.set("its guest reset itself");
            if let Err(error) = process.kill() {
                tracing::error!(pid = process.pid(), %error, "cannot kill a VMM whose guest resets itself");
            }
        }
        // There may be no subscriber.
        let _ = sender.send(event);
    }
}
