//! The start of a pod, top to bottom. Each phase consumes the previous one, so a half-started pod cannot be used. Each
//! phase registers its undo step, so a failed start leaves nothing behind.
//!
//! ```text
//!  Prepared ─▶ claim   ─▶ Greeted ─▶ configure ─▶ Up       from the pool
//!           ─▶ restore ─▶ Running ─▶ greet ─▶ …            as a copy of a template
//!           ─▶ boot    ─▶ Running ─▶ greet ─▶ …
//! ```
//!
//! If the pool or a template cannot provide a VM, the start falls back to the next slower path. The caller of
//! RunPodSandbox does not notice.

use std::{
    convert::Infallible, future::Future, io, mem, net::TcpListener, path::PathBuf, sync::Arc, time::Duration,
};

use sandboxer_base::{Code, chain, clock::now_ns};
use sandboxer_config::{StartPath, VmmName};
use sandboxer_guest::GuestError;
use sandboxer_host::network::{self, Interface, PooledTap, interface};
use sandboxer_protocol::{
    agent::{ConfigurePodRequest, PodLimits, Ready},
    id::SandboxId,
    link::{LinkError, LinkKey},
    stage::Stage,
};
use sandboxer_vmm::{DiskRecord, DiskSpec, Vm, VmExit, VmSpec, Vmm, VmmError, VmmKey};
use tokio::{sync::SemaphorePermit, time::Instant};
use tokio_util::sync::CancellationToken;

use super::{
    DaemonState,
    admission::Work,
    cgroup_attach::{self, CgroupAttach},
    host_ports, place,
    placer::Placement,
    pool::{self, Warm},
    spare,
    spec::PodSpec,
    stages::Stages,
    start_paths,
    undo::Undo,
};
use crate::{
    error::PodError,
    pod::container::start::RunningVm,
    taps::VmTaps,
    template::{Kind, Missing, Template},
};

/// Number of random bytes that the guest receives to seed its generator.
const ENTROPY: usize = 64;

/// Time limit for the exit of a VM whose link broke.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// A started pod.
#[derive(Debug)]
pub struct Up {
    /// The pod's VM and agent.
    pub live: RunningVm,
    /// The agent's ready message.
    pub ready: Ready,
    /// The start path that provided the VM.
    pub start_path: StartPath,
    /// The pod's network interfaces.
    pub interfaces: Vec<Interface>,
    /// Listeners on the host's ports that lead to the pod.
    pub host_ports: Vec<TcpListener>,
    /// The move of the VMM into the pod's cgroup, if it is still in progress.
    pub counting: Option<CgroupAttach>,
    /// A scratch disk that the guest has already mounted.
    pub spare: Option<DiskRecord>,
    /// The placement of the VMM.
    pub placement: Placement,
}

/// Maximum number of boots per pod. Each boot gets an equal share of the remaining time.
///
/// With emulated guests on an overloaded host, about one boot in 130 hung before its agent ran; a second boot nearly
/// always succeeded.
const BOOTS: u32 = 2;

/// Divisor of the remaining time for a start path faster than a boot, so that a hang leaves enough for the others.
const FASTER: u32 = 4;

/// The source of a pod's VM.
enum Source {
    Pool(Box<Warm>),
    Template(Arc<Template>),
    Boot,
}

impl Source {
    /// Returns a source of a VM of this kind on this start path, or the reason why there is none.
    fn take(
        node: &DaemonState,
        kind: Kind,
        prefers: Option<u32>,
        start_path: StartPath,
    ) -> Result<Self, &'static str> {
        match start_path {
            StartPath::Pool => {
                node.pool.claim(kind, prefers, &node.templates).map(|warm| Self::Pool(Box::new(warm)))
            }
            StartPath::Template => node.templates.get(kind).map(Self::Template).map_err(Missing::as_str),
            StartPath::Boot => Ok(Self::Boot),
        }
    }

    /// Returns the host's resources for the VM, if it is a pooled one. Whatever fails from here on, none of them is
    /// left behind, including the VM's directory if it has not become the pod's yet.
    fn waited(&mut self, pod: &SandboxId, undo: &mut Undo) -> Option<Waited> {
        let Self::Pool(warm) = self else { return None };
        let (doomed, ended) = (warm.vm.clone(), end(pod, warm.vm.clone()));
        undo.push("end the VMM", async move {
            ended.await?;
            pool::end(doomed.as_ref()).await;
            Ok::<_, Infallible>(())
        });
        Some(Waited { taps: mem::take(&mut warm.taps), vm: warm.vm.clone() })
    }
}

/// Starts a pod. If this is cancelled or fails, everything is undone before it returns.
pub async fn start(
    node: &DaemonState,
    spec: &PodSpec,
    key: &LinkKey,
    stages: &Stages,
    cancel: &CancellationToken,
) -> Result<Up, PodError> {
    let _urgent = node.admission.urgent();
    let interfaces = stages.run(Stage::Netns, interfaces(node, spec)).await?;
    // Check before anything is created.
    let host_ports = host_ports::listen(&node.front, spec)?;
    let kind = Kind { vmm: vmm(node, spec)?, shape: spec.shape(interfaces.len()) };
    let placement = place::take(node, spec, kind)?;
    let deadline = Instant::now() + node.config.vm.boot_timeout;
    let interfaces = &interfaces;
    let mut start = Start { node, spec, kind, interfaces, key, stages, placement, deadline, boots: BOOTS };
    if let Some(kept) = spec.kept_from_pool {
        node.start_paths.missed(StartPath::Pool, kept.as_str(), None);
    }
    let mut start_path = spec.start_path;
    loop {
        let failed = match Source::take(node, kind, start.placement.node(), start_path) {
            Ok(source) => match start.attempt(source, cancel).await {
                Ok(up) => {
                    node.start_paths.taken(start_path);
                    return Ok(Up { host_ports, ..up });
                }
                Err(error) => error,
            },
            Err(reason) => {
                node.start_paths.missed(start_path, reason, None);
                start_path = start_path.slower();
                continue;
            }
        };
        let is_silent = matches!(failed, PodError::NotReady { .. } | PodError::Vmm(VmmError::Hung { .. }));
        match failed.code() {
            // Another VM would fail in the same way.
            Code::Cancelled | Code::InvalidArgument => return Err(failed),
            _ if start_path != StartPath::Boot => {}
            _ if is_silent && start.boots > 1 => start.boots -= 1,
            _ => return Err(failed),
        }
        tracing::debug!(pod = %spec.id, %start_path, error = chain(&failed), "the pod gets another VM");
        node.start_paths.missed(start_path, start_paths::reason(start_path, &failed), Some(&failed));
        start_path = start_path.slower();
    }
}

/// Returns the pod's VMM. Its handler may have named one to an earlier daemon that this one does not have.
fn vmm(node: &DaemonState, spec: &PodSpec) -> Result<VmmKey, PodError> {
    node.vmms.key(spec.vmm).ok_or_else(|| PodError::Invalid {
        subject: format!("pod {}", spec.id),
        reason: format!(
            "its VMM is {}, which this daemon was not configured for: make the pod again, or name the VMM in [handlers]",
            spec.vmm.map_or("", VmmName::as_str)
        ),
    })
}

/// Returns the pod's network interfaces.
async fn interfaces(node: &DaemonState, spec: &PodSpec) -> Result<Vec<Interface>, PodError> {
    match &spec.netns {
        Some(netns) => Ok(network::look(&spec.id, netns, node.config.network.foreign_rules).await?),
        None => {
            tracing::warn!(
                pod = %spec.id,
                "a VM cannot use the host's network: the pod has loopback only"
            );
            Ok(Vec::new())
        }
    }
}

/// State that all attempts to start one pod share.
struct Start<'a> {
    node: &'a DaemonState,
    spec: &'a PodSpec,
    kind: Kind,
    interfaces: &'a [Interface],
    key: &'a LinkKey,
    stages: &'a Stages,
    /// The place of a VM that is created for the pod.
    placement: Placement,
    /// The deadline of all attempts together. Time spent waiting for admission is added to it.
    deadline: Instant,
    /// Number of remaining boots.
    boots: u32,
}

impl<'a> Start<'a> {
    async fn attempt(&mut self, mut source: Source, cancel: &CancellationToken) -> Result<Up, PodError> {
        let spec = self.spec;
        let mut undo = Undo::default();
        // Before the first point at which the start can be cancelled.
        let waited = source.waited(&spec.id, &mut undo);
        let result = tokio::select! {
            biased;
            () = cancel.cancelled() => Err(PodError::Cancelled(spec.id.clone())),
            result = self.phases(source, waited, &mut undo) => result,
        };
        if result.is_ok() {
            undo.forget();
        } else if let Err(left) = undo.run().await {
            tracing::error!(pod = %spec.id, left, "cannot undo a failed start completely");
        }
        result
    }

    async fn phases(
        &mut self,
        source: Source,
        waited: Option<Waited>,
        undo: &mut Undo,
    ) -> Result<Up, PodError> {
        let Self { node, spec, kind, interfaces, key, stages, .. } = *self;
        let placement = match &source {
            Source::Pool(warm) => place::of_warm(spec, &self.placement, warm),
            Source::Template(_) | Source::Boot => self.placement.clone(),
        };
        let preparing = async {
            let placement = place::make_group(node, spec, placement, undo)?;
            Ok::<_, PodError>((Prepared::new(node, spec, kind, interfaces, waited, undo).await?, placement))
        };
        let (prepared, placement) = stages.run(Stage::Network, preparing).await?;
        let up = match source {
            Source::Pool(warm) => {
                let until = self.until(FASTER);
                let greeted = stages.run(Stage::Claim, prepared.claim(warm, until)).await?;
                stages.run(Stage::AgentReady, greeted.configure(key)).await
            }
            Source::Template(template) => {
                let _place = stages.run(Stage::Queue, self.turn()).await?;
                let until = self.until(FASTER);
                let running = stages.run(Stage::Restore, prepared.restore(&template, until, undo)).await?;
                stages
                    .run(Stage::AgentReady, async {
                        running.greet(&template.link_key).await?.configure(key).await
                    })
                    .await
            }
            Source::Boot => {
                let _place = stages.run(Stage::Queue, self.turn()).await?;
                let until = self.until(self.boots);
                let running = stages.run(Stage::VmmSpawn, prepared.boot(key, until, undo)).await?;
                let greeted = stages.run(Stage::Boot, running.greet(key)).await?;
                stages.run(Stage::AgentReady, greeted.configure(key)).await
            }
        };
        Ok(Up { placement, ..up? })
    }

    /// Waits for admission of a new VM, and moves the deadline by the time waited.
    async fn turn(&mut self) -> Result<Option<SemaphorePermit<'a>>, PodError> {
        let asked = Instant::now();
        let place = self.node.admission.enter(Work::Vm).await;
        self.deadline += asked.elapsed();
        Ok(place)
    }

    /// Returns the deadline for one of `parts` equal parts of the remaining time.
    fn until(&self, parts: u32) -> Instant {
        let now = Instant::now();
        now + self.deadline.saturating_duration_since(now) / parts
    }
}

/// The host's resources for a pooled VM.
struct Waited {
    taps: Vec<PooledTap>,
    vm: Arc<dyn Vm>,
}

/// The phase in which the host side is ready: cgroup, run directory, taps.
struct Prepared<'a> {
    node: &'a DaemonState,
    spec: &'a PodSpec,
    kind: Kind,
    run_dir: PathBuf,
    interfaces: Vec<Interface>,
    /// The taps of the interfaces, unless the VM has them already.
    taps: VmTaps,
    /// The move of a pooled VMM into the pod's cgroup.
    counting: Option<CgroupAttach>,
}

impl<'a> Prepared<'a> {
    async fn new(
        node: &'a DaemonState,
        spec: &'a PodSpec,
        kind: Kind,
        interfaces: &[Interface],
        waited: Option<Waited>,
        undo: &mut Undo,
    ) -> Result<Self, PodError> {
        let host = |action, path: PathBuf| {
            move |source: io::Error| PodError::Path { pod: spec.id.clone(), action, path, source }
        };
        let mut counting = None;
        if let Some(Waited { vm, .. }) = &waited {
            // The cgroup can only be removed after the VMM in it has exited.
            undo.push("end the VMM", end(&spec.id, vm.clone()));
            counting = cgroup_attach::counted(node, spec, vm, undo);
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
        let taps = match (&spec.netns, waited) {
            (None, _) => VmTaps::None,
            (Some(netns), None) => {
                let vmm = node.vmms.get(kind.vmm).as_ref();
                VmTaps::of_pod(vmm, &node.tap_pool, &spec.id, netns, interfaces, spec.net_limits).await?
            }
            (Some(netns), Some(waited)) => {
                let taps = (node.tap_pool.clone(), waited.taps);
                network::plug(&spec.id, netns, interfaces, spec.net_limits, taps).await?;
                VmTaps::None
            }
        };
        Ok(Self { node, spec, kind, run_dir, interfaces: interfaces.to_vec(), taps, counting })
    }

    /// Takes a paused VM from the pool and resumes it.
    async fn claim(self, warm: Box<Warm>, until: Instant) -> Result<Greeted<'a>, PodError> {
        let Self { spec, run_dir, interfaces, counting, .. } = self;
        let vm = warm.vm.assign(&spec.id, &run_dir)?;
        answered(spec, until, "the resumption", vm.resume()).await?;
        let live = RunningVm { vm, agent: warm.agent.of(&spec.id), disk_limits: spec.disk_limits };
        let (ready, spare, host_ports) = (warm.ready, warm.spare, Vec::new());
        let (start_path, placement) = (StartPath::Pool, Placement::default());
        let up = Up { live, ready, start_path, interfaces, host_ports, counting, spare, placement };
        Ok(Greeted { spec, until, up })
    }

    async fn restore(
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

    async fn boot(self, key: &LinkKey, until: Instant, undo: &mut Undo) -> Result<Running<'a>, PodError> {
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
        let cgroup = self.node.cgroups.of(&spec.cgroup_parent, &spec.id);
        // Memory that a VM gets later would not be in huge pages.
        let growth_mib = if spec.huge_pages { 0 } else { described.growth_mib };
        self.taps.given_to(VmSpec { cgroup, huge_pages: spec.huge_pages, growth_mib, ..described })
    }

    fn running(self, vm: Arc<dyn Vm>, start_path: StartPath, until: Instant, undo: &mut Undo) -> Running<'a> {
        undo.push("end the VMM", end(&self.spec.id, vm.clone()));
        let Self { node, spec, interfaces, .. } = self;
        Running { node, spec, until, vm, start_path, interfaces, spare: None }
    }
}

/// The phase in which the VM runs.
struct Running<'a> {
    node: &'a DaemonState,
    spec: &'a PodSpec,
    /// The deadline of this VM.
    until: Instant,
    vm: Arc<dyn Vm>,
    start_path: StartPath,
    interfaces: Vec<Interface>,
    /// A scratch disk that the guest has mounted.
    spare: Option<DiskRecord>,
}

impl<'a> Running<'a> {
    async fn greet(self, key: &LinkKey) -> Result<Greeted<'a>, PodError> {
        let Self { node, spec, until, vm, start_path, interfaces, spare } = self;
        let greeted = sandboxer_guest::connect(&spec.id, vm.as_ref(), key, node.config.vm.agent_timeout);
        let (agent, ready) = watched(spec, until, vm.as_ref(), greeted).await?;
        let live = RunningVm { vm, agent, disk_limits: spec.disk_limits };
        let (host_ports, counting, placement) = (Vec::new(), None, Placement::default());
        let up = Up { live, ready, start_path, interfaces, host_ports, counting, spare, placement };
        Ok(Greeted { spec, until, up })
    }
}

/// The phase in which the agent responds.
struct Greeted<'a> {
    spec: &'a PodSpec,
    /// The deadline of this VM, as in [`Running::until`].
    until: Instant,
    up: Up,
}

impl Greeted<'_> {
    /// Sends the guest its identity: hostname, clock, randomness, addresses, limits and link key.
    async fn configure(self, key: &LinkKey) -> Result<Up, PodError> {
        let Self { spec, until, up } = self;
        let entropy: [u8; ENTROPY] = rand::random();
        // A booted guest has its key already. Sending it again would look like a greeting.
        let link_key = if up.start_path == StartPath::Boot { Vec::new() } else { key.as_bytes().to_vec() };
        let processes = spec.max_processes.and_then(|most| i64::try_from(most).ok()).unwrap_or_default();
        let limits = PodLimits { processes, ..spec.limits.for_guest() };
        let identity = ConfigurePodRequest {
            hostname: spec.hostname.clone(),
            realtime_ns: now_ns(),
            entropy: entropy.to_vec(),
            sysctls: spec.sysctls.clone().into_iter().collect(),
            host_sysctls: spec.node_sysctls.clone().into_iter().collect(),
            link_key,
            limits: Some(limits).into(),
            interfaces: (0..).zip(&up.interfaces).map(|(nic, of)| interface::for_guest(nic, of)).collect(),
            ..Default::default()
        };
        let configured = up.live.agent.configure_pod(identity);
        watched(spec, until, up.live.vm.as_ref(), configured).await?;
        Ok(up)
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
fn end(pod: &SandboxId, vm: Arc<dyn Vm>) -> impl Future<Output = Result<(), Infallible>> + Send + use<> {
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
