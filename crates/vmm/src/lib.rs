//! VMs, whoever runs them.
//!
//! [`Vmm`] makes a [`Vm`] out of a [`VmSpec`]; nothing outside the file of one VMM knows its
//! name. A VM outlives the daemon: dropping a handle never ends it, and [`Vmm::adopt`] takes
//! it up again from its [`VmRecord`].

mod accelerator;
mod capture;
pub mod cloud_hypervisor;
pub mod console;
pub mod frozen;
#[cfg(fuzzing)]
pub mod fuzzing;
mod held;
pub mod kvm;
mod permit;
pub mod qemu;
mod qmp;
mod room;
mod run_dir;
mod setup;
pub mod spec;
mod tsc;

use std::{
    fmt,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use sandboxer_protocol::id::SandboxId;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};

pub use frozen::{FREEZABLE, Frozen, MEMORY};
pub use held::{Held, HeldProcesses};
pub use setup::{SetupError, detect};
pub use spec::{DiskSpec, Shape, VmSpec};

/// A kind of VMM, ready to run VMs.
#[async_trait]
pub trait Vmm: Send + Sync + fmt::Debug {
    /// Returns what runs the VMs, for people.
    fn info(&self) -> VmmInfo;

    /// Starts a VM; returns when its VMM is in control of it and the guest is running.
    ///
    /// Dropping the future ends what it began: no process, no socket stays.
    async fn boot(&self, spec: &VmSpec) -> Result<Arc<dyn Vm>, VmmError>;

    /// Returns what a template of `spec` depends on beside the program and the guest's files: the VMM's version
    /// and arguments. Nothing in it is of one pod.
    fn template_inputs(&self, spec: &VmSpec) -> TemplateInputs;

    /// Starts a VM as a copy of a frozen one; returns when it stands still where that one was
    /// frozen. [`Vm::resume`] lets it go on.
    ///
    /// Of `spec`, what the guest was booted with counts for nothing. As for [`Vmm::boot`], dropping
    /// the future ends what it began.
    async fn restore(&self, spec: &VmSpec, frozen: &Frozen) -> Result<Arc<dyn Vm>, VmmError>;

    /// Takes up a VM that an earlier daemon started. `Ok(None)`: it has ended since. An error says nothing about
    /// its end: [`Vmm::hold`] does.
    async fn adopt(&self, record: &VmRecord) -> Result<Option<Arc<dyn Vm>>, VmmError>;

    /// Holds on to the VMM of a VM that an earlier daemon started, whether it answers or not. `Ok(None)`: it has
    /// ended since.
    fn hold(&self, record: &VmRecord) -> Result<Option<Arc<dyn Held>>, VmmError> {
        let held = HeldProcesses::of(record)?;
        Ok(held.map(|held| Arc::new(held) as Arc<dyn Held>))
    }
}

/// A running VM. All methods can be called at any time and from several tasks.
#[async_trait]
pub trait Vm: Send + Sync + fmt::Debug {
    /// Returns what [`Vmm::adopt`] needs; goes into the journal.
    fn record(&self) -> VmRecord;

    /// Returns a fresh stream to the agent's end of the link. The one before it is dead from now on.
    async fn agent_stream(&self) -> Result<Box<dyn AgentStream>, VmmError>;

    /// Plugs a disk in; the guest sees it soon after.
    async fn attach_disk(&self, disk: &DiskSpec) -> Result<(), VmmError>;

    /// Takes a disk out. A disk that isn't there is no error.
    async fn detach_disk(&self, serial: &str) -> Result<(), VmmError>;

    /// Listens where the guest's requests for files come out, once [`Vm::connect_shares`] has been called. Whoever is
    /// given the socket has the guest on its own, for as long as both live.
    fn listen_for_shares(&self) -> Result<ShareListener, VmmError>;

    /// Gives the guest its end of the way to that listener, which is being listened at. What was begun of it before is
    /// begun anew.
    async fn connect_shares(&self) -> Result<(), VmmError>;

    /// Stops the guest's processors; its clocks stand still with them.
    async fn pause(&self) -> Result<(), VmmError>;

    /// Lets them run again.
    async fn resume(&self) -> Result<(), VmmError>;

    /// Stops the guest for good and writes into `dir` what [`Vmm::restore`] needs, beside
    /// [`VmSpec::memory_file`], with which the VM was booted. It is to be killed then.
    async fn freeze(&self, dir: &Path) -> Result<(), VmmError>;

    /// Returns the same VM, from now on that of `pod`, whose directory `run_dir` is: the VM's own is
    /// moved there, over an empty one. This handle is not to be used any more.
    fn assign(&self, pod: &SandboxId, run_dir: &Path) -> Result<Arc<dyn Vm>, VmmError>;

    /// Returns the VMM's last words on stderr, then the last lines of the guest's console; few and bounded.
    async fn last_lines(&self) -> Vec<String>;

    /// Waits for the VM's end, by event. Cancel-safe; answers again when asked again.
    async fn exited(&self) -> VmExit;

    /// Ends the VM at once and waits until its process is gone. The guest has been told
    /// before, where it matters. Ending a VM that has ended is no error.
    async fn kill(&self) -> Result<(), VmmError>;

    /// Returns what its VMM has written so far; none if the system doesn't say.
    fn written(&self) -> Option<sandboxer_process::Written> {
        sandboxer_process::written(self.record().pid)
    }
}

/// Where a guest's requests for files come out.
#[derive(Debug)]
pub struct ShareListener {
    /// Connected to by the VMM alone.
    pub socket: OwnedFd,
    /// What comes by each connection.
    pub way: ShareWay,
}

/// By which way a guest's requests for files come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShareWay {
    /// By a disk of the guest's: the VMM reads and writes it by NBD. See `sandboxer_protocol::share`.
    Disk,
    /// By connections of the guest's, each a stream of its own.
    Streams,
}

/// A byte stream to a guest.
pub trait AgentStream: AsyncRead + AsyncWrite + Send + Sync + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Sync + Unpin> AgentStream for T {}

/// Who runs the VMs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct VmmInfo {
    /// "qemu", "cloud-hypervisor", ….
    pub name: &'static str,
    /// As the VMM itself reports it.
    pub version: String,
    /// "kvm" or "tcg".
    pub accelerator: &'static str,
    /// Why this VMM with this accelerator: what was measured, or who asked for it.
    pub accelerator_reason: String,
}

/// On what of a VMM's a template depends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TemplateInputs {
    /// As in [`VmmInfo`].
    pub vmm: String,
    /// As in [`VmmInfo`].
    pub version: String,
    /// The program, found in `PATH`.
    pub program: PathBuf,
    /// As in [`VmmInfo`].
    pub accelerator: String,
    /// Arguments that make the VM what it is.
    pub vm: Vec<String>,
}

/// All that is needed to find a VM again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmRecord {
    /// The pod it is for.
    pub pod: SandboxId,
    /// Its directory, as in [`VmSpec::run_dir`].
    pub run_dir: PathBuf,
    /// Process of the VMM.
    pub pid: u32,
    /// Start time of that process (field 22 of `/proc/PID/stat`, clock ticks since boot): a pid
    /// alone may by now be somebody else's.
    pub start_time: u64,
    /// As in [`VmSpec::console_log_bytes`].
    pub console_log_bytes: u64,
    /// Who runs it, as in [`VmmInfo::name`]. Records had none while there was one VMM only.
    #[serde(default = "qemu::name")]
    pub vmm: String,
}

/// How a VM ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmExit {
    /// For people: "exited with status 1", "killed by signal 9", "is gone".
    pub how: String,
    /// Same as [`Vm::last_lines`].
    pub last_lines: Vec<String>,
}

/// What can go wrong with a VM. Each names the pod.
#[derive(Debug, thiserror::Error)]
pub enum VmmError {
    /// The program can't be started.
    #[error("cannot start {program:?} for pod {pod}: install it or set its path in the configuration")]
    Spawn {
        /// The pod.
        pod: SandboxId,
        /// The VMM's program.
        program: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The VMM ended before it had answered.
    #[error("VMM of pod {pod} {how} during {call}: {last_lines}")]
    Died {
        /// The pod.
        pod: SandboxId,
        /// What was asked.
        call: String,
        /// As in [`VmExit::how`].
        how: String,
        /// Its last words.
        last_lines: String,
    },
    /// The VMM didn't answer in time.
    #[error("VMM of pod {pod} did not answer {call} within {limit:?}")]
    Hung {
        /// The pod.
        pod: SandboxId,
        /// What was asked.
        call: String,
        /// How long was waited.
        limit: Duration,
    },
    /// The VMM said no.
    #[error("VMM of pod {pod} refused {call}: {reason}")]
    Refused {
        /// The pod.
        pod: SandboxId,
        /// What was asked.
        call: String,
        /// In the VMM's words, bounded.
        reason: String,
    },
    /// The VMM said what no VMM says.
    #[error("VMM of pod {pod} gave a malformed answer to {call}: {reason}")]
    Malformed {
        /// The pod.
        pod: SandboxId,
        /// What was asked.
        call: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Something of the host failed.
    #[error("cannot {action} {path:?} for the VMM of pod {pod}")]
    Host {
        /// The pod.
        pod: SandboxId,
        /// What was attempted.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}
