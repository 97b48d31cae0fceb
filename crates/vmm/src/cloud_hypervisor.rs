//! Cloud Hypervisor as a VMM.
//!
//! ```text
//! run_dir/control.sock      its API, listened on by us and inherited by it
//! run_dir/events            a pipe on which it tells what happens
//! run_dir/console.log       the guest's serial port, which is its stdout; bounded, the older half in console.log.1
//! run_dir/vmm.log           its stderr, bounded likewise
//!
//! and in its jail
//!
//! /run/vsock.sock           the way to the agent
//! /run/vsock.sock_1024      on which the agent says that it listens
//! /run/vsock.sock_1025      where the guest's requests for files come out, once it has shares
//! /run/disks/               a disk, while it is plugged in
//! /run/frozen/              what it writes down of a VM that is frozen
//! /template/                links to what a copy of a frozen VM is made of, which it inherits
//! ```
//!
//! Its seccomp filters are on, and so is Landlock where this kernel has it.

pub mod api;
pub(crate) mod events;
mod landlock;
mod passing;
mod shown;
mod template;
pub mod version;
mod vm;
mod vsock;
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
use sandboxer_protocol::boot::BootParams;
use tokio::{net::unix::pipe, time::Instant};

use self::{
    api::Api,
    events::Events,
    version::{Version, VersionError},
    vm::{CloudHypervisorVm, Watched},
    vsock::Link,
};
use super::{
    FREEZABLE, Frozen, TemplateInputs, Vm, VmRecord, VmSpec, Vmm, VmmError, VmmInfo,
    run_dir::{Captures, Files, host, reopen},
};

/// As in [`VmmInfo::name`].
pub const NAME: &str = "cloud-hypervisor";
/// The guest's vsock address. Each VM has a vsock of its own, so all can have the same.
const CID: u32 = 3;

/// Cloud Hypervisor, of a known version.
#[derive(Debug)]
pub struct CloudHypervisor {
    program: PathBuf,
    landlock: bool,
    info: VmmInfo,
    boot_timeout: Duration,
    call_timeout: Duration,
}

impl CloudHypervisor {
    /// Asks the configured program for its version. `reason` is why it is used, for people.
    pub async fn new(config: &VmConfig, reason: String) -> Result<Self, VersionError> {
        let version = Version::of(&config.cloud_hypervisor).await?;
        let landlock = landlock::usable();
        if let Err(why) = &landlock {
            tracing::warn!(why, "VMMs are jailed, and not confined by Landlock beside that");
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

    /// Returns what `vm.create` is to make.
    pub fn description(&self, spec: &VmSpec) -> wire::VmConfig {
        wire::VmConfig {
            cpus: wire::Cpus { boot_vcpus: spec.vcpus, max_vcpus: spec.vcpus },
            memory: template::memory(spec),
            payload: wire::Payload {
                kernel: spec.kernel.clone(),
                initramfs: spec.initramfs.clone(),
                cmdline: kernel_line(&spec.boot),
            },
            disks: spec.disks.iter().map(vm::disk).collect(),
            rng: wire::Rng { src: "/dev/urandom" },
            serial: wire::Console { mode: wire::ConsoleMode::Tty },
            console: wire::Console { mode: wire::ConsoleMode::Off },
            vsock: wire::Vsock { cid: CID, socket: Path::new(ROOM).join(vsock::SOCKET) },
            landlock_enable: self.landlock,
            landlock_rules: vec![wire::LandlockRule { path: ROOM.into(), access: "rw" }],
        }
    }

    /// Returns the jail of `spec`'s VM.
    fn jail(&self, spec: &VmSpec) -> Result<Jail, VmmError> {
        let program = sandboxer_process::find(&self.program);
        let readable = [program.as_path(), &spec.kernel, &spec.initramfs];
        let jail = Jail::new(&spec.run_dir, &readable, &[Path::new("/dev/kvm")]);
        jail.map(Jail::with_room).map_err(host(&spec.pod, "prepare a jail in", spec.run_dir.clone()))
    }

    /// Starts Cloud Hypervisor in `jail` and has it make the VM.
    async fn start(&self, spec: &VmSpec, jail: Jail, begin: Begin) -> Result<Arc<dyn Vm>, VmmError> {
        let (pod, run_dir) = (&spec.pod, &spec.run_dir);
        let mut files = Files::default();
        let control = files.listen(spec, api::SOCKET)?;
        let (events, told) =
            Events::create(run_dir).map_err(host(pod, "make pipe", run_dir.join(events::FILE)))?;
        files.add(run_dir.join(events::FILE));
        let (console, stdout) = io::pipe().map_err(host(pod, "capture output in", run_dir.clone()))?;

        let arguments = arguments(control.as_raw_fd(), told.as_raw_fd());
        let mut inherited = vec![control, told];
        let user = jail.user();
        let boots = match begin {
            Begin::Boot { memory } => {
                let mut description = self.description(spec);
                if let (Some(file), [zone]) = (&memory, &mut description.memory.zones[..]) {
                    zone.file = template::inherited(file.as_raw_fd());
                }
                inherited.extend(memory);
                Some(description)
            }
            Begin::Restore(source) => {
                inherited.extend(source);
                None
            }
        };
        let equipment = Equipment {
            inherited,
            stdout: Some(stdout.into()),
            background: spec.background,
            jail: Some(jail),
            groups: spec.entries()?,
        };
        let (program, dir) = (self.program.clone(), run_dir.clone());
        let spawned = tokio::task::spawn_blocking(move || {
            sandboxer_process::spawn(&program, arguments, &dir, equipment)
        });
        let (process, words) = spawned
            .await
            .unwrap_or_else(|panic| Err(io::Error::other(panic)))
            .map_err(|source| VmmError::Spawn { pod: pod.clone(), program: self.program.clone(), source })?;
        let captures = pipe::Receiver::from_owned_fd(console.into())
            .and_then(|console| Captures::start(words, console, run_dir, spec.console_log_bytes))
            .map_err(host(pod, "capture output in", run_dir.clone()))?;

        let watched = Watched::new(pod, process.watched(), captures, events);
        let room = watched.room().await?;
        let listen = match boots {
            Some(_) => Link::new,
            // Its agent has announced itself long ago.
            None => Link::of_running,
        };
        let link = listen(room.clone()).map_err(host(pod, "listen on", vsock::announcements().into()))?;
        let api = Api::new(run_dir, self.boot_timeout);
        match boots {
            Some(description) => {
                let shown = watched.show("vm.create", user, &spec.disks).await?;
                watched.answered("vm.create", api.create(&description)).await?;
                watched.answered("vm.boot", api.boot()).await?;
                drop(shown);
            }
            None => watched.answered(template::CALL, api.restore(Path::new(template::DIR))).await?,
        }
        // What is to be frozen gets none: a copy would want the taps that were its template's.
        if spec.memory_file.is_none() {
            let taps = spec.own_taps().map_err(host(pod, "pass on the taps of", run_dir.clone()))?;
            for (nic, tap) in (0..).zip(taps) {
                watched.answered("vm.add-net", api.add_net(&vm::nic(nic), vec![tap])).await?;
            }
        }
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
            room,
            link,
            user,
            call_timeout: self.call_timeout,
            freezable: Instant::now() + FREEZABLE,
        }))
    }
}

/// How a VM comes to be.
#[derive(Debug)]
enum Begin {
    /// It boots.
    Boot {
        /// File for its memory; none: memory is of its own.
        memory: Option<OwnedFd>,
    },
    /// It is a copy, standing still, made of these, to which links in the jail lead.
    Restore([OwnedFd; 3]),
}

#[async_trait]
impl Vmm for CloudHypervisor {
    fn info(&self) -> VmmInfo {
        self.info.clone()
    }

    async fn boot(&self, spec: &VmSpec) -> Result<Arc<dyn Vm>, VmmError> {
        let jail = self.jail(spec)?;
        let memory = template::make_memory(spec, jail.user())?;
        self.start(spec, jail, Begin::Boot { memory }).await
    }

    fn template_inputs(&self, spec: &VmSpec) -> TemplateInputs {
        let description = serde_json::to_string(&self.description(&spec.of_no_pod()));
        TemplateInputs {
            vmm: self.info.name.to_owned(),
            version: self.info.version.clone(),
            program: sandboxer_process::find(&self.program),
            accelerator: self.info.accelerator.to_owned(),
            vm: vec![description.unwrap_or_default()],
        }
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

/// Same as [`Vmm::adopt`], whatever program is installed by now. `limit` is for each call, from then on too.
pub async fn adopt(record: &VmRecord, limit: Duration) -> Result<Option<Arc<dyn Vm>>, VmmError> {
    let pod = &record.pod;
    let proc = PathBuf::from(format!("/proc/{}", record.pid));
    let found =
        sandboxer_process::adopt(record.pid, record.start_time).map_err(host(pod, "look at", proc))?;
    let Some(process) = found.map(Arc::new) else { return Ok(None) };
    match take_over(record, process.clone(), limit).await {
        Ok(vm) => Ok(Some(Arc::new(vm))),
        // Most likely because it ended meanwhile.
        Err(error) => match tokio::time::timeout(limit, process.exited()).await {
            Ok(_) => Ok(None),
            Err(_) => Err(error),
        },
    }
}

/// Connects to what a running VMM has had from an earlier daemon.
async fn take_over(
    record: &VmRecord,
    process: Arc<sandboxer_process::Process>,
    limit: Duration,
) -> Result<CloudHypervisorVm, VmmError> {
    let VmRecord { pod, run_dir, .. } = record;
    let words = reopen(record, libc::STDERR_FILENO)?;
    let console = reopen(record, libc::STDOUT_FILENO)?;
    let captures = pipe::Receiver::from_owned_fd(console)
        .and_then(|console| Captures::start(words, console, run_dir, record.console_log_bytes))
        .map_err(host(pod, "capture output in", run_dir.clone()))?;
    let events = Events::open(run_dir).map_err(host(pod, "read", run_dir.join(events::FILE)))?;
    let user = fs::metadata(run_dir).map(|dir| jail::user_of(&dir)).map_err(host(
        pod,
        "look at",
        run_dir.clone(),
    ))?;
    let watched = Watched::new(pod, process, captures, events);
    let room = watched.room().await?;
    watched.clear().await?;
    let link =
        Link::of_running(room.clone()).map_err(host(pod, "listen on", vsock::announcements().into()))?;
    let api = Api::new(run_dir, limit);
    let ping = watched.answered("vmm.ping", api.ping()).await?;
    Version::of_running(&ping.version).map_err(|error| VmmError::Malformed {
        pod: pod.clone(),
        call: "vmm.ping".into(),
        reason: error.to_string(),
    })?;
    let (record, freezable) = (record.clone(), Instant::now() + FREEZABLE);
    Ok(CloudHypervisorVm { record, watched, api, room, link, user, call_timeout: limit, freezable })
}

/// Returns the VMM's arguments: what it is given open, and that it filters its system calls. All else it learns over its API, Landlock too:
/// it takes `--landlock` with the description of a VM alone.
fn arguments(control: RawFd, told: RawFd) -> Vec<OsString> {
    let (control, told) = (format!("fd={control}"), format!("fd={told}"));
    ["--api-socket", &control, "--event-monitor", &told, "--seccomp", "true"].map(OsString::from).into()
}

/// Returns the guest kernel's command line.
fn kernel_line(boot: &BootParams) -> String {
    // A panic resets the VM, which is its end: see `vm::follow`.
    format!("console=ttyS0 quiet panic=-1 reboot=t random.trust_cpu=on {boot}")
}
