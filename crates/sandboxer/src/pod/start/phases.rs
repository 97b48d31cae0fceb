//! The phases of one attempt to start a pod.

use std::{convert::Infallible, future::Future, io, path::PathBuf, sync::Arc, time::Duration};

use sandboxer_base::{chain, clock::now_ns};
use sandboxer_config::StartPath;
use sandboxer_guest::GuestError;
use sandboxer_host::network::{self, Interface, PooledTap, interface};
use sandboxer_protocol::{
    agent::{ConfigurePodRequest, PodLimits},
    id::SandboxId,
    link::{LinkError, LinkKey},
    newer,
};
use sandboxer_vmm::{DiskFile, DiskLimits, DiskRecord, DiskSpec, SPARE, Vm, VmExit, VmSpec, Vmm, VmmError};
use tokio::time::Instant;

use crate::{
    checkpoint::{Restoring, SavedDisk},
    error::PodError,
    pod::{
        cgroup::{self, CgroupAttach},
        daemon_state::DaemonState,
        pool::Warm,
        running_vm::RunningVm,
        spare,
        spec::PodSpec,
        undo::Undo,
    },
    taps::VmTaps,
    template::{Kind, Template},
};

/// Number of random bytes that the guest receives to seed its generator.
const ENTROPY: usize = 64;

/// Time limit for the exit of a VM whose link broke.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// The host's resources for a pooled VM.
pub(super) struct PooledResources {
    pub taps: Vec<PooledTap>,
    pub vm: Arc<dyn Vm>,
}

/// The phase in which the host side is ready: cgroup, run directory, taps.
pub(super) struct Prepared<'a> {
    node: &'a DaemonState,
    spec: &'a PodSpec,
    kind: Kind,
    run_dir: PathBuf,
    interfaces: Vec<Interface>,
    /// The taps of the interfaces, unless the VM has them already.
    taps: VmTaps,
    /// The move of a pooled VMM into the pod's cgroup.
    cgroup_attach: Option<CgroupAttach>,
}

impl<'a> Prepared<'a> {
    pub async fn new(
        node: &'a DaemonState,
        spec: &'a PodSpec,
        kind: Kind,
        interfaces: &[Interface],
        resources: Option<PooledResources>,
        undo: &mut Undo,
    ) -> Result<Self, PodError> {
        let host = |action, path: PathBuf| {
            move |source: io::Error| PodError::Path { pod: spec.id.clone(), action, path, source }
        };
        let mut cgroup_attach = None;
        if let Some(PooledResources { vm, .. }) = &resources {
            // The cgroup can only be removed after the VMM in it has exited.
            undo.push("end the VMM", end(&spec.id, vm.clone()));
            cgroup_attach = cgroup::attach(node, spec, vm, undo);
        }
        let run_dir = node.run_dir(&spec.id);
        match make_private_dir(&run_dir) {
            // A failed start or a killed daemon may have left the directory.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                std::fs::remove_dir_all(&run_dir)
                    .and_then(|()| make_private_dir(&run_dir))
                    .map_err(host("clear run directory", run_dir.clone()))?;
            }
            made => made.map_err(host("make run directory", run_dir.clone()))?,
        }
        let dir = run_dir.clone();
        undo.push("remove the run directory", async move { std::fs::remove_dir_all(dir) });
        let taps = match (&spec.netns, resources) {
            // Taps of a VM that waited stay down, joined to nothing, and its guest gives the network cards up.
            (None, _) => VmTaps::None,
            (Some(netns), None) => {
                let vmm = node.vmms.get(kind.vmm).as_ref();
                VmTaps::of_pod(vmm, &node.tap_pool, &spec.id, netns, interfaces, spec.net_limits.clone())
                    .await?
            }
            (Some(netns), Some(pooled)) => {
                let taps = (node.tap_pool.clone(), pooled.taps);
                network::plug(&spec.id, netns, interfaces, spec.net_limits.clone(), taps).await?;
                VmTaps::None
            }
        };
        Ok(Self { node, spec, kind, run_dir, interfaces: interfaces.to_vec(), taps, cgroup_attach })
    }

    /// Takes a paused VM from the pool and resumes it.
    pub async fn claim(self, warm: Box<Warm>, until: Instant) -> Result<Greeted<'a>, PodError> {
        let Self { node, spec, run_dir, interfaces, cgroup_attach, .. } = self;
        let vm = warm.vm.assign(&spec.id, &run_dir)?;
        answered(spec, until, "the resumption", vm.resume()).await?;
        let live = RunningVm { vm, agent: warm.agent.for_pod(&spec.id), disk_limits: spec.disk_limits };
        // A pod with other limits does not use it, and gets a disk of its own.
        let is_fit = spec.disk_limits == DiskLimits::configured(&node.config.limits);
        let (kernel_release, spare) = (warm.ready.kernel_release, warm.spare.filter(|_| is_fit));
        let start_path = Some(StartPath::Pool);
        Ok(Greeted { spec, until, live, kernel_release, start_path, interfaces, cgroup_attach, spare })
    }

    pub async fn restore(
        self,
        template: &Template,
        until: Instant,
        undo: &mut Undo,
    ) -> Result<Running<'a>, PodError> {
        let spare = spare::of_copy(&self.node.rootfs, &self.spec.id, template).await?;
        let disks = spare.iter().map(|spare| spare.disk.clone()).collect();
        let described = VmSpec { disks, ..self.vm_spec(&template.link_key) };
        let restored = self.vmm().restore(&described, &template.frozen);
        let vm = answered(self.spec, until, "the restore", restored)
            .await
            .inspect_err(|error| self.node.templates.not_restored(self.kind, template, error))?;
        // A pod with other limits does not use it. The VMM has the file open, so it can be unlinked and closed.
        let is_fit = |disk: &DiskSpec| disk.limits == self.spec.disk_limits;
        let disk = spare.map(|spare| spare.disk).filter(is_fit).map(|disk| disk.record());
        let running = Running { spare: disk, ..self.running(vm, StartPath::Template, until, undo) };
        answered(running.spec, until, "the resumption", running.vm.resume()).await?;
        Ok(running)
    }

    /// Starts the VM of a checkpoint, which goes on where it was saved.
    pub async fn go_on(
        self,
        restoring: &Restoring,
        until: Instant,
        undo: &mut Undo,
    ) -> Result<Running<'a>, PodError> {
        let manifest = &restoring.saved.manifest;
        let (node, spec) = (self.node, self.spec);
        let (mut disks, mut scratches, mut spare) = (Vec::new(), Vec::new(), None);
        for SavedDisk { serial, read_only } in &manifest.disks {
            let (file, path) = restoring.disk(serial).map_err(|source| PodError::Path {
                pod: spec.id.clone(),
                action: "open a saved disk in",
                path: restoring.saved.frozen.dir().to_owned(),
                source,
            })?;
            let file = match read_only {
                true => DiskFile::new(file, path.clone()).map_err(|source| PodError::Path {
                    pod: spec.id.clone(),
                    action: "open",
                    path,
                    source,
                })?,
                false => {
                    let scratch = node.rootfs.scratch_copy(&spec.id, file).await?;
                    let file = scratch.file();
                    scratches.push(scratch);
                    file
                }
            };
            let disk =
                DiskSpec { serial: serial.clone(), file, read_only: *read_only, limits: spec.disk_limits };
            if manifest.has_spare && serial == SPARE {
                spare = Some(disk.record());
            }
            disks.push(disk);
        }
        let described = VmSpec { disks, ..self.vm_spec(&manifest.link_key) };
        let restored = self.vmm().restore(&described, &restoring.saved.frozen);
        let vm = answered(spec, until, "the restore", restored).await?;
        // The VMM has the files open, so they can be unlinked and closed.
        drop((scratches, described));
        let running = Running { spare, start_path: None, ..self.running(vm, StartPath::Boot, until, undo) };
        answered(running.spec, until, "the resumption", running.vm.resume()).await?;
        Ok(running)
    }

    pub async fn boot(self, key: &LinkKey, until: Instant, undo: &mut Undo) -> Result<Running<'a>, PodError> {
        let spare = spare::of_boot(&self.node.rootfs, &self.spec.id, self.spec.disk_limits).await;
        let disks = spare.iter().map(|spare| spare.disk.clone()).collect();
        let described = VmSpec { disks, ..self.vm_spec(key) };
        let vm = answered(self.spec, until, "the boot", self.vmm().boot(&described)).await?;
        // The VMM has the file open, so it can be unlinked and closed.
        let spare = spare.map(|spare| spare.disk.record());
        Ok(Running { spare, ..self.running(vm, StartPath::Boot, until, undo) })
    }

    fn vmm(&self) -> &dyn Vmm {
        self.node.vmms.get(self.kind.vmm).as_ref()
    }

    fn vm_spec(&self, key: &LinkKey) -> VmSpec {
        let (spec, run_dir) = (self.spec, self.run_dir.clone());
        let shape = spec.shape(self.taps.count());
        let described = VmSpec::new(&self.node.config.vm, spec.id.clone(), run_dir, shape, key.clone());
        let cgroup = self.node.cgroups.for_pod(&spec.cgroup_parent, &spec.id);
        // Memory that a VM gets later would not be in huge pages.
        let growth_mib = if spec.huge_pages { 0 } else { described.growth_mib };
        self.taps.given_to(VmSpec { cgroup, huge_pages: spec.huge_pages, growth_mib, ..described })
    }

    fn running(self, vm: Arc<dyn Vm>, start_path: StartPath, until: Instant, undo: &mut Undo) -> Running<'a> {
        undo.push("end the VMM", end(&self.spec.id, vm.clone()));
        let Self { node, spec, interfaces, .. } = self;
        Running { node, spec, until, vm, start_path: Some(start_path), interfaces, spare: None }
    }
}

/// The phase in which the VM runs.
pub(super) struct Running<'a> {
    node: &'a DaemonState,
    spec: &'a PodSpec,
    /// The deadline of this VM.
    until: Instant,
    vm: Arc<dyn Vm>,
    /// The start path; `None`: the pod goes on from a checkpoint.
    start_path: Option<StartPath>,
    interfaces: Vec<Interface>,
    /// A scratch disk that the guest has mounted.
    spare: Option<DiskRecord>,
}

impl<'a> Running<'a> {
    pub async fn greet(self, key: &LinkKey) -> Result<Greeted<'a>, PodError> {
        let Self { node, spec, until, vm, start_path, interfaces, spare } = self;
        let greeted = sandboxer_guest::connect(&spec.id, vm.as_ref(), key, node.config.vm.agent_timeout);
        let (agent, ready) = watched(spec, until, vm.as_ref(), greeted).await?;
        let live = RunningVm { vm, agent, disk_limits: spec.disk_limits };
        let kernel_release = ready.kernel_release;
        Ok(Greeted { spec, until, live, kernel_release, start_path, interfaces, cgroup_attach: None, spare })
    }
}

/// The phase in which the agent responds.
pub(super) struct Greeted<'a> {
    spec: &'a PodSpec,
    /// The deadline of this VM, as in [`Running::until`].
    until: Instant,
    pub live: RunningVm,
    pub kernel_release: String,
    pub start_path: Option<StartPath>,
    pub interfaces: Vec<Interface>,
    pub cgroup_attach: Option<CgroupAttach>,
    pub spare: Option<DiskRecord>,
}

impl Greeted<'_> {
    /// Sends the guest its identity: hostname, clock, randomness, addresses, limits and link key.
    pub async fn configure(self, key: &LinkKey) -> Result<Self, PodError> {
        let Self { spec, until, .. } = self;
        let entropy: [u8; ENTROPY] = rand::random();
        // A booted guest has its key already. Sending it again would look like a greeting.
        let link_key =
            if self.start_path == Some(StartPath::Boot) { Vec::new() } else { key.as_bytes().to_vec() };
        // A pod does without what its agent does not know: the doctor warns of an initramfs of the release before.
        let agent = &self.live.agent;
        let most = spec.max_processes.filter(|_| agent.knows(&newer::PROCESSES));
        let processes = most.and_then(|most| i64::try_from(most).ok()).unwrap_or_default();
        let limits = PodLimits { processes, ..spec.limits.for_guest() };
        let of_node = Some(&spec.node_sysctls).filter(|_| agent.knows(&newer::HOST_SYSCTLS));
        let identity = ConfigurePodRequest {
            hostname: spec.hostname.clone(),
            realtime_ns: now_ns(),
            entropy: entropy.to_vec(),
            sysctls: spec.sysctls.clone().into_iter().collect(),
            host_sysctls: of_node
                .into_iter()
                .flatten()
                .map(|(name, value)| (name.clone(), value.clone()))
                .collect(),
            link_key,
            limits: Some(limits).into(),
            interfaces: (0..)
                .zip(&self.interfaces)
                .map(|(nic, interface)| interface::for_guest(nic, interface))
                .collect(),
            removes_other_cards: agent.knows(&newer::REMOVES_OTHER_CARDS),
            ..Default::default()
        };
        let configured = agent.configure_pod(identity);
        watched(spec, until, self.live.vm.as_ref(), configured).await?;
        Ok(self)
    }
}

/// Waits for the VMM until the deadline.
async fn answered<T>(
    spec: &PodSpec,
    until: Instant,
    call: &str,
    answer: impl Future<Output = Result<T, VmmError>>,
) -> Result<T, VmmError> {
    let limit = whole_ms(until.saturating_duration_since(Instant::now()));
    let late = |_| Err(VmmError::Hung { pod: spec.id.clone(), call: call.to_owned(), limit });
    tokio::time::timeout_at(until, answer).await.unwrap_or_else(late)
}

/// Rounds a time limit to ms, for messages.
fn whole_ms(limit: Duration) -> Duration {
    Duration::from_millis(limit.as_millis().try_into().unwrap_or(u64::MAX))
}

/// Waits for the agent until the VM exits or the deadline passes.
async fn watched<T, E: Into<PodError>>(
    spec: &PodSpec,
    until: Instant,
    vm: &dyn Vm,
    answer: impl Future<Output = Result<T, E>>,
) -> Result<T, PodError> {
    let limit = whole_ms(until.saturating_duration_since(Instant::now()));
    tokio::select! {
        answer = answer => match answer.map_err(E::into) {
            Err(PodError::Guest(GuestError::Greeting { source: LinkError::Io(error), pod })) => {
                // The link breaks a moment before the VMM exits. The VMM's exit shows the reason.
                match tokio::time::timeout(EXIT_TIMEOUT, vm.exited()).await {
                    Ok(exit) => Err(vm_ended(spec, exit)),
                    Err(_) => Err(GuestError::Greeting { pod, source: LinkError::Io(error) }.into()),
                }
            }
            answer => answer,
        },
        exit = vm.exited() => Err(vm_ended(spec, exit)),
        () = tokio::time::sleep_until(until) => {
            Err(PodError::NotReady { pod: spec.id.clone(), limit, console: vm.last_lines().await.join(" | ") })
        }
    }
}

/// Kills a VM and waits until it has exited, because another VM or the state Stopped follows.
pub(super) fn end(
    pod: &SandboxId,
    vm: Arc<dyn Vm>,
) -> impl Future<Output = Result<(), Infallible>> + Send + use<> {
    let pod = pod.clone();
    async move {
        while let Err(error) = vm.kill().await {
            let error = chain(&error);
            tracing::error!(%pod, error, "cannot kill the VMM of a failed start yet; retrying");
        }
        Ok(())
    }
}

/// Converts a VM's exit to an error of its pod.
pub fn vm_ended(spec: &PodSpec, exit: VmExit) -> PodError {
    PodError::VmEnded { pod: spec.id.clone(), how: exit.how, last_lines: exit.last_lines.join(" | ") }
}

fn make_private_dir(path: &std::path::Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().mode(0o700).create(path)
}
