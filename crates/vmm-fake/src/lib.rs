//! A VMM double for tests: no process, no kernel, no isolation.
//!
//! The guests of this VMM are functions that a test supplies; its VMs fail on request. `tests/vmm_contract.rs` holds it
//! to the same contract as a real VMM.

mod guest;
mod memory;
mod vm;

use std::{
    collections::HashMap,
    fmt, fs,
    io::{self, Read},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use async_trait::async_trait;
use sandboxer_protocol::{boot::BootParams, id::SandboxId, link::LinkKey};
use sandboxer_vmm::{Frozen, Held, MEMORY, TemplateInputs, Vm, VmRecord, VmSpec, Vmm, VmmError, VmmInfo};
use tokio::sync::watch;

pub use self::guest::{FakeGuest, Power};
use self::{
    memory::{Memory, Processors},
    vm::{FakeVm, STATE},
};

/// What goes wrong with the VMs of a [`FakeVmm`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Fault {
    /// No fault.
    #[default]
    None,
    /// The VMM exits while it starts.
    FailsToBoot,
    /// The VMM starts but never responds.
    Hangs,
    /// The VM runs, but its agent does not respond.
    NeverReady,
    /// The VMM refuses every disk.
    RefusesDisks,
    /// The VMM restores no template.
    RefusesTemplates,
    /// The VMM exits while it starts a VM with more memory, MiB.
    FailsToBootOver(u64),
    /// The VMM never responds to a restore.
    HangsOnRestore,
    /// Guests plug no more than this much memory, MiB, and unplug none.
    PlugsAtMost(u64),
    /// Guests release no vCPU.
    KeepsVcpus,
    /// The VMM saves no running VM.
    FailsToSave,
}

/// What is wrong with a running VM.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Ailment {
    /// No ailment.
    #[default]
    None,
    /// The VMM does not respond to a later daemon.
    Silent,
    /// As [`Ailment::Silent`]; in addition the VMM survives being killed, like a process that waits for a disk.
    Undying,
}

type Vms = Arc<Mutex<HashMap<SandboxId, Arc<FakeVm>>>>;
type Guest = Arc<dyn Fn(FakeGuest) + Send + Sync>;

/// A VMM whose VMs are structs in this process.
pub struct FakeVmm {
    name: &'static str,
    guest: Guest,
    fault: Mutex<Fault>,
    vms: Vms,
    version: Mutex<String>,
    started: AtomicU64,
}

impl FakeVmm {
    /// Returns a VMM that calls `guest` for each stream that the host opens to a VM's agent; `guest` must not block.
    pub fn new(guest: impl Fn(FakeGuest) + Send + Sync + 'static) -> Self {
        Self::named("fake", guest)
    }

    /// Returns the same VMM under the name of a real one.
    pub fn named(name: &'static str, guest: impl Fn(FakeGuest) + Send + Sync + 'static) -> Self {
        Self {
            name,
            guest: Arc::new(guest),
            fault: Mutex::default(),
            vms: Arc::default(),
            version: Mutex::new("0".into()),
            started: AtomicU64::new(0),
        }
    }

    /// Makes boots and VMs fail with `fault` from now on.
    pub fn inject(&self, fault: Fault) {
        *lock(&self.fault) = fault;
    }

    /// Simulates an upgrade of the VMM program to `version`.
    pub fn upgrade(&self, version: &str) {
        version.clone_into(&mut lock(&self.version));
    }

    /// Crashes the VMM of `pod`. Returns whether it was running.
    pub fn crash(&self, pod: &SandboxId) -> bool {
        let vm = lock(&self.vms).get(pod).cloned();
        vm.is_some_and(|vm| vm.end("was killed by signal 11", "injected crash"))
    }

    /// Sets the ailment of the VM of `pod`, if it has one.
    pub fn ail(&self, pod: &SandboxId, ailment: Ailment) {
        if let Some(vm) = lock(&self.vms).get(pod) {
            *lock(&vm.ailment) = ailment;
        }
    }

    /// Adds to the bytes that the VMM of `pod` has written.
    pub fn write(&self, pod: &SandboxId, bytes: u64) {
        if let Some(vm) = lock(&self.vms).get(pod) {
            vm.written.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Returns the recorded VM, if it is running.
    fn recorded(&self, record: &VmRecord) -> Option<Arc<FakeVm>> {
        let vm = lock(&self.vms).get(&record.pod).cloned();
        vm.filter(|vm| vm.record == *record && vm.is_running())
    }

    /// Returns the serial numbers of the disks of the VM of `pod`, sorted.
    pub fn disks(&self, pod: &SandboxId) -> Vec<String> {
        let vms = lock(&self.vms);
        let disks = vms.get(pod).map(|vm| vm.disks.borrow().clone()).unwrap_or_default();
        let mut serials: Vec<_> = disks.into_iter().map(|disk| disk.serial).collect();
        serials.sort();
        serials
    }

    /// Returns the pods whose VMs are running.
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
            name: self.name,
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
            | Fault::HangsOnRestore
            | Fault::PlugsAtMost(_)
            | Fault::KeepsVcpus
            | Fault::FailsToSave => {}
        }
        if let Some(memory) = &spec.memory_file {
            let pod = spec.pod.clone();
            let host = |source| VmmError::Path { pod, action: "create", path: memory.clone(), source };
            fs::write(memory, "memory of a fake VM").map_err(host)?;
        }
        let vm = Arc::new(FakeVm {
            record: VmRecord {
                pod: spec.pod.clone(),
                run_dir: spec.run_dir.clone(),
                pid: std::process::id(),
                start_time: self.started.fetch_add(1, Ordering::Relaxed),
                console_log_bytes: spec.console_log_bytes,
                vmm: self.name.into(),
            },
            link_key: watch::Sender::new(spec.boot.link_key.clone()),
            boot: spec.boot.clone(),
            guest: self.guest.clone(),
            fault,
            disks: watch::Sender::new(spec.disks.clone()),
            memory: Arc::new(Memory::of(spec)),
            vcpus: Arc::new(Processors::of(spec)),
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

    fn freezes_interfaces(&self) -> bool {
        true
    }

    fn template_inputs(&self, spec: &VmSpec) -> TemplateInputs {
        TemplateInputs {
            vmm: self.name.into(),
            version: lock(&self.version).clone(),
            program: "/dev/null".into(),
            accelerator: "none".into(),
            vm: (spec.growth_mib > 0 || spec.growth_vcpus > 0)
                .then(|| format!("grows by {} MiB and {} vCPUs", spec.growth_mib, spec.growth_vcpus))
                .into_iter()
                .collect(),
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
            move |source| VmmError::Path { pod, action: "read", path, source }
        };
        frozen.file(MEMORY).map_err(host(MEMORY))?;
        let mut key = String::new();
        let state = frozen.file(STATE).map_err(host(STATE))?;
        fs::File::from(state).read_to_string(&mut key).map_err(host(STATE))?;
        let Some(link_key) = LinkKey::from_hex(&key) else {
            return Err(host(STATE)(io::ErrorKind::InvalidData.into()));
        };
        let boot = BootParams { link_key, ..spec.boot.clone() };
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

// A std mutex: never held across an await.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
