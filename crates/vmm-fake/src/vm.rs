//! A running VM of the double.

use std::{
    fmt, fs, io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use rustix::net::Shutdown;
use sandboxer_base::failpoint::fail;
use sandboxer_process::{Written, socket};
use sandboxer_protocol::{boot::BootParams, id::SandboxId, link::LinkKey};
use sandboxer_vmm::{
    AgentStream, Destination, DiskRecord, DiskSpec, Held, HotpluggedMemory, MEMORY, SavedDisk, ShareListener,
    ShareTransport, Vcpus, Vm, VmExit, VmRecord, VmmError,
};
use tokio::{net::UnixStream, sync::watch};

use crate::{
    Ailment, Fault, Guest, Vms,
    guest::{FakeGuest, Power, end},
    lock,
    memory::{Memory, Processors},
};

/// Socket on which the guest's file requests arrive.
const SHARES: &str = "shares.sock";
/// File of a frozen fake VM: the key of its link, in hex.
pub(crate) const STATE: &str = "state";

/// A running fake VM.
#[derive(Clone)]
pub(crate) struct FakeVm {
    pub(crate) record: VmRecord,
    pub(crate) boot: BootParams,
    pub(crate) link_key: watch::Sender<LinkKey>,
    pub(crate) guest: Guest,
    pub(crate) fault: Fault,
    pub(crate) disks: watch::Sender<Vec<DiskSpec>>,
    pub(crate) memory: Arc<Memory>,
    pub(crate) vcpus: Arc<Processors>,
    pub(crate) exit: watch::Sender<Option<VmExit>>,
    /// The VM's taps, kept open while it runs.
    pub(crate) taps: Arc<Mutex<Vec<Arc<OwnedFd>>>>,
    pub(crate) vms: Vms,
    pub(crate) last_stream: Arc<Mutex<Option<OwnedFd>>>,
    /// The guest's ends of streams to a guest that never listens.
    pub(crate) unheard: Arc<Mutex<Vec<UnixStream>>>,
    pub(crate) ailment: Arc<Mutex<Ailment>>,
    /// Number of bytes that the VMM has written.
    pub(crate) written: Arc<AtomicU64>,
}

impl FakeVm {
    pub(crate) fn is_running(&self) -> bool {
        self.exit.borrow().is_none()
    }

    pub(crate) fn end(&self, how: &str, last_line: &str) -> bool {
        let ended = end(&self.exit, VmExit { how: how.to_owned(), last_lines: vec![last_line.to_owned()] });
        self.cut_stream();
        lock(&self.taps).clear();
        ended
    }

    fn cut_stream(&self) {
        if let Some(stream) = lock(&self.last_stream).take() {
            // A stream that is dead already is fine.
            let _ = rustix::net::shutdown(&stream, Shutdown::Both);
        }
    }

    pub(crate) fn hung(&self, call: &str) -> VmmError {
        VmmError::Hung { pod: self.record.pod.clone(), call: call.to_owned(), limit: Duration::ZERO }
    }

    fn reachable(&self, call: &str) -> Result<(), VmmError> {
        if self.is_running() {
            return Ok(());
        }
        Err(VmmError::Malformed {
            pod: self.record.pod.clone(),
            call: call.to_owned(),
            reason: "control socket was closed".into(),
        })
    }

    fn path_error(&self, action: &'static str, path: PathBuf) -> impl FnOnce(io::Error) -> VmmError {
        let pod = self.record.pod.clone();
        move |source| VmmError::Path { pod, action, path, source }
    }
}

impl fmt::Debug for FakeVm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FakeVm").field("record", &self.record).finish_non_exhaustive()
    }
}

#[async_trait]
impl Vm for FakeVm {
    fn record(&self) -> VmRecord {
        self.record.clone()
    }

    async fn agent_stream(&self) -> Result<Box<dyn AgentStream>, VmmError> {
        let open = || {
            if !self.is_running() {
                return Err(io::ErrorKind::ConnectionRefused.into());
            }
            let (ours, theirs) = UnixStream::pair()?;
            *lock(&self.last_stream) = Some(ours.as_fd().try_clone_to_owned()?);
            Ok((ours, theirs))
        };
        self.cut_stream();
        let (ours, theirs) =
            open().map_err(self.path_error("connect to", self.record.run_dir.join("agent.sock")))?;
        if self.fault == Fault::NeverReady {
            lock(&self.unheard).push(theirs);
        } else {
            (self.guest)(FakeGuest {
                boot: self.boot.clone(),
                link_key: self.link_key.clone(),
                stream: theirs,
                disks: self.disks.subscribe(),
                memory_mib: self.memory.total_mib.subscribe(),
                vcpus: self.vcpus.plugged.subscribe(),
                shares: self.record.run_dir.join(SHARES),
                power: Power(self.exit.clone()),
            });
        }
        Ok(Box::new(ours))
    }

    async fn attach_disk(&self, disk: &DiskSpec) -> Result<(), VmmError> {
        self.reachable("attach_disk")?;
        let plugged = self.fault != Fault::RefusesDisks
            && self.disks.send_if_modified(|disks| {
                let new = disks.iter().all(|known| known.serial != disk.serial);
                if new {
                    disks.push(disk.clone());
                }
                new
            });
        if plugged {
            return Ok(());
        }
        Err(VmmError::Refused {
            pod: self.record.pod.clone(),
            call: format!("attaching {} as disk {}", disk.file.name().display(), disk.serial),
            reason: "injected refusal, or a disk of that serial is there already".into(),
        })
    }

    async fn detach_disk(&self, serial: &str) -> Result<(), VmmError> {
        self.reachable("detach_disk")?;
        self.disks.send_modify(|disks| disks.retain(|disk| disk.serial != serial));
        Ok(())
    }

    async fn hotplugged_memory(&self) -> Result<Option<HotpluggedMemory>, VmmError> {
        self.reachable("hotplugged_memory")?;
        Ok(self.memory.now())
    }

    async fn request_memory(&self, mib: u64) -> Result<(), VmmError> {
        self.reachable("request_memory")?;
        if self.memory.request(mib, self.fault) {
            return Ok(());
        }
        Err(VmmError::Refused {
            pod: self.record.pod.clone(),
            call: "request_memory".into(),
            reason: format!("the VM cannot get {mib} MiB"),
        })
    }

    async fn vcpus(&self) -> Result<Option<Vcpus>, VmmError> {
        self.reachable("vcpus")?;
        Ok(Some(self.vcpus.now()))
    }

    async fn request_vcpus(&self, count: u32) -> Result<(), VmmError> {
        self.reachable("request_vcpus")?;
        if self.vcpus.request(count, self.fault) {
            return Ok(());
        }
        Err(VmmError::Refused {
            pod: self.record.pod.clone(),
            call: "request_vcpus".into(),
            reason: format!("the VM cannot have {count} vCPUs now"),
        })
    }

    fn listen_for_shares(&self) -> Result<ShareListener, VmmError> {
        let run_dir = &self.record.run_dir;
        let listener = socket::listen_anew(run_dir, SHARES)
            .map_err(self.path_error("listen on", run_dir.join(SHARES)))?;
        Ok(ShareListener { socket: listener.into(), transport: ShareTransport::Streams })
    }

    async fn connect_shares(&self) -> Result<(), VmmError> {
        self.reachable("connect_shares")
    }

    async fn pause(&self) -> Result<(), VmmError> {
        self.reachable("pause")
    }

    async fn resume(&self) -> Result<(), VmmError> {
        self.reachable("resume")
    }

    async fn freeze(&self, dir: &Path) -> Result<(), VmmError> {
        self.reachable("freeze")?;
        let path = dir.join(STATE);
        fs::write(&path, self.link_key.borrow().to_hex()).map_err(self.path_error("create", path))
    }

    async fn checkpoint(&self, to: &Destination, disks: &[DiskRecord]) -> Result<Vec<SavedDisk>, VmmError> {
        self.reachable("checkpoint")?;
        if self.fault == Fault::FailsToSave {
            let reason = "injected refusal".to_owned();
            return Err(VmmError::Refused {
                pod: self.record.pod.clone(),
                call: "checkpoint".into(),
                reason,
            });
        }
        let path = to.dir.join(MEMORY);
        fail(format_args!("a fake VM is saved: {}", path.display()))
            .and_then(|()| fs::write(&path, "memory of a fake VM"))
            .map_err(self.path_error("create", path))?;
        self.freeze(&to.dir).await?;
        let all = self.disks.borrow().clone();
        let saved = disks.iter().map(|record| {
            let disk = all.iter().find(|disk| disk.serial == record.serial);
            let file = disk.ok_or(io::ErrorKind::NotFound.into()).and_then(|disk| disk.file.descriptor());
            let file = file.map_err(self.path_error("open", record.path.clone()))?;
            Ok(SavedDisk { record: record.clone(), file: file.into() })
        });
        saved.collect()
    }

    fn assign(&self, pod: &SandboxId, run_dir: &Path) -> Result<Arc<dyn Vm>, VmmError> {
        self.reachable("assign")?;
        fs::rename(&self.record.run_dir, run_dir)
            .map_err(self.path_error("move a VM's directory to", run_dir.to_owned()))?;
        let record = VmRecord { pod: pod.clone(), run_dir: run_dir.to_owned(), ..self.record.clone() };
        let vm = Arc::new(Self { record, ..self.clone() });
        let mut vms = lock(&self.vms);
        vms.remove(&self.record.pod);
        vms.insert(pod.clone(), vm.clone());
        Ok(vm)
    }

    async fn last_lines(&self) -> Vec<String> {
        self.exit.borrow().as_ref().map(|exit| exit.last_lines.clone()).unwrap_or_default()
    }

    async fn exited(&self) -> VmExit {
        let mut exit = self.exit.subscribe();
        match exit.wait_for(Option::is_some).await.map(|exit| exit.clone()) {
            Ok(Some(exit)) => exit,
            _ => VmExit { how: "is gone".into(), last_lines: Vec::new() },
        }
    }

    async fn kill(&self) -> Result<(), VmmError> {
        if self.is_running() && *lock(&self.ailment) == Ailment::Undying {
            // As long as a caller of a real VMM waits.
            tokio::time::sleep(Duration::from_millis(50)).await;
            return Err(self.hung("SIGKILL"));
        }
        self.end("was killed by signal 9", "");
        Ok(())
    }

    fn written(&self) -> Option<Written> {
        Some(Written { stored: self.written.load(Ordering::Relaxed), called: 0 })
    }
}

#[async_trait]
impl Held for FakeVm {
    async fn ended(&self) -> VmExit {
        self.exited().await
    }

    async fn end(&self) -> Result<(), VmmError> {
        self.kill().await
    }

    fn written(&self) -> Option<Written> {
        Vm::written(self)
    }
}
