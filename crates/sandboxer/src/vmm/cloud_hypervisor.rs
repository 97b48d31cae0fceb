//! Cloud Hypervisor as a VMM.
//!
//! ```text
//! run_dir/control.sock      its API, listened on by us and inherited by it
//! run_dir/vsock.sock        the way to the agent
//! run_dir/vsock.sock_1024   on which the agent says that it listens
//! run_dir/events            a pipe on which it tells what happens
//! run_dir/disks/            a disk, while it is plugged in
//! run_dir/template/         of what a copy of a frozen machine is made, while it is
//! run_dir/console.log       the guest's serial port, which is its stdout; bounded, the older half in console.log.1
//! run_dir/vmm.log           its stderr, bounded likewise
//! ```
//!
//! Its seccomp filters are on, and so is Landlock where this kernel has it.

pub mod api;
pub(crate) mod events;
mod jail;
mod machine;
mod passing;
mod template;
pub mod version;
mod vsock;
pub mod wire;

use std::{
    ffi::OsString,
    io, iter,
    os::fd::{AsRawFd, RawFd},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use sandboxer_protocol::boot::BootParams;
use tokio::net::unix::pipe;

use self::{
    api::Api,
    events::Events,
    machine::{CloudHypervisorMachine, Watched},
    template::Source,
    version::{Version, VersionError},
    vsock::Link,
};
use super::{
    Frozen, Machine, MachineRecord, TemplateInputs, VmSpec, Vmm, VmmError, VmmInfo, process,
    run_dir::{Captures, Files, host, reopen},
};
use crate::config::VmConfig;

/// As in [`VmmInfo::name`].
pub const NAME: &str = "cloud-hypervisor";
/// The guest's vsock address. Each machine has a vsock of its own, so all can have the same.
const CID: u32 = 3;

/// Cloud Hypervisor, of a known version.
#[derive(Debug)]
pub struct CloudHypervisor {
    program: PathBuf,
    version: Version,
    jailed: bool,
    info: VmmInfo,
    boot_timeout: Duration,
    call_timeout: Duration,
}

impl CloudHypervisor {
    /// Asks the configured program for its version. `reason` is why it is used, for people.
    pub async fn new(config: &VmConfig, reason: String) -> Result<Self, VersionError> {
        let version = Version::of(&config.cloud_hypervisor).await?;
        let jail = jail::usable();
        if let Err(why) = &jail {
            tracing::warn!(why, "VMMs are not confined by Landlock");
        }
        Ok(Self {
            program: config.cloud_hypervisor.clone(),
            info: VmmInfo {
                name: NAME,
                version: version.to_string(),
                accelerator: "kvm",
                accelerator_reason: reason,
            },
            version,
            jailed: jail.is_ok(),
            boot_timeout: config.boot_timeout,
            call_timeout: config.call_timeout,
        })
    }

    /// What `vm.create` is to make.
    pub fn description(&self, spec: &VmSpec) -> wire::VmConfig {
        let image_type = self.version.image_type();
        // One that is to be frozen writes itself down beside its memory.
        let frozen_into = spec.memory_file.as_ref().and_then(|file| file.parent());
        let writable = iter::once(spec.run_dir.as_path()).chain(frozen_into).map(Path::to_owned);
        wire::VmConfig {
            cpus: wire::Cpus { boot_vcpus: spec.vcpus, max_vcpus: spec.vcpus },
            memory: template::memory(spec),
            payload: wire::Payload {
                kernel: spec.kernel.clone(),
                initramfs: spec.initramfs.clone(),
                cmdline: kernel_line(&spec.boot),
            },
            disks: spec.disks.iter().map(|disk| machine::disk(disk, image_type)).collect(),
            rng: wire::Rng { src: "/dev/urandom" },
            serial: wire::Console { mode: wire::ConsoleMode::Tty },
            console: wire::Console { mode: wire::ConsoleMode::Off },
            // Relative to the VMM's working directory, so never too long for a socket's address.
            vsock: wire::Vsock { cid: CID, socket: PathBuf::from("./").join(vsock::SOCKET) },
            landlock_enable: self.jailed,
            landlock_rules: writable.map(|path| wire::LandlockRule { path, access: "rw" }).collect(),
        }
    }

    /// Starts Cloud Hypervisor and has it make the machine.
    async fn start(&self, spec: &VmSpec, begin: Begin<'_>) -> Result<Arc<dyn Machine>, VmmError> {
        let (pod, run_dir) = (&spec.pod, &spec.run_dir);
        let at = |name: &str| run_dir.join(name);
        let mut files = Files::default();
        let control = files.listen(spec, api::SOCKET)?;
        let announcements = at(&vsock::announcements());
        let link = match begin {
            Begin::Boot => Link::new(run_dir),
            // Its agent has announced itself long ago.
            Begin::Restore { .. } => Link::of_running(run_dir),
        };
        let link = link.map_err(host(pod, "listen on", announcements.clone()))?;
        files.add(announcements);
        // Made by the VMM.
        files.add(at(vsock::SOCKET));
        let (events, told) = Events::create(run_dir).map_err(host(pod, "make pipe", at(events::FILE)))?;
        files.add(at(events::FILE));
        let (console, stdout) = io::pipe().map_err(host(pod, "capture output in", run_dir.clone()))?;

        let arguments = arguments(control.as_raw_fd(), told.as_raw_fd());
        let mut inherited = vec![control, told];
        let source = match begin {
            Begin::Boot => None,
            Begin::Restore { frozen } => {
                let (source, sealed) = Source::new(spec, frozen)?;
                inherited.extend(sealed);
                Some(source)
            }
        };
        let confined = match source {
            Some(_) if self.jailed => jail::rules(&process::find(&self.program), spec)
                .map_err(|error| host(pod, "confine the VMM to", run_dir.clone())(io::Error::other(error)))?,
            _ => None,
        };
        let (program, dir, background) = (self.program.clone(), run_dir.clone(), spec.background);
        let spawned = tokio::task::spawn_blocking(move || {
            process::spawn(
                &program,
                arguments,
                &dir,
                inherited,
                Some(stdout.into()),
                background,
                confined.map(process::Confined::Landlocked),
            )
        });
        let (process, words) = spawned
            .await
            .unwrap_or_else(|panic| Err(io::Error::other(panic)))
            .map_err(|source| VmmError::Spawn { pod: pod.clone(), program: self.program.clone(), source })?;
        let captures = pipe::Receiver::from_owned_fd(console.into())
            .and_then(|console| Captures::start(words, console, run_dir, spec.console_log_bytes))
            .map_err(host(pod, "capture output in", run_dir.clone()))?;

        let watched = Watched::new(pod, process.watched(), captures, events);
        let api = Api::new(run_dir, self.boot_timeout);
        match source {
            None => {
                watched.answered("vm.create", api.create(&self.description(spec))).await?;
                watched.answered("vm.boot", api.boot()).await?;
            }
            Some(source) => watched.answered(template::CALL, api.restore(source.path())).await?,
        }
        // What is to be frozen gets none: a copy would want the taps that were its template's.
        if spec.memory_file.is_none() {
            let taps = spec.own_taps().map_err(host(pod, "pass on the taps of", run_dir.clone()))?;
            for (nic, tap) in (0..).zip(taps) {
                watched.answered("vm.add-net", api.add_net(&machine::nic(nic), vec![tap])).await?;
            }
        }
        let record = MachineRecord {
            pod: pod.clone(),
            run_dir: run_dir.clone(),
            pid: process.pid(),
            start_time: process.start_time(),
            console_log_bytes: spec.console_log_bytes,
            vmm: NAME.into(),
        };
        files.keep();
        process.keep();
        Ok(Arc::new(CloudHypervisorMachine {
            api: Api::new(run_dir, self.call_timeout),
            record,
            watched,
            link,
            image_type: self.version.image_type(),
            jailed: self.jailed,
            call_timeout: self.call_timeout,
        }))
    }
}

/// How a machine comes to be.
#[derive(Debug, Clone, Copy)]
enum Begin<'a> {
    /// It boots.
    Boot,
    /// It is a copy of this one, standing still.
    Restore { frozen: &'a Frozen },
}

#[async_trait]
impl Vmm for CloudHypervisor {
    fn info(&self) -> VmmInfo {
        self.info.clone()
    }

    async fn boot(&self, spec: &VmSpec) -> Result<Arc<dyn Machine>, VmmError> {
        template::make_memory(spec)?;
        self.start(spec, Begin::Boot).await
    }

    fn template_inputs(&self, spec: &VmSpec) -> TemplateInputs {
        let description = serde_json::to_string(&self.description(&spec.of_no_pod()));
        TemplateInputs {
            vmm: self.info.name.to_owned(),
            version: self.info.version.clone(),
            program: process::find(&self.program),
            accelerator: self.info.accelerator.to_owned(),
            machine: vec![description.unwrap_or_default()],
        }
    }

    async fn restore(&self, spec: &VmSpec, frozen: &Frozen) -> Result<Arc<dyn Machine>, VmmError> {
        self.start(spec, Begin::Restore { frozen }).await
    }

    async fn adopt(&self, record: &MachineRecord) -> Result<Option<Arc<dyn Machine>>, VmmError> {
        adopt(record, self.call_timeout).await
    }
}

/// As [`Vmm::adopt`], whatever program is installed by now. `limit` is for each call, from then on too.
pub async fn adopt(record: &MachineRecord, limit: Duration) -> Result<Option<Arc<dyn Machine>>, VmmError> {
    let MachineRecord { pod, run_dir, .. } = record;
    jail::clear(run_dir).map_err(host(pod, "take disks out of", run_dir.clone()))?;
    let proc = PathBuf::from(format!("/proc/{}", record.pid));
    let found = process::adopt(record.pid, record.start_time).map_err(host(pod, "look at", proc))?;
    let Some(process) = found.map(Arc::new) else { return Ok(None) };
    match take_over(record, process.clone(), limit).await {
        Ok(machine) => Ok(Some(Arc::new(machine))),
        // Most likely because it ended meanwhile.
        Err(error) => match tokio::time::timeout(limit, process.exited()).await {
            Ok(_) => Ok(None),
            Err(_) => Err(error),
        },
    }
}

/// Connects to what a running VMM has had from an earlier daemon.
async fn take_over(
    record: &MachineRecord,
    process: Arc<process::Process>,
    limit: Duration,
) -> Result<CloudHypervisorMachine, VmmError> {
    let MachineRecord { pod, run_dir, .. } = record;
    let words = reopen(record, libc::STDERR_FILENO)?;
    let console = reopen(record, libc::STDOUT_FILENO)?;
    let captures = pipe::Receiver::from_owned_fd(console)
        .and_then(|console| Captures::start(words, console, run_dir, record.console_log_bytes))
        .map_err(host(pod, "capture output in", run_dir.clone()))?;
    let events = Events::open(run_dir).map_err(host(pod, "read", run_dir.join(events::FILE)))?;
    let link =
        Link::of_running(run_dir).map_err(host(pod, "listen on", run_dir.join(vsock::announcements())))?;
    let watched = Watched::new(pod, process, captures, events);
    let api = Api::new(run_dir, limit);
    let ping = watched.answered("vmm.ping", api.ping()).await?;
    let version = Version::of_running(&ping.version).map_err(|error| VmmError::Malformed {
        pod: pod.clone(),
        call: "vmm.ping".into(),
        reason: error.to_string(),
    })?;
    Ok(CloudHypervisorMachine {
        record: record.clone(),
        watched,
        api,
        link,
        image_type: version.image_type(),
        jailed: jail::usable().is_ok(),
        call_timeout: limit,
    })
}

/// The VMM's arguments: what it is given open. All else it learns over its API.
fn arguments(control: RawFd, told: RawFd) -> Vec<OsString> {
    ["--api-socket", &format!("fd={control}"), "--event-monitor", &format!("fd={told}"), "--seccomp", "true"]
        .map(OsString::from)
        .into()
}

/// The guest kernel's command line.
fn kernel_line(boot: &BootParams) -> String {
    // A panic resets the machine, which is its end: see `machine::follow`.
    format!("console=ttyS0 quiet panic=-1 reboot=t random.trust_cpu=on {boot}")
}
