//! A running Firecracker.

use std::{
    os::fd::RawFd,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use sandboxer_protocol::id::SandboxId;
use tokio::{sync::Mutex, time::Instant};

use super::{
    api::Api,
    slots::{SlotError, Slots},
    template,
    wire::{DrivePatch, MemoryRequest, Net, VmState},
};
use crate::{
    AgentStream, DiskSpec, HotpluggedMemory, ShareListener, ShareTransport, Vm, VmExit, VmRecord, VmmError,
    hotplug,
    process::process_error,
    room::Room,
    run_dir::path_error,
    spec::first_mac_text,
    vsock::{self, Link},
    watched::Watched,
};

/// A VM run by Firecracker.
#[derive(Debug)]
pub(super) struct FirecrackerVm {
    pub(super) record: VmRecord,
    pub(super) watched: Watched,
    pub(super) api: Api,
    pub(super) room: Arc<Room>,
    // Held across a call on purpose: the index and the drives change together.
    pub(super) slots: Arc<Mutex<Slots>>,
    pub(super) link: Link,
    /// User ID of the VMM.
    pub(super) user: u32,
    /// The VMM's descriptor of the file for the guest's memory, if the VM is to be frozen.
    pub(super) memory: Option<RawFd>,
    pub(super) call_timeout: Duration,
    /// Whether the VM may have been started with memory that it can get later. The VMM logs each request that it
    /// refuses.
    pub(super) may_grow: bool,
    /// Whether the process is stopped: see [`FirecrackerVm::pause`].
    pub(super) stopped: Arc<AtomicBool>,
    /// Time from which the VM can be frozen; see [`crate::frozen::FREEZABLE`].
    pub(super) freezable: Instant,
}

#[async_trait]
impl Vm for FirecrackerVm {
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
        let pod = &self.record.pod;
        let name = disk.file.name();
        let bytes = disk.file.bytes().map_err(path_error(pod, "attach", name.to_owned()))?;
        let call = format!("attaching {} as disk {}", name.display(), disk.serial);
        let mut slots = self.slots.lock().await;
        let patch = slots.take(disk, bytes).map_err(|error| refused(pod, &call, error))?;
        let attached = self.point(&call, disk, &patch).await;
        if attached.is_err()
            && let Some(slot) = slots.of(&disk.serial)
            && let Err(error) = slots.free(slot)
        {
            tracing::warn!(%pod, disk = disk.serial, %error, "cannot remove a disk from a VM's index");
        }
        attached
    }

    async fn detach_disk(&self, serial: &str) -> Result<(), VmmError> {
        let call = format!("detaching disk {serial}");
        let mut slots = self.slots.lock().await;
        let Some(slot) = slots.of(serial) else { return Ok(()) };
        self.watched.answered(&call, self.api.patch_drive(&Slots::emptied(slot))).await?;
        slots.free(slot).map_err(|error| refused(&self.record.pod, &call, error.into()))
    }

    async fn hotplugged_memory(&self) -> Result<Option<HotpluggedMemory>, VmmError> {
        if !self.may_grow {
            return Ok(None);
        }
        match self.watched.answered("GET /hotplug/memory", self.api.memory()).await {
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

    async fn request_memory(&self, mib: u64) -> Result<(), VmmError> {
        let request = MemoryRequest { requested_size_mib: mib };
        self.watched.answered(&hotplug::call(mib), self.api.request_memory(&request)).await
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

    /// Stops the VMM process instead of the CPUs. After v1.16 has resumed a VM, it delivers nothing to the VM's vsock,
    /// because it waits for the guest to acknowledge a reset. Only a restored guest is notified of that reset.
    async fn pause(&self) -> Result<(), VmmError> {
        let Watched { pod, process, .. } = &self.watched;
        process.stop().map_err(process_error(pod, "stop", process.pid()))?;
        self.stopped.store(true, Ordering::Release);
        Ok(())
    }

    async fn resume(&self) -> Result<(), VmmError> {
        let Watched { pod, process, .. } = &self.watched;
        if self.stopped.swap(false, Ordering::AcqRel) {
            return process.go_on().map_err(process_error(pod, "continue", process.pid()));
        }
        // The process is not stopped, so the VM was restored.
        self.watched.answered("resuming the guest", self.api.set_state(VmState::Resumed)).await
    }

    async fn freeze(&self, dir: &Path) -> Result<(), VmmError> {
        let pod = &self.record.pod;
        let closed = tokio::time::timeout(self.call_timeout, self.link.close()).await;
        closed.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into())).map_err(path_error(
            pod,
            "close the agent's connection on",
            vsock::SOCKET.into(),
        ))?;
        let no_memory = || VmmError::Refused {
            pod: pod.clone(),
            call: template::FREEZE.to_owned(),
            reason: "the VM was booted without a file for its memory".to_owned(),
        };
        let memory = self.memory.ok_or_else(no_memory)?;
        tokio::time::sleep_until(self.freezable).await;
        self.watched.answered("pausing the guest", self.api.set_state(VmState::Paused)).await?;
        let written = self.room.make_dir(template::FROZEN).map_err(path_error(
            pod,
            "create",
            template::FROZEN.into(),
        ))?;
        let snapshot = template::snapshot(&written, memory);
        self.watched.answered(template::FREEZE, self.api.snapshot(&snapshot)).await?;
        template::take(&self.room, dir).map_err(path_error(pod, "store a frozen VM in", dir.to_owned()))
    }

    fn assign(&self, pod: &SandboxId, run_dir: &Path) -> Result<Arc<dyn Vm>, VmmError> {
        let record = self.record.assign(&self.watched.process, pod, run_dir)?;
        Ok(Arc::new(Self {
            record,
            watched: self.watched.of(pod),
            api: self.api.clone(),
            room: self.room.clone(),
            slots: self.slots.clone(),
            link: self.link.clone(),
            stopped: self.stopped.clone(),
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
        self.record.kill(&self.watched.process, self.call_timeout, &[]).await
    }
}

impl FirecrackerVm {
    /// Points a slot's drive to `disk`, which the VMM can open during the call.
    async fn point(&self, call: &str, disk: &DiskSpec, patch: &DrivePatch) -> Result<(), VmmError> {
        let _shown = self.watched.show(call, self.user, std::slice::from_ref(disk)).await?;
        self.watched.answered(call, self.api.patch_drive(patch)).await
    }
}

/// Returns the error of a disk that gets no slot.
pub(super) fn refused(pod: &SandboxId, call: &str, error: SlotError) -> VmmError {
    let (pod, call) = (pod.clone(), call.to_owned());
    VmmError::Refused { pod, call, reason: sandboxer_base::chain(&error) }
}

/// Returns the API's description of a network interface.
pub(super) fn nic(nic: u8, tap: &str) -> Net {
    Net { iface_id: nic_id(nic), guest_mac: first_mac_text(nic), host_dev_name: tap.to_owned() }
}

/// Returns the ID of a network interface.
pub(super) fn nic_id(nic: u8) -> String {
    format!("nic{nic}")
}
