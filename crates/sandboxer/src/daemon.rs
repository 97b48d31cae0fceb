//! The daemon's own life: build everything, bind, recover, announce ready, serve, drain.

use std::{
    collections::HashSet,
    fs::{self, Permissions},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{DirBuilderExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use containerd_shim_protos::shim_async::create_task;
use futures::{StreamExt, stream::BoxStream};
use rustix::fs::FlockOperation;
use sandboxer_base::sockets;
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
use sandboxer_protocol::{admin::admin_server::AdminServer, controller::controller_server::ControllerServer};
use sandboxer_vmm::Vmm;
use tokio::{
    net::{TcpListener, UnixListener, UnixStream},
    task::JoinSet,
};
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;

use crate::{
    api::{self, admin::AdminService, peers, sandbox::SandboxService, task::TaskService},
    events::Events,
    front::{self, Front},
    heap,
    pod::{
        DaemonState,
        admission::Admission,
        clocks,
        journal::Journal,
        quarantine::{self, Quarantine},
        recover::{self, Records},
        registry::Registry,
        start_paths::StartPaths,
    },
    pool::{self, Meminfo, Pool},
    template::{self, Shape, Templates},
};

/// Why the daemon can't run.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// A VMM that an earlier daemon left can't be ended.
    #[error("cannot clear away what an earlier daemon left")]
    Strays(#[from] strays::StrayError),
    /// Something of the host is in the way.
    #[error("cannot {action} {path:?}")]
    Host {
        /// What was attempted.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Another daemon has this directory.
    #[error("another sandboxer serves {0:?}: stop it, or give this one a run_dir and a state_dir of its own")]
    Running(PathBuf),
    /// The rootfs cache can't be opened.
    #[error(transparent)]
    Rootfs(#[from] RootfsError),
    /// Pods would not start.
    #[error(transparent)]
    Unfit(#[from] sandboxer_doctor::Unfit),
    /// No VMM can be used.
    #[error(transparent)]
    Vmm(#[from] sandboxer_vmm::SetupError),
    /// A service ended.
    #[error("the {service} service failed")]
    Serve {
        /// "controller", "task", "admin", "metrics".
        service: &'static str,
        /// How.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// Runs until `shutdown` is cancelled; pods stay when it returns. `ready` is called once all
/// earlier pods are taken up and every socket answers.
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
    let vmm: Arc<dyn Vmm> = sandboxer_vmm::detect(&config.vm).await?;
    let info = vmm.info();
    sandboxer_doctor::fit(&config, &info).await?;
    tracing::info!(
        vmm = info.name,
        version = info.version,
        accelerator = info.accelerator,
        reason = info.accelerator_reason,
        "pods run in this VMM"
    );
    let node = node(config, vmm, front)?;

    // Bound before recovery, so that early callers queue instead of failing; served after it.
    let listeners = Listeners::bind(&node.front, &node.config.run_dir)?;
    let records = Records::read(&node).map_err(|source| DaemonError::Host {
        action: "read journal in",
        path: node.config.state_dir.clone(),
        source,
    })?;
    // Ahead of the pods: one that a pod was about to take is in the pod's control group, which goes with it.
    clear_vms_of_no_pod(&node, &records)?;
    let recovered = recover::recover(&node, records).await;
    node.rootfs.settle();
    serve(node, listeners, recovered, shutdown, ready).await
}

/// Returns the size of a pod that doesn't ask for another.
fn usual_shape(config: &Config) -> Shape {
    Shape { vcpus: config.vm.default_vcpus, memory_mib: config.vm.default_memory_mib, nics: 1 }
}

/// Makes the control group of VMs without a pod, which give way to pods. Without it all goes on, only counted elsewhere.
fn is_made(cgroup: &Cgroup) -> bool {
    let made = cgroup.make().and_then(|()| cgroup.yield_to_others());
    if let Err((path, error)) = &made {
        tracing::warn!(path = %path.display(), %error,
            "cannot make the control group of VMs without a pod (vm.idle_cgroup): they are counted with the daemon");
    }
    made.is_ok()
}

/// Returns what all pods of a node share, its directories made and its files opened.
pub fn node(config: Config, vmm: Arc<dyn Vmm>, front: Arc<Front>) -> Result<Arc<DaemonState>, DaemonError> {
    for dir in [config.run_dir.clone(), config.run_dir.join("pods"), config.state_dir.clone()] {
        private_dir(&dir)?;
    }
    let journal = Journal::open(&config.state_dir).map_err(|source| DaemonError::Host {
        action: "open journal in",
        path: config.state_dir.clone(),
        source,
    })?;
    let tap_pool = Arc::<TapPool>::default();
    let cgroups = Hierarchies::detect().map_err(|source| DaemonError::Host {
        action: "read",
        path: "/proc/self/mountinfo".into(),
        source,
    })?;
    let idle_cgroup = cgroups.named(&config.vm.idle_cgroup).filter(is_made);
    let templates = Templates::open(&config, vmm.clone(), tap_pool.clone(), idle_cgroup.clone());
    let templates = templates.map_err(|source| DaemonError::Host {
        action: "open templates in",
        path: config.state_dir.clone(),
        source,
    })?;
    let dir = config.state_dir.join("volumes");
    let helpers = Helpers::new(config.helper_program.clone(), config.volumes.timeout);
    let volumes = VolumeStore::open(&dir, config.volumes.empty_dir_bytes, helpers.clone())
        .map_err(|source| DaemonError::Host { action: "open volumes in", path: dir, source })?;
    let usual = usual_shape(&config);
    Ok(Arc::new(DaemonState {
        templates,
        tap_pool,
        pool: Pool::new(config.pool, usual, Meminfo::of_host()),
        start_paths: StartPaths::default(),
        rootfs: RootfsStore::open(&config.state_dir.join("rootfs"), &config.rootfs, helpers)?,
        volumes: Arc::new(volumes),
        admission: Admission::new(config.concurrent_starts, config.concurrent_containers),
        vmm,
        cgroups,
        idle_cgroup,
        journal,
        registry: Registry::default(),
        events: Events::default(),
        stage_times: Arc::default(),
        old_readings: Arc::default(),
        front,
        config,
    }))
}

/// Ends what an earlier daemon had waiting or was about to freeze.
fn clear_vms_of_no_pod(node: &DaemonState, records: &Records) -> Result<(), DaemonError> {
    let mut pods: HashSet<u32> = records.vmms().collect();
    // Those of pods whose records can't be understood were in the pool, too.
    pods.extend(Quarantine::of(&node.config).pids().map_err(|source| DaemonError::Host {
        action: "look for VMs of",
        path: node.config.state_dir.join(quarantine::DIR),
        source,
    })?);
    for dir in [pool::run_dir(node), template::run_dir(&node.config)] {
        strays::end_below(&template::template_id(), &dir, &pods)?;
        match fs::remove_dir_all(&dir) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                return Err(DaemonError::Host { action: "clear", path: dir, source });
            }
            _ => {}
        }
    }
    Ok(())
}

async fn serve(
    node: Arc<DaemonState>,
    listeners: Listeners,
    recovered: recover::Recovered,
    shutdown: CancellationToken,
    ready: impl FnOnce(recover::Recovered),
) -> Result<(), DaemonError> {
    let metrics = match node.config.metrics_listen {
        None => None,
        Some(address) => Some(TcpListener::bind(address).await.map_err(|source| DaemonError::Host {
            action: "listen for metrics at",
            path: address.to_string().into(),
            source,
        })?),
    };
    let task_address = format!("ttrpc+unix://{}", listeners.task_path.display());
    let controller = SandboxService::new(node.clone(), task_address, shutdown.clone()).map_err(|source| {
        DaemonError::Host { action: "note starts in", path: node.config.run_dir.clone(), source }
    })?;
    let controller = ControllerServer::new(controller);
    let admin = AdminServer::new(AdminService::new(node.clone(), recovered.alive));

    // Its requests are the front's to give again: it needs no farewell.
    let lost = CancellationToken::new();
    let connections = node
        .front
        .connections(lost.clone())
        .map_err(|source| DaemonError::Serve { service: "task", source: source.into() })?;
    let mut tasks = ttrpc::asynchronous::Server::new()
        .add_listener(ttrpc::asynchronous::transport::Listener::new(ReceiverStream::new(connections)))
        .register_service(create_task(Arc::new(TaskService::new(node.clone()))));
    tasks.start().await.map_err(|source| DaemonError::Serve { service: "task", source: source.into() })?;

    if let Some(socket) = node.config.containerd_ttrpc.clone() {
        tokio::spawn(api::events::publish(socket, node.events.listen()));
    }
    let mut services = JoinSet::new();
    let (until, incoming) = (shutdown.clone(), listeners.controller);
    services.spawn(async move {
        let server = Server::builder().add_service(controller);
        let served = server.serve_with_incoming_shutdown(incoming, until.cancelled_owned()).await;
        served.map_err(|source| DaemonError::Serve { service: "controller", source: source.into() })
    });
    let (until, incoming) = (shutdown.clone(), listeners.admin);
    services.spawn(async move {
        let server = Server::builder().add_service(admin);
        let served = server.serve_with_incoming_shutdown(incoming, until.cancelled_owned()).await;
        served.map_err(|source| DaemonError::Serve { service: "admin", source: source.into() })
    });
    if let Some(metrics) = metrics {
        let (node, until) = (node.clone(), shutdown.clone());
        services.spawn(async move {
            let served = api::metrics::serve(metrics, node, until).await;
            served.map_err(|source| DaemonError::Serve { service: "metrics", source: source.into() })
        });
    }
    let (filling, until) = (node.clone(), shutdown.clone());
    let filling = tokio::spawn(async move {
        let usual = usual_shape(&filling.config);
        // The first pod finds it made, or on its way.
        let _ = filling.templates.get(usual);
        filling.pool.keep_filled(&filling, &until).await;
    });
    tokio::spawn(clocks::keep(node.clone()));
    tokio::spawn(heap::give_back_at_rest(node.events.listen()));
    ready(recovered);
    let claimed = node.front.clone();
    tokio::spawn(async move {
        tokio::time::sleep(CLAIMED_WITHIN).await;
        claimed.forget_rest(front::DELETED);
    });

    let ended = tokio::select! {
        () = shutdown.cancelled() => Ok(()),
        // Whoever waited for an answer is gone, too.
        () = lost.cancelled() => return Ok(()),
        Some(ended) = services.join_next() => ended.unwrap_or_else(|panic| {
            Err(DaemonError::Serve { service: "gRPC", source: panic.into() })
        }),
    };
    // Requests under way may end.
    tracing::info!("draining; pods stay as they are");
    let drained = async {
        while services.join_next().await.is_some() {}
        // After it, nothing is added to the pool.
        let _ = filling.await;
        node.pool.drain().await;
    };
    if tokio::time::timeout(node.config.drain_timeout, drained).await.is_err() {
        tracing::info!("requests still under way are given up");
    }
    ended
}

/// The daemon's sockets, bound and private.
struct Listeners {
    controller: BoxStream<'static, io::Result<UnixStream>>,
    admin: BoxStream<'static, io::Result<UnixStream>>,
    task_path: PathBuf,
}

impl Listeners {
    /// Returns those of earlier workers, or new ones, which the front keeps: while no worker is there, callers wait.
    fn bind(front: &Arc<Front>, run_dir: &Path) -> Result<Self, DaemonError> {
        let task_path = run_dir.join(sockets::TASK);
        // It is the front that accepts there.
        listener(front, TASK_LISTENER, &task_path)?;
        let serve = |name: &str| -> Result<_, DaemonError> {
            let path = run_dir.join(name);
            let listener = UnixListener::from_std(listener(front, "listen ", &path)?);
            let host = |source| DaemonError::Host { action: "listen at", path, source };
            Ok(peers::trusted(UnixListenerStream::new(listener.map_err(host)?)).boxed())
        };
        Ok(Self { controller: serve(sockets::CONTROLLER)?, admin: serve(sockets::ADMIN)?, task_path })
    }
}

/// Binds a socket of mode 0600, over one that a dead daemon left. The run directory is locked and
/// of mode 0700: nobody else can be at the path.
fn listener(
    front: &Arc<Front>,
    kind: &str,
    path: &Path,
) -> Result<std::os::unix::net::UnixListener, DaemonError> {
    let host = |action| move |source| DaemonError::Host { action, path: path.to_owned(), source };
    let key = format!("{kind}{}", path.display());
    if let Some(fd) = front.take(&key).and_then(|mut entry| entry.fds.pop()) {
        return Ok(fd.into());
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(host("replace socket")(error)),
        _ => {}
    }
    let listener = std::os::unix::net::UnixListener::bind(path).map_err(host("bind socket"))?;
    fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(host("make private"))?;
    listener.set_nonblocking(true).map_err(host("listen at"))?;
    front.keep(&key, &(), &[listener.as_fd()]).map_err(host("hand over"))?;
    Ok(listener)
}

fn private_dir(path: &Path) -> Result<(), DaemonError> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(|source| DaemonError::Host {
        action: "make directory",
        path: path.to_owned(),
        source,
    })
}

/// Requests that are given again claim what the front has kept for them at once. What nobody has claimed by then
/// belonged to what is no more.
const CLAIMED_WITHIN: Duration = Duration::from_secs(300);

/// How long a worker that has lost its front may take to be gone.
const ORPHANS_END: Duration = Duration::from_secs(3);

/// Held as long as the front is there: two daemons on one directory would fight over its pods and images.
async fn lock(front: &Arc<Front>, dir: &Path, name: &str) -> Result<OwnedFd, DaemonError> {
    private_dir(dir)?;
    let path = dir.join(name);
    let key = format!("lock {}", path.display());
    if let Some(held) = front.take(&key).and_then(|mut entry| entry.fds.pop()) {
        return Ok(held);
    }
    let host = |source| DaemonError::Host { action: "make lock", path: path.clone(), source };
    let file = OwnedFd::from(fs::File::create(&path).map_err(host)?);
    let locked = async {
        // Nothing tells when a lock becomes free, save a thread that would wait for it for ever.
        let mut again = tokio::time::interval(Duration::from_millis(20));
        while rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            again.tick().await;
        }
    };
    let locked = tokio::time::timeout(ORPHANS_END, locked).await;
    locked.map_err(|_| DaemonError::Running(dir.to_owned()))?;
    front.keep(&key, &(), &[file.as_fd()]).map_err(host)?;
    Ok(file)
}
