//! A running Cloud Hypervisor.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
    time::Duration,
};

use async_trait::async_trait;
use sandboxer_process::Process;
use sandboxer_protocol::id::SandboxId;
use tokio::{sync::broadcast, time::Instant};
use tokio_util::task::AbortOnDropHandle;

use super::{
    api::{self, Api},
    events::{self, Event, Events},
    template, wire,
};
use crate::{
    AgentStream, DiskSpec, HotpluggedMemory, ShareListener, ShareTransport, Vcpus, Vm, VmExit, VmRecord,
    VmmError, hotplug,
    rate::RateLimiter,
    room::{Room, shown as path_of},
    run_dir::path_error,
    spec::first_mac_text,
    vsock::{self, Link},
    watched::Watched,
};

/// Maximum number of events that wait for a subscriber.
const EVENTS: usize = 16;
/// A VM run by Cloud Hypervisor.
#[derive(Debug)]
pub(super) struct CloudHypervisorVm {
    pub(super) record: VmRecord,
    pub(super) watched: Watched,
    pub(super) events: Followed,
    pub(super) api: Api,
    pub(super) room: Arc<Room>,
    pub(super) link: Link,
    /// User ID of the VMM.
    pub(super) user: u32,
    pub(super) call_timeout: Duration,
    /// Time from which the VM can be frozen; see [`FREEZABLE`].
    pub(super) freezable: Instant,
}

#[async_trait]
impl Vm for CloudHypervisorVm {
    fn record(&self) -> VmRecord {
        self.record.clone()
    }

    async fn agent_stream(&self) -> Result<Box<dyn AgentStream>, VmmError> {
        let path = PathBuf::from(vsock::SOCKET);
        tokio::select! {
            stream = self.link.stream() => match stream {
                Ok(stream) => Ok(Box::new(stream)),
                Err(source) => Err(path_error(&self.record.pod, "connect to", path)(source)),
            },
            _ = self.watched.process.exited() => Err(self.watched.died("a connection to the agent").await),
        }
    }

    async fn attach_disk(&self, disk: &DiskSpec) -> Result<(), VmmError> {
        let call = format!("attaching {} as disk {}", disk.file.name().display(), disk.serial);
        // The disk stays in the jail until the VMM has responded.
        let _shown = self.watched.show(&call, self.user, std::slice::from_ref(disk)).await?;
        self.watched.answered(&call, self.api.add_disk(&self::disk(disk))).await.map(drop)
    }

    async fn detach_disk(&self, serial: &str) -> Result<(), VmmError> {
        let (id, call) = (device_id(serial), format!("detaching disk {serial}"));
        // Subscribed before the call, so that the event is not missed.
        let events = self.events.sender.subscribe();
        match self.watched.answered(&call, self.api.remove_device(&id)).await {
            Err(VmmError::Refused { .. }) if !self.has(&id, &call).await? => return Ok(()),
            asked => asked?,
        }
        let (pod, limit) = (self.record.pod.clone(), self.call_timeout);
        match tokio::time::timeout(limit, self.let_go(&id, &call, events)).await {
            Ok(gone) => gone,
            Err(_) => Err(VmmError::Hung { pod, call, limit }),
        }
    }

    async fn hotplugged_memory(&self) -> Result<Option<HotpluggedMemory>, VmmError> {
        let info = self.watched.answered("vm.info", self.api.info()).await?;
        Ok(zone(&info).map(|(zone, max)| HotpluggedMemory {
            plugged_mib: info.memory_actual_size.saturating_sub(zone.size) >> 20,
            requested_mib: zone.hotplugged_size.unwrap_or(0) >> 20,
            max_mib: max >> 20,
        }))
    }

    async fn request_memory(&self, mib: u64) -> Result<(), VmmError> {
        let call = hotplug::call(mib);
        let info = self.watched.answered(&call, self.api.info()).await?;
        let refused = |reason: &str| VmmError::Refused {
            pod: self.record.pod.clone(),
            call: call.clone(),
            reason: reason.to_owned(),
        };
        let (zone, max) = zone(&info).ok_or_else(|| refused("the VM was started with a fixed size"))?;
        if mib << 20 > max {
            return Err(refused(&format!("the VM can get at most {} MiB", max >> 20)));
        }
        // The VMM refuses a request for the size that was requested last.
        if zone.hotplugged_size.unwrap_or(0) == mib << 20 {
            return Ok(());
        }
        let resize = wire::ResizeZone { id: &zone.id, desired_ram: zone.size + (mib << 20) };
        self.watched.answered(&call, self.api.resize_zone(&resize)).await
    }

    async fn vcpus(&self) -> Result<Option<Vcpus>, VmmError> {
        let info = self.watched.answered("vm.info", self.api.info()).await?;
        let (pod, pid) = (&self.record.pod, self.record.pid);
        let plugged = hotplug::vcpu_threads(pid);
        let plugged =
            plugged.map_err(path_error(pod, "count vCPUs in", format!("/proc/{pid}/task").into()))?;
        let wire::InfoCpus { boot_vcpus: requested, max_vcpus: max } = info.config.cpus;
        Ok(Some(Vcpus { plugged, requested, max }))
    }

    async fn request_vcpus(&self, count: u32) -> Result<(), VmmError> {
        let call = hotplug::call_for_vcpus(count);
        let resize = wire::Resize { desired_vcpus: Some(count), ..wire::Resize::default() };
        self.watched.answered(&call, self.api.resize(&resize)).await
    }

    fn listen_for_shares(&self) -> Result<ShareListener, VmmError> {
        let name = vsock::shares();
        let listener =
            self.room.listen(&name).map_err(path_error(&self.record.pod, "listen on", name.into()))?;
        Ok(ShareListener { socket: listener.into(), transport: ShareTransport::Streams })
    }

    /// Does nothing: a guest with a vsock connects to its host's ports by itself.
    async fn connect_shares(&self) -> Result<(), VmmError> {
        Ok(())
    }

    async fn pause(&self) -> Result<(), VmmError> {
        self.watched.answered("pausing the guest", self.api.pause()).await
    }

    async fn resume(&self) -> Result<(), VmmError> {
        self.watched.answered("resuming the guest", self.api.resume()).await
    }

    async fn freeze(&self, dir: &Path) -> Result<(), VmmError> {
        let pod = &self.record.pod;
        // A connection that still exists in the copy would break the copy's next ones.
        let closed = tokio::time::timeout(self.call_timeout, self.link.close()).await;
        closed.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into())).map_err(path_error(
            pod,
            "close the agent's connection on",
            vsock::SOCKET.into(),
        ))?;
        tokio::time::sleep_until(self.freezable).await;
        self.pause().await?;
        let written = self.room.make_dir(template::FROZEN).map_err(path_error(
            pod,
            "create",
            template::FROZEN.into(),
        ))?;
        self.watched.answered("freezing the guest", self.api.snapshot(&written)).await?;
        template::take(&self.room, dir).map_err(path_error(pod, "store a frozen VM in", dir.to_owned()))
    }

    fn assign(&self, pod: &SandboxId, run_dir: &Path) -> Result<Arc<dyn Vm>, VmmError> {
        let record = self.record.assign(&self.watched.process, pod, run_dir)?;
        Ok(Arc::new(Self {
            record,
            watched: self.watched.of(pod),
            events: self.events.clone(),
            api: Api::new(run_dir, self.call_timeout),
            room: self.room.clone(),
            link: self.link.clone(),
            ..*self
        }))
    }

    async fn last_lines(&self) -> Vec<String> {
        self.watched.captures.last_lines().await
    }

    async fn exited(&self) -> VmExit {
        let how = self.watched.end().await;
        // Boxed: this waits for as long as the VM runs.
        VmExit { how, last_lines: Box::pin(self.watched.captures.last_lines()).await }
    }

    async fn kill(&self) -> Result<(), VmmError> {
        let files = [api::SOCKET, events::FILE];
        self.record.kill(&self.watched.process, self.call_timeout, &files).await
    }
}

impl CloudHypervisorVm {
    /// Returns whether the VM still has the device `id`.
    async fn has(&self, id: &str, call: &str) -> Result<bool, VmmError> {
        let info = self.watched.answered(call, self.api.info()).await?;
        Ok(info.device_tree.is_some_and(|devices| devices.contains_key(id)))
    }

    /// Waits until the guest has released a device.
    async fn let_go(
        &self,
        id: &str,
        call: &str,
        mut events: broadcast::Receiver<Event>,
    ) -> Result<(), VmmError> {
        loop {
            match events.recv().await {
                Ok(event) if event.is("device-removed") && event.device() == Some(id) => return Ok(()),
                Ok(_) => {}
                // The event may be among those that were missed.
                Err(broadcast::error::RecvError::Lagged(_)) if !self.has(id, call).await? => return Ok(()),
                Err(broadcast::error::RecvError::Lagged(_)) => {}
                Err(broadcast::error::RecvError::Closed) => return Err(self.watched.died(call).await),
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

/// Returns the API's description of a disk, at the path at which it is shown in the jail.
pub(super) fn disk(disk: &DiskSpec) -> wire::Disk {
    wire::Disk {
        id: device_id(&disk.serial),
        serial: disk.serial.clone(),
        path: path_of(&disk.serial),
        readonly: disk.read_only,
        image_type: wire::ImageType::Raw,
        rate_limiter_config: RateLimiter::of(disk.limits),
    }
}

/// Returns the API's description of a network interface.
pub(super) fn nic(nic: u8) -> wire::Net {
    wire::Net { id: format!("nic{nic}"), mac: first_mac_text(nic), num_queues: 2 }
}

/// The events of a VMM, which all clones share.
#[derive(Debug, Clone)]
pub(super) struct Followed {
    sender: broadcast::Sender<Event>,
    /// The task that reads the events. It ends with this, because another task reads them after an adoption.
    _task: Arc<AbortOnDropHandle<()>>,
}

impl Followed {
    /// Starts reading the `events` of the VMM `watched`.
    pub(super) fn new(events: Events, watched: &Watched) -> Self {
        let (sender, _) = broadcast::channel(EVENTS);
        let (process, cause) = (watched.process.clone(), watched.cause.clone());
        let task = tokio::spawn(follow(events, process, cause, sender.clone()));
        Self { sender, _task: Arc::new(AbortOnDropHandle::new(task)) }
    }
}

/// Forwards events. Kills a VMM whose guest resets itself, because the VMM would boot it again.
async fn follow(
    mut events: Events,
    process: Arc<Process>,
    cause: Arc<OnceLock<&'static str>>,
    sender: broadcast::Sender<Event>,
) {
    while let Some(event) = events.next().await {
        tracing::debug!(pid = process.pid(), source = event.source, event = event.name, "event of a VMM");
        if event.is("rebooting") {
            let _ = cause.set("its guest reset itself");
            if let Err(error) = process.kill() {
                tracing::error!(pid = process.pid(), %error, "cannot kill a VMM whose guest resets itself");
            }
        }
        // There may be no subscriber.
        let _ = sender.send(event);
    }
}
