//! Cloud Hypervisor as the VMM: a [`jailed`] one, and in addition
//!
//! ```text
//! run_dir/control.sock      its API; the daemon listens on it, the VMM inherits it
//! run_dir/events            a pipe with the VMM's events
//! /template/                in the jail: links to the inherited files from which a frozen VM is copied
//! ```
//!
//! Cloud Hypervisor's seccomp filters are on, and so is Landlock where the kernel has it.

pub mod api;
mod checkpoint;
pub(crate) mod events;
mod landlock;
mod opened;
mod passing;
mod template;
mod vm;
pub mod wire;

use std::{
    ffi::OsString,
    os::fd::{AsRawFd, RawFd},
    path::Path,
    time::Duration,
};

use async_trait::async_trait;
use sandboxer_config::VmConfig;
use sandboxer_process::jail::Jail;
use sandboxer_protocol::boot::KERNEL_WORDS;

use self::{
    api::Api,
    events::Events,
    opened::Opened,
    vm::{CloudHypervisorVm, EventReader},
};
use super::{
    VmSpec, VmmError, jail_dir,
    jailed::{self, Begin, CID, Jailed, JailedVmm, Launch, RESTORE, VmmDriver},
    run_dir::{Files, path_error},
    version::{self, Supported},
    vsock,
};

/// The value of [`VmmInfo::name`](super::VmmInfo::name).
pub const NAME: &str = "cloud-hypervisor";

/// Cloud Hypervisor, of a supported version.
pub type CloudHypervisor = JailedVmm<CloudHypervisorDriver>;

impl CloudHypervisor {
    /// Returns the configuration for `vm.create`.
    pub fn description(&self, spec: &VmSpec) -> wire::VmConfig {
        self.driver.description(spec)
    }
}

/// What Cloud Hypervisor does differently from other jailed VMMs.
#[derive(Debug)]
pub struct CloudHypervisorDriver {
    landlock: bool,
}

/// The values that a start needs once the VMM runs.
#[derive(Debug)]
pub struct Start {
    events: Events,
    /// Configuration of a VM that boots; `None`: the VM is restored.
    description: Option<wire::VmConfig>,
    /// Names of the network cards that the restored VM had.
    nics: Vec<String>,
}

#[async_trait]
impl VmmDriver for CloudHypervisorDriver {
    const NAME: &'static str = NAME;
    const SUPPORTED: &'static Supported = &version::CLOUD_HYPERVISOR;
    const OPENS_TAPS: bool = false;
    const HAS_HUGE_PAGES: bool = true;
    const FREEZES_INTERFACES: bool = false;
    const SIZES_MEMORY_FILE: bool = true;

    type Vm = CloudHypervisorVm;
    type Start = Start;

    fn new() -> Self {
        let landlock = landlock::usable();
        if let Err(why) = &landlock {
            tracing::warn!(why, "VMMs are jailed, but not confined by Landlock");
        }
        Self { landlock: landlock.is_ok() }
    }

    fn program(config: &VmConfig) -> &Path {
        &config.cloud_hypervisor
    }

    fn template_arguments(&self, spec: &VmSpec) -> Vec<String> {
        vec![serde_json::to_string(&self.description(spec)).unwrap_or_default()]
    }

    fn launch(
        &self,
        spec: &VmSpec,
        begin: Begin<'_>,
        jail: &mut Jail,
        files: &mut Files,
    ) -> Result<Launch<Start>, VmmError> {
        let (mut inherited, description, nics) = match begin {
            Begin::Boot { memory } => {
                let mut description = self.description(spec);
                if let (Some(file), [zone]) = (&memory, &mut description.memory.zones[..]) {
                    zone.file = Some(jailed::inherited(file.as_raw_fd()));
                }
                (Vec::from_iter(memory), Some(description), Vec::new())
            }
            Begin::Restore(frozen) => {
                let (files, nics) = template::source(spec, frozen, jail)?;
                (files.into(), None, nics)
            }
        };
        let run_dir = &spec.run_dir;
        let control = files.listen(spec, api::SOCKET)?;
        let (events, event_pipe) = Events::create(run_dir).map_err(path_error(
            &spec.pod,
            "create pipe",
            run_dir.join(events::FILE),
        ))?;
        files.add(run_dir.join(events::FILE));
        let arguments = arguments(control.as_raw_fd(), event_pipe.as_raw_fd());
        inherited.extend([control, event_pipe]);
        Ok(Launch { arguments, inherited, start: Start { events, description, nics } })
    }

    async fn create(
        &self,
        spec: &VmSpec,
        vm: &Jailed,
        Start { events, description, nics }: Start,
        limit: Duration,
    ) -> Result<CloudHypervisorVm, VmmError> {
        let events = EventReader::new(events, &vm.process);
        let api = Api::new(&spec.run_dir, limit);
        let opened = Opened::create(vm.jail_dir.clone()).map_err(path_error(
            vm.pod(),
            "write to the jail of",
            jail_dir::PATH.into(),
        ))?;
        let taps = spec.own_taps().map_err(|source| VmmError::Taps { pod: spec.pod.clone(), source })?;
        let mut taps = (0..).zip(taps).collect::<Vec<(u8, _)>>();
        match description {
            Some(description) => {
                let _mounted = vm.mount("vm.create", &spec.disks).await?;
                vm.process.call("vm.create", api.create(&description)).await?;
                vm.process.call("vm.boot", api.boot()).await?;
            }
            None => {
                let had = nics.len();
                if had > 0 && had != taps.len() {
                    let reason = format!("it has {had} network interfaces, and the pod {}", taps.len());
                    return Err(vm.refused(RESTORE, reason));
                }
                let nics = nics.into_iter().zip(taps.drain(..had)).map(|(nic, (_, tap))| (nic, tap));
                // The VMM opens the disks at the paths that they had in the frozen VM.
                let _mounted = vm.mount(RESTORE, &spec.disks).await?;
                vm.process.call(RESTORE, api.restore(Path::new(template::DIR), nics.collect())).await?;
            }
        }
        // A VM that is to be frozen gets no interfaces: a copy would require the taps of its template.
        if spec.memory_file.is_none() {
            for (nic, tap) in taps {
                vm.process.call("vm.add-net", api.add_net(&vm::nic(nic), vec![tap])).await?;
            }
        }
        opened.add(&spec.disks);
        Ok(CloudHypervisorVm { api: Api::new(&spec.run_dir, vm.call_timeout), events, opened })
    }

    fn adopt(vm: &Jailed) -> Result<CloudHypervisorVm, VmmError> {
        let run_dir = &vm.process.record.run_dir;
        let events =
            Events::open(run_dir).map_err(path_error(vm.pod(), "read", run_dir.join(events::FILE)))?;
        let events = EventReader::new(events, &vm.process);
        let opened = Opened::open(vm.jail_dir.clone());
        Ok(CloudHypervisorVm { api: Api::new(run_dir, vm.call_timeout), events, opened })
    }
}

impl CloudHypervisorDriver {
    /// Returns the configuration for `vm.create`.
    fn description(&self, spec: &VmSpec) -> wire::VmConfig {
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
            vsock: wire::Vsock { cid: CID, socket: Path::new(jail_dir::PATH).join(vsock::SOCKET) },
            // The host drops a reported huge page together with its reservation.
            balloon: wire::Balloon { size: 0, free_page_reporting: !spec.huge_pages },
            landlock_enable: self.landlock,
            landlock_rules: vec![wire::LandlockRule { path: jail_dir::PATH.into(), access: "rw" }],
        }
    }
}

/// Returns the VMM's arguments: its inherited descriptors and its seccomp filters. Everything else goes over its API,
/// even Landlock: the VMM accepts `--landlock` only together with the description of a VM.
fn arguments(control: RawFd, event_pipe: RawFd) -> Vec<OsString> {
    let (control, event_pipe) = (format!("fd={control}"), format!("fd={event_pipe}"));
    ["--api-socket", &control, "--event-monitor", &event_pipe, "--seccomp", "true"].map(OsString::from).into()
}

/// Returns the kernel command line.
fn kernel_line(spec: &VmSpec) -> String {
    let (hotplug, boot) = (spec.hotplug_parameters(), &spec.boot);
    // A reset ends the VM: see `vm::forward`.
    format!("{KERNEL_WORDS} reboot=t {hotplug}{boot}")
}
