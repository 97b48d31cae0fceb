//! Cloud Hypervisor as the VMM.
//!
//! ```text
//! run_dir/control.sock      its API; the daemon listens on it, the VMM inherits it
//! run_dir/events            a pipe with the VMM's events
//! run_dir/console.log       the guest's serial port (the VMM's stdout); bounded, the older half in console.log.1
//! run_dir/vmm.log           its stderr, bounded as well
//!
//! and in its jail
//!
//! /run/vsock.sock           connections to the agent
//! /run/vsock.sock_1024      where the agent announces that it listens
//! /run/vsock.sock_1025      the guest's file requests, once it has shares
//! /run/disks/               a disk, while it is being attached
//! /run/frozen/              the files of a VM that is frozen
//! /template/                links to the inherited files from which a frozen VM is copied
//! ```
//!
//! Cloud Hypervisor's seccomp filters are on, and so is Landlock where the kernel has it.

pub mod api;
pub(crate) mod events;
mod landlock;
mod passing;
mod template;
pub mod version;
mod vm;
pub mod wire;

use std::{
    ffi::OsString,
    fs, io,
    os::fd::{AsRawFd, OwnedFd, RawFd},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use sandboxer_config::VmConfig;
use sandboxer_process::{
    Equipment,
    jail::{self, Jail, ROOM},
};
use sandboxer_protocol::boot::KERNEL_WORDS;
use tokio::{net::unix::pipe, time::Instant};

use self::{
    api::Api,
    events::Events,
    version::{Version, VersionError},
    vm::{CloudHypervisorVm, Followed},
};
use super::{
    FREEZABLE, Frozen, TemplateInputs, Vm, VmRecord, VmSpec, Vmm, VmmError, VmmInfo, huge_pages, process,
    run_dir::{Captures, Files, path_error, reopen},
    vsock::{self, Link},
    watched::Watched,
};

/// The value of [`VmmInfo::name`].
pub const NAME: &str = "cloud-hypervisor";
/// The guest's vsock address. Each VM has its own vsock, so all can have the same address.
const CID: u32 = 3;

/// Cloud Hypervisor, of a supported version.
#[derive(Debug)]
pub struct CloudHypervisor {
    program: PathBuf,
    landlock: bool,
    info: VmmInfo,
    boot_timeout: Duration,
    call_timeout: Duration,
}

impl CloudHypervisor {
    /// Reads the version of the configured program. `reason` explains the choice to the operator.
    pub async fn new(config: &VmConfig, reason: String) -> Result<Self, VersionError> {
        let version = Version::of(&config.cloud_hypervisor).await?;
        let landlock = landlock::usable();
        if let Err(why) = &landlock {
            tracing::warn!(why, "VMMs are jailed, but not confined by Landlock");
        }
        Ok(Self {
            program: config.cloud_hypervisor.clone(),
            info: VmmInfo {
                name: NAME,
                version: version.to_string(),
                accelerator: "kvm",
                accelerator_reason: reason,
            },
            landlock: landlock.is_ok(),
            boot_timeout: config.boot_timeout,
            call_timeout: config.call_timeout,
        })
    }

    /// Returns the configuration for `vm.create`.
    pub fn description(&self, spec: &VmSpec) -> wire::VmConfig {
        wire::VmConfig {
            cpus: wire::Cpus { boot_vcpus: spec.vcpus, max_vcpus: spec.vcpus + spec.growth_vcpus },
            memory: template::memory(spec),
            payload: wire::Payload {
                kernel: spec.kernel.clone(),
                initramfs: spec.initramfs.clone(),
                cmdline: kernel_line(spec),
            },
            disks: spec.disks.iter().map(vm::disk).collect(),
            rng: wire::Rng { src: "/dev/urandom" },
            serial: wire::Console { mode: wire::ConsoleMode::Tty },
            console: wire::Console { mode: wire::ConsoleMode::Off },
            vsock: wire::Vsock { cid: CID, socket: Path::new(ROOM).join(vsock::SOCKET) },
            // The host drops a reported huge page together with its reservation.
            balloon: wire::Balloon { size: 0, free_page_reporting: !spec.huge_pages },
            landlock_enable: self.landlock,
            landlock_rules: vec![wire::LandlockRule { path: ROOM.into(), access: "rw" }],
        }
    }

    /// Prepares the jail of `spec`'s VM.
    fn jail(&self, spec: &VmSpec) -> Result<Jail, VmmError> {
        let program = sandboxer_process::find(&self.program);
        let readable = [program.as_path(), &spec.kernel, &spec.initramfs];
        let jail = Jail::new(&spec.run_dir, &readable, &[Path::new("/dev/kvm")]).and_then(Jail::alone);
        jail.map(Jail::with_room).map_err(path_error(&spec.pod, "prepare a jail in", spec.run_dir.clone()))
    }

    /// Starts Cloud Hypervisor in `jail` and creates the VM.
    async fn start(&self, spec: &VmSpec, jail: Jail, begin: Begin) -> Result<Arc<dyn Vm>, VmmError> {
        let (pod, run_dir) = (&spec.pod, &spec.run_dir);
        let mut files = Files::default();
        let control = files.listen(spec, api::SOCKET)?;
        let (events, event_pipe) =
            Events::create(run_dir).map_err(path_error(pod, "create pipe", run_dir.join(events::FILE)))?;
        files.add(run_dir.join(events::FILE));
        let (console, stdout) = io::pipe().map_err(path_error(pod, "capture output in", run_dir.clone()))?;

        let arguments = arguments(control.as_raw_fd(), event_pipe.as_raw_fd());
        let mut inherited = vec![control, event_pipe];
        let boots = self.prepare(spec, begin, &mut inherited);
        let user = jail.user();
        let equipment = Equipment {
            inherited,
            stdout: Some(stdout.into()),
            background: spec.background,
            jail: Some(jail),
            groups: spec.entries()?,
            ..Equipment::default()
        };
        let (process, stderr) = process::spawn(&self.program, arguments, spec, equipment).await?;
        let captures = pipe::Receiver::from_owned_fd(console.into())
            .and_then(|console| Captures::start(stderr, console, run_dir, spec.console_log_bytes))
            .map_err(path_error(pod, "capture output in", run_dir.clone()))?;

        let watched = Watched::new(pod, process.watched(), captures);
        let events = Followed::new(events, &watched);
        let room = watched.room().await?;
        let listen = match boots {
            Some(_) => Link::new,
            // A restored agent announced itself before the freeze.
            None => Link::of_running,
        };
        let link =
            listen(room.clone()).map_err(path_error(pod, "listen on", vsock::announcements().into()))?;
        self.create(spec, user, boots, &watched).await?;
        let record = VmRecord {
            pod: pod.clone(),
            run_dir: run_dir.clone(),
            pid: process.pid(),
            start_time: process.start_time(),
            console_log_bytes: spec.console_log_bytes,
            vmm: NAME.into(),
        };
        files.keep();
        process.keep();
        Ok(Arc::new(CloudHypervisorVm {
            api: Api::new(run_dir, self.call_timeout),
            record,
            watched,
            events,
            room,
            link,
            user,
            call_timeout: self.call_timeout,
            freezable: Instant::now() + FREEZABLE,
        }))
    }

    /// Adds to `inherited` the files that the VM begins with. Returns the configuration of a VM that boots, or `None`
    /// for one that is restored.
    fn prepare(&self, spec: &VmSpec, begin: Begin, inherited: &mut Vec<OwnedFd>) -> Option<wire::VmConfig> {
        match begin {
            Begin::Boot { memory } => {
                let mut description = self.description(spec);
                if let (Some(file), [zone]) = (&memory, &mut description.memory.zones[..]) {
                    zone.file = Some(template::inherited(file.as_raw_fd()));
                }
                inherited.extend(memory);
                Some(description)
            }
            Begin::Restore(source) => {
                inherited.extend(source);
                None
            }
        }
    }

    /// Makes the VMM, which runs as `user`, boot or restore the VM and attach its network interfaces.
    async fn create(
        &self,
        spec: &VmSpec,
        user: u32,
        boots: Option<wire::VmConfig>,
        watched: &Watched,
    ) -> Result<(), VmmError> {
        let api = Api::new(&spec.run_dir, self.boot_timeout);
        match boots {
            Some(description) => {
                let shown = watched.show("vm.create", user, &spec.disks).await?;
                watched.answered("vm.create", api.create(&description)).await?;
                watched.answered("vm.boot", api.boot()).await?;
                drop(shown);
            }
            None => {
                // The VMM opens the disks at the paths that they had in the frozen VM.
                let _shown = watched.show(template::CALL, user, &spec.disks).await?;
                watched.answered(template::CALL, api.restore(Path::new(template::DIR))).await?;
            }
        }
        // A VM that is to be frozen gets no interfaces: a copy would require the taps of its template.
        if spec.memory_file.is_none() {
            let taps = spec.own_taps().map_err(|source| VmmError::Taps { pod: spec.pod.clone(), source })?;
            for (nic, tap) in (0..).zip(taps) {
                watched.answered("vm.add-net", api.add_net(&vm::nic(nic), vec![tap])).await?;
            }
        }
        Ok(())
    }
}

/// How a VM starts.
#[derive(Debug)]
enum Begin {
    /// The VM boots.
    Boot {
        /// File for the guest's memory; `None`: private memory.
        memory: Option<OwnedFd>,
    },
    /// The VM is a paused copy, made of these files, to which links in the jail lead.
    Restore([OwnedFd; 3]),
}

#[async_trait]
impl Vmm for CloudHypervisor {
    fn info(&self) -> VmmInfo {
        self.info.clone()
    }

    async fn boot(&self, spec: &VmSpec) -> Result<Arc<dyn Vm>, VmmError> {
        let jail = self.jail(spec)?;
        let memory = match template::make_memory(spec, jail.user())? {
            None => huge_pages::reserve(spec, Some(jail.user()))?,
            file => file,
        };
        self.start(spec, jail, Begin::Boot { memory }).await
    }

    fn template_inputs(&self, spec: &VmSpec) -> TemplateInputs {
        let description = serde_json::to_string(&self.description(&spec.without_pod()));
        TemplateInputs {
            vmm: self.info.name.to_owned(),
            version: self.info.version.clone(),
            program: sandboxer_process::find(&self.program),
            accelerator: self.info.accelerator.to_owned(),
            vm: vec![description.unwrap_or_default()],
        }
    }

    fn has_huge_pages(&self) -> bool {
        true
    }

    fn freezes_interfaces(&self) -> bool {
        false
    }

    async fn restore(&self, spec: &VmSpec, frozen: &Frozen) -> Result<Arc<dyn Vm>, VmmError> {
        let mut jail = self.jail(spec)?;
        let source = template::source(spec, frozen, &mut jail)?;
        self.start(spec, jail, Begin::Restore(source)).await
    }

    async fn adopt(&self, record: &VmRecord) -> Result<Option<Arc<dyn Vm>>, VmmError> {
        adopt(record, self.call_timeout).await
    }
}

/// Adopts a VM as [`Vmm::adopt`] does, whichever program is installed now. `limit` applies to this and to each later
/// call.
pub async fn adopt(record: &VmRecord, limit: Duration) -> Result<Option<Arc<dyn Vm>>, VmmError> {
    let Some(process) = record.process()?.map(Arc::new) else { return Ok(None) };
    match take_over(record, process.clone(), limit).await {
        Ok(vm) => Ok(Some(Arc::new(vm))),
        // The VMM has most likely ended meanwhile.
        Err(error) => match tokio::time::timeout(limit, process.exited()).await {
            Ok(_) => Ok(None),
            Err(_) => Err(error),
        },
    }
}

/// Opens the connections of an earlier daemon to a running VMM, and the API.
async fn take_over(
    record: &VmRecord,
    process: Arc<sandboxer_process::Process>,
    limit: Duration,
) -> Result<CloudHypervisorVm, VmmError> {
    let VmRecord { pod, run_dir, .. } = record;
    let stderr = reopen(record, libc::STDERR_FILENO)?;
    let console = reopen(record, libc::STDOUT_FILENO)?;
    let captures = pipe::Receiver::from_owned_fd(console)
        .and_then(|console| Captures::start(stderr, console, run_dir, record.console_log_bytes))
        .map_err(path_error(pod, "capture output in", run_dir.clone()))?;
    let events = Events::open(run_dir).map_err(path_error(pod, "read", run_dir.join(events::FILE)))?;
    let user = fs::metadata(run_dir).map(|dir| jail::user_of(&dir)).map_err(path_error(
        pod,
        "inspect",
        run_dir.clone(),
    ))?;
    let watched = Watched::new(pod, process, captures);
    let events = Followed::new(events, &watched);
    let room = watched.room().await?;
    watched.clear(user).await?;
    let link = Link::of_running(room.clone()).map_err(path_error(
        pod,
        "listen on",
        vsock::announcements().into(),
    ))?;
    let api = Api::new(run_dir, limit);
    let ping = watched.answered("vmm.ping", api.ping()).await?;
    Version::of_running(&ping.version).map_err(|error| VmmError::Malformed {
        pod: pod.clone(),
        call: "vmm.ping".into(),
        reason: error.to_string(),
    })?;
    let (record, freezable) = (record.clone(), Instant::now() + FREEZABLE);
    Ok(CloudHypervisorVm { record, watched, events, api, room, link, user, call_timeout: limit, freezable })
}

/// Returns the VMM's arguments: its inherited descriptors and its seccomp filters. Everything else goes over its API,
/// even Landlock: the VMM accepts `--landlock` only together with the description of a VM.
fn arguments(control: RawFd, event_pipe: RawFd) -> Vec<OsString> {
    let (control, event_pipe) = (format!("fd={control}"), format!("fd={event_pipe}"));
    ["--api-socket", &control, "--event-monitor", &event_pipe, "--seccomp", "true"].map(OsString::from).into()
}

/// Returns the kernel command line.
fn kernel_line(spec: &VmSpec) -> String {
    let (hotplug, boot) = (spec.hotplug_words(), &spec.boot);
    // A reset ends the VM: see `vm::follow`.
    format!("{KERNEL_WORDS} reboot=t {hotplug}{boot}")
}
