//! The daemon's lifetime: build everything, bind, recover, announce ready, serve, drain.

use std::{
    collections::HashSet,
    fs::{self, Permissions},
    io,
    net::SocketAddr,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{DirBuilderExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use futures::{StreamExt, stream::BoxStream};
use rustix::fs::FlockOperation;
use sandboxer_base::{clock::now_ns, sockets};
use sandboxer_config::Config;
use sandboxer_front::control::TASK_LISTENER;
use sandboxer_host::{
    helper::Helpers,
    network::TapPool,
    rootfs::{RootfsError, RootfsStore},
    volume::VolumeStore,
};
use sandboxer_process::{
    cgroup::{Cgroup, Hierarchies},
    strays,
};
use sandboxer_protocol::{
    admin::admin_server::AdminServer, controller::controller_server::ControllerServer,
    cri::runtime_service_server::RuntimeServiceServer,
};
use sandboxer_vmm::{DiskLimits, VmmInfo, Vmms};
use tokio::{
    net::{TcpListener, UnixListener, UnixStream},
    task::{JoinHandle, JoinSet},
};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tonic::transport::{Server, server::Router};

use crate::{
    api::{
        self, admin::AdminService, cri_checkpoints::CriCheckpoints, peers, sandbox::SandboxService,
        sandbox_container, task, task::TaskService, ttrpc_server,
    },
    checkpoint::Checkpoints,
    events::Events,
    front::{self, Front},
    heap,
    pod::{
        DaemonState,
        admission::Admission,
        clocks,
        journal::Journal,
        placer::Placer,
        pool::{self, Meminfo, Pool},
        quarantine::{self, Quarantine},
        recover::{self, Records},
        registry::Registry,
        rehearsal::Rehearsal,
        start_paths::StartPaths,
    },
    state::PodState,
    template::{self, Kind, Shape, Templates},
    traces::Traces,
};

/// A reason why the daemon cannot run.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// A VMM left by an earlier daemon cannot be killed.
    #[error("cannot remove what an earlier daemon left")]
    Strays(#[from] strays::StrayError),
    /// An operation on a file, directory or socket of the host failed.
    #[error("cannot {action} {path:?}")]
    Path {
        /// The attempted operation.
        action: &'static str,
        /// The path of the file, directory or socket.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The address for metrics cannot be used.
    #[error("cannot listen for metrics at {address}: configure another metrics_listen")]
    Metrics {
        /// The configured address.
        address: SocketAddr,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// Another daemon uses this directory.
    #[error("another sandboxer uses {0:?}: stop it, or configure another run_dir and state_dir for this one")]
    Running(PathBuf),
    /// The rootfs cache cannot be opened.
    #[error(transparent)]
    Rootfs(#[from] RootfsError),
    /// The host does not meet the requirements: pods would not start.
    #[error(transparent)]
    Unfit(#[from] sandboxer_doctor::Unfit),
    /// No VMM can be used.
    #[error(transparent)]
    Vmm(#[from] sandboxer_vmm::SetupError),
    /// A service failed.
    #[error("the {service} service failed")]
    Serve {
        /// Name of the service: "controller", "task", "admin" or "metrics".
        service: &'static str,
        /// The service's error.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// Runs until `shutdown` is cancelled; pods keep running when it returns. Calls `ready` once all earlier pods are
/// adopted and every socket is served.
pub async fn run(
    config: Config,
    front: Arc<Front>,
    shutdown: CancellationToken,
    ready: impl FnOnce(recover::Recovered),
) -> Result<(), DaemonError> {
    let _locks = [
        lock(&front, &config.run_dir, "run.lock").await?,
        lock(&front, &config.state_dir, "state.lock").await?,
    ];
    let vmms = sandboxer_vmm::detect_all(&config).await?;
    let infos: Vec<VmmInfo> = vmms.keys().map(|key| vmms.get(key).info()).collect();
    sandboxer_doctor::fit(&config, &infos).await?;
    for info in infos {
        tracing::info!(
            vmm = info.name,
            version = info.version,
            accelerator = info.accelerator,
            reason = info.accelerator_reason,
            "pods run in this VMM"
        );
    }
    let node = node(config, vmms, front)?;

    // Bound before recovery, so that early callers wait instead of failing; served after it.
    let listeners = Listeners::bind(&node.front, &node.config.run_dir)?;
    let records = Records::read(&node).map_err(|source| DaemonError::Path {
        action: "read the journal in",
        path: node.config.state_dir.clone(),
        source,
    })?;
    // Before the pods are recovered: a VM that a pod was about to take is in the pod's cgroup and is removed with it.
    clear_unassigned_vms(&node, &records)?;
    let recovered = recover::recover(&node, records).await;
    node.rootfs.settle();
    serve(node, listeners, recovered, shutdown, ready).await
}

/// Returns the shape of a pod that requests no size.
fn usual_shape(config: &Config) -> Shape {
    Shape { vcpus: config.vm.default_vcpus, memory_mib: config.vm.default_memory_mib, nics: 1 }
}

/// Creates the low-priority cgroup for VMs without a pod and, inside it, a child for VMs without a NUMA node; returns
/// the child. (A cgroup with child cgroups cannot hold processes itself.) On failure, these VMs stay in the daemon's
/// cgroup.
fn idle_cgroup(cgroups: &Hierarchies, name: &str) -> Option<Cgroup> {
    let (all, any) = (cgroups.named(name)?, cgroups.named(&format!("{name}/any"))?);
    let made = all.make().and_then(|()| all.yield_to_others()).and_then(|()| any.make());
    if let Err((path, error)) = made {
        tracing::warn!(path = %path.display(), %error,
            "cannot create the control group of VMs without a pod (vm.idle_cgroup): they are counted with the daemon");
        return None;
    }
    Some(any)
}

/// Creates the state that all pods of a node share; creates its directories and opens its files.
pub fn node(
    config: Config,
    vmms: impl Into<Vmms>,
    front: Arc<Front>,
) -> Result<Arc<DaemonState>, DaemonError> {
    let vmms = vmms.into();
    for dir in [config.run_dir.clone(), config.run_dir.join("pods"), config.state_dir.clone()] {
        private_dir(&dir)?;
    }
    let journal = Journal::open(&config.state_dir).map_err(|source| DaemonError::Path {
        action: "open the journal in",
        path: config.state_dir.clone(),
        source,
    })?;
    let tap_pool = Arc::<TapPool>::default();
    let cgroups = Hierarchies::detect().map_err(|source| DaemonError::Path {
        action: "read",
        path: "/proc/self/mountinfo".into(),
        source,
    })?;
    let idle_cgroup = idle_cgroup(&cgroups, &config.vm.idle_cgroup);
    let placer = Placer::new(&config.placement, &cgroups, &config.vm.idle_cgroup);
    let placer = Arc::new(placer.prepare(idle_cgroup.as_ref()));
    let dir = config.state_dir.join("volumes");
    let helpers = Helpers::new(config.helper_program.clone(), config.volumes.timeout)
        .with_kubelet_root(&config.volumes.kubelet_root);
    let volumes = VolumeStore::open(&dir, config.volumes.empty_dir_bytes, helpers.clone())
        .map_err(|source| DaemonError::Path { action: "open volumes in", path: dir, source })?;
    let (volumes, usual) = (Arc::new(volumes), usual_shape(&config));
    let rootfs = RootfsStore::open(&config.state_dir.join("rootfs"), &config.rootfs, helpers)?;
    let in_state = |action| {
        let path = config.state_dir.clone();
        move |source| DaemonError::Path { action, path, source }
    };
    let disk_limits = DiskLimits::configured(&config.limits);
    let rehearsal = Rehearsal::new(&config.state_dir, rootfs.clone(), volumes.clone(), disk_limits);
    let rehearsal = Arc::new(rehearsal);
    let preparation = rehearsal.clone();
    let templates =
        Templates::open(&config, vmms.clone(), tap_pool.clone(), idle_cgroup.clone(), preparation);
    let templates = templates.map_err(in_state("open templates in"))?;
    let checkpoints =
        Checkpoints::open(&config.state_dir, &config.checkpoints).map_err(in_state("open checkpoints in"))?;
    let node = Arc::new(DaemonState {
        checkpoints,
        templates,
        rehearsal,
        tap_pool,
        pool: Pool::new(config.pool, usual, Meminfo::of_host()),
        start_paths: StartPaths::default(),
        rootfs,
        volumes,
        admission: Admission::new(config.concurrent_starts, config.concurrent_containers),
        vmms,
        cgroups,
        idle_cgroup,
        placer,
        journal,
        registry: Registry::default(),
        events: Events::default(),
        stage_times: Arc::default(),
        old_readings: Arc::default(),
        traces: Traces::new(config.traces.as_ref()),
        front,
        config,
    });
    let known = Arc::downgrade(&node);
    node.volumes
        .helpers
        .know_namespaces(move |pod| Some(known.upgrade()?.registry.pod(pod).ok()?.namespace().into()));
    Ok(node)
}

/// Kills the pooled VMs of an earlier daemon, and the VMs that it was about to freeze.
fn clear_unassigned_vms(node: &DaemonState, records: &Records) -> Result<(), DaemonError> {
    let mut pods: HashSet<u32> = records.vmms().collect();
    // Pods with malformed records also had VMs from the pool.
    pods.extend(Quarantine::of(&node.config).pids().map_err(|source| DaemonError::Path {
        action: "search for VMs of",
        path: node.config.state_dir.join(quarantine::DIR),
        source,
    })?);
    for dir in [pool::run_dir(node), template::run_dir(&node.config)] {
        strays::end_below(&template::template_id(), &dir, &pods)?;
        match fs::remove_dir_all(&dir) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                return Err(DaemonError::Path { action: "remove", path: dir, source });
            }
            _ => {}
        }
    }
    Ok(())
}

/// Serves all sockets until `shutdown` is cancelled or the front is gone; then lets running requests finish.
async fn serve(
    node: Arc<DaemonState>,
    listeners: Listeners,
    recovered: recover::Recovered,
    shutdown: CancellationToken,
    ready: impl FnOnce(recover::Recovered),
) -> Result<(), DaemonError> {
    let metrics = match node.config.metrics_listen {
        None => None,
        Some(address) => {
            let bound = TcpListener::bind(address).await;
            Some(bound.map_err(|source| DaemonError::Metrics { address, source })?)
        }
    };
    let task_address = format!("ttrpc+unix://{}", listeners.task_path.display());
    let controller = SandboxService::new(node.clone(), task_address, shutdown.clone()).map_err(|source| {
        DaemonError::Path { action: "open the list of starts in", path: node.config.run_dir.clone(), source }
    })?;
    let controller = Arc::new(controller);
    let admin = AdminService::new(node.clone(), recovered.alive);

    let lost = CancellationToken::new();
    let _tasks = serve_tasks(&node, controller.clone(), &lost)?;
    let filling = spawn_background(&node, &shutdown);
    let sending = node.traces.run();
    let mut services = Services::new(shutdown.clone());
    let controller = Server::builder().add_service(ControllerServer::from_arc(controller));
    services.spawn_grpc("controller", controller, listeners.controller);
    let of_cri = RuntimeServiceServer::new(CriCheckpoints::new(node.clone()));
    let admin = Server::builder().add_service(AdminServer::new(admin)).add_service(of_cri);
    services.spawn_grpc("admin", admin, listeners.admin);
    if let Some(listener) = metrics {
        services.spawn_metrics(listener, node.clone());
    }
    ready(recovered);

    let ended = tokio::select! {
        () = shutdown.cancelled() => Ok(()),
        // The callers are gone, too.
        () = lost.cancelled() => return Ok(()),
        ended = services.ended() => ended,
    };
    // Running requests may finish.
    tracing::info!("draining; pods keep running");
    let drained = async {
        // Requests may wait for a template, and so may the pool.
        tokio::join!(node.templates.stop(), services.drained());
        // After this, no VM is added to the pool.
        let _ = filling.await;
        node.pool.drain().await;
        node.traces.close();
        if let Some(sending) = sending {
            let _ = sending.await;
        }
    };
    if tokio::time::timeout(node.config.drain_timeout, drained).await.is_err() {
        tracing::info!("aborting requests that are still running");
    }
    ended
}

/// Serves the task API on the connections from the front. Cancels `lost` when the front is gone: the front repeats this
/// worker's requests, so they need not finish.
fn serve_tasks(
    node: &Arc<DaemonState>,
    controller: Arc<SandboxService>,
    lost: &CancellationToken,
) -> Result<AbortOnDropHandle<()>, DaemonError> {
    let connections = node
        .front
        .connections(lost.clone())
        .map_err(|source| DaemonError::Serve { service: "task", source: source.into() })?;
    let tasks = Arc::new(TaskService::new(node.clone(), controller));
    tokio::spawn(tasks.clone().tidy(sandbox_container::SEARCH_INTERVAL));
    Ok(ttrpc_server::serve(connections, task::services(tasks)))
}

/// Spawns the tasks that run next to the services. Returns the task that fills the pool.
fn spawn_background(node: &Arc<DaemonState>, shutdown: &CancellationToken) -> JoinHandle<()> {
    if let Some(socket) = node.config.containerd_ttrpc.clone() {
        tokio::spawn(api::events::publish(socket, node.events.listen()));
    }
    tokio::spawn(sandbox_container::remove_abandoned(node.clone(), sandbox_container::SEARCH_INTERVAL));
    tokio::spawn(clocks::keep(node.clone()));
    tokio::spawn(heap::trim_at_rest(node.events.listen()));
    tokio::spawn(forget_unclaimed(node.clone()));
    if node.config.checkpoints.max_age.is_some() {
        tokio::spawn(remove_aged(node.checkpoints.clone()));
    }
    let (node, until) = (node.clone(), shutdown.clone());
    tokio::spawn(async move {
        let shape = usual_shape(&node.config);
        // The first pod of each VMM finds the template ready, or in preparation.
        for vmm in node.vmms.keys() {
            let _ = node.templates.get(Kind { vmm, shape });
        }
        node.pool.keep_filled(&node, &until).await;
    })
}

/// Removes the entries of earlier workers at the front that no pod has taken. As long as some pods are unreachable or
/// have records in quarantine, these entries may belong to them.
async fn forget_unclaimed(node: Arc<DaemonState>) {
    loop {
        tokio::time::sleep(CLAIMED_WITHIN).await;
        let is_unknown = node.registry.pods().iter().any(|pod| pod.status().state == PodState::Unknown);
        let quarantine = Quarantine::of(&node.config);
        let running = tokio::task::spawn_blocking(move || quarantine.running_pods()).await;
        let running = running.map_err(io::Error::other).and_then(|running| running);
        let are_adopted = running.is_ok_and(|pods| pods.iter().all(|pod| node.registry.pod(pod).is_ok()));
        if !is_unknown && are_adopted {
            return node.front.forget_rest(front::DELETED);
        }
    }
}

/// Removes checkpoints when they are too old.
async fn remove_aged(checkpoints: Arc<Checkpoints>) {
    loop {
        tokio::time::sleep(AGED_WITHIN).await;
        let checkpoints = checkpoints.clone();
        // A panic was logged, and the next round may be better.
        let _ = tokio::task::spawn_blocking(move || checkpoints.remove_aged(now_ns())).await;
    }
}

/// The services that end with `shutdown`.
struct Services {
    running: JoinSet<Result<(), DaemonError>>,
    shutdown: CancellationToken,
}

impl Services {
    fn new(shutdown: CancellationToken) -> Self {
        Self { running: JoinSet::new(), shutdown }
    }

    fn spawn_grpc(&mut self, name: &'static str, server: Router, incoming: Connections) {
        let until = self.shutdown.clone();
        self.running.spawn(async move {
            let served = server.serve_with_incoming_shutdown(incoming, until.cancelled_owned()).await;
            served.map_err(|source| DaemonError::Serve { service: name, source: source.into() })
        });
    }

    fn spawn_metrics(&mut self, listener: TcpListener, node: Arc<DaemonState>) {
        let until = self.shutdown.clone();
        self.running.spawn(async move {
            let served = api::metrics::serve(listener, node, until).await;
            served.map_err(|source| DaemonError::Serve { service: "metrics", source: source.into() })
        });
    }

    /// Waits until one service has ended.
    async fn ended(&mut self) -> Result<(), DaemonError> {
        match self.running.join_next().await {
            Some(ended) => ended
                .unwrap_or_else(|panic| Err(DaemonError::Serve { service: "gRPC", source: panic.into() })),
            None => std::future::pending().await,
        }
    }

    /// Waits until all services have ended.
    async fn drained(&mut self) {
        while self.running.join_next().await.is_some() {}
    }
}

/// A stream of connections to a socket.
type Connections = BoxStream<'static, io::Result<UnixStream>>;

/// The daemon's sockets, bound and private.
struct Listeners {
    controller: Connections,
    admin: Connections,
    task_path: PathBuf,
}

impl Listeners {
    /// Takes the sockets of earlier workers, or binds new ones. The front keeps them open, so that callers wait while
    /// no worker runs.
    fn bind(front: &Arc<Front>, run_dir: &Path) -> Result<Self, DaemonError> {
        let task_path = run_dir.join(sockets::TASK);
        // The front accepts on this socket.
        listener(front, TASK_LISTENER, &task_path)?;
        let serve = |name: &str| -> Result<_, DaemonError> {
            let path = run_dir.join(name);
            let listener = UnixListener::from_std(listener(front, "listen ", &path)?);
            let failed = |source| DaemonError::Path { action: "listen on", path, source };
            Ok(peers::trusted(UnixListenerStream::new(listener.map_err(failed)?)).boxed())
        };
        Ok(Self { controller: serve(sockets::CONTROLLER)?, admin: serve(sockets::ADMIN)?, task_path })
    }
}

/// Binds a socket of mode 0600; replaces one that a dead daemon left. The run directory is locked and has mode 0700, so
/// no other process can use the path.
fn listener(
    front: &Arc<Front>,
    kind: &str,
    path: &Path,
) -> Result<std::os::unix::net::UnixListener, DaemonError> {
    let failed = |action| move |source| DaemonError::Path { action, path: path.to_owned(), source };
    let key = format!("{kind}{}", path.display());
    if let Some(fd) = front.take(&key).and_then(|mut entry| entry.fds.pop()) {
        return Ok(fd.into());
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed("replace socket")(error)),
        _ => {}
    }
    let listener = std::os::unix::net::UnixListener::bind(path).map_err(failed("bind socket"))?;
    fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(failed("set the mode of"))?;
    listener.set_nonblocking(true).map_err(failed("listen on"))?;
    front.keep(&key, &(), &[listener.as_fd()]).map_err(failed("keep in the front socket"))?;
    Ok(listener)
}

fn private_dir(path: &Path) -> Result<(), DaemonError> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(|source| DaemonError::Path {
        action: "create directory",
        path: path.to_owned(),
        source,
    })
}

/// Time limit for repeated requests to take the entries that the front keeps for them. They do so immediately; an entry
/// that is left after this time belongs to something that no longer exists.
const CLAIMED_WITHIN: Duration = Duration::from_secs(300);

/// Time after which a checkpoint that is too old is removed at the latest.
const AGED_WITHIN: Duration = Duration::from_secs(300);

/// Time limit for the exit of a worker that has lost its front.
const ORPHANS_END: Duration = Duration::from_secs(3);

/// Takes a lock for the lifetime of the front: two daemons on one directory would use the same pods and images.
async fn lock(front: &Arc<Front>, dir: &Path, name: &str) -> Result<OwnedFd, DaemonError> {
    private_dir(dir)?;
    let path = dir.join(name);
    let key = format!("lock {}", path.display());
    if let Some(fd) = front.take(&key).and_then(|mut entry| entry.fds.pop()) {
        return Ok(fd);
    }
    let failed = |source| DaemonError::Path { action: "create lock", path: path.clone(), source };
    // On a read-only disk, the file may exist from an earlier daemon.
    let file = fs::File::create(&path).or_else(|error| fs::File::open(&path).map_err(|_| error));
    let file = OwnedFd::from(file.map_err(failed)?);
    let locked = async {
        // A lock that becomes free notifies only a thread that blocks on it without a time limit.
        let mut again = tokio::time::interval(Duration::from_millis(20));
        while rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            again.tick().await;
        }
    };
    let locked = tokio::time::timeout(ORPHANS_END, locked).await;
    locked.map_err(|_| DaemonError::Running(dir.to_owned()))?;
    front.keep(&key, &(), &[file.as_fd()]).map_err(failed)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use sandboxer_front::control::{self, Kind as Message};
    use sandboxer_protocol::link::LinkKey;
    use sandboxer_vmm_fake::FakeVmm;

    use super::*;
    use crate::{
        pod::{self, spec::PodSpec},
        state::PodStatus,
    };

    #[tokio::test(start_paused = true)]
    async fn what_may_belong_to_an_unknown_pod_is_kept_until_that_is_known() {
        let (theirs, ours) = control::pair().unwrap();
        control::send(theirs.as_fd(), Message::Kept, "exec c1 e1", b"{}", &[]).unwrap();
        control::send(theirs.as_fd(), Message::AllKept, "", b"front", &[]).unwrap();
        let front = Front::connect(ours).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let (run_dir, state_dir) = (dir.path().join("run"), dir.path().join("state"));
        let mut config = Config { run_dir, state_dir, ..Config::default() };
        // None of the host's.
        config.vm.idle_cgroup.clear();
        let node = node(config, Arc::new(FakeVmm::new(|_| ())), front).unwrap();
        let spec = PodSpec::plain("web".parse().unwrap(), 1, 128);
        let id = spec.id.clone();
        let status = PodStatus { state: PodState::Unknown, ..PodStatus::created(1) };
        let made = || pod::spawn(node.clone(), spec, LinkKey::random(), status, Default::default());
        node.registry.insert(&id, made).unwrap();

        let forgetting = tokio::spawn(forget_unclaimed(node.clone()));
        tokio::time::sleep(3 * CLAIMED_WITHIN).await;
        assert!(node.front.has("exec c1 e1"), "its pod may answer yet");
        node.registry.remove(&id);
        forgetting.await.unwrap();
        assert!(!node.front.has("exec c1 e1"));
    }
}
