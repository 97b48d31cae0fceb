//! QEMU as a VMM.
//!
//! ```text
//! run_dir/control.sock   QMP; one client at a time
//! run_dir/agent.sock     the guest's virtio-serial port; one client at a time
//! run_dir/console.sock   the guest's serial console, copied to console.log
//! run_dir/console.log    bounded, the older half in console.log.1
//! run_dir/vmm.log        QEMU's stdout and stderr, bounded likewise
//! ```

mod command_line;

use std::{
    fs, io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    process::Stdio,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use rustix::net::Shutdown;
use sandboxer_protocol::id::SandboxId;
use tokio::net::unix::pipe;

use self::command_line::{Execution, Sockets};
use super::{
    AgentStream, DiskSpec, Machine, MachineExit, MachineRecord, VmSpec, Vmm, VmmError, VmmInfo,
    capture::Capture,
    kvm::{self, KvmUnusable},
    process::{self, Process, Starting},
    qmp::{Qmp, QmpError},
    socket, tsc,
};
use crate::config::{Accelerator, VmConfig};

const CONTROL: &str = "control.sock";
const AGENT: &str = "agent.sock";
const CONSOLE: &str = "console.sock";
/// Most bytes of QEMU's own words that are kept.
const VMM_LOG_BYTES: u64 = 64 << 10;
/// Lines of QEMU's last words.
const VMM_LINES: usize = 4;
/// Lines of the guest's: a panic with its call trace takes up to 20.
const CONSOLE_LINES: usize = 24;
/// A KVM that takes longer over its test than this is not usable; the test itself takes 0.15 s at most.
const KVM_TEST_LIMIT: Duration = Duration::from_secs(5);
/// Longest wait for `--version`.
const VERSION_LIMIT: Duration = Duration::from_secs(5);

/// Why QEMU can't be used as configured.
#[derive(Debug, thiserror::Error)]
pub enum QemuSetupError {
    /// The configuration asks for KVM.
    #[error("accelerator \"kvm\" is configured and doesn't work here: set it to \"auto\" or \"tcg\"")]
    NoKvm(#[source] KvmUnusable),
    /// The test didn't come back.
    #[error(
        "accelerator \"kvm\" is configured and its test did not end within {0:?}: set it to \"auto\" or \"tcg\""
    )]
    KvmHung(Duration),
}

/// QEMU, with the accelerator chosen.
#[derive(Debug)]
pub struct Qemu {
    program: PathBuf,
    execution: Execution,
    info: VmmInfo,
    boot_timeout: Duration,
    call_timeout: Duration,
}

impl Qemu {
    /// Chooses the accelerator, by measurement where `auto` is configured.
    pub async fn new(config: &VmConfig) -> Result<Self, QemuSetupError> {
        let (version, tsc_khz, chosen) = tokio::join!(
            version(&config.qemu),
            tsc::frequency_khz(),
            choose(config.accelerator)
        );
        let (accelerator, reason) = chosen?;
        let execution = match accelerator {
            "kvm" => Execution::Kvm,
            _ => Execution::Tcg { tsc_khz },
        };
        Ok(Self {
            program: config.qemu.clone(),
            execution,
            info: VmmInfo {
                name: "qemu",
                version,
                accelerator,
                accelerator_reason: reason,
            },
            boot_timeout: config.boot_timeout,
            call_timeout: config.call_timeout,
        })
    }

    /// Takes control of the machine behind `process`, whose control socket has been connected.
    fn machine(
        &self,
        record: MachineRecord,
        process: Arc<Process>,
        qmp: Qmp,
        captures: Captures,
    ) -> Arc<dyn Machine> {
        Arc::new(QemuMachine {
            record,
            process,
            qmp,
            captures,
            call_timeout: self.call_timeout,
            agent: Mutex::new(None),
        })
    }
}

#[async_trait]
impl Vmm for Qemu {
    fn info(&self) -> VmmInfo {
        self.info.clone()
    }

    async fn boot(&self, spec: &VmSpec) -> Result<Arc<dyn Machine>, VmmError> {
        let pod = &spec.pod;
        let files = SocketFiles::new(&spec.run_dir);
        let listen = |name| {
            socket::listen(&spec.run_dir, name).map_err(host(pod, "listen on", spec.run_dir.join(name)))
        };
        let [control, agent, console] = [listen(CONTROL)?, listen(AGENT)?, listen(CONSOLE)?];
        let numbers = Sockets {
            control: control.as_raw_fd(),
            agent: agent.as_raw_fd(),
            console: console.as_raw_fd(),
        };
        let arguments = command_line::arguments(spec, self.execution, numbers);
        let inherited: Vec<OwnedFd> = vec![control.into(), agent.into(), console.into()];

        let program = self.program.clone();
        let spawned = tokio::task::spawn_blocking(move || process::spawn(&program, arguments, inherited));
        let (process, words) = spawned
            .await
            .unwrap_or_else(|panic| Err(io::Error::other(panic)))
            .map_err(|source| VmmError::Spawn {
                pod: pod.clone(),
                program: self.program.clone(),
                source,
            })?;
        let captures = Captures::start(words, &spec.run_dir, spec.console_log_bytes).map_err(host(
            pod,
            "capture output in",
            spec.run_dir.clone(),
        ))?;
        let qmp = self.take_control(spec, &process, &captures).await?;

        let record = MachineRecord {
            pod: pod.clone(),
            run_dir: spec.run_dir.clone(),
            pid: process.pid(),
            start_time: process.start_time(),
            console_log_bytes: spec.console_log_bytes,
        };
        files.keep();
        Ok(self.machine(record, process.keep(), qmp, captures))
    }

    async fn adopt(&self, record: &MachineRecord) -> Result<Option<Arc<dyn Machine>>, VmmError> {
        let pod = &record.pod;
        let proc = PathBuf::from(format!("/proc/{}", record.pid));
        let found =
            process::adopt(record.pid, record.start_time).map_err(host(pod, "look at", proc.clone()))?;
        let Some(process) = found else { return Ok(None) };
        // The other end of its stderr died with the earlier daemon; this makes a new one.
        let words = fs::File::open(proc.join("fd/2")).map_err(host(pod, "read", proc.join("fd/2")))?;
        let captures = Captures::start(words.into(), &record.run_dir, record.console_log_bytes)
            .map_err(host(pod, "capture output in", record.run_dir.clone()))?;
        let control = socket::connect(&record.run_dir, CONTROL).map_err(host(
            pod,
            "connect to",
            record.run_dir.join(CONTROL),
        ))?;
        let ended = process.exited();
        let qmp = tokio::select! {
            _ = ended => return Ok(None),
            qmp = Qmp::handshake(control, self.call_timeout) => qmp.map_err(answer(pod, "the greeting"))?,
        };
        Ok(Some(self.machine(
            record.clone(),
            Arc::new(process),
            qmp,
            captures,
        )))
    }
}

impl Qemu {
    /// Waits until a QEMU that was just started answers its control socket, or has failed to.
    async fn take_control(
        &self,
        spec: &VmSpec,
        process: &Starting,
        captures: &Captures,
    ) -> Result<Qmp, VmmError> {
        let pod = &spec.pod;
        let shaken = async {
            match socket::connect(&spec.run_dir, CONTROL) {
                Ok(control) => Qmp::handshake(control, self.boot_timeout)
                    .await
                    .map_err(answer(pod, "the greeting")),
                Err(error) => Err(host(pod, "connect to", spec.run_dir.join(CONTROL))(error)),
            }
        };
        let outcome = tokio::select! {
            biased;
            shaken = shaken => Some(shaken),
            _ = process.exited() => None,
        };
        let error = match outcome {
            Some(Ok(qmp)) => return Ok(qmp),
            Some(Err(error @ VmmError::Hung { .. })) => return Err(error),
            Some(Err(error)) => Some(error),
            None => None,
        };
        // The sockets of a process that ends close before it is gone; one that stays said nonsense.
        if let Some(error) = error
            && tokio::time::timeout(self.call_timeout, process.exited())
                .await
                .is_err()
        {
            return Err(error);
        }
        let how = process.exited().await.to_string();
        captures.drained().await;
        Err(VmmError::Died {
            pod: pod.clone(),
            how,
            last_lines: captures.last_lines().await.join(" | "),
        })
    }
}

/// A machine run by QEMU.
#[derive(Debug)]
struct QemuMachine {
    record: MachineRecord,
    process: Arc<Process>,
    qmp: Qmp,
    captures: Captures,
    call_timeout: Duration,
    /// Another hold on the stream given out last: QEMU takes the next one only when this is dead.
    agent: Mutex<Option<OwnedFd>>,
}

#[async_trait]
impl Machine for QemuMachine {
    fn record(&self) -> MachineRecord {
        self.record.clone()
    }

    async fn agent_stream(&self) -> Result<Box<dyn AgentStream>, VmmError> {
        let fresh = || -> io::Result<_> {
            let mut last = self.agent.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(last) = last.take() {
                // One that is dead already is what is wanted.
                let _ = rustix::net::shutdown(&last, Shutdown::Both);
            }
            let stream = socket::connect(&self.record.run_dir, AGENT)?;
            *last = Some(stream.as_fd().try_clone_to_owned()?);
            Ok(stream)
        };
        let stream = fresh().map_err(host(
            &self.record.pod,
            "connect to",
            self.record.run_dir.join(AGENT),
        ))?;
        Ok(Box::new(stream))
    }

    async fn attach_disk(&self, disk: &DiskSpec) -> Result<(), VmmError> {
        let pod = &self.record.pod;
        fs::metadata(&disk.path).map_err(host(pod, "attach", disk.path.clone()))?;
        let call = format!("attaching {} as disk {}", disk.path.display(), disk.serial);
        self.qmp
            .blockdev_add(&command_line::block_node(disk), self.call_timeout)
            .await
            .map_err(answer(pod, &call))?;
        let plugged = self
            .qmp
            .device_add(command_line::disk_device(disk), self.call_timeout)
            .await;
        if plugged.is_err()
            && let Err(error) = self.detach_disk(&disk.serial).await
        {
            tracing::warn!(%pod, disk = disk.serial, %error, "cannot undo half an attachment");
        }
        plugged.map_err(answer(pod, &call))
    }

    async fn detach_disk(&self, serial: &str) -> Result<(), VmmError> {
        let detach = async {
            self.qmp
                .device_del(&command_line::device_id(serial), self.call_timeout)
                .await?;
            self.qmp
                .blockdev_del(&command_line::node_name(serial), self.call_timeout)
                .await
        };
        detach
            .await
            .map_err(answer(&self.record.pod, &format!("detaching disk {serial}")))
    }

    async fn last_lines(&self) -> Vec<String> {
        self.captures.last_lines().await
    }

    async fn exited(&self) -> MachineExit {
        let exit = self.process.exited().await;
        self.captures.drained().await;
        MachineExit {
            how: exit.to_string(),
            last_lines: self.captures.last_lines().await,
        }
    }

    async fn kill(&self) -> Result<(), VmmError> {
        let pod = &self.record.pod;
        let proc = PathBuf::from(format!("/proc/{}", self.record.pid));
        self.process.kill().map_err(host(pod, "kill", proc))?;
        let limit = self.call_timeout;
        tokio::time::timeout(limit, self.process.exited())
            .await
            .map_err(|_| VmmError::Hung {
                pod: pod.clone(),
                call: "SIGKILL".into(),
                limit,
            })?;
        drop(SocketFiles::new(&self.record.run_dir));
        Ok(())
    }
}

/// What the two hostile parties of a machine print.
#[derive(Debug)]
struct Captures {
    vmm: Capture,
    console: Capture,
}

impl Captures {
    fn start(words: OwnedFd, run_dir: &Path, console_bytes: u64) -> io::Result<Self> {
        let words = pipe::Receiver::from_owned_fd(words)?;
        let console = socket::connect(run_dir, CONSOLE)?;
        Ok(Self {
            vmm: Capture::start(words, run_dir.join("vmm.log"), VMM_LOG_BYTES),
            console: Capture::start(console, run_dir.join("console.log"), console_bytes),
        })
    }

    /// All that an ended process printed is in the files from here on.
    async fn drained(&self) {
        tokio::join!(self.vmm.drained(), self.console.drained());
    }

    async fn last_lines(&self) -> Vec<String> {
        let mut lines = self.vmm.last_lines(VMM_LINES).await;
        lines.extend(self.console.last_lines(CONSOLE_LINES).await);
        lines
    }
}

/// The files of a machine's sockets, removed on drop unless kept.
#[derive(Debug)]
struct SocketFiles<'a> {
    run_dir: &'a Path,
    kept: bool,
}

impl<'a> SocketFiles<'a> {
    fn new(run_dir: &'a Path) -> Self {
        Self { run_dir, kept: false }
    }

    fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for SocketFiles<'_> {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        for name in [CONTROL, AGENT, CONSOLE] {
            let path = self.run_dir.join(name);
            if let Err(error) = fs::remove_file(&path)
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!(path = %path.display(), %error, "cannot remove a machine's socket");
            }
        }
    }
}

/// Makes of a host's error one that names the pod and what was attempted.
fn host(pod: &SandboxId, action: &'static str, path: PathBuf) -> impl FnOnce(io::Error) -> VmmError {
    let pod = pod.clone();
    move |source| VmmError::Host {
        pod,
        action,
        path,
        source,
    }
}

/// Makes of QEMU's answer an error that names the pod and what was asked.
fn answer(pod: &SandboxId, call: &str) -> impl FnOnce(QmpError) -> VmmError {
    let (pod, call) = (pod.clone(), call.to_owned());
    move |error| match error {
        QmpError::Timeout(limit) => VmmError::Hung { pod, call, limit },
        QmpError::Refused { reason, .. } => VmmError::Refused { pod, call, reason },
        QmpError::Malformed(reason) => VmmError::Malformed { pod, call, reason },
        QmpError::Closed => VmmError::Malformed {
            pod,
            call,
            reason: error.to_string(),
        },
    }
}

/// The accelerator, and why this one.
async fn choose(configured: Accelerator) -> Result<(&'static str, String), QemuSetupError> {
    if configured == Accelerator::Tcg {
        return Ok(("tcg", "configured".into()));
    }
    let test = tokio::task::spawn_blocking(|| kvm::measure(Path::new("/dev/kvm")));
    let unusable = match tokio::time::timeout(KVM_TEST_LIMIT, test).await {
        Ok(Ok(Ok(rate))) => {
            let reason = format!("KVM runs {:.0} million guest instructions per second", rate / 1e6);
            return Ok(("kvm", reason));
        }
        Ok(Ok(Err(unusable))) => QemuSetupError::NoKvm(unusable),
        Ok(Err(_)) | Err(_) => QemuSetupError::KvmHung(KVM_TEST_LIMIT),
    };
    match (configured, unusable) {
        (Accelerator::Kvm, unusable) => Err(unusable),
        (_, QemuSetupError::NoKvm(unusable)) => Ok(("tcg", unusable.to_string())),
        (_, QemuSetupError::KvmHung(limit)) => {
            Ok(("tcg", format!("the test of KVM did not end within {limit:?}")))
        }
    }
}

/// The version QEMU reports. A QEMU that can't be run is no error yet: each boot will say so.
async fn version(program: &Path) -> String {
    let output = tokio::process::Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .output();
    match tokio::time::timeout(VERSION_LIMIT, output).await {
        Ok(Ok(output)) => {
            let text = String::from_utf8_lossy(&output.stdout);
            let line = text.lines().next().unwrap_or_default();
            line.trim_start_matches("QEMU emulator version ")
                .chars()
                .take(100)
                .collect()
        }
        Ok(Err(error)) => format!("unknown: {error}"),
        Err(_) => format!("unknown: no answer within {VERSION_LIMIT:?}"),
    }
}
