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
    AgentStream, DiskSpec, ShareListener, ShareWay, Vm, VmExit, VmRecord, VmmError,
    room::{Room, shown as path_of},
    run_dir::{Captures, Files, host},
    spec::first_mac_text,
};

/// Events that may wait for who looks at them.
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
    /// As which the VMM runs.
    pub(super) user: u32,
    pub(super) call_timeout: Duration,
    /// When it is [`FREEZABLE`].
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
                Err(source) => Err(host(&self.record.pod, "connect to", path)(source)),
            },
            _ = self.watched.process.exited() => Err(self.watched.died("a connection to the agent").await),
        }
    }

    async fn attach_disk(&self, disk: &DiskSpec) -> Result<(), VmmError> {
        let pod = &self.record.pod;
        fs::metadata(&disk.path).map_err(host(pod, "attach", disk.path.clone()))?;
        let call = format!("attaching {} as disk {}", disk.path.display(), disk.serial);
        // In the jail until it has answered.
        let _shown = self.watched.show(&call, self.user, std::slice::from_ref(disk)).await?;
        self.watched.answered(&call, self.api.add_disk(&self::disk(disk))).await.map(drop)
    }

    async fn detach_disk(&self, serial: &str) -> Result<(), VmmError> {
        let (id, call) = (device_id(serial), format!("detaching disk {serial}"));
        // Subscribed before asking, or the event could come too early.
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
        let listener = self.room.listen(&name).map_err(host(&self.record.pod, "listen on", name.into()))?;
        Ok(ShareListener { socket: listener.into(), way: ShareWay::Streams })
    }

    /// A guest with a vsock reaches its host's ports by itself.
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
        // A connection that lives on in the copy would be in the way of its next ones.
        let closed = tokio::time::timeout(self.call_timeout, self.link.close()).await;
        closed.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into())).map_err(host(
            pod,
            "close the agent's connection on",
            vsock::SOCKET.into(),
        ))?;
        tokio::time::sleep_until(self.freezable).await;
        self.pause().await?;
        let written =
            self.room.make_dir(template::FROZEN).map_err(host(pod, "make", template::FROZEN.into()))?;
        self.watched.answered("freezing the guest", self.api.snapshot(&written)).await?;
        template::take(&self.room, dir).map_err(host(pod, "keep a frozen VM in", dir.to_owned()))
    }

    fn assign(&self, pod: &SandboxId, run_dir: &Path) -> Result<Arc<dyn Vm>, VmmError> {
        let proc = PathBuf::from(format!("/proc/{}", self.record.pid));
        let process = &self.watched.process;
        process.to_foreground().map_err(host(pod, "raise the priority of", proc))?;
        fs::rename(&self.record.run_dir, run_dir).map_err(host(
            pod,
            "move a VM's directory to",
            run_dir.to_owned(),
        ))?;
        let record = VmRecord { pod: pod.clone(), run_dir: run_dir.to_owned(), ..self.record.clone() };
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
        let pod = &self.record.pod;
        let proc = PathBuf::from(format!("/proc/{}", self.record.pid));
        self.watched.process.kill().map_err(host(pod, "kill", proc))?;
        let limit = self.call_timeout;
        tokio::time::timeout(limit, self.watched.process.exited()).await.map_err(|_| VmmError::Hung {
            pod: pod.clone(),
            call: "SIGKILL".into(),
            limit,
        })?;
        drop(Files::of_ended(&self.record.run_dir, &[api::SOCKET, events::FILE]));
        Ok(())
    }
}

impl CloudHypervisorVm {
    /// Returns whether the guest has the device.
    async fn has(&self, id: &str, call: &str) -> Result<bool, VmmError> {
        let info = self.watched.answered(call, self.api.info()).await?;
        Ok(info.device_tree.is_some_and(|devices| devices.contains_key(id)))
    }

    /// Waits until the guest has let go of a device.
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
                // It may have been among those that were missed.
                Err(broadcast::error::RecvError::Lagged(_)) if !self.has(id, call).await? => return Ok(()),
                Err(broadcast::error::RecvError::Lagged(_)) => {}
                Err(broadcast::error::RecvError::Closed) => return Err(self.watched.died(call).await),
            }
        }
    }
}

/// Name of a disk's device.
fn device_id(serial: &str) -> String {
    format!("disk-{serial}")
}

/// Returns a disk in the VMM's words, as it is shown to it.
pub(super) fn disk(disk: &DiskSpec) -> wire::Disk {
    wire::Disk {
        id: device_id(&disk.serial),
        serial: disk.serial.clone(),
        path: path_of(&disk.serial),
        readonly: disk.read_only,
        image_type: wire::ImageType::Raw,
    }
}

/// Returns a network interface in the VMM's words.
pub(super) fn nic(nic: u8) -> wire::Net {
    wire::Net { id: format!("nic{nic}"), mac: first_mac_text(nic), num_queues: 2 }
}

/// A VMM's process with all that it tells. Its clones watch the same.
#[derive(Debug, Clone)]
pub(super) struct Watched {
    pod: SandboxId,
    process: Arc<Process>,
    captures: Arc<Captures>,
    events: broadcast::Sender<Event>,
    /// Why the process was ended by us.
    cause: Arc<OnceLock<&'static str>>,
    /// Ends with this: who takes the VM up again reads the events.
    _follow: Arc<AbortOnDropHandle<()>>,
}

impl Watched {
    pub(super) fn new(pod: &SandboxId, process: Arc<Process>, captures: Captures, events: Events) -> Self {
        let (told, _) = broadcast::channel(EVENTS);
        let cause = Arc::default();
        let follow = follow(events, process.clone(), Arc::clone(&cause), told.clone());
        Self {
            pod: pod.clone(),
            process,
            captures: Arc::new(captures),
            events: told,
            cause,
            _follow: Arc::new(AbortOnDropHandle::new(tokio::spawn(follow))),
        }
    }

    /// Returns an answer to `call`, or one error for all the ways in which there is none.
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
                Err(VmmError::Host { pod, action: "connect to", path, source })
            }
            Err(ApiError::Timeout(limit)) => Err(VmmError::Hung { pod, call, limit }),
            Err(ApiError::Refused { reason, .. }) => Err(VmmError::Refused { pod, call, reason }),
            Err(error @ (ApiError::Malformed(_) | ApiError::Closed(_))) => {
                Err(VmmError::Malformed { pod, call, reason: chain(&error) })
            }
        }
    }

    /// Returns what the VMM can write to.
    pub(super) async fn room(&self) -> Result<Arc<Room>, VmmError> {
        match Room::of(&self.process) {
            Ok(room) => Ok(Arc::new(room)),
            Err(_) if self.is_ending().await => Err(self.died("its start").await),
            Err(error) => {
                let path = PathBuf::from(format!("/proc/{}/root", self.process.pid()));
                Err(host(&self.pod, "look into the jail", path)(error))
            }
        }
    }

    /// Shows the VMM, which runs as `user`, these disks for `call`.
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
                shown.map_err(host(&pod, "show the VMM", disk.path.clone()))
            };
            disks.iter().map(show).collect()
        };
        match tokio::task::spawn_blocking(show).await {
            Ok(Err(_)) if self.is_ending().await => Err(self.died(call).await),
            Ok(shown) => shown,
            Err(ended) => Err(host(&self.pod, "show the VMM", "a disk".into())(std::io::Error::other(ended))),
        }
    }

    /// Takes out of the jail what an earlier daemon showed and did not take out.
    pub(super) async fn clear(&self) -> Result<(), VmmError> {
        let process = self.process.clone();
        let cleared = tokio::task::spawn_blocking(move || shown::clear(&process)).await;
        cleared.unwrap_or_else(|ended| Err(std::io::Error::other(ended))).map_err(host(
            &self.pod,
            "take disks out of",
            path_of(""),
        ))
    }

    /// Returns the sockets of a process that ends close before it is gone.
    async fn is_ending(&self) -> bool {
        tokio::time::timeout(EXIT_TIMEOUT, self.process.exited()).await.is_ok()
    }

    /// Waits for the process's end; how it ended.
    async fn end(&self) -> String {
        let exit = self.process.exited().await;
        self.captures.drained().await;
        match self.cause.get() {
            Some(cause) => format!("was ended after {cause}"),
            None => exit.to_string(),
        }
    }

    /// Returns the error of a call that the process did not live to answer.
    async fn died(&self, call: &str) -> VmmError {
        let how = self.end().await;
        let last_lines = self.captures.last_lines().await.join(" | ");
        VmmError::Died { pod: self.pod.clone(), call: call.to_owned(), how, last_lines }
    }
}

/// Passes events on; ends a VM whose guest resets itself, which the VMM would boot anew.
async fn follow(
    mut events: Events,
    process: Arc<Process>,
    cause: Arc<OnceLock<&'static str>>,
    told: broadcast::Sender<Event>,
) {
    while let Some(event) = events.next().await {
        tracing::debug!(pid = process.pid(), source = event.source, event = event.name, "the VMM tells");
        if event.is("rebooting") {
            let _ = cause.set("its guest had reset itself");
            if let Err(error) = process.kill() {
                tracing::error!(pid = process.pid(), %error, "cannot end a VMM whose guest resets itself");
            }
        }
        // Nobody may be looking.
        let _ = told.send(event);
    }
}
