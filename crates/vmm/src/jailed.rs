//! VMMs that run in a jail and have an HTTP API and a hybrid vsock: everything that they have in common.
//!
//! ```text
//! JailedVmm<D>   starts and adopts VMs    D: VmmDriver         its arguments, and the calls by which a VM starts
//! JailedVm<V>    one VM                   V: VmDriver          the calls of a running VM
//! Jailed         the VM's process, jail directory and vsock, which drivers use
//!
//! run_dir/console.log       the guest's serial port (the VMM's stdout), bounded; the older half in console.log.1
//! run_dir/vmm.log           the VMM's stderr, bounded as well
//!
//! and in the jail
//!
//! /run/vsock.sock           connections to the agent
//! /run/vsock.sock_1024      where the agent announces that it listens
//! /run/vsock.sock_1025      the guest's file requests, once it has shares
//! /run/disks/               a disk, while it is being attached
//! /run/frozen/              what the VMM writes when its VM is frozen
//! ```

mod process;
mod vm;

use std::{
    ffi::OsString,
    fmt,
    fs::{self, File},
    io,
    os::fd::{OwnedFd, RawFd},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use sandboxer_config::VmConfig;
use sandboxer_process::{
    Equipment, Process,
    jail::{self, Jail},
};

pub use self::{
    process::VmmProcess,
    vm::{Jailed, JailedVm, VmDriver},
};
use super::{
    Frozen, TemplateInputs, Vm, VmRecord, VmSpec, Vmm, VmmError, VmmInfo, frozen, huge_pages,
    permit::Permit,
    process as vmm_process,
    run_dir::{Files, path_error, reopen},
    version::{Supported, VersionError},
};

/// The guest's vsock address. Each VM has its own vsock, so all can have the same address.
pub const CID: u32 = 3;
/// The call that restores a VM, in errors.
pub const RESTORE: &str = "loading a template";
/// The device by which taps are opened.
const TUN: &str = "/dev/net/tun";

/// The part of a VMM that differs from other jailed VMMs: how it starts.
#[async_trait]
pub trait VmmDriver: fmt::Debug + Send + Sync + Sized + 'static {
    /// The value of [`VmmInfo::name`].
    const NAME: &'static str;
    /// The supported versions.
    const SUPPORTED: &'static Supported;
    /// The value of [`Vmm::opens_taps`].
    const OPENS_TAPS: bool;
    /// The value of [`Vmm::has_huge_pages`].
    const HAS_HUGE_PAGES: bool;
    /// The value of [`Vmm::freezes_interfaces`].
    const FREEZES_INTERFACES: bool;
    /// Whether the file for the memory of a VM that is to be frozen must have its full size before the VMM starts.
    const SIZES_MEMORY_FILE: bool;

    /// The calls of a running VM.
    type Vm: VmDriver;
    /// The values that [`VmmDriver::launch`] prepares for [`VmmDriver::create`].
    type Start: Send;

    /// Returns the driver for this host.
    fn new() -> Self;

    /// Returns the configured program.
    fn program(config: &VmConfig) -> &Path;

    /// Returns the arguments of the VMM that define the VM of `spec`, which has no pod.
    fn template_arguments(&self, spec: &VmSpec) -> Vec<String>;

    /// Prepares the start of a VMM in `jail`. Sockets and pipes in the VM's directory are added to `files`.
    fn launch(
        &self,
        spec: &VmSpec,
        begin: Begin<'_>,
        jail: &mut Jail,
        files: &mut Files,
    ) -> Result<Launch<Self::Start>, VmmError>;

    /// Creates the pipe for the VMM's stdout. Returns the daemon's and the VMM's end.
    fn console() -> io::Result<(OwnedFd, OwnedFd)> {
        let (console, stdout) = io::pipe()?;
        Ok((console.into(), stdout.into()))
    }

    /// Makes the VMM boot the VM, or restore it paused. No call takes longer than `limit`.
    async fn create(
        &self,
        spec: &VmSpec,
        vm: &Jailed,
        start: Self::Start,
        limit: Duration,
    ) -> Result<Self::Vm, VmmError>;

    /// Opens what a VM has whose VMM an earlier daemon started.
    fn adopt(vm: &Jailed) -> Result<Self::Vm, VmmError>;
}

/// How a VM starts.
#[derive(Debug)]
pub enum Begin<'a> {
    /// The VM boots.
    Boot {
        /// File for the guest's memory; `None`: private memory.
        memory: Option<OwnedFd>,
    },
    /// The VM is a paused copy.
    Restore(&'a Frozen),
}

/// A VMM that is about to be started.
#[derive(Debug)]
pub struct Launch<S> {
    /// The VMM's arguments.
    pub arguments: Vec<OsString>,
    /// Descriptors that the VMM inherits, with their numbers.
    pub inherited: Vec<OwnedFd>,
    /// Values for [`VmmDriver::create`].
    pub start: S,
}

/// A VMM in a jail, of a supported version.
#[derive(Debug)]
pub struct JailedVmm<D> {
    pub(crate) driver: D,
    program: PathBuf,
    info: VmmInfo,
    boot_timeout: Duration,
    call_timeout: Duration,
}

impl<D: VmmDriver> JailedVmm<D> {
    /// Reads the version of the configured program. `reason` explains the choice to the operator.
    pub async fn new(config: &VmConfig, reason: String) -> Result<Self, VersionError> {
        let program = D::program(config).to_owned();
        let version = D::SUPPORTED.read(&program).await?;
        Ok(Self {
            driver: D::new(),
            program,
            info: VmmInfo { name: D::NAME, version, accelerator: "kvm", accelerator_reason: reason },
            boot_timeout: config.boot_timeout,
            call_timeout: config.call_timeout,
        })
    }

    /// Prepares the jail of `spec`'s VM.
    fn jail(&self, spec: &VmSpec) -> Result<Jail, VmmError> {
        let program = sandboxer_process::find(&self.program);
        let readable = [program.as_path(), &spec.kernel, &spec.initramfs];
        let devices = [Path::new("/dev/kvm"), Path::new(TUN)];
        let devices = if spec.named_taps.is_some() { &devices[..] } else { &devices[..1] };
        let jail = Jail::new(&spec.run_dir, &readable, devices)
            .and_then(Jail::alone)
            .map_err(path_error(&spec.pod, "prepare a jail in", spec.run_dir.clone()))?
            .with_writable_dir();
        let Some(taps) = &spec.named_taps else { return Ok(jail) };
        let network = taps.namespace.try_clone();
        let network = network.map_err(|source| VmmError::Taps { pod: spec.pod.clone(), source })?;
        Ok(jail.with_network(network))
    }

    /// Starts the VMM in `jail` and creates the VM.
    async fn start(&self, spec: &VmSpec, mut jail: Jail, begin: Begin<'_>) -> Result<Arc<dyn Vm>, VmmError> {
        let (pod, run_dir, user) = (&spec.pod, &spec.run_dir, jail.user());
        let boots = matches!(begin, Begin::Boot { .. });
        let mut files = Files::default();
        let Launch { arguments, inherited, start } =
            self.driver.launch(spec, begin, &mut jail, &mut files)?;
        let (console, stdout) =
            D::console().map_err(path_error(pod, "capture output in", run_dir.clone()))?;
        let equipment = Equipment {
            inherited,
            stdout: Some(stdout),
            background: spec.background,
            jail: Some(jail),
            groups: spec.entries()?,
            ..Equipment::default()
        };
        let (process, stderr) = vmm_process::spawn(&self.program, arguments, spec, equipment).await?;
        let record = VmRecord {
            pod: pod.clone(),
            run_dir: run_dir.clone(),
            pid: process.pid(),
            start_time: process.start_time(),
            console_log_bytes: spec.console_log_bytes,
            vmm: D::NAME.into(),
        };
        let vmm = VmmProcess::new(record, process.watched(), stderr, console)?;
        // A restored agent announced itself before the freeze.
        let vm = Jailed::open(vmm, user, self.call_timeout, !boots).await?;
        // The VMM opens its taps while it starts; only root may be allowed to open the device.
        let _tun =
            match spec.named_taps {
                Some(_) => File::open(TUN)
                    .and_then(|tun| Permit::grant(tun, user, true))
                    .map_err(path_error(pod, "give access to", TUN.into()))?,
                None => None,
            };
        let driver = self.driver.create(spec, &vm, start, self.boot_timeout).await?;
        files.keep();
        process.keep();
        Ok(Arc::new(JailedVm::new(vm, driver)))
    }
}

#[async_trait]
impl<D: VmmDriver> Vmm for JailedVmm<D> {
    fn info(&self) -> VmmInfo {
        self.info.clone()
    }

    async fn boot(&self, spec: &VmSpec) -> Result<Arc<dyn Vm>, VmmError> {
        let jail = self.jail(spec)?;
        let user = Some(jail.user());
        let memory = match &spec.memory_file {
            Some(path) => {
                let bytes = if D::SIZES_MEMORY_FILE { spec.memory_mib << 20 } else { 0 };
                let file = frozen::create_memory(path, user, bytes);
                Some(file.map_err(path_error(&spec.pod, "create", path.clone()))?)
            }
            None if D::HAS_HUGE_PAGES => huge_pages::reserve(spec, user)?,
            None => None,
        };
        self.start(spec, jail, Begin::Boot { memory }).await
    }

    fn opens_taps(&self) -> bool {
        D::OPENS_TAPS
    }

    fn has_huge_pages(&self) -> bool {
        D::HAS_HUGE_PAGES
    }

    fn freezes_interfaces(&self) -> bool {
        D::FREEZES_INTERFACES
    }

    fn template_inputs(&self, spec: &VmSpec) -> TemplateInputs {
        self.info.template_inputs(&self.program, self.driver.template_arguments(&spec.without_pod()))
    }

    async fn restore(&self, spec: &VmSpec, frozen: &Frozen) -> Result<Arc<dyn Vm>, VmmError> {
        self.start(spec, self.jail(spec)?, Begin::Restore(frozen)).await
    }

    async fn adopt(&self, record: &VmRecord) -> Result<Option<Arc<dyn Vm>>, VmmError> {
        adopt::<D>(record, self.call_timeout).await
    }
}

/// Adopts a VM as [`Vmm::adopt`] does, whichever program is installed now. `limit` applies to this and to each later
/// call.
pub async fn adopt<D: VmmDriver>(
    record: &VmRecord,
    limit: Duration,
) -> Result<Option<Arc<dyn Vm>>, VmmError> {
    let Some(process) = record.process()?.map(Arc::new) else { return Ok(None) };
    let adopted = connect::<D>(record, process.clone(), limit).await;
    vmm_process::adopted(&process, limit, adopted).await
}

/// Opens the connections of an earlier daemon to a running VMM, and the API.
async fn connect<D: VmmDriver>(
    record: &VmRecord,
    process: Arc<Process>,
    limit: Duration,
) -> Result<Arc<dyn Vm>, VmmError> {
    let VmRecord { pod, run_dir, .. } = record;
    let stderr = reopen(record, libc::STDERR_FILENO)?;
    let console = reopen(record, libc::STDOUT_FILENO)?;
    let vmm = VmmProcess::new(record.clone(), process, stderr, console)?;
    let dir = fs::metadata(run_dir).map_err(path_error(pod, "inspect", run_dir.clone()))?;
    let user = jail::user_of(&dir);
    let vm = Jailed::open(vmm, user, limit, true).await?;
    vm.unmount_all().await?;
    // The VMM may have been starting when an earlier daemon was killed.
    if D::OPENS_TAPS
        && let Err(error) = Permit::take_back(Path::new(TUN), user)
    {
        tracing::warn!(%pod, %error, "cannot remove a VMM's entry from the access control list of {TUN}");
    }
    let driver = D::adopt(&vm)?;
    let call = D::Vm::VERSION_CALL;
    let version = vm.process.call(call, driver.version()).await?;
    D::SUPPORTED.check_running(&version).map_err(|error| VmmError::Malformed {
        pod: pod.clone(),
        call: call.into(),
        reason: error.to_string(),
    })?;
    Ok(Arc::new(JailedVm::new(vm, driver)))
}

/// Returns the path of an inherited descriptor, valid in the process that inherited it.
pub fn inherited(fd: RawFd) -> PathBuf {
    format!("/proc/self/fd/{fd}").into()
}
