//! VMs, whichever VMM runs them.
//!
//! [`Vmm`] starts a [`Vm`] from a [`VmSpec`]. Only the module of a VMM knows which VMM it is. A VM outlives the
//! daemon: dropping a handle does not end it, and [`Vmm::adopt`] finds it again by its [`VmRecord`].

mod accelerator;
mod capture;
pub mod cloud_hypervisor;
pub mod console;
pub mod firecracker;
pub mod frozen;
#[cfg(fuzzing)]
pub mod fuzzing;
mod held;
pub mod hotplug;
mod http;
mod huge_pages;
mod jail_dir;
mod jailed;
pub mod kvm;
mod mounted_disk;
mod permit;
mod preload;
mod process;
pub mod qemu;
mod qmp;
mod rate;
mod run_dir;
mod setup;
pub mod spec;
mod tsc;
pub mod version;
mod vmms;
mod vsock;

use std::{
    fmt,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use sandboxer_process::huge_pages::ReserveError;
use sandboxer_protocol::id::SandboxId;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};

pub use frozen::{Destination, FREEZABLE, Frozen, MEMORY, SavedDisk};
pub use held::{Held, HeldProcesses};
pub use hotplug::{HOTPLUG_STEP_MIB, HotpluggedMemory, Vcpus};
pub use rate::{DiskLimits, Rate};
pub use setup::{SetupError, detect, detect_all};
pub use spec::{DiskFile, DiskRecord, DiskSpec, FIRST_IMAGE, NamedTaps, SPARE, Shape, VmSpec};
pub use vmms::{VmmKey, Vmms};

/// A kind of VMM, ready to run VMs.
#[async_trait]
pub trait Vmm: Send + Sync + fmt::Debug {
    /// Returns the name, version and accelerator of the VMM, for operators.
    fn info(&self) -> VmmInfo;

    /// Starts a VM. Returns once the VMM controls it and the guest runs.
    ///
    /// If the future is dropped, the start is undone: no process and no socket remains.
    async fn boot(&self, spec: &VmSpec) -> Result<Arc<dyn Vm>, VmmError>;

    /// Returns whether the VMM opens the taps of its VMs by name ([`VmSpec::named_taps`]); otherwise it inherits them.
    fn opens_taps(&self) -> bool {
        false
    }

    /// Returns whether a VM can have [`VmSpec::huge_pages`].
    fn has_huge_pages(&self) -> bool {
        false
    }

    /// Returns whether a VM has its network interfaces when it is frozen; otherwise each copy gets new ones.
    fn freezes_interfaces(&self) -> bool;

    /// Returns the inputs of a template of `spec`, in addition to the program and the guest's files: the VMM's version
    /// and arguments. None of them is specific to one pod.
    fn template_inputs(&self, spec: &VmSpec) -> TemplateInputs;

    /// Starts a VM as a copy of a frozen one. Returns once it is ready, paused at the point at which the other VM was
    /// frozen. [`Vm::resume`] lets it continue.
    ///
    /// The boot parameters in `spec` are ignored. If the future is dropped, the start is undone, as for [`Vmm::boot`].
    async fn restore(&self, spec: &VmSpec, frozen: &Frozen) -> Result<Arc<dyn Vm>, VmmError>;

    /// Adopts a VM that an earlier daemon started. `Ok(None)`: the VM has ended. After an error the VM may still run:
    /// use [`Vmm::hold`].
    async fn adopt(&self, record: &VmRecord) -> Result<Option<Arc<dyn Vm>>, VmmError>;

    /// Opens a handle to the VMM processes of a VM that an earlier daemon started, even if the VMM does not respond.
    /// `Ok(None)`: the VM has ended.
    fn hold(&self, record: &VmRecord) -> Result<Option<Arc<dyn Held>>, VmmError> {
        let processes = HeldProcesses::open(record)?;
        Ok(processes.map(|processes| Arc::new(processes) as Arc<dyn Held>))
    }
}

/// A running VM. All methods can be called at any time and from several tasks.
#[async_trait]
pub trait Vm: Send + Sync + fmt::Debug {
    /// Returns the record that [`Vmm::adopt`] needs, which is kept in the journal.
    fn record(&self) -> VmRecord;

    /// Opens a new stream to the agent's end of the link, which kills the previous stream.
    async fn agent_stream(&self) -> Result<Box<dyn AgentStream>, VmmError>;

    /// Attaches a disk; the guest sees it soon after.
    async fn attach_disk(&self, disk: &DiskSpec) -> Result<(), VmmError>;

    /// Detaches a disk. Detaching a disk that is not attached is no error.
    async fn detach_disk(&self, serial: &str) -> Result<(), VmmError>;

    /// Returns the guest's memory in addition to its boot memory; `None`: the guest can have none.
    async fn hotplugged_memory(&self) -> Result<Option<HotpluggedMemory>, VmmError> {
        Ok(None)
    }

    /// Requests that the guest has `mib` MiB in addition to its boot memory, a multiple of [`HOTPLUG_STEP_MIB`]. The
    /// guest plugs or unplugs memory after this returns: see [`hotplug::settled`].
    async fn request_memory(&self, mib: u64) -> Result<(), VmmError> {
        let VmRecord { pod, vmm, .. } = self.record();
        let reason = format!("{vmm} cannot change the memory of a running VM");
        Err(VmmError::Refused { pod, call: hotplug::call(mib), reason })
    }

    /// Returns the number of the guest's vCPUs; `None`: it cannot change.
    async fn vcpus(&self) -> Result<Option<Vcpus>, VmmError> {
        Ok(None)
    }

    /// Requests that the guest has `count` vCPUs, at least those of its boot. A new vCPU exists when this returns, but
    /// the guest does not use it until a process in the guest brings it online. The guest releases vCPUs after this
    /// returns: see [`hotplug::given_up`].
    async fn request_vcpus(&self, count: u32) -> Result<(), VmmError> {
        Err(hotplug::vcpus_refused(&self.record(), count))
    }

    /// Listens for the guest's file requests, which arrive once [`Vm::connect_shares`] has been called. The holder of
    /// the socket serves only this guest, for the lifetime of both.
    fn listen_for_shares(&self) -> Result<ShareListener, VmmError>;

    /// Connects the guest to the socket of [`Vm::listen_for_shares`], on which a process must be listening. Replaces
    /// an earlier connection.
    async fn connect_shares(&self) -> Result<(), VmmError>;

    /// Stops the guest's CPUs and clocks.
    async fn pause(&self) -> Result<(), VmmError>;

    /// Lets the guest's CPUs run again.
    async fn resume(&self) -> Result<(), VmmError>;

    /// Stops the guest for good and writes to `dir` what [`Vmm::restore`] needs in addition to
    /// [`VmSpec::memory_file`], with which the VM was booted. The caller kills the VM afterwards.
    async fn freeze(&self, dir: &Path) -> Result<(), VmmError>;

    /// Pauses the guest and writes to `to` what [`Vmm::restore`] needs for copies of it. The guest stays paused, also
    /// after an error, until [`Vm::resume`]. `disks` are all disks that the VM has; returns them in the order in which
    /// a copy has to begin with them.
    async fn checkpoint(&self, to: &Destination, disks: &[DiskRecord]) -> Result<Vec<SavedDisk>, VmmError> {
        let _ = (to, disks);
        let VmRecord { pod, vmm, .. } = self.record();
        let reason = format!("VMs of {vmm} cannot be saved while they run");
        Err(VmmError::Refused { pod, call: "a checkpoint".into(), reason })
    }

    /// Assigns this VM to `pod` and moves its directory to `run_dir`, which must be empty. Returns the new handle; the
    /// old one must no longer be used.
    fn assign(&self, pod: &SandboxId, run_dir: &Path) -> Result<Arc<dyn Vm>, VmmError>;

    /// Returns the last lines of the VMM's stderr, followed by the last lines of the guest's console; few and bounded.
    async fn last_lines(&self) -> Vec<String>;

    /// Waits until the VM has ended, by event. Cancel-safe; can be called repeatedly.
    async fn exited(&self) -> VmExit;

    /// Kills the VM and waits until its process is gone. The caller notifies the guest first, where it matters.
    /// Killing a VM that has ended is no error.
    async fn kill(&self) -> Result<(), VmmError>;

    /// Returns what the VMM has written so far; `None` if the kernel does not report it.
    fn written(&self) -> Option<sandboxer_process::Written> {
        sandboxer_process::written(self.record().pid)
    }

    /// Returns the IDs of kernel processes that work only for this VM's VMM and have to move with it to another
    /// control group. The first call blocks.
    fn helpers(&self) -> Vec<u32> {
        Vec::new()
    }

    /// Returns the processor time that the VMM and [`Vm::helpers`] have used so far; `None` if the kernel does not
    /// report it.
    fn cpu_time(&self) -> Option<Duration> {
        let of_helpers = || self.helpers().into_iter().filter_map(sandboxer_process::cpu_time).sum();
        Some(sandboxer_process::cpu_time(self.record().pid)? + of_helpers())
    }
}

/// A socket on which a guest's file requests arrive.
#[derive(Debug)]
pub struct ShareListener {
    /// The listening socket, to which only the VMM connects.
    pub socket: OwnedFd,
    /// Kind of traffic that a connection carries.
    pub transport: ShareTransport,
}

/// The transport of a guest's file requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShareTransport {
    /// A disk of the guest, which the VMM reads and writes by NBD. See `sandboxer_protocol::share`.
    Disk,
    /// Connections that the guest opens, each of which is a separate stream.
    Streams,
}

/// A byte stream to a guest.
pub trait AgentStream: AsyncRead + AsyncWrite + Send + Sync + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Sync + Unpin> AgentStream for T {}

/// The VMM and accelerator that run the VMs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct VmmInfo {
    /// Name of the VMM: "qemu", "cloud-hypervisor" or "firecracker".
    pub name: &'static str,
    /// Version of the VMM, as it reports it.
    pub version: String,
    /// Accelerator: "kvm" or "tcg".
    pub accelerator: &'static str,
    /// The reason for this VMM and accelerator: a measurement, or the configuration.
    pub accelerator_reason: String,
}

impl VmmInfo {
    /// Returns the inputs of a template that `program` makes with the arguments `vm`.
    fn template_inputs(&self, program: &Path, vm: Vec<String>) -> TemplateInputs {
        TemplateInputs {
            vmm: self.name.to_owned(),
            version: self.version.clone(),
            program: sandboxer_process::find(program),
            accelerator: self.accelerator.to_owned(),
            vm,
        }
    }
}

/// The inputs from the VMM that a template depends on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TemplateInputs {
    /// The value of [`VmmInfo::name`].
    pub vmm: String,
    /// The value of [`VmmInfo::version`].
    pub version: String,
    /// Path of the program, as found in `PATH`.
    pub program: PathBuf,
    /// The value of [`VmmInfo::accelerator`].
    pub accelerator: String,
    /// Arguments of the VMM that define the VM.
    pub vm: Vec<String>,
}

/// Everything that is needed to find a VM again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmRecord {
    /// The pod that the VM is for.
    pub pod: SandboxId,
    /// The VM's directory, as in [`VmSpec::run_dir`].
    pub run_dir: PathBuf,
    /// Process ID of the VMM.
    pub pid: u32,
    /// Start time of that process (field 22 of `/proc/PID/stat`, clock ticks since boot): the PID alone may have been
    /// reused.
    pub start_time: u64,
    /// The value of [`VmSpec::console_log_bytes`].
    pub console_log_bytes: u64,
    /// Name of the VMM, as in [`VmmInfo::name`]. Old records have none, because QEMU was the only VMM.
    #[serde(default = "qemu::name")]
    pub vmm: String,
}

/// How a VM ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmExit {
    /// How the VMM ended, in words: "exited with status 1", "killed by signal 9", "is gone".
    pub how: String,
    /// The last lines of output, as from [`Vm::last_lines`].
    pub last_lines: Vec<String>,
}

/// An error of a VM, which names the pod.
#[derive(Debug, thiserror::Error)]
pub enum VmmError {
    /// The program cannot be started.
    #[error("cannot start {program:?} for pod {pod}: install it or set its path in the configuration")]
    Spawn {
        /// The pod.
        pod: SandboxId,
        /// Path of the VMM's program.
        program: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The VMM ended before it responded.
    #[error("VMM of pod {pod} {how} during {call}: {last_lines}")]
    Died {
        /// The pod.
        pod: SandboxId,
        /// Name of the call.
        call: String,
        /// How the VMM ended, as in [`VmExit::how`].
        how: String,
        /// The VMM's last output.
        last_lines: String,
    },
    /// The VMM did not respond in time.
    #[error("VMM of pod {pod} did not answer {call} within {limit:?}")]
    Hung {
        /// The pod.
        pod: SandboxId,
        /// Name of the call.
        call: String,
        /// The time limit.
        limit: Duration,
    },
    /// The VMM refused the call.
    #[error("VMM of pod {pod} refused {call}: {reason}")]
    Refused {
        /// The pod.
        pod: SandboxId,
        /// Name of the call.
        call: String,
        /// The VMM's explanation, bounded.
        reason: String,
    },
    /// The VMM's response is not valid.
    #[error("VMM of pod {pod} gave a malformed answer to {call}: {reason}")]
    Malformed {
        /// The pod.
        pod: SandboxId,
        /// Name of the call.
        call: String,
        /// The fault of the response.
        reason: String,
    },
    /// An operation on a file, directory or socket of the host failed.
    #[error("cannot {action} {path:?} for the VMM of pod {pod}")]
    Path {
        /// The pod.
        pod: SandboxId,
        /// The action that failed.
        action: &'static str,
        /// Path of the file, directory or socket.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// The process of the VMM cannot be used.
    #[error("cannot {action} VMM process {pid} of pod {pod}")]
    Process {
        /// The pod.
        pod: SandboxId,
        /// The action that failed.
        action: &'static str,
        /// ID of the process.
        pid: u32,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// The guest's memory cannot be in huge pages.
    #[error("the memory of pod {pod} cannot be in huge pages")]
    HugePages {
        /// The pod.
        pod: SandboxId,
        /// The reason, and what to do.
        source: ReserveError,
    },
    /// The taps cannot be passed to the VMM.
    #[error("cannot duplicate the taps of pod {pod} for its VMM")]
    Taps {
        /// The pod.
        pod: SandboxId,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
}
