//! One pod's way up, top to bottom. Each phase takes the one before it, so a pod that is half-way
//! can't be used; each adds what undoes it, so a start that fails leaves nothing.
//!
//! ```text
//!  Prepared ─▶ claim   ─▶ Greeted ─▶ configure ─▶ Up       from the pool
//!           ─▶ restore ─▶ Running ─▶ greet ─▶ …            as a copy of a template
//!           ─▶ boot    ─▶ Running ─▶ greet ─▶ …
//! ```
//!
//! What the pool or a template can't give comes the next slower way; whoever asked for the pod never
//! sees it.

use std::{
    convert::Infallible, future::Future, io, mem, net::TcpListener, os::fd::OwnedFd, path::PathBuf,
    sync::Arc, time::Duration,
};

use sandboxer_base::{Code, chain, clock::now_ns, failpoint::pass};
use sandboxer_config::StartPath;
use sandboxer_guest::GuestError;
use sandboxer_host::network::{self, Interface, PooledTap, interface};
use sandboxer_protocol::{
    agent::{ConfigurePodRequest, Ready},
    id::SandboxId,
    link::{LinkError, LinkKey},
    stage::Stage,
};
use sandboxer_vmm::{DiskSpec, Shape, Vm, VmExit, VmSpec, VmmError};
use tokio::{
    sync::{SemaphorePermit, oneshot},
    task::JoinHandle,
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use super::{
    DaemonState, admission::Work, host_ports, spec::PodSpec, stages::Stages, start_paths, stop, undo::Undo,
};
use crate::{
    error::PodError,
    pod::container::start::RunningVm,
    pool::{self, Warm},
    template::{Missing, Template},
};

/// Fresh randomness a guest gets, bytes.
const ENTROPY: usize = 64;

/// How long a VM whose link broke is given to be seen to end.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// A pod that is up.
#[derive(Debug)]
pub struct Up {
    /// Its VM and agent.
    pub live: RunningVm,
    /// The agent's first words.
    pub ready: Ready,
    /// How it got its VM.
    pub start_path: StartPath,
    /// Its network interfaces.
    pub interfaces: Vec<Interface>,
    /// Where connections come in that are for ports of the host.
    pub host_ports: Vec<TcpListener>,
    /// Its VMM's way into the pod's control group.
    pub counting: Option<CgroupAttach>,
    /// A scratch disk that its guest has mounted.
    pub spare: Option<DiskSpec>,
}

/// How often a pod boots at most. Each boot has an equal share of the time that is left.
///
/// Observed with emulated guests on a host with several times more work than processors: about one
/// boot in 130 stops for good before its agent runs. Another one then nearly always succeeds.
const BOOTS: u32 = 2;

/// A faster way than a boot may take this part of the time that is left: one that hangs leaves enough for the others.
const FASTER: u32 = 4;

/// Where a pod's VM comes from.
enum Source {
    Pool(Box<Warm>),
    Template(Arc<Template>),
    Boot,
}

impl Source {
    /// Returns what there is of this shape by this way, or why there is nothing.
    fn take(node: &DaemonState, shape: Shape, start_path: StartPath) -> Result<Self, &'static str> {
        match start_path {
            StartPath::Pool => node.pool.claim(shape, &node.templates).map(|warm| Self::Pool(Box::new(warm))),
            StartPath::Template => node.templates.get(shape).map(Self::Template).map_err(Missing::as_str),
            StartPath::Boot => Ok(Self::Boot),
        }
    }
}

/// Brings a pod up. Cancelled or failed, it has undone all it did when it answers.
pub async fn start(
    node: &DaemonState,
    spec: &PodSpec,
    key: &LinkKey,
    stages: &Stages,
    cancel: &CancellationToken,
) -> Result<Up, PodError> {
    let _urgent = node.admission.urgent();
    let interfaces = stages.run(Stage::Netns, interfaces(node, spec)).await?;
    // Before anything is made for it.
    let host_ports = host_ports::listen(&node.front, spec)?;
    let shape = spec.shape(interfaces.len());
    let deadline = Instant::now() + node.config.vm.boot_timeout;
    let mut start = Start { node, spec, interfaces: &interfaces, key, stages, deadline, boots: BOOTS };
    let mut start_path = spec.start_path;
    loop {
        let failed = match Source::take(node, shape, start_path) {
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
            // Another VM would not help.
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

/// Returns the pod's network interfaces.
async fn interfaces(node: &DaemonState, spec: &PodSpec) -> Result<Vec<Interface>, PodError> {
    match &spec.netns {
        Some(netns) => Ok(network::look(&spec.id, netns, node.config.network.foreign_rules).await?),
        None => {
            tracing::warn!(
                pod = %spec.id,
                "the pod asks for the host's network, which a VM cannot be in: it has loopback alone"
            );
            Ok(Vec::new())
        }
    }
}

/// What all attempts at one pod have in common.
struct Start<'a> {
    node: &'a DaemonState,
    spec: &'a PodSpec,
    interfaces: &'a [Interface],
    key: &'a LinkKey,
    stages: &'a Stages,
    /// When its time is up, in whatever way it is tried then. What it waits for its turn is not counted.
    deadline: Instant,
    /// How often it may still boot.
    boots: u32,
}

impl<'a> Start<'a> {
    async fn attempt(&mut self, source: Source, cancel: &CancellationToken) -> Result<Up, PodError> {
        let spec = self.spec;
        let mut undo = Undo::default();
        let result = tokio::select! {
            biased;
            () = cancel.cancelled() => Err(PodError::Cancelled(spec.id.clone())),
            result = self.phases(source, &mut undo) => result,
        };
        if result.is_ok() {
            undo.forget();
        } else if let Err(left) = undo.run().await {
            tracing::error!(pod = %spec.id, left, "a pod's failed start left something behind");
        }
        result
    }

    async fn phases(&mut self, mut source: Source, undo: &mut Undo) -> Result<Up, PodError> {
        let Self { node, spec, interfaces, key, stages, .. } = *self;
        // Whatever fails from here on, nothing of a VM that waited is left behind: not its directory either,
        // should it not have become the pod's.
        let mut waited = None;
        if let Source::Pool(warm) = &mut source {
            waited = Some(Waited { taps: mem::take(&mut warm.taps), pid: warm.vm.record().pid });
            let doomed = warm.vm.clone();
            let pod = spec.id.clone();
            undo.push("end the VMM", async move {
                gone(&pod, doomed.as_ref()).await;
                pool::end(doomed.as_ref()).await;
                Ok::<_, Infallible>(())
            });
        }
        let prepared =
            stages.run(Stage::Network, Prepared::new(node, spec, interfaces, waited, undo)).await?;
        match source {
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
        }
    }

    /// Waits until a VM may be made; the deadline waits with it.
    async fn turn(&mut self) -> Result<Option<SemaphorePermit<'a>>, PodError> {
        let asked = Instant::now();
        let place = self.node.admission.enter(Work::Vm).await;
        self.deadline += asked.elapsed();
        Ok(place)
    }

    /// Returns when the time is up for something that may take one of `parts` parts of what is left.
    fn until(&self, parts: u32) -> Instant {
        let now = Instant::now();
        now + self.deadline.saturating_duration_since(now) / parts
    }
}

/// What the host has of a VM that waited.
struct Waited {
    taps: Vec<PooledTap>,
    pid: u32,
}

/// The host holds what the VM needs.
struct Prepared<'a> {
    node: &'a DaemonState,
    spec: &'a PodSpec,
    run_dir: PathBuf,
    interfaces: Vec<Interface>,
    /// What is behind them, unless the VM has it already.
    taps: Vec<Arc<OwnedFd>>,
    /// Of a VM that is there already.
    counting: Option<CgroupAttach>,
}

impl<'a> Prepared<'a> {
    async fn new(
        node: &'a DaemonState,
        spec: &'a PodSpec,
        interfaces: &[Interface],
        waited: Option<Waited>,
        undo: &mut Undo,
    ) -> Result<Self, PodError> {
        let host = |action, path: PathBuf| {
            move |source: io::Error| PodError::Host { pod: spec.id.clone(), action, path, source }
        };
        if let Some(cgroup) = node.cgroups.of(&spec.cgroup_parent, &spec.id) {
            cgroup.make().map_err(|(path, error)| host("make control group", path)(error))?;
            let of = spec.id.clone();
            undo.push("remove the control group", async move { stop::leave(&of, &cgroup).await });
        }
        let counting = waited.as_ref().and_then(|waited| counted(node, spec, waited.pid, undo));
        let run_dir = node.run_dir(&spec.id);
        match make_private_dir(&run_dir) {
            // A start that failed before, or a daemon that died, may have left it.
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
            (None, _) => Vec::new(),
            (Some(netns), None) => network::taps(&spec.id, netns, interfaces).await?,
            (Some(netns), Some(waited)) => {
                network::plug(&spec.id, netns, interfaces, node.tap_pool.clone(), waited.taps).await?;
                Vec::new()
            }
        };
        Ok(Self { node, spec, run_dir, interfaces: interfaces.to_vec(), taps, counting })
    }

    /// Takes a VM that waited, which stands still, and lets it go on.
    async fn claim(self, warm: Box<Warm>, until: Instant) -> Result<Greeted<'a>, PodError> {
        let Self { spec, run_dir, interfaces, counting, .. } = self;
        let vm = warm.vm.assign(&spec.id, &run_dir)?;
        answered(spec, until, "the resumption", vm.resume()).await?;
        let live = RunningVm { vm, agent: warm.agent.of(&spec.id) };
        let (ready, spare, host_ports) = (warm.ready, warm.spare, Vec::new());
        let up = Up { live, ready, start_path: StartPath::Pool, interfaces, host_ports, counting, spare };
        Ok(Greeted { spec, until, up })
    }

    async fn restore(
        self,
        template: &Template,
        until: Instant,
        undo: &mut Undo,
    ) -> Result<Running<'a>, PodError> {
        let described = self.vm_spec(&template.link_key);
        let restored = self.node.vmm.restore(&described, &template.frozen);
        let vm = answered(self.spec, until, "the restore", restored)
            .await
            .inspect_err(|error| self.node.templates.not_restored(template, error))?;
        let running = self.running(vm, StartPath::Template, until, undo);
        answered(running.spec, until, "the resumption", running.vm.resume()).await?;
        Ok(running)
    }

    async fn boot(self, key: &LinkKey, until: Instant, undo: &mut Undo) -> Result<Running<'a>, PodError> {
        let described = self.vm_spec(key);
        let vm = answered(self.spec, until, "the boot", self.node.vmm.boot(&described)).await?;
        Ok(self.running(vm, StartPath::Boot, until, undo))
    }

    fn vm_spec(&self, key: &LinkKey) -> VmSpec {
        let (spec, run_dir) = (self.spec, self.run_dir.clone());
        let shape = spec.shape(self.taps.len());
        let described = VmSpec::new(&self.node.config.vm, spec.id.clone(), run_dir, shape, key.clone());
        let cgroup = self.node.cgroups.of(&spec.cgroup_parent, &spec.id);
        VmSpec { taps: self.taps.clone(), cgroup, ..described }
    }

    fn running(self, vm: Arc<dyn Vm>, start_path: StartPath, until: Instant, undo: &mut Undo) -> Running<'a> {
        let doomed = vm.clone();
        let pod = self.spec.id.clone();
        undo.push("end the VMM", async move {
            gone(&pod, doomed.as_ref()).await;
            Ok::<_, Infallible>(())
        });
        let Self { node, spec, interfaces, .. } = self;
        Running { node, spec, until, vm, start_path, interfaces }
    }
}

/// The VM runs.
struct Running<'a> {
    node: &'a DaemonState,
    spec: &'a PodSpec,
    /// When the time for this host is up.
    until: Instant,
    vm: Arc<dyn Vm>,
    start_path: StartPath,
    interfaces: Vec<Interface>,
}

impl<'a> Running<'a> {
    async fn greet(self, key: &LinkKey) -> Result<Greeted<'a>, PodError> {
        let Self { node, spec, until, vm, start_path, interfaces } = self;
        let greeted = sandboxer_guest::connect(&spec.id, vm.as_ref(), key, node.config.vm.agent_timeout);
        let (agent, ready) = watched(spec, until, vm.as_ref(), greeted).await?;
        let live = RunningVm { vm, agent };
        let (host_ports, counting, spare) = (Vec::new(), None, None);
        let up = Up { live, ready, start_path, interfaces, host_ports, counting, spare };
        Ok(Greeted { spec, until, up })
    }
}

/// The agent answers.
struct Greeted<'a> {
    spec: &'a PodSpec,
    /// As in [`Running::until`].
    until: Instant,
    up: Up,
}

impl Greeted<'_> {
    /// Gives the guest what makes it this pod's and nobody else's.
    async fn configure(self, key: &LinkKey) -> Result<Up, PodError> {
        let Self { spec, until, up } = self;
        let entropy: [u8; ENTROPY] = rand::random();
        // What is marked by its key already must not be told it: the message would pass for a greeting.
        let link_key = if up.start_path == StartPath::Boot { Vec::new() } else { key.as_bytes().to_vec() };
        let identity = ConfigurePodRequest {
            hostname: spec.hostname.clone(),
            realtime_ns: now_ns(),
            entropy: entropy.to_vec(),
            sysctls: spec.sysctls.clone().into_iter().collect(),
            link_key,
            limits: Some(spec.limits.for_guest()).into(),
            interfaces: (0..).zip(&up.interfaces).map(|(nic, of)| interface::for_guest(nic, of)).collect(),
            ..Default::default()
        };
        let configured = up.live.agent.configure_pod(identity);
        watched(spec, until, up.live.vm.as_ref(), configured).await?;
        Ok(up)
    }
}

/// The way of a VMM of the pool's into its pod's control group; others are born there. The kernel lets all its processors pass by before it moves a process, 5
/// to 17 ms on two cores: that goes on beside what follows. A container waits for it, and so does the VMM's end, after
/// which its number may be another's.
#[derive(Debug)]
pub struct CgroupAttach(JoinHandle<Result<(), (PathBuf, io::Error)>>);

impl CgroupAttach {
    /// Same as [`CgroupAttach::begin`], of a VMM that an earlier daemon may have moved, or not.
    pub fn go_on(node: &DaemonState, spec: &PodSpec, pid: u32) -> Option<Self> {
        let cgroup = node.cgroups.of(&spec.cgroup_parent, &spec.id)?;
        if cgroup.holds(pid) { None } else { Self::begin(node, spec, pid, oneshot::channel().0) }
    }

    /// Begins to move process `pid`; none where the pod has no group. Lets go of `over` when that is over.
    fn begin(
        node: &DaemonState,
        spec: &PodSpec,
        pid: u32,
        over: oneshot::Sender<Infallible>,
    ) -> Option<Self> {
        let cgroup = node.cgroups.of(&spec.cgroup_parent, &spec.id)?;
        let moved = tokio::task::spawn_blocking(move || {
            let _over = over;
            pass(format_args!("before the VMM is counted"));
            cgroup.enter(pid)
        });
        Some(Self(moved))
    }

    /// Waits until it is counted.
    pub async fn done(self, spec: &PodSpec) -> Result<(), PodError> {
        match self.0.await.unwrap_or_else(|ended| Err((PathBuf::new(), io::Error::other(ended)))) {
            // It has ended, and that is told by whoever watches it.
            Err((_, error)) if error.raw_os_error() == Some(libc::ESRCH) => Ok(()),
            moved => moved.map_err(|(path, source)| PodError::Host {
                pod: spec.id.clone(),
                action: "move the VMM into control group",
                path,
                source,
            }),
        }
    }
}

/// Begins to count a start's VMM.
fn counted(node: &DaemonState, spec: &PodSpec, pid: u32, undo: &mut Undo) -> Option<CgroupAttach> {
    let (over, ended) = oneshot::channel();
    let counting = CgroupAttach::begin(node, spec, pid, over);
    undo.push("wait for the control group", async move {
        let _ = ended.await;
        Ok::<_, Infallible>(())
    });
    counting
}

/// Waits for the VMM, in vain once the time is up.
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

/// Returns a time limit as people are told it.
fn whole_ms(limit: Duration) -> Duration {
    Duration::from_millis(limit.as_millis().try_into().unwrap_or(u64::MAX))
}

/// Waits for the agent, in vain once the VM has ended or the time is up.
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
                // The link breaks a moment before its VM is gone, whose end tells why.
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

/// Ends a VM, and is not over before it is gone: another one follows, or the pod is told stopped.
async fn gone(pod: &SandboxId, vm: &dyn Vm) {
    while let Err(error) = vm.kill().await {
        let error = chain(&error);
        tracing::error!(%pod, error, "the VMM of a start that failed does not end; the pod waits for that");
    }
}

/// Returns a VM's end as an error of its pod.
pub fn vm_ended(spec: &PodSpec, exit: VmExit) -> PodError {
    PodError::VmEnded { pod: spec.id.clone(), how: exit.how, last_lines: exit.last_lines.join(" | ") }
}

fn make_private_dir(path: &std::path::Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().mode(0o700).create(path)
}
