//! Firecracker as the VMM.
//!
//! ```text
//! run_dir/console.log       the guest's serial port and the VMM's log (stdout), bounded; older half in console.log.1
//! run_dir/vmm.log           its stderr, bounded as well
//!
//! and in its jail
//!
//! /run/api.sock             its API
//! /run/vsock.sock           connections to the agent
//! /run/vsock.sock_1024      where the agent announces that it listens
//! /run/vsock.sock_1025      the guest's file requests, once it has shares
//! /run/index, /run/empty    the files of its drives; see `slots`
//! /run/disks/               a disk, while it is being attached
//! /run/frozen/              the state of a VM that is frozen
//! ```
//!
//! Firecracker needs no `jailer`, because all VMMs have a jail. Its seccomp filters are on.

pub mod api;
mod slots;
mod template;
pub mod version;
mod vm;
pub mod wire;

use std::{
    ffi::OsString,
    fs::{self, File},
    io,
    os::fd::{AsRawFd, OwnedFd},
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
use sandboxer_protocol::{boot::KERNEL_WORDS, disk_index};
use tokio::{net::unix::pipe, sync::Mutex, time::Instant};

use self::{api::Api, slots::Slots, version::Version, vm::FirecrackerVm, wire::DrivePatch};
use super::{
    DiskSpec, FREEZABLE, Frozen, HOTPLUG_STEP_MIB, TemplateInputs, Vm, VmRecord, VmSpec, Vmm, VmmError,
    VmmInfo,
    permit::Permit,
    process,
    run_dir::{Captures, path_error, reopen},
    version::VersionError,
    vsock::{self, Link},
    watched::Watched,
};

/// The value of [`VmmInfo::name`].
pub const NAME: &str = "firecracker";
/// The guest's vsock address. Each VM has its own vsock, so all can have the same address.
const CID: u32 = 3;
/// Firecracker's arguments. Everything else goes over its API.
const ARGUMENTS: [&str; 5] = ["--enable-pci", "--level", "Warning", "--api-sock", "/run/api.sock"];

/// The device by which a guest reports freed pages, which the VMM then drops.
const BALLOON: wire::Balloon =
    wire::Balloon { amount_mib: 0, deflate_on_oom: false, free_page_reporting: true };

/// Unit in which a guest plugs and unplugs memory, MiB: the smallest possible one.
const BLOCK_MIB: u64 = 2;

/// The device by which taps are opened.
const TUN: &str = "/dev/net/tun";

/// Firecracker, of a supported version.
#[derive(Debug)]
pub struct Firecracker {
    program: PathBuf,
    info: VmmInfo,
    boot_timeout: Duration,
    call_timeout: Duration,
}

/// How a VM starts.
#[derive(Debug)]
enum Begin {
    /// The VM boots.
    Boot {
        /// File for the guest's memory, if the VM is to be frozen.
        memory: Option<OwnedFd>,
    },
    /// The VM is a paused copy, made of these files.
    Restore([OwnedFd; 2]),
}

impl Firecracker {
    /// Reads the version of the configured program. `reason` explains the choice to the operator.
    pub async fn new(config: &VmConfig, reason: String) -> Result<Self, VersionError> {
        let version = Version::of(&config.firecracker).await?;
        Ok(Self {
            program: config.firecracker.clone(),
            info: VmmInfo {
                name: NAME,
                version: version.to_string(),
                accelerator: "kvm",
                accelerator_reason: reason,
            },
            boot_timeout: config.boot_timeout,
            call_timeout: config.call_timeout,
        })
    }

    /// Prepares the jail of `spec`'s VM.
    fn jail(&self, spec: &VmSpec) -> Result<Jail, VmmError> {
        let program = sandboxer_process::find(&self.program);
        let readable = [program.as_path(), &spec.kernel, &spec.initramfs];
        let devices: &[&Path] = match spec.named_taps {
            Some(_) => &[Path::new("/dev/kvm"), Path::new(TUN)],
            None => &[Path::new("/dev/kvm")],
        };
        let jail = Jail::new(&spec.run_dir, &readable, devices)
            .and_then(Jail::alone)
            .map_err(path_error(&spec.pod, "prepare a jail in", spec.run_dir.clone()))?
            .with_room();
        match &spec.named_taps {
            Some(taps) => taps
                .namespace
                .try_clone()
                .map(|namespace| jail.with_network(namespace))
                .map_err(|source| VmmError::Taps { pod: spec.pod.clone(), source }),
            None => Ok(jail),
        }
    }

    /// Starts Firecracker in `jail` and creates the VM.
    async fn start(&self, spec: &VmSpec, jail: Jail, begin: Begin) -> Result<Arc<dyn Vm>, VmmError> {
        let (pod, run_dir) = (&spec.pod, &spec.run_dir);
        let (console, stdout) = output().map_err(path_error(pod, "capture output in", run_dir.clone()))?;
        let taps = spec.named_taps.as_ref().map_or(&[][..], |taps| &taps.names);
        let (memory, load, inherited) = match begin {
            Begin::Boot { memory } => {
                (memory.as_ref().map(AsRawFd::as_raw_fd), None, memory.into_iter().collect())
            }
            Begin::Restore(files) => (None, Some(template::load(&files, taps)), Vec::from(files)),
        };
        let user = jail.user();
        let equipment = Equipment {
            inherited,
            stdout: Some(stdout),
            background: spec.background,
            jail: Some(jail),
            groups: spec.entries()?,
            ..Equipment::default()
        };
        let arguments = ARGUMENTS.map(OsString::from).into();
        let (process, stderr) = process::spawn(&self.program, arguments, spec, equipment).await?;
        let captures = pipe::Receiver::from_owned_fd(console)
            .and_then(|console| Captures::start(stderr, console, run_dir, spec.console_log_bytes))
            .map_err(path_error(pod, "capture output in", run_dir.clone()))?;

        let watched = Watched::new(pod, process.watched(), captures);
        let room = watched.room().await?;
        let listen = match load {
            None => Link::new,
            // A restored agent announced itself before the freeze.
            Some(_) => Link::of_running,
        };
        let link =
            listen(room.clone()).map_err(path_error(pod, "listen on", vsock::announcements().into()))?;
        let mut slots =
            Slots::create(room.clone()).map_err(path_error(pod, "write to the room of", ROOM.into()))?;
        let api = Api::new(room.clone(), self.boot_timeout);
        watched.answered("its API", api.listens()).await?;
        // The VMM opens its taps while it starts; only root may be allowed to open the device.
        let _tun =
            match spec.named_taps {
                Some(_) => File::open(TUN)
                    .and_then(|tun| Permit::grant(tun, user, true))
                    .map_err(path_error(pod, "give access to", TUN.into()))?,
                None => None,
            };
        match load {
            Some(load) => {
                // In the same order, so into the same slots. The frozen VM's drives already point there.
                enter(spec, &mut slots)?;
                // The VMM opens the disks at the paths that they had in the frozen VM.
                let _shown = watched.show(template::CALL, user, &spec.disks).await?;
                watched.answered(template::CALL, api.load(&load)).await?;
            }
            None => self.create(spec, user, &mut slots, (&watched, &api)).await?,
        }
        let record = record(spec, &watched);
        process.keep();
        Ok(Arc::new(FirecrackerVm {
            api: Api::new(room.clone(), self.call_timeout),
            record,
            watched,
            room,
            slots: Arc::new(Mutex::new(slots)),
            link,
            user,
            memory,
            call_timeout: self.call_timeout,
            may_grow: spec.growth_mib > 0,
            stopped: Arc::default(),
            freezable: Instant::now() + FREEZABLE,
        }))
    }

    /// Describes the VM to its VMM, which runs as `user`, and boots it.
    async fn create(
        &self,
        spec: &VmSpec,
        user: u32,
        slots: &mut Slots,
        (watched, api): (&Watched, &Api),
    ) -> Result<(), VmmError> {
        let mut drives = slots.drives();
        for patch in enter(spec, slots)? {
            if let Some(drive) = drives.iter_mut().find(|drive| drive.drive_id == patch.drive_id) {
                drive.path_on_host = patch.path_on_host;
            }
        }
        let _shown = watched.show("PUT /drives", user, &spec.disks).await?;
        let machine = wire::Machine { vcpu_count: spec.vcpus, mem_size_mib: spec.memory_mib };
        watched.answered("PUT /machine-config", api.machine(&machine)).await?;
        watched.answered("PUT /boot-source", api.boot_source(&boot_source(spec))).await?;
        for drive in &drives {
            watched.answered("PUT /drives", api.drive(drive)).await?;
        }
        let vsock = wire::Vsock { guest_cid: CID, uds_path: Path::new(ROOM).join(vsock::SOCKET) };
        watched.answered("PUT /vsock", api.vsock(&vsock)).await?;
        watched.answered("PUT /entropy", api.entropy()).await?;
        watched.answered("PUT /balloon", api.balloon(&BALLOON)).await?;
        if let Some(memory) = &memory_hotplug(spec) {
            watched.answered("PUT /hotplug/memory", api.memory_hotplug(memory)).await?;
        }
        let taps = spec.named_taps.iter().flat_map(|taps| &taps.names);
        for (nic, tap) in (0..).zip(taps) {
            watched.answered("PUT /network-interfaces", api.net(&vm::nic(nic, tap))).await?;
        }
        watched.answered("InstanceStart", api.start()).await
    }
}

#[async_trait]
impl Vmm for Firecracker {
    fn info(&self) -> VmmInfo {
        self.info.clone()
    }

    fn opens_taps(&self) -> bool {
        true
    }

    async fn boot(&self, spec: &VmSpec) -> Result<Arc<dyn Vm>, VmmError> {
        let jail = self.jail(spec)?;
        let memory = template::make_memory(spec, jail.user())?;
        self.start(spec, jail, Begin::Boot { memory }).await
    }

    fn freezes_interfaces(&self) -> bool {
        true
    }

    fn template_inputs(&self, spec: &VmSpec) -> TemplateInputs {
        let spec = spec.without_pod();
        let vm = ARGUMENTS.map(str::to_owned).into_iter().chain([
            format!("{} vCPU, {} MiB, {} interfaces", spec.vcpus, spec.memory_mib, spec.nics),
            slots::layout(),
            serde_json::to_string(&BALLOON).unwrap_or_default(),
            kernel_line(&spec),
        ]);
        let growth = memory_hotplug(&spec).and_then(|memory| serde_json::to_string(&memory).ok());
        TemplateInputs {
            vmm: self.info.name.to_owned(),
            version: self.info.version.clone(),
            program: sandboxer_process::find(&self.program),
            accelerator: self.info.accelerator.to_owned(),
            vm: vm.chain(growth).collect(),
        }
    }

    async fn restore(&self, spec: &VmSpec, frozen: &Frozen) -> Result<Arc<dyn Vm>, VmmError> {
        let source = template::source(spec, frozen)?;
        self.start(spec, self.jail(spec)?, Begin::Restore(source)).await
    }

    async fn adopt(&self, record: &VmRecord) -> Result<Option<Arc<dyn Vm>>, VmmError> {
        adopt(record, self.call_timeout).await
    }
}

/// Enters the disks of `spec` into slots. Returns the patches that point the slots' drives to them.
fn enter(spec: &VmSpec, slots: &mut Slots) -> Result<Vec<DrivePatch>, VmmError> {
    let enter = |disk: &DiskSpec| {
        let name = disk.file.name();
        let call = format!("attaching {} as disk {}", name.display(), disk.serial);
        let bytes = disk.file.bytes().map_err(path_error(&spec.pod, "attach", name.to_owned()))?;
        slots.take(disk, bytes).map_err(|error| vm::refused(&spec.pod, &call, error))
    };
    spec.disks.iter().map(enter).collect()
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
) -> Result<FirecrackerVm, VmmError> {
    let VmRecord { pod, run_dir, .. } = record;
    let stderr = reopen(record, libc::STDERR_FILENO)?;
    let console = reopen(record, libc::STDOUT_FILENO)?;
    let captures = pipe::Receiver::from_owned_fd(console)
        .and_then(|console| Captures::start(stderr, console, run_dir, record.console_log_bytes))
        .map_err(path_error(pod, "capture output in", run_dir.clone()))?;
    let user = fs::metadata(run_dir).map(|dir| jail::user_of(&dir)).map_err(path_error(
        pod,
        "inspect",
        run_dir.clone(),
    ))?;
    let watched = Watched::new(pod, process, captures);
    let room = watched.room().await?;
    watched.clear(user).await?;
    // The VMM may have been starting when an earlier daemon was killed.
    if let Err(error) = Permit::take_back(Path::new(TUN), user) {
        tracing::warn!(%pod, %error, "cannot remove a VMM's entry from the access control list of {TUN}");
    }
    let link = Link::of_running(room.clone()).map_err(path_error(
        pod,
        "listen on",
        vsock::announcements().into(),
    ))?;
    let slots =
        Slots::found(room.clone()).map_err(path_error(pod, "read the index of disks in", ROOM.into()))?;
    // An earlier daemon may have stopped it.
    watched.process.go_on().map_err(process::process_error(pod, "continue", record.pid))?;
    let api = Api::new(room.clone(), limit);
    let instance = watched.answered("GET /", api.instance()).await?;
    Version::of_running(&instance.vmm_version).map_err(|error| VmmError::Malformed {
        pod: pod.clone(),
        call: "GET /".into(),
        reason: error.to_string(),
    })?;
    Ok(FirecrackerVm {
        record: record.clone(),
        watched,
        api,
        room,
        slots: Arc::new(Mutex::new(slots)),
        link,
        user,
        memory: None,
        call_timeout: limit,
        may_grow: true,
        stopped: Arc::default(),
        freezable: Instant::now() + FREEZABLE,
    })
}

/// Creates a pipe for the VMM's stdout: the daemon's end, and an end that reads as well as writes.
///
/// Because the VMM's end reads too, the pipe has a reader while no daemon runs. Without a reader, a log message raises
/// SIGPIPE in the VMM, and the signal handler waits for the log's lock, which the interrupted thread holds: the VMM
/// would hang.
fn output() -> io::Result<(OwnedFd, OwnedFd)> {
    let (console, writer) = io::pipe()?;
    let path = format!("/proc/self/fd/{}", writer.as_raw_fd());
    let both = File::options().read(true).write(true).open(path)?;
    Ok((console.into(), both.into()))
}

fn record(spec: &VmSpec, watched: &Watched) -> VmRecord {
    VmRecord {
        pod: spec.pod.clone(),
        run_dir: spec.run_dir.clone(),
        pid: watched.process.pid(),
        start_time: watched.process.start_time(),
        console_log_bytes: spec.console_log_bytes,
        vmm: NAME.into(),
    }
}

fn boot_source(spec: &VmSpec) -> wire::BootSource {
    wire::BootSource {
        kernel_image_path: spec.kernel.clone(),
        initrd_path: spec.initramfs.clone(),
        boot_args: kernel_line(spec),
    }
}

/// Returns the kernel command line.
fn kernel_line(spec: &VmSpec) -> String {
    let (hotplug, boot) = (spec.hotplug_words(), &spec.boot);
    format!("{KERNEL_WORDS} reboot=k {} {hotplug}{boot}", disk_index::WORD)
}

/// Returns the memory that the guest can get while it runs; `None`: it can get none.
fn memory_hotplug(spec: &VmSpec) -> Option<wire::MemoryHotplug> {
    (spec.growth_mib > 0).then_some(wire::MemoryHotplug {
        total_size_mib: spec.growth_mib,
        block_size_mib: BLOCK_MIB,
        slot_size_mib: HOTPLUG_STEP_MIB,
    })
}
