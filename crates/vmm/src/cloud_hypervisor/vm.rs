//! A running Cloud Hypervisor.

use std::{
    fs,
    future::Future,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
    time::Duration,
};

use async_trait::async_trait;
use sandboxer_base::chain;
use sandboxer_process::Process;
use sandboxer_protocol::id::SandboxId;
use tokio::{sync::broadcast, time::Instant};
use tokio_util::task::AbortOnDropHandle;

use super::{
    api::{self, Api, ApiError},
    events::{self, Event, Events},
    shown::{self, Shown},
    template,
    vsock::{self, Link},
    wire,
};
use crate::{
    AgentStream, DiskSpec, ShareListener, ShareTransport, Vm, VmExit, VmRecord, VmmError,
    room::{Room, shown as path_of},
    run_dir::{Captures, path_error},
    spec::first_mac_text,
};

/// Events that may wait for a subscriber.
const EVENTS: usize = 16;
/// A process whose sockets are closed is gone within this time, or lives on without them.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);
/// A VM run by Cloud Hypervisor.
#[derive(Debug)]
pub(super) struct CloudHypervisorVm {
    pub(super) record: VmRecord,
    pub(super) watched: Watched,
    pub(super) api: Api,
    pub(super) room: Arc<Room>,
    pub(super) link: Link,
    /// User id of the VMM.
    pub(super) user: u32,
    pub(super) call_timeout: Duration,
    /// When it can be frozen; see [`FREEZABLE`].
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
        let pod = &self.record.pod;
        fs::metadata(&disk.path).map_err(path_error(pod, "attach", disk.path.clone()))?;
        let call = format!("attaching {} as disk {}", disk.path.display(), disk.serial);
        // Stays in the jail until the VMM has answered.
        let _shown = self.watched.show(&call, self.user, std::slice::from_ref(disk)).await?;
        self.watched.answered(&call, self.api.add_disk(&self::disk(disk))).await.map(drop)
    }

    async fn detach_disk(&self, serial: &str) -> Result<(), VmmError> {
        let (id, call) = (device_id(serial), format!("detaching disk {serial}"));
        // Subscribed before the call, or the event could come too early.
        let events = self.watched.events.subscribe();
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
        // A connection that still exists in the copy would break its next ones.
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
            watched: Watched { pod: pod.clone(), ..self.watched.clone() },
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
        VmExit { how, last_lines: self.watched.captures.last_lines().await }
    }

    async fn kill(&self) -> Result<(), VmmError> {
        let files = [api::SOCKET, events::FILE];
        self.record.kill(&self.watched.process, self.call_timeout, &files).await
    }
}

impl CloudHypervisorVm {
    /// Returns whether the guest has the device.
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
                // It may be among the events that were missed.
                Err(broadcast::error::RecvError::Lagged(_)) if !self.has(id, call).await? => return Ok(()),
                Err(broadcast::error::RecvError::Lagged(_)) => {}
                Err(broadcast::error::RecvError::Closed) => return Err(self.watched.died(call).await),
            }
        }
    }
}

/// Returns the id of a disk's device.
fn device_id(serial: &str) -> String {
    format!("disk-{serial}")
}

/// Returns a disk as the VMM's API describes it, at the path at which it is shown in the jail.
pub(super) fn disk(disk: &DiskSpec) -> wire::Disk {
    wire::Disk {
        id: device_id(&disk.serial),
        serial: disk.serial.clone(),
        path: path_of(&disk.serial),
        readonly: disk.read_only,
        image_type: wire::ImageType::Raw,
    }
}

/// Returns a network interface as the VMM's API describes it.
pub(super) fn nic(nic: u8) -> wire::Net {
    wire::Net { id: format!("nic{nic}"), mac: first_mac_text(nic), num_queues: 2 }
}

/// A VMM's process with its output and events. Clones watch the same process.
#[derive(Debug, Clone)]
pub(super) struct Watched {
    pod: SandboxId,
    process: Arc<Process>,
    captures: Arc<Captures>,
    events: broadcast::Sender<Event>,
    /// Why the daemon ended the process.
    cause: Arc<OnceLock<&'static str>>,
    /// Stops with this: after an adoption, another task reads the events.
    _follow: Arc<AbortOnDropHandle<()>>,
}

impl Watched {
    pub(super) fn new(pod: &SandboxId, process: Arc<Process>, captures: Captures, events: Events) -> Self {
        let (sender, _) = broadcast::channel(EVENTS);
        let cause = Arc::default();
        let follow = follow(events, process.clone(), Arc::clone(&cause), sender.clone());
        Self {
            pod: pod.clone(),
            process,
            captures: Arc::new(captures),
            events: sender,
            cause,
            _follow: Arc::new(AbortOnDropHandle::new(tokio::spawn(follow))),
        }
    }

    /// Waits for the answer to `call`; turns each failure into one kind of error.
    pub(super) async fn answered<T>(
        &self,
        call: &str,
        asked: impl Future<Output = Result<T, ApiError>>,
    ) -> Result<T, VmmError> {
        let answer = tokio::select! {
            biased;
            answer = asked => answer,
            _ = self.process.exited() => return Err(self.died(call).await),
        };
        let (pod, call) = (self.pod.clone(), call.to_owned());
        match answer {
            Ok(answer) => Ok(answer),
            Err(ApiError::Connect { .. } | ApiError::Closed(_)) if self.is_ending().await => {
                Err(self.died(&call).await)
            }
            Err(ApiError::Connect { path, source }) => {
                Err(VmmError::Path { pod, action: "connect to", path, source })
            }
            Err(ApiError::Timeout(limit)) => Err(VmmError::Hung { pod, call, limit }),
            Err(ApiError::Refused { reason, .. }) => Err(VmmError::Refused { pod, call, reason }),
            Err(error @ (ApiError::Malformed(_) | ApiError::Closed(_))) => {
                Err(VmmError::Malformed { pod, call, reason: chain(&error) })
            }
        }
    }

    /// Opens the directory that the VMM can write to.
    pub(super) async fn room(&self) -> Result<Arc<Room>, VmmError> {
        match Room::of(&self.process) {
            Ok(room) => Ok(Arc::new(room)),
            Err(_) if self.is_ending().await => Err(self.died("its start").await),
            Err(error) => {
                let path = PathBuf::from(format!("/proc/{}/root", self.process.pid()));
                Err(path_error(&self.pod, "open the jail", path)(error))
            }
        }
    }

    /// Makes these disks visible to the VMM, which runs as `user`, for `call`.
    pub(super) async fn show(
        &self,
        call: &str,
        user: u32,
        disks: &[DiskSpec],
    ) -> Result<Vec<Shown>, VmmError> {
        let (process, disks, pod) = (self.process.clone(), disks.to_vec(), self.pod.clone());
        let show = move || -> Result<Vec<Shown>, VmmError> {
            let show = |disk: &DiskSpec| {
                let shown = Shown::new(process.clone(), user, disk);
                shown.map_err(path_error(&pod, "mount disk", disk.path.clone()))
            };
            disks.iter().map(show).collect()
        };
        match tokio::task::spawn_blocking(show).await {
            Ok(Err(_)) if self.is_ending().await => Err(self.died(call).await),
            Ok(shown) => shown,
            Err(ended) => {
                Err(path_error(&self.pod, "mount disks in", path_of(""))(std::io::Error::other(ended)))
            }
        }
    }

    /// Removes from the jail the disks that an earlier daemon left there.
    pub(super) async fn clear(&self) -> Result<(), VmmError> {
        let process = self.process.clone();
        let cleared = tokio::task::spawn_blocking(move || shown::clear(&process)).await;
        cleared.unwrap_or_else(|ended| Err(std::io::Error::other(ended))).map_err(path_error(
            &self.pod,
            "unmount disks in",
            path_of(""),
        ))
    }

    /// Returns whether the process exits soon: its sockets close before it is gone.
    async fn is_ending(&self) -> bool {
        tokio::time::timeout(EXIT_TIMEOUT, self.process.exited()).await.is_ok()
    }

    /// Waits for the process's end. Returns how it ended.
    async fn end(&self) -> String {
        let exit = self.process.exited().await;
        self.captures.drained().await;
        match self.cause.get() {
            Some(cause) => format!("was killed after {cause}"),
            None => exit.to_string(),
        }
    }

    /// Returns the error of a call during which the process ended.
    async fn died(&self, call: &str) -> VmmError {
        let how = self.end().await;
        let last_lines = self.captures.last_lines().await.join(" | ");
        VmmError::Died { pod: self.pod.clone(), call: call.to_owned(), how, last_lines }
    }
}

/// Forwards events. Kills a VMM whose guest resets itself; the VMM would boot it again.
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
