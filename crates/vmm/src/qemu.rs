//! QEMU as the VMM.
//!
//! ```text
//! run_dir/control.sock   QMP; one client at a time
//! run_dir/agent.sock     the guest's virtio-serial port; one client at a time
//! run_dir/shares.sock    the guest's file requests, once it has shares
//! run_dir/console.sock   the guest's serial console, copied to console.log
//! run_dir/console.log    bounded, the older half in console.log.1
//! run_dir/vmm.log        QEMU's stdout and stderr, bounded as well
//! ```
//!
//! A frozen VM is two files: `memory` of the guest and `state` of the devices. Restored VMs map the memory privately
//! and share the pages that none of them has written.

mod command_line;
pub(crate) mod ram;
mod slots;
mod vhost;
mod vm;

use std::{
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    process::Stdio,
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use sandboxer_config::VmConfig;
use sandboxer_process::{Equipment, Process, Starting, jail::Jail};
use sandboxer_protocol::id::SandboxId;
use tokio::{net::UnixStream, time::Instant};

use self::{
    command_line::{Begin, Execution, Sockets},
    vhost::Packets,
    vm::{AGENT, CONSOLE, CONTROL, QemuVm, STATE, answer},
};
use super::{
    DiskSpec, FREEZABLE, Frozen, MEMORY, TemplateInputs, Vm, VmRecord, VmSpec, Vmm, VmmError, VmmInfo,
    accelerator::{self, AcceleratorError},
    frozen, huge_pages, preload, process,
    qmp::Qmp,
    run_dir::{Captures, Files, connect, path_error, reopen},
    tsc,
    version::{self, VersionError},
};

/// The value of [`VmmInfo::name`].
const NAME: &str = "qemu";

/// The QEMU program with all devices, which can also emulate.
const PROGRAM: &str = "qemu-system-x86_64";
/// Debian's build with few devices and no emulator, in the same package. A VMM starts in a third of the time and has 9
/// MB less memory of its own.
const PROGRAM_FOR_KVM: &str = "qemu-system-x86_64-microvm";

/// Returns the program that runs VMs on `accelerator`, "kvm" or "tcg": the configured one, or else the smallest that
/// is installed.
pub fn program(config: &VmConfig, accelerator: &str) -> PathBuf {
    let small = || {
        let found = sandboxer_process::find(Path::new(PROGRAM_FOR_KVM));
        (accelerator == "kvm" && found.is_absolute()).then_some(found)
    };
    config.qemu.clone().or_else(small).unwrap_or_else(|| PROGRAM.into())
}

/// Returns QEMU's version, for messages. A QEMU that cannot be run is no error here: each boot will report it.
async fn version(program: &Path) -> String {
    match version::QEMU.read(program).await {
        Ok(version) | Err(VersionError::Unsupported { version, .. }) => version,
        Err(VersionError::Foreign { output, .. }) if !output.is_empty() => output,
        Err(error) => format!("unknown: {error}"),
    }
}

/// Returns whether QEMU has a filter of system calls (`-sandbox`), because it was built with libseccomp.
async fn has_filter(program: &Path) -> bool {
    let run = tokio::process::Command::new(program)
        .args(["-sandbox", "off", "--version"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .status();
    // A QEMU that does not respond may have a filter. It is requested, and a start fails with a message if it is
    // missing.
    !matches!(tokio::time::timeout(version::LIMIT, run).await, Ok(Ok(status)) if !status.success())
}

/// Returns the default of [`VmRecord::vmm`].
pub(super) fn name() -> String {
    NAME.to_owned()
}

/// QEMU with the chosen accelerator.
#[derive(Debug)]
pub struct Qemu {
    program: PathBuf,
    execution: Execution,
    /// Whether QEMU has its own filter of system calls.
    filter: bool,
    info: VmmInfo,
    boot_timeout: Duration,
    call_timeout: Duration,
    jail: bool,
    /// Whether the host's kernel carries packets.
    vhost: bool,
}

impl Qemu {
    /// Chooses the accelerator, by a measurement if `auto` is configured.
    pub async fn new(config: &VmConfig) -> Result<Self, AcceleratorError> {
        let (accelerator, reason) = accelerator::choose(config.accelerator).await?;
        Ok(Self::on(config, accelerator, reason).await)
    }

    /// Returns a QEMU that runs guests on `accelerator`, "kvm" or "tcg". `reason` explains the choice to the operator.
    pub async fn on(config: &VmConfig, accelerator: &'static str, reason: String) -> Self {
        let program = program(config, accelerator);
        let (version, filter, tsc_khz) =
            tokio::join!(version(&program), has_filter(&program), tsc::frequency_khz());
        let execution = match accelerator {
            "kvm" => Execution::Kvm,
            _ => Execution::Tcg { tsc_khz },
        };
        Self {
            program,
            execution,
            filter,
            info: VmmInfo { name: NAME, version, accelerator, accelerator_reason: reason },
            boot_timeout: config.boot_timeout,
            call_timeout: config.call_timeout,
            jail: config.jail,
            vhost: vhost::is_wanted(config.vhost_net, execution),
        }
    }

    /// Returns the VM of `process`, whose control socket is connected.
    fn vm(
        &self,
        record: VmRecord,
        (process, packets): (Arc<Process>, Arc<Packets>),
        qmp: Qmp,
        captures: Captures,
    ) -> QemuVm {
        QemuVm {
            packets,
            record,
            process,
            qmp,
            captures: Arc::new(captures),
            call_timeout: self.call_timeout,
            agent: Arc::default(),
            freezable: matches!(self.execution, Execution::Kvm).then(|| Instant::now() + FREEZABLE),
        }
    }

    /// Prepares the jail for `spec`'s VM, if jails are configured.
    fn jail(&self, spec: &VmSpec) -> Result<Option<Jail>, VmmError> {
        let program = sandboxer_process::find(&self.program);
        let readable = [program.as_path(), &spec.kernel, &spec.initramfs];
        let devices: &[&Path] = match self.execution {
            Execution::Kvm => &[Path::new("/dev/kvm")],
            Execution::Tcg { .. } => &[],
        };
        let jail = self.jail.then(|| Jail::new(&spec.run_dir, &readable, devices).and_then(Jail::alone));
        jail.transpose().map_err(path_error(&spec.pod, "prepare a jail in", spec.run_dir.clone()))
    }

    /// Starts QEMU in `jail` and connects to it. QEMU inherits `inherited_files`, to which `begin` may refer.
    async fn start(
        &self,
        spec: &VmSpec,
        begin: Begin,
        inherited_files: Vec<OwnedFd>,
        jail: Option<Jail>,
    ) -> Result<Started, VmmError> {
        let pod = &spec.pod;
        let descriptor = |disk: &DiskSpec| {
            disk.file.descriptor().map_err(path_error(pod, "attach", disk.file.name().to_owned()))
        };
        let disks = spec.disks.iter().map(descriptor).collect::<Result<Vec<_>, _>>()?;
        let mut files = Files::default();
        let control = files.listen(spec, CONTROL)?;
        let agent = files.listen(spec, AGENT)?;
        let console = files.listen(spec, CONSOLE)?;
        let taps = spec.own_taps().map_err(|source| VmmError::Taps { pod: pod.clone(), source })?;
        let vhosts = if self.vhost { vhost::open(pod, taps.len())? } else { Vec::new() };
        let numbers = Sockets {
            control: control.as_raw_fd(),
            agent: agent.as_raw_fd(),
            console: console.as_raw_fd(),
            taps: taps.iter().map(AsRawFd::as_raw_fd).collect(),
            vhosts: vhosts.iter().map(AsRawFd::as_raw_fd).collect(),
            disks: disks.iter().map(AsRawFd::as_raw_fd).collect(),
        };
        let mut arguments = command_line::arguments(spec, self.execution, &numbers, begin);
        if self.filter {
            arguments.extend(command_line::FILTER.map(Into::into));
        }
        let mut inherited = inherited_files;
        inherited.extend([control, agent, console]);
        inherited.extend(taps);
        let carried = vhosts.len();
        inherited.extend(vhosts);
        inherited.extend(disks);
        // Connected while the listeners certainly exist: QEMU may exit before its first output is read.
        let control = connect(pod, &spec.run_dir, CONTROL)?;
        let console = connect(pod, &spec.run_dir, CONSOLE)?;

        let environment = match begin {
            Begin::Boot { .. } => Vec::new(),
            Begin::Restore { .. } => {
                let variable = preload::add(&mut inherited);
                vec![variable.map_err(path_error(pod, "prepare a library for", self.program.clone()))?]
            }
        };

        let (background, groups) = (spec.background, spec.entries()?);
        let equipment =
            Equipment { inherited, background, jail, groups, environment, ..Equipment::default() };
        let (process, stderr) = process::spawn(&self.program, arguments, spec, equipment).await?;
        let captures = Captures::start(stderr, console, &spec.run_dir, spec.console_log_bytes)
            .map_err(path_error(pod, "capture output in", spec.run_dir.clone()))?;
        let qmp = self.take_control(pod, control, &process, &captures).await?;

        let packets = Packets::new(process.pid(), carried);
        packets.prepare();

        let record = VmRecord {
            pod: pod.clone(),
            run_dir: spec.run_dir.clone(),
            pid: process.pid(),
            start_time: process.start_time(),
            console_log_bytes: spec.console_log_bytes,
            vmm: name(),
        };
        Ok(Started { vm: self.vm(record, (process.watched(), packets), qmp, captures), process, files })
    }
}

/// A QEMU that responds, before its caller knows the VM. QEMU is killed when this is dropped.
struct Started {
    vm: QemuVm,
    process: Starting,
    files: Files,
}

impl Started {
    /// Returns the VM, which then outlives this, or kills it if `ready` is an error.
    async fn keep_if(self, ready: Result<(), VmmError>) -> Result<Arc<dyn Vm>, VmmError> {
        if let Err(error) = ready {
            if let Err(left) = self.vm.kill().await {
                tracing::error!(pod = %self.vm.record.pod, error = %left, "cannot kill a VM that did not get ready");
            }
            return Err(error);
        }
        self.files.keep();
        self.process.keep();
        Ok(Arc::new(self.vm))
    }
}

#[async_trait]
impl Vmm for Qemu {
    fn info(&self) -> VmmInfo {
        self.info.clone()
    }

    async fn boot(&self, spec: &VmSpec) -> Result<Arc<dyn Vm>, VmmError> {
        let jail = self.jail(spec)?;
        let owner = jail.as_ref().map(Jail::user);
        let memory = match &spec.memory_file {
            Some(path) => Some(frozen::create_memory(path, owner, 0).map_err(path_error(
                &spec.pod,
                "create",
                path.clone(),
            ))?),
            None => huge_pages::reserve(spec, owner)?,
        };
        let begin = Begin::Boot { memory: memory.as_ref().map(AsRawFd::as_raw_fd) };
        let started = self.start(spec, begin, memory.into_iter().collect(), jail).await?;
        let limited = started.vm.limit(&spec.disks).await;
        started.keep_if(limited).await
    }

    fn has_huge_pages(&self) -> bool {
        true
    }

    fn freezes_interfaces(&self) -> bool {
        true
    }

    fn template_inputs(&self, spec: &VmSpec) -> TemplateInputs {
        let vm = command_line::vm(spec, self.execution, self.vhost);
        self.info.template_inputs(&self.program, vm)
    }

    async fn restore(&self, spec: &VmSpec, frozen: &Frozen) -> Result<Arc<dyn Vm>, VmmError> {
        let (memory, state) = (frozen.open(&spec.pod, MEMORY)?, frozen.open(&spec.pod, STATE)?);
        let (begin, state_fd) = (Begin::Restore { memory: memory.as_raw_fd() }, state.as_raw_fd());
        let started = self.start(spec, begin, vec![memory, state], self.jail(spec)?).await?;
        let restored = async {
            started.vm.load(state_fd).await?;
            started.vm.limit(&spec.disks).await
        };
        let restored = restored.await;
        started.keep_if(restored).await
    }

    async fn adopt(&self, record: &VmRecord) -> Result<Option<Arc<dyn Vm>>, VmmError> {
        let Some(process) = record.process()? else { return Ok(None) };
        let connected = self.connect(record).await;
        let Some((qmp, captures)) = process::adopted(&process, self.call_timeout, connected).await? else {
            return Ok(None);
        };
        let packets = Packets::of_running(record.pid);
        Ok(Some(Arc::new(self.vm(record.clone(), (Arc::new(process), packets), qmp, captures))))
    }
}

impl Qemu {
    /// Connects to the sockets of a QEMU that an earlier daemon started.
    async fn connect(&self, record: &VmRecord) -> Result<(Qmp, Captures), VmmError> {
        let VmRecord { pod, run_dir, .. } = record;
        let stderr = reopen(record, libc::STDERR_FILENO)?;
        let console = connect(pod, run_dir, CONSOLE)?;
        let captures = Captures::start(stderr, console, run_dir, record.console_log_bytes)
            .map_err(path_error(pod, "capture output in", run_dir.clone()))?;
        let control = connect(pod, run_dir, CONTROL)?;
        let qmp = Qmp::handshake(control, self.call_timeout).await.map_err(answer(pod, "the greeting"))?;
        Ok((qmp, captures))
    }

    /// Waits until a new QEMU responds on its control socket, or exits.
    async fn take_control(
        &self,
        pod: &SandboxId,
        control: UnixStream,
        process: &Starting,
        captures: &Captures,
    ) -> Result<Qmp, VmmError> {
        let greeted = Qmp::handshake(control, self.boot_timeout);
        let outcome = tokio::select! {
            biased;
            greeted = greeted => Some(greeted.map_err(answer(pod, "the greeting"))),
            _ = process.exited() => None,
        };
        let error = match outcome {
            Some(Ok(qmp)) => return Ok(qmp),
            Some(Err(error @ VmmError::Hung { .. })) => return Err(error),
            Some(Err(error)) => Some(error),
            None => None,
        };
        // An exiting process closes its sockets before it is gone. A process that stays has sent a malformed greeting.
        if let Some(error) = error
            && tokio::time::timeout(self.call_timeout, process.exited()).await.is_err()
        {
            return Err(error);
        }
        let how = process.exited().await.to_string();
        captures.drained().await;
        let call = "the greeting".to_owned();
        Err(VmmError::Died {
            pod: pod.clone(),
            call,
            how,
            last_lines: captures.last_lines().await.join(" | "),
        })
    }
}
