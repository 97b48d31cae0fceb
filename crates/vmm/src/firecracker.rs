//! Firecracker as the VMM: a [`jailed`] one, and in addition, in its jail
//!
//! ```text
//! /run/api.sock             its API
//! /run/index, /run/empty    the files of its drives; see `slots`
//! ```
//!
//! Firecracker writes its log to stdout, too. It needs no `jailer`, because all VMMs have a jail. Its seccomp filters
//! are on.

pub mod api;
mod slots;
mod template;
mod vm;
pub mod wire;

use std::{
    ffi::OsString,
    fs::File,
    io,
    os::fd::{AsRawFd, OwnedFd, RawFd},
    path::Path,
    time::Duration,
};

use async_trait::async_trait;
use sandboxer_config::VmConfig;
use sandboxer_process::jail::Jail;
use sandboxer_protocol::{boot::KERNEL_WORDS, disk_index};

use self::{api::Api, slots::Slots, vm::FirecrackerVm};
use super::{
    HOTPLUG_STEP_MIB, VmSpec, VmmError, jail_dir,
    jailed::{self, Begin, CID, Jailed, JailedVmm, Launch, RESTORE, VmmDriver},
    process::process_error,
    run_dir::{Files, path_error},
    version::{self, Supported},
    vsock,
};

/// The value of [`VmmInfo::name`](super::VmmInfo::name).
pub const NAME: &str = "firecracker";
/// Firecracker's arguments. Everything else goes over its API.
const ARGUMENTS: [&str; 5] = ["--enable-pci", "--level", "Warning", "--api-sock", "/run/api.sock"];

/// The device by which a guest reports freed pages, which the VMM then drops.
const BALLOON: wire::Balloon =
    wire::Balloon { amount_mib: 0, deflate_on_oom: false, free_page_reporting: true };

/// Unit in which a guest plugs and unplugs memory, MiB: the smallest possible one.
const BLOCK_MIB: u64 = 2;

/// Firecracker, of a supported version.
pub type Firecracker = JailedVmm<FirecrackerDriver>;

/// What Firecracker does differently from other jailed VMMs.
#[derive(Debug)]
pub struct FirecrackerDriver;

/// The values that a start needs once the VMM runs.
#[derive(Debug)]
pub struct Start {
    /// The VMM's descriptor of the file for the memory of a VM that is to be frozen.
    memory: Option<RawFd>,
    /// The request that restores the VM; `None`: the VM boots.
    load: Option<wire::SnapshotLoad>,
}

#[async_trait]
impl VmmDriver for FirecrackerDriver {
    const NAME: &'static str = NAME;
    const SUPPORTED: &'static Supported = &version::FIRECRACKER;
    const OPENS_TAPS: bool = true;
    const HAS_HUGE_PAGES: bool = false;
    const FREEZES_INTERFACES: bool = true;
    const SIZES_MEMORY_FILE: bool = false;

    type Vm = FirecrackerVm;
    type Start = Start;

    fn new() -> Self {
        Self
    }

    fn program(config: &VmConfig) -> &Path {
        &config.firecracker
    }

    fn template_arguments(&self, spec: &VmSpec) -> Vec<String> {
        let arguments = ARGUMENTS.map(str::to_owned).into_iter().chain([
            format!("{} vCPU, {} MiB, {} interfaces", spec.vcpus, spec.memory_mib, spec.nics),
            slots::layout(),
            serde_json::to_string(&BALLOON).unwrap_or_default(),
            kernel_line(spec),
        ]);
        let growth = memory_hotplug(spec).and_then(|memory| serde_json::to_string(&memory).ok());
        arguments.chain(growth).collect()
    }

    fn launch(
        &self,
        spec: &VmSpec,
        begin: Begin<'_>,
        _: &mut Jail,
        _: &mut Files,
    ) -> Result<Launch<Start>, VmmError> {
        let (inherited, start) = match begin {
            Begin::Boot { memory } => {
                let start = Start { memory: memory.as_ref().map(AsRawFd::as_raw_fd), load: None };
                (Vec::from_iter(memory), start)
            }
            Begin::Restore(frozen) => {
                let files = template::source(spec, frozen)?;
                let load = template::load(&files, spec.tap_names());
                (files.into(), Start { memory: None, load: Some(load) })
            }
        };
        Ok(Launch { arguments: ARGUMENTS.map(OsString::from).into(), inherited, start })
    }

    /// Creates a pipe for the VMM's stdout: the daemon's end, and an end that reads as well as writes.
    ///
    /// Because the VMM's end reads too, the pipe has a reader while no daemon runs. Without a reader, a log message
    /// raises SIGPIPE in the VMM, and the signal handler waits for the log's lock, which the interrupted thread holds:
    /// the VMM would hang.
    fn console() -> io::Result<(OwnedFd, OwnedFd)> {
        let (console, writer) = io::pipe()?;
        let both = File::options().read(true).write(true).open(jailed::inherited(writer.as_raw_fd()))?;
        Ok((console.into(), both.into()))
    }

    async fn create(
        &self,
        spec: &VmSpec,
        vm: &Jailed,
        Start { memory, load }: Start,
        limit: Duration,
    ) -> Result<FirecrackerVm, VmmError> {
        let mut slots = Slots::create(vm.jail_dir.clone()).map_err(path_error(
            vm.pod(),
            "write to the jail of",
            jail_dir::PATH.into(),
        ))?;
        let api = Api::new(vm.jail_dir.clone(), limit);
        vm.process.call("its API", api.listens()).await?;
        match load {
            Some(load) => {
                // In the same order, so into the same slots. The frozen VM's drives already point there.
                slots.fill(vm, &spec.disks)?;
                // The VMM opens the disks at the paths that they had in the frozen VM.
                let _mounted = vm.mount(RESTORE, &spec.disks).await?;
                vm.process.call(RESTORE, api.load(&load)).await?;
            }
            None => boot(spec, vm, &mut slots, &api).await?,
        }
        let api = Api::new(vm.jail_dir.clone(), vm.call_timeout);
        Ok(FirecrackerVm::new(api, slots, memory, spec.growth_mib > 0))
    }

    fn adopt(vm: &Jailed) -> Result<FirecrackerVm, VmmError> {
        let slots = Slots::open(vm.jail_dir.clone()).map_err(path_error(
            vm.pod(),
            "read the index of disks in",
            jail_dir::PATH.into(),
        ))?;
        // An earlier daemon may have stopped it.
        let process = &vm.process.handle;
        process.go_on().map_err(process_error(vm.pod(), "continue", process.pid()))?;
        Ok(FirecrackerVm::new(Api::new(vm.jail_dir.clone(), vm.call_timeout), slots, None, true))
    }
}

/// Describes the VM to its VMM and boots it.
async fn boot(spec: &VmSpec, vm: &Jailed, slots: &mut Slots, api: &Api) -> Result<(), VmmError> {
    let mut drives = slots.drives();
    for patch in slots.fill(vm, &spec.disks)? {
        if let Some(drive) = drives.iter_mut().find(|drive| drive.drive_id == patch.drive_id) {
            drive.path_on_host = patch.path_on_host;
        }
    }
    let _mounted = vm.mount("PUT /drives", &spec.disks).await?;
    let machine = wire::Machine { vcpu_count: spec.vcpus, mem_size_mib: spec.memory_mib };
    vm.process.call("PUT /machine-config", api.machine(&machine)).await?;
    vm.process.call("PUT /boot-source", api.boot_source(&boot_source(spec))).await?;
    for drive in &drives {
        vm.process.call("PUT /drives", api.drive(drive)).await?;
    }
    let vsock = wire::Vsock { guest_cid: CID, uds_path: Path::new(jail_dir::PATH).join(vsock::SOCKET) };
    vm.process.call("PUT /vsock", api.vsock(&vsock)).await?;
    vm.process.call("PUT /entropy", api.entropy()).await?;
    vm.process.call("PUT /balloon", api.balloon(&BALLOON)).await?;
    if let Some(memory) = &memory_hotplug(spec) {
        vm.process.call("PUT /hotplug/memory", api.memory_hotplug(memory)).await?;
    }
    for (nic, tap) in (0..).zip(spec.tap_names()) {
        vm.process.call("PUT /network-interfaces", api.net(&self::vm::nic(nic, tap))).await?;
    }
    vm.process.call("InstanceStart", api.start()).await
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
    let (hotplug, boot) = (spec.hotplug_parameters(), &spec.boot);
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
