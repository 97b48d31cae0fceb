//! A VMM double for tests: no process, no kernel, no isolation whatever.
//!
//! Its guests are functions that a test supplies; its VMs fail when told to. It is held to
//! the same contract as a real VMM by `tests/vmm_contract.rs`.

use std::{
    collections::HashMap,
    fmt, fs,
    io::{self, Read},
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use rustix::net::Shutdown;
use sandboxer_process::{Written, socket};
use sandboxer_protocol::{boot::BootParams, id::SandboxId, link::LinkKey};
use sandboxer_vmm::{
    AgentStream, DiskSpec, Frozen, Held, MEMORY, ShareListener, ShareWay, TemplateInputs, Vm, VmExit,
    VmRecord, VmSpec, Vmm, VmmError, VmmInfo,
};
use tokio::{net::UnixStream, sync::watch};

/// What a guest is called with, once for each stream that the host opens.
#[derive(Debug)]
pub struct FakeGuest {
    /// As on its kernel's command line.
    pub boot: BootParams,
    /// The key its agent knows its host by; stays with the VM.
    pub link_key: watch::Sender<LinkKey>,
    /// Its end of the link.
    pub stream: UnixStream,
    /// Disks plugged in at the moment.
    pub disks: watch::Receiver<Vec<DiskSpec>>,
    /// To which it connects for each stream of requests for files.
    pub shares: PathBuf,
    /// Its power switch.
    pub power: Power,
}

/// Ends a fake VM from within.
#[derive(Debug, Clone)]
pub struct Power(watch::Sender<Option<VmExit>>);

impl Power {
    /// The VM ends, its VMM exiting with status 0 after these last lines.
    pub fn off(&self, last_lines: &[&str]) {
        let last_lines = last_lines.iter().map(|&line| line.to_owned()).collect();
        end(&self.0, VmExit { how: "exited with status 0".into(), last_lines });
    }
}

/// What goes wrong with the VMs of a [`FakeVmm`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    #[default]
    None,
    /// The VMM exits while it starts.
    FailsToBoot,
    /// The VMM starts and never answers.
    Hangs,
    /// The VM runs; nobody in it listens.
    NeverReady,
    /// The VMM refuses every disk.
    RefusesDisks,
    /// The VMM restores no template.
    RefusesTemplates,
    /// The VMM exits while it starts a VM with more memory, MiB.
    FailsToBootOver(u64),
    /// The VMM never answers when it is to restore a template.
    HangsOnRestore,
}

/// What ails a VM that runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Ailment {
    /// Nothing.
    #[default]
    None,
    /// Its VMM answers no later daemon.
    Silent,
    /// Neither does it end when it is killed, as a process that waits for a disk.
    Undying,
}

/// Socket at which requests of a guest come out.
const SHARES: &str = "shares.sock";
/// File of a frozen fake VM: the key of its link, hex.
const STATE: &str = "state";

type Vms = Arc<Mutex<HashMap<SandboxId, Arc<FakeVm>>>>;
type Guest = Arc<dyn Fn(FakeGuest) + Send + Sync>;

/// A VMM whose VMs are structs in this process.
pub struct FakeVmm {
    guest: Guest,
    fault: Mutex<Fault>,
    vms: Vms,
    version: Mutex<String>,
    started: AtomicU64,
}

impl FakeVmm {
    /// Calls `guest` for each stream that the host opens to a VM's agent; it spawns what it needs.
    pub fn new(guest: impl Fn(FakeGuest) + Send + Sync + 'static) -> Self {
        Self {
            guest: Arc::new(guest),
            fault: Mutex::default(),
            vms: Arc::default(),
            version: Mutex::new("0".into()),
            started: AtomicU64::new(0),
        }
    }

    /// From now on, boots and VMs fail this way.
    pub fn inject(&self, fault: Fault) {
        *lock(&self.fault) = fault;
    }

    /// As if the VMM's program was replaced by one of another version.
    pub fn upgrade(&self, version: &str) {
        version.clone_into(&mut lock(&self.version));
    }

    /// Returns the VMM of `pod` dies. Returns whether it was running.
    pub fn crash(&self, pod: &SandboxId) -> bool {
        let vm = lock(&self.vms).get(pod).cloned();
        vm.is_some_and(|vm| vm.end("was killed by signal 11", "injected crash"))
    }

    /// From now on, this ails the VM of `pod`, if it has one.
    pub fn ail(&self, pod: &SandboxId, ailment: Ailment) {
        if let Some(vm) = lock(&self.vms).get(pod) {
            *lock(&vm.ailment) = ailment;
        }
    }

    /// The VMM of `pod` writes so many bytes to its disks.
    pub fn write(&self, pod: &SandboxId, bytes: u64) {
        if let Some(vm) = lock(&self.vms).get(pod) {
            vm.written.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Returns the VM that is recorded so, if it runs.
    fn recorded(&self, record: &VmRecord) -> Option<Arc<FakeVm>> {
        let vm = lock(&self.vms).get(&record.pod).cloned();
        vm.filter(|vm| vm.record == *record && vm.is_running())
    }

    /// Pods whose VMs run.
    pub fn running(&self) -> Vec<SandboxId> {
        let vms = lock(&self.vms);
        vms.values().filter(|vm| vm.is_running()).map(|vm| vm.record.pod.clone()).collect()
    }
}

impl fmt::Debug for FakeVmm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FakeVmm").field("fault", &self.fault).finish_non_exhaustive()
    }
}

#[async_trait]
impl Vmm for FakeVmm {
    fn info(&self) -> VmmInfo {
        VmmInfo {
            name: "fake",
            version: "0".into(),
            accelerator: "none",
            accelerator_reason: "runs nothing".into(),
        }
    }

    async fn boot(&self, spec: &VmSpec) -> Result<Arc<dyn Vm>, VmmError> {
        let fault = *lock(&self.fault);
        match fault {
            Fault::Hangs => std::future::pending().await,
            Fault::FailsToBootOver(mib) if spec.memory_mib <= mib => {}
            Fault::FailsToBoot | Fault::FailsToBootOver(_) => {
                return Err(VmmError::Died {
                    pod: spec.pod.clone(),
                    call: "boot".into(),
                    how: "exited with status 1".into(),
                    last_lines: "injected failure".into(),
                });
            }
            Fault::None
            | Fault::NeverReady
            | Fault::RefusesDisks
            | Fault::RefusesTemplates
            | Fault::HangsOnRestore => {}
        }
        if let Some(memory) = &spec.memory_file {
            let pod = spec.pod.clone();
            let host = |source| VmmError::Host { pod, action: "make", path: memory.clone(), source };
            fs::write(memory, "memory of a fake VM").map_err(host)?;
        }
        let vm = Arc::new(FakeVm {
            record: VmRecord {
                pod: spec.pod.clone(),
                run_dir: spec.run_dir.clone(),
                pid: std::process::id(),
                start_time: self.started.fetch_add(1, Ordering::Relaxed),
                console_log_bytes: spec.console_log_bytes,
                vmm: "fake".into(),
            },
            link_key: watch::Sender::new(spec.boot.link_key.clone()),
            boot: spec.boot.clone(),
            guest: self.guest.clone(),
            fault,
            disks: watch::Sender::new(spec.disks.clone()),
            exit: watch::Sender::new(None),
            taps: Arc::new(Mutex::new(spec.taps.clone())),
            last_stream: Arc::default(),
            unheard: Arc::default(),
            ailment: Arc::default(),
            written: Arc::default(),
            vms: self.vms.clone(),
        });
        lock(&self.vms).insert(spec.pod.clone(), vm.clone());
        Ok(vm)
    }

    fn template_inputs(&self, _: &VmSpec) -> TemplateInputs {
        TemplateInputs {
            vmm: "fake".into(),
            version: lock(&self.version).clone(),
            program: "/dev/null".into(),
            accelerator: "none".into(),
            vm: Vec::new(),
        }
    }

    async fn restore(&self, spec: &VmSpec, frozen: &Frozen) -> Result<Arc<dyn Vm>, VmmError> {
        let fault = *lock(&self.fault);
        match fault {
            Fault::RefusesTemplates => {
                return Err(VmmError::Refused {
                    pod: spec.pod.clone(),
                    call: "loading a template".into(),
                    reason: "injected refusal".into(),
                });
            }
            Fault::HangsOnRestore => std::future::pending().await,
            _ => {}
        }
        let host = |name: &str| {
            let (pod, path) = (spec.pod.clone(), frozen.dir().join(name));
            move |source| VmmError::Host { pod, action: "read", path, source }
        };
        frozen.file(MEMORY).map_err(host(MEMORY))?;
        let mut key = String::new();
        let state = frozen.file(STATE).map_err(host(STATE))?;
        fs::File::from(state).read_to_string(&mut key).map_err(host(STATE))?;
        let Some(link_key) = LinkKey::from_hex(&key) else {
            return Err(host(STATE)(io::ErrorKind::InvalidData.into()));
        };
        let boot = BootParams { link_key, log: spec.boot.log.clone() };
        self.boot(&VmSpec { boot, ..spec.clone() }).await
    }

    async fn adopt(&self, record: &VmRecord) -> Result<Option<Arc<dyn Vm>>, VmmError> {
        let Some(vm) = self.recorded(record) else { return Ok(None) };
        if *lock(&vm.ailment) == Ailment::None {
            return Ok(Some(vm));
        }
        Err(vm.hung("the greeting"))
    }

    fn hold(&self, record: &VmRecord) -> Result<Option<Arc<dyn Held>>, VmmError> {
        Ok(self.recorded(record).map(|vm| vm as Arc<dyn Held>))
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

#[derive(Clone)]
struct FakeVm {
    record: VmRecord,
    boot: BootParams,
    link_key: watch::Sender<LinkKey>,
    guest: Guest,
    fault: Fault,
    disks: watch::Sender<Vec<DiskSpec>>,
    exit: watch::Sender<Option<VmExit>>,
    /// Held while it runs.
    taps: Arc<Mutex<Vec<Arc<OwnedFd>>>>,
    vms: Vms,
    last_stream: Arc<Mutex<Option<OwnedFd>>>,
    /// Ends of streams to a guest that never listens.
    unheard: Arc<Mutex<Vec<UnixStream>>>,
    ailment: Arc<Mutex<Ailment>>,
    /// Bytes that its VMM has written.
    written: Arc<AtomicU64>,
}

impl FakeVm {
    fn is_running(&self) -> bool {
        self.exit.borrow().is_none()
    }

    fn end(&self, how: &str, last_line: &str) -> bool {
        let ended = end(&self.exit, VmExit { how: how.to_owned(), last_lines: vec![last_line.to_owned()] });
        self.cut_stream();
        lock(&self.taps).clear();
        ended
    }

    fn cut_stream(&self) {
        if let Some(stream) = lock(&self.last_stream).take() {
            // One that is dead already is what is wanted.
            let _ = rustix::net::shutdown(&stream, Shutdown::Both);
        }
    }

    fn hung(&self, call: &str) -> VmmError {
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

    fn host_error(&self, action: &'static str, path: PathBuf) -> impl FnOnce(io::Error) -> VmmError {
        let pod = self.record.pod.clone();
        move |source| VmmError::Host { pod, action, path, source }
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
            open().map_err(self.host_error("connect to", self.record.run_dir.join("agent.sock")))?;
        if self.fault == Fault::NeverReady {
            lock(&self.unheard).push(theirs);
        } else {
            (self.guest)(FakeGuest {
                boot: self.boot.clone(),
                link_key: self.link_key.clone(),
                stream: theirs,
                disks: self.disks.subscribe(),
                shares: self.record.run_dir.join(SHARES),
                power: Power(self.exit.clone()),
            });
        }
        Ok(Box::new(ours))
    }

    async fn attach_disk(&self, disk: &DiskSpec) -> Result<(), VmmError> {
        self.reachable("attach_disk")?;
        fs::metadata(&disk.path).map_err(self.host_error("attach", disk.path.clone()))?;
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
            call: format!("attaching {} as disk {}", disk.path.display(), disk.serial),
            reason: "injected refusal, or a disk of that serial is there already".into(),
        })
    }

    async fn detach_disk(&self, serial: &str) -> Result<(), VmmError> {
        self.reachable("detach_disk")?;
        self.disks.send_modify(|disks| disks.retain(|disk| disk.serial != serial));
        Ok(())
    }

    fn listen_for_shares(&self) -> Result<ShareListener, VmmError> {
        let run_dir = &self.record.run_dir;
        let listener = socket::listen_anew(run_dir, SHARES)
            .map_err(self.host_error("listen on", run_dir.join(SHARES)))?;
        Ok(ShareListener { socket: listener.into(), way: ShareWay::Streams })
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
        fs::write(&path, self.link_key.borrow().to_hex()).map_err(self.host_error("make", path))
    }

    fn assign(&self, pod: &SandboxId, run_dir: &Path) -> Result<Arc<dyn Vm>, VmmError> {
        self.reachable("assign")?;
        fs::rename(&self.record.run_dir, run_dir)
            .map_err(self.host_error("move a VM's directory to", run_dir.to_owned()))?;
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
            // As long as a caller of a real one waits.
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

/// Returns the first end counts. Returns whether this was it.
fn end(switch: &watch::Sender<Option<VmExit>>, exit: VmExit) -> bool {
    switch.send_if_modified(|state| {
        let running = state.is_none();
        if running {
            *state = Some(exit);
        }
        running
    })
}

// A std mutex: never held across an await.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
