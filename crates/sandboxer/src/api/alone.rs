//! Containers that no pod of CRI has (`ctr run`, `docker run`). Each is a pod by itself, whose id is the container's.
//!
//! | of the task service | of the pod |
//! |---|---|
//! | Create | –, the container waits, and a thread in its network namespace stands for its process |
//! | Start | Create and Start; then the container is created and started in it |
//! | Delete | Delete of the container, then the pod is removed |
//! | all others | as for any container |
//!
//! Callers give a container its network between Create and Start: they look for the network namespace of its process,
//! and move interfaces there. So the pod, which reads its interfaces at its start, starts with its container. What is
//! known of a waiting container is an entry at the front, and its namespace has a path: `run_dir/netns/<id>`.

mod request;
pub(super) mod root;

use std::{
    collections::{HashMap, HashSet},
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use containerd_shim_protos::{
    api::{CreateTaskRequest, DeleteResponse, StateResponse, Status as TaskStatus},
    types::mount::Mount as WireMount,
};
use sandboxer_base::{chain, clock::now_ns};
use sandboxer_host::{
    network::namespace::{self, Occupant},
    rootfs::Mount,
};
use sandboxer_protocol::id::ContainerId;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use self::request::Network;
use super::{bundle, convert::ttrpc_time, sandbox::SandboxService};
use crate::{
    containerd,
    error::{PodError, tolerate},
    front,
    pod::{
        DaemonState, PodHandle,
        container::{Exit, KILLED, NewContainer, Phase, StdioPaths},
    },
    state::PodState,
};

/// Kind of the front's entry for a waiting container.
const KIND: &str = "alone";
/// Name of the directory of network namespaces, in the run directory.
const NAMESPACES: &str = "netns";
/// The network namespace of the host.
const OF_HOST: &str = "/proc/self/ns/net";
/// Exit code of a container that could not be started.
const NOT_STARTED: u32 = 128;
const SIGKILL: u32 = 9;
/// Signals that end runc's init before the start, besides SIGKILL: SIGHUP, SIGINT, SIGQUIT, SIGTERM. It ignores others.
const ENDING: [u32; 4] = [1, 2, 3, 15];
/// Exit code of runc's init after one of these, as of any program in Go.
const ENDED: u32 = 2;

/// The containers of a node that wait for their start.
#[derive(Debug)]
pub struct Alone {
    node: Arc<DaemonState>,
    controller: Arc<SandboxService>,
    // A plain lock: held for a look-up, never across an await.
    waiting: Mutex<HashMap<ContainerId, Arc<Waiting>>>,
}

/// Type, source and options of a mount.
type Mounted = (String, String, Vec<String>);

/// What the next worker has to know of a waiting container.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Note {
    bundle: PathBuf,
    /// The container's namespace in containerd.
    namespace: String,
    /// Type, source and options of each mount of the container's snapshot.
    mounts: Vec<Mounted>,
    /// The directory with the container's root file system, if there is no snapshot.
    #[serde(default)]
    root: Option<PathBuf>,
    stdio: StdioPaths,
    /// The container's network namespace.
    netns: PathBuf,
    /// Whether its stdin was closed.
    is_stdin_closed: bool,
    /// Columns and rows of its terminal, if they were set.
    size: Option<(u32, u32)>,
    /// The exit of the container, if it was killed or could not be started.
    exit: Option<Exit>,
}

/// A container between Create and Start, or one that has ended there.
#[derive(Debug)]
pub struct Waiting {
    id: ContainerId,
    note: Mutex<Note>,
    /// Running: the container is its pod's.
    phase: watch::Sender<Phase>,
    /// The stand-in for its process.
    occupant: Occupant,
}

impl Waiting {
    fn new(id: ContainerId, note: Note, occupant: Occupant) -> Self {
        let phase = note.exit.clone().map_or(Phase::Created, Phase::Exited);
        Self { id, note: Mutex::new(note), phase: watch::Sender::new(phase), occupant }
    }

    /// Returns the id of the thread that stands for the container's process.
    pub fn pid(&self) -> u32 {
        self.occupant.id()
    }

    /// Returns the state of the container.
    pub fn state(&self) -> StateResponse {
        let note = self.note();
        let path = |path: &Path| path.to_string_lossy().into_owned();
        let exit = note.exit.as_ref();
        let status = if exit.is_some() { TaskStatus::STOPPED } else { TaskStatus::CREATED };
        StateResponse {
            id: self.id.to_string(),
            bundle: path(&note.bundle),
            pid: self.pid(),
            status: status.into(),
            stdin: path(&note.stdio.stdin),
            stdout: path(&note.stdio.stdout),
            stderr: path(&note.stdio.stderr),
            terminal: note.stdio.terminal,
            exit_status: exit.map_or(0, |exit| exit.code),
            exited_at: ttrpc_time(exit.map_or(0, |exit| exit.at_ns)),
            ..Default::default()
        }
    }

    /// Waits until the container is its pod's, or has ended: then returns its exit.
    pub async fn over(&self) -> Option<Exit> {
        let mut phase = self.phase.subscribe();
        let over = phase.wait_for(|phase| matches!(phase, Phase::Running | Phase::Exited(_))).await;
        over.ok().and_then(|phase| phase.exit().cloned())
    }

    /// Returns the error of a request that needs a process.
    pub fn refused(&self, action: &'static str) -> PodError {
        let state = self.phase.borrow().as_str().to_owned();
        PodError::State { action, subject: format!("container {}", self.id), state }
    }

    /// Returns whether containerd has it in `namespace`, if that is known.
    pub fn is_of(&self, namespace: Option<&str>) -> bool {
        namespace.is_none_or(|namespace| self.note().namespace == namespace)
    }

    fn note(&self) -> MutexGuard<'_, Note> {
        self.note.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn new_container(&self) -> NewContainer {
        let note = self.note();
        let mount = |(fstype, source, options): &Mounted| Mount {
            fstype: fstype.clone(),
            source: source.clone(),
            options: options.clone(),
        };
        NewContainer {
            id: self.id.clone(),
            bundle: note.bundle.clone(),
            mounts: note.mounts.iter().map(mount).collect(),
            root: note.root.clone(),
            stdio: note.stdio.clone(),
            beside: Vec::new(),
        }
    }
}

impl Alone {
    /// Takes up the containers that wait since an earlier worker.
    pub fn new(node: Arc<DaemonState>, controller: Arc<SandboxService>) -> Self {
        let mut waiting = HashMap::new();
        for key in node.front.keys(&format!("{KIND} ")) {
            let found = node.front.take(&key).and_then(|entry| entry.note::<Note>());
            let id = key.split(' ').nth(1).and_then(|id| id.parse::<ContainerId>().ok());
            let (Some(note), Some(id)) = (found, id) else {
                tracing::error!(key, "cannot read what an earlier worker noted of a container");
                continue;
            };
            let entered = namespace::open(&note.netns).and_then(|netns| Occupant::enter(Some(netns)));
            match entered.or_else(|_| Occupant::enter(None)) {
                Ok(occupant) => {
                    waiting.insert(id.clone(), Arc::new(Waiting::new(id, note, occupant)));
                }
                Err(error) => {
                    tracing::error!(container = %id, %error, "cannot take up a container that waits for its start")
                }
            }
        }
        Self { node, controller, waiting: Mutex::new(waiting) }
    }

    /// Returns the waiting container with this id.
    pub fn waiting(&self, id: &str) -> Option<Arc<Waiting>> {
        self.lock().get(id).cloned()
    }

    /// Creates a container that waits for its start. Returns the id of the thread that stands for its process.
    pub fn create(
        &self,
        id: &ContainerId,
        request: &CreateTaskRequest,
        of: &str,
        again: bool,
    ) -> Result<u32, PodError> {
        let dir = Path::new(&request.bundle);
        if let Some(waiting) = self.waiting(id.as_str()) {
            return match again && waiting.note().bundle == dir {
                true => Ok(waiting.pid()),
                false => Err(PodError::ContainerExists(id.clone())),
            };
        }
        if self.node.registry.pod(id).is_ok() || self.node.registry.pod_of(id).is_ok() {
            return Err(PodError::ContainerExists(id.clone()));
        }
        if let Some(uri) = [&request.stdout, &request.stderr].into_iter().find(|path| path.contains("://")) {
            return Err(PodError::Unsupported(format!(
                "container {id}: the log URI {uri:?} is not available in a microVM pod: its output goes to FIFOs"
            )));
        }
        let spec = bundle::spec(id, dir)?;
        let asked = request::network(id, &spec)?;
        let mount = |mount: &WireMount| (mount.type_.clone(), mount.source.clone(), mount.options.clone());
        let root = match request.rootfs.as_slice() {
            [] => Some(root::of(id, &spec, dir)?),
            _ => None,
        };
        let (occupant, netns) = self.enter(id, asked)?;
        let note = Note {
            bundle: dir.to_owned(),
            namespace: of.to_owned(),
            mounts: request.rootfs.iter().map(mount).collect(),
            root,
            stdio: StdioPaths {
                stdin: request.stdin.clone().into(),
                stdout: request.stdout.clone().into(),
                stderr: request.stderr.clone().into(),
                terminal: request.terminal,
            },
            netns,
            is_stdin_closed: false,
            size: None,
            exit: None,
        };
        self.keep(id, &note).inspect_err(|_| self.release(id))?;
        let waiting = Arc::new(Waiting::new(id.clone(), note, occupant));
        self.lock().insert(id.clone(), waiting.clone());
        Ok(waiting.pid())
    }

    /// Enters the network namespace of a container. Returns its path.
    fn enter(&self, id: &ContainerId, asked: Network) -> Result<(Occupant, PathBuf), PodError> {
        let failed = |action, path: &Path| {
            let (pod, path) = (id.clone(), path.to_owned());
            move |source| PodError::Path { pod, action, path, source }
        };
        let Network::At(path) = asked else {
            let path = self.namespaces().join(id);
            let occupant = Occupant::enter(None);
            let occupant = occupant.map_err(failed("make a network namespace for", &path))?;
            occupant.keep_at(&path).map_err(failed("keep the network namespace at", &path))?;
            return Ok((occupant, path));
        };
        let shared = |what: String| {
            Err(PodError::Unsupported(format!(
                "container {id}: the network namespace {path:?} is {what}, which is not available in a microVM pod: \
                 a guest has network cards of its own; give the container a network namespace or a network of its own"
            )))
        };
        let entered = namespace::open(&path).map_err(failed("open the network namespace", &path))?;
        let is = |other: &Path| namespace::is_same(&path, other).unwrap_or_default();
        // Of a container, callers know only the VMM's process.
        let of_pid = |pid: u32| pid > 0 && path == Path::new(&format!("/proc/{pid}/ns/net"));
        let pods = self.node.registry.pods();
        let other = pods.iter().find(|pod| of_pid(pod.status().vmm_pid) || pod.netns().is_some_and(is));
        if let Some(other) = other {
            return shared(format!("that of container or pod {} (--network=container:…)", other.id()));
        }
        if is(OF_HOST.as_ref()) {
            return shared("the host's (--network=host, --net-host)".to_owned());
        }
        let occupant = Occupant::enter(Some(entered));
        Ok((occupant.map_err(failed("enter the network namespace", &path))?, path))
    }

    /// Starts a waiting container: starts its pod, and the container in it.
    pub async fn start(&self, waiting: &Waiting, again: bool) -> Result<PodHandle, PodError> {
        let may_start = waiting.phase.send_if_modified(|phase| {
            let is_created = *phase == Phase::Created;
            if is_created {
                *phase = Phase::Starting;
            }
            is_created
        });
        if !may_start {
            return Err(waiting.refused("start it"));
        }
        match self.begin(waiting, again).await {
            Ok(pod) => {
                self.lock().remove(&waiting.id);
                // Requests came while it started. A program that has ended since needs none of them.
                let _ = self.catch_up(waiting, &pod).await;
                self.node.front.forget(&front::key(KIND, &waiting.id, None));
                waiting.phase.send_replace(Phase::Running);
                Ok(pod)
            }
            Err(error) => {
                if let Ok(pod) = self.node.registry.pod(&waiting.id)
                    && let Err(error) = self.remove(&pod).await
                {
                    tracing::error!(pod = %pod.id(), error = chain(&error), "cannot remove the pod of a container that did not start");
                }
                self.end(waiting, NOT_STARTED, chain(&error));
                Err(error)
            }
        }
    }

    /// Does in the pod what the waiting container was asked for.
    async fn catch_up(&self, waiting: &Waiting, pod: &PodHandle) -> Result<(), PodError> {
        let (is_stdin_closed, size) = {
            let note = waiting.note();
            (note.is_stdin_closed, note.size)
        };
        if is_stdin_closed {
            pod.close_stdin(waiting.id.clone(), None).await?;
        }
        match size {
            Some((columns, rows)) => pod.resize(waiting.id.clone(), None, columns, rows).await,
            None => Ok(()),
        }
    }

    async fn begin(&self, waiting: &Waiting, again: bool) -> Result<PodHandle, PodError> {
        let id = &waiting.id;
        let (dir, of, netns) = {
            let note = waiting.note();
            (note.bundle.clone(), note.namespace.clone(), note.netns.clone())
        };
        if again && let Ok(pod) = self.node.registry.pod(id) {
            // An earlier worker died over this start.
            match pod.status().state {
                PodState::Ready if pod.process(id.clone(), None).await.is_ok() => {
                    pod.start_process_again(id.clone(), None).await?;
                    return Ok(pod);
                }
                _ => self.remove(&pod).await?,
            }
        }
        let spec = bundle::spec(id, &dir)?;
        let request = request::pod(id, &of, &spec, &netns);
        let by = match bundle::containerd(id, &dir) {
            Ok(socket) => containerd::pid(&socket).await,
            Err(_) => None,
        };
        let pod = self.controller.make_alone(&request, &dir, by)?;
        pod.start().await?;
        self.node.registry.insert_container(id, id)?;
        pod.create_container(waiting.new_container()).await?;
        self.catch_up(waiting, &pod).await?;
        pod.start_process(id.clone(), None).await?;
        Ok(pod)
    }

    /// Closes the stdin of a waiting container, from its start on.
    pub fn close_stdin(&self, waiting: &Waiting) -> Result<(), PodError> {
        self.change(waiting, |note| note.is_stdin_closed = true)
    }

    /// Sets the size of the terminal of a waiting container, from its start on.
    pub fn resize(&self, waiting: &Waiting, columns: u32, rows: u32) -> Result<(), PodError> {
        self.change(waiting, |note| note.size = Some((columns, rows)))
    }

    /// Signals a waiting container, as runc's init takes signals before its start.
    pub async fn kill(&self, waiting: &Waiting, signal: u32) -> Result<(), PodError> {
        let phase = waiting.phase.borrow().clone();
        match phase {
            Phase::Exited(_) => Err(PodError::ProcessEnded(waiting.id.clone())),
            _ if signal != SIGKILL && !ENDING.contains(&signal) => Ok(()),
            Phase::Created => {
                self.end(waiting, if signal == SIGKILL { KILLED } else { ENDED }, String::new());
                Ok(())
            }
            // Its start fails.
            Phase::Starting | Phase::Running => match self.node.registry.pod(&waiting.id) {
                Ok(pod) => pod.stop().await,
                Err(_) => Err(waiting.refused("signal it")),
            },
        }
    }

    /// Removes a waiting container. Returns its exit.
    pub fn delete(&self, waiting: &Waiting) -> Result<DeleteResponse, PodError> {
        if *waiting.phase.borrow() == Phase::Starting {
            return Err(waiting.refused("delete it"));
        }
        let never = || Exit { code: KILLED, at_ns: now_ns(), reason: String::new() };
        let exit = waiting.note().exit.clone().unwrap_or_else(never);
        self.node.front.remember_deleted(front::key(front::DELETED, &waiting.id, None), &exit);
        self.forget(&waiting.id);
        waiting.phase.send_replace(Phase::Exited(exit.clone()));
        Ok(DeleteResponse {
            pid: waiting.pid(),
            exit_status: exit.code,
            exited_at: ttrpc_time(exit.at_ns),
            ..Default::default()
        })
    }

    /// Removes the pod of a container that was deleted, with its network namespace.
    pub async fn deleted(&self, pod: &PodHandle) -> Result<(), PodError> {
        self.remove(pod).await?;
        self.release(pod.id());
        Ok(())
    }

    async fn remove(&self, pod: &PodHandle) -> Result<(), PodError> {
        match pod.remove().await {
            // Another removal was faster.
            Ok(()) | Err(PodError::Gone(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Removes what is left of containers that containerd removed while no daemon responded. Runs as long as the daemon,
    /// and searches every `interval`.
    pub async fn tidy(&self, interval: Duration) {
        let mut search = tokio::time::interval(interval);
        // What the search before has found: a container may be created meanwhile.
        let mut before = HashSet::new();
        loop {
            search.tick().await;
            let mut found = HashSet::new();
            let waiting: Vec<_> = self.lock().values().cloned().collect();
            for waiting in waiting {
                let bundle = waiting.note().bundle.clone();
                if matches!(tokio::fs::try_exists(bundle).await, Ok(false)) {
                    found.insert(waiting.id.clone());
                }
            }
            for entry in fs::read_dir(self.namespaces()).into_iter().flatten().flatten() {
                let id = entry.file_name().to_str().and_then(|name| name.parse::<ContainerId>().ok());
                let is_unused =
                    |id: &ContainerId| self.node.registry.pod(id).is_err() && !self.lock().contains_key(id);
                found.extend(id.filter(is_unused));
            }
            for id in before.intersection(&found) {
                tracing::info!(container = %id, "removing what is left of a container that containerd has removed");
                self.forget(id);
            }
            before = found;
        }
    }

    /// Records the end of a waiting container.
    fn end(&self, waiting: &Waiting, code: u32, reason: String) {
        let exit = Exit { code, at_ns: now_ns(), reason };
        if let Err(error) = self.change(waiting, |note| note.exit = Some(exit.clone())) {
            tracing::warn!(container = %waiting.id, error = chain(&error), "the end of a container is not noted");
        }
        waiting.phase.send_replace(Phase::Exited(exit));
    }

    fn change(&self, waiting: &Waiting, change: impl FnOnce(&mut Note)) -> Result<(), PodError> {
        let mut note = waiting.note();
        change(&mut note);
        self.keep(&waiting.id, &note)
    }

    fn keep(&self, id: &ContainerId, note: &Note) -> Result<(), PodError> {
        let key = front::key(KIND, id, None);
        self.node.front.keep(&key, note, &[]).map(drop).map_err(|source| PodError::Front {
            pod: id.clone(),
            what: format!("note {key}").into(),
            source,
        })
    }

    fn forget(&self, id: &ContainerId) {
        self.lock().remove(id);
        self.node.front.forget(&front::key(KIND, id, None));
        self.release(id);
    }

    fn release(&self, id: &ContainerId) {
        let path = self.namespaces().join(id);
        tolerate("remove the network namespace", &path, namespace::release(&path));
    }

    fn namespaces(&self) -> PathBuf {
        self.node.config.run_dir.join(NAMESPACES)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ContainerId, Arc<Waiting>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
