//! The sandbox container: the form in which a containerd without a sandbox controller, or CRI-O, sees a pod.
//!
//! For such a caller, a pod is a container that runs a pause program. Here nothing runs in it: the container *is*
//! the pod. Each request about it becomes a request about the pod, to the controller that other containerds use.
//!
//! | of the task service | of the controller |
//! |---|---|
//! | Create | Create with CRI's description of the pod, which containerd keeps, and CRI-O writes into the bundle; Start |
//! | Start | – |
//! | State, Wait | the pod's status |
//! | Kill, by a signal that ends a pause program | Stop |
//! | Delete | Shutdown |
//! | Stats | Metrics |
//!
//! containerd removes the container's bundle after Delete, and also if it has lost the daemon and takes the pod for
//! dead. So a pod that has no bundle and that containerd does not know any more is removed here ([`remove_abandoned`]).

use std::{
    collections::HashMap,
    ffi::OsStr,
    future,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use containerd_shim_protos::api::{
    CreateTaskRequest, DeleteResponse, KillRequest, ProcessInfo, StateResponse, Status as TaskStatus,
    WaitResponse,
};
use sandboxer_base::chain;
use sandboxer_protocol::{
    agent::StatsResponse,
    controller::{
        ControllerShutdownRequest, ControllerStartRequest, ControllerStopRequest,
        controller_server::Controller,
    },
    id::ContainerId,
};
use tonic::{Request, Status};

use super::{bundle, convert::ttrpc_time, cri_metadata, cri_o, quarantine, sandbox::SandboxService};
use crate::{
    containerd,
    error::PodError,
    front,
    pod::{
        DaemonState, PodHandle,
        container::{Exit, KILLED},
        sandbox_exit, spec,
    },
    state::{PodState, PodStatus},
};

/// Signals that end a pause program: SIGINT, SIGQUIT, SIGKILL, SIGTERM.
const ENDING: [u32; 4] = [2, 3, 9, 15];

/// Interval of searches for pods without their bundles.
pub const SEARCH_INTERVAL: Duration = Duration::from_secs(20);
/// Number of consecutive searches in which a bundle must be missing.
const LOOKS: u32 = 2;
/// Interval of checks of a pod whose record is in quarantine.
const HELD_INTERVAL: Duration = Duration::from_secs(5);

/// The sandbox containers of a node.
#[derive(Debug)]
pub struct SandboxContainers {
    node: Arc<DaemonState>,
    controller: Arc<SandboxService>,
}

impl SandboxContainers {
    /// Creates the service for sandbox containers of the pods that `controller` serves.
    pub fn new(node: Arc<DaemonState>, controller: Arc<SandboxService>) -> Self {
        Self { node, controller }
    }

    /// Returns the pod behind a sandbox container; `None` for any other id.
    pub fn pod(&self, id: &str) -> Option<PodHandle> {
        let pod = self.node.registry.pod(&id.parse().ok()?).ok()?;
        (pod.bundle().is_some() && !pod.is_alone()).then_some(pod)
    }

    /// Creates and starts the pod. `namespace` is its namespace in containerd; `None`: CRI-O asks. `again`: whether an
    /// earlier worker may have done it. Returns the VMM's PID.
    pub async fn create(
        &self,
        id: &ContainerId,
        request: &CreateTaskRequest,
        namespace: Option<&str>,
        again: bool,
    ) -> Result<u32, Status> {
        let bundle = Path::new(&request.bundle);
        if again && let Some(pod) = self.pod(id.as_str()).filter(|pod| pod.bundle() == Some(bundle)) {
            match pod.status().state {
                PodState::Ready => return Ok(pod.status().vmm_pid),
                // The earlier worker died, so its start is undone.
                PodState::Stopping | PodState::Stopped => self.shutdown(id).await?,
                PodState::Created | PodState::Starting | PodState::Unknown => return self.start(&pod).await,
            }
        }
        let invalid = |reason| PodError::Invalid { subject: format!("pod {id}"), reason };
        let (request, by) = match namespace {
            Some(namespace) => {
                let socket = bundle::containerd(id, bundle)?;
                let description = containerd::description(&socket, namespace, id).await?;
                let request = cri_metadata::create_request(id.as_str(), &description).map_err(invalid)?;
                (request, containerd::pid(&socket).await)
            }
            None => {
                [&request.stdout, &request.stderr]
                    .into_iter()
                    .for_each(|path| cri_o::end_output(path.as_ref()));
                (cri_o::create_request(id, &bundle::spec(id, bundle)?).map_err(invalid)?, None)
            }
        };
        let pod = self.controller.make(&request, Some(bundle), by)?;
        self.start(&pod).await
    }

    async fn start(&self, pod: &PodHandle) -> Result<u32, Status> {
        let request = ControllerStartRequest { sandbox_id: pod.id().to_string(), ..Default::default() };
        Ok(self.controller.start(Request::new(request)).await?.into_inner().pid)
    }

    /// Handles the start of the sandbox container, which only shows that containerd knows that the pod has started.
    /// Returns the VMM's PID.
    pub fn started(&self, pod: &PodHandle) -> Result<u32, PodError> {
        let status = pod.status();
        self.controller.shown(pod);
        match status.state {
            PodState::Stopped | PodState::Stopping => {
                Err(state_error("start the sandbox container", pod, &status))
            }
            _ => Ok(status.vmm_pid),
        }
    }

    /// Returns the state of the sandbox container.
    pub fn state(&self, pod: &PodHandle) -> StateResponse {
        let status = pod.status();
        if status.state != PodState::Starting {
            self.controller.shown(pod);
        }
        let exit = sandbox_exit(&status);
        StateResponse {
            id: pod.id().to_string(),
            bundle: pod.bundle().map(|path| path.to_string_lossy().into_owned()).unwrap_or_default(),
            pid: status.vmm_pid,
            status: task_status(&status).into(),
            exit_status: exit.as_ref().map_or(0, |exit| exit.code),
            exited_at: ttrpc_time(exit.map_or(0, |exit| exit.at_ns)),
            ..Default::default()
        }
    }

    /// Waits until the pod has stopped.
    pub async fn wait(&self, pod: &PodHandle) -> WaitResponse {
        self.controller.shown(pod);
        match pod.ended().await {
            Ok(status) => {
                let exit = sandbox_exit(&status).unwrap_or_else(unknown_exit);
                WaitResponse {
                    exit_status: exit.code,
                    exited_at: ttrpc_time(exit.at_ns),
                    ..Default::default()
                }
            }
            // This process exits, and the front repeats the request. containerd would take a response for the end of
            // the pod.
            Err(_) => future::pending().await,
        }
    }

    /// Handles a signal as a pause program would.
    pub async fn kill(&self, pod: &PodHandle, request: &KillRequest) -> Result<(), Status> {
        self.controller.shown(pod);
        if pod.status().state == PodState::Stopped {
            return Err(PodError::ProcessEnded(pod.id().clone()).into());
        }
        if ENDING.contains(&request.signal) {
            let request = ControllerStopRequest { sandbox_id: pod.id().to_string(), ..Default::default() };
            self.controller.stop(Request::new(request)).await?;
        }
        Ok(())
    }

    /// Removes a pod that has stopped or was never ready. Returns its exit.
    pub async fn delete(&self, pod: &PodHandle) -> Result<DeleteResponse, Status> {
        let status = pod.status();
        if task_status(&status) == TaskStatus::RUNNING {
            return Err(state_error("delete the sandbox container", pod, &status).into());
        }
        let exit = sandbox_exit(&status).unwrap_or_else(unknown_exit);
        self.shutdown(pod.id()).await?;
        // For a repetition of this request.
        self.node.front.remember_deleted(front::key(front::DELETED, pod.id(), None), &exit);
        Ok(DeleteResponse {
            pid: status.vmm_pid,
            exit_status: exit.code,
            exited_at: ttrpc_time(exit.at_ns),
            ..Default::default()
        })
    }

    async fn shutdown(&self, id: &ContainerId) -> Result<(), Status> {
        let request = ControllerShutdownRequest { sandbox_id: id.to_string(), ..Default::default() };
        self.controller.shutdown(Request::new(request)).await.map(drop)
    }

    /// Returns the processes of the sandbox container: the VMM.
    pub fn pids(&self, pod: &PodHandle) -> Vec<ProcessInfo> {
        let pid = pod.status().vmm_pid;
        if pid == 0 { Vec::new() } else { vec![ProcessInfo { pid, ..Default::default() }] }
    }

    /// Returns the statistics of the whole guest.
    pub async fn stats(&self, pod: &PodHandle) -> Result<StatsResponse, PodError> {
        pod.stats(None).await
    }

    /// Returns the error for a pod whose record is in quarantine and whose VM runs: containerd must not take it for
    /// stopped.
    pub async fn held(&self, id: &ContainerId) -> Result<Option<Status>, Status> {
        quarantine::held(&self.node, id).await
    }

    /// Waits while the pod's record is in quarantine and its VM runs.
    pub async fn wait_held(&self, id: &ContainerId) {
        while !matches!(self.held(id).await, Ok(None)) {
            tokio::time::sleep(HELD_INTERVAL).await;
        }
    }

    /// Kills the VMM of a pod whose record is in quarantine. Returns `false` if there is none.
    pub async fn kill_held(&self, id: &ContainerId) -> Result<bool, Status> {
        quarantine::kill(&self.node, id).await
    }
}

/// Removes pods whose sandbox containers, or only containers, containerd removed while no daemon responded. Runs as long
/// as the daemon, and searches every `interval`.
pub async fn remove_abandoned(node: Arc<DaemonState>, interval: Duration) {
    let mut search = tokio::time::interval(interval);
    let mut looks: HashMap<ContainerId, Looks> = HashMap::new();
    loop {
        search.tick().await;
        let mut earlier = std::mem::take(&mut looks);
        for pod in node.registry.pods() {
            let Some(bundle) = pod.bundle() else { continue };
            let mut look = earlier.remove(pod.id()).unwrap_or_default();
            look.at(&pod, bundle).await;
            if look.missing >= LOOKS && is_forgotten(&node, &pod, bundle, look.containerd.as_deref()).await {
                tracing::info!(pod = %pod.id(), "removing: containerd has removed the container that stands for it");
                if let Err(error) = pod.remove().await
                    && !matches!(error, PodError::Gone(_))
                {
                    tracing::error!(pod = %pod.id(), error = chain(&error), "cannot remove a pod that containerd has forgotten");
                }
            }
            looks.insert(pod.id().clone(), look);
        }
    }
}

/// The results of the searches for a pod's bundle.
#[derive(Debug, Default)]
struct Looks {
    /// Number of consecutive searches in which the bundle was missing.
    missing: u32,
    /// The socket of the pod's containerd.
    containerd: Option<PathBuf>,
}

impl Looks {
    async fn at(&mut self, pod: &PodHandle, bundle: &Path) {
        // If the directory of all bundles is missing, it may be unmounted, which says nothing about one bundle.
        let whole = async |path| matches!(tokio::fs::try_exists(path).await, Ok(true));
        // CRI-O's is in a directory that it removes, too.
        let above = if spec::is_cri_os(bundle) { bundle.parent().unwrap_or(bundle) } else { bundle };
        match tokio::fs::try_exists(bundle).await {
            Ok(false) if whole(above.parent().unwrap_or(above)).await => self.missing += 1,
            Ok(there) => {
                self.missing = 0;
                if there && self.containerd.is_none() {
                    self.containerd = bundle::containerd(pod.id(), bundle).ok();
                }
            }
            Err(_) => self.missing = 0,
        }
    }
}

/// Returns whether containerd has no task of a pod whose bundle is gone. Without a socket of containerd, as with CRI-O,
/// only the bundle counts.
async fn is_forgotten(node: &DaemonState, pod: &PodHandle, bundle: &Path, containerd: Option<&Path>) -> bool {
    if spec::is_cri_os(bundle) {
        return true;
    }
    let configured = || {
        let path = node.config.containerd_ttrpc.as_ref()?.to_str()?;
        path.strip_suffix(".ttrpc").map(PathBuf::from)
    };
    let Some(socket) = containerd.map(Path::to_owned).or_else(configured) else { return true };
    // The layout of containerd's directories.
    let namespace = bundle.parent().and_then(Path::file_name).and_then(OsStr::to_str).unwrap_or_default();
    match containerd::has_task(&socket, namespace, pod.id()).await {
        Ok(false) => true,
        Ok(true) => {
            tracing::warn!(pod = %pod.id(), ?bundle, "a pod that containerd has is without its bundle");
            false
        }
        Err(error) => {
            tracing::warn!(pod = %pod.id(), ?bundle, error, "a pod without its bundle stays until containerd answers");
            false
        }
    }
}

/// Returns the state of the container that stands for a pod.
fn task_status(status: &PodStatus) -> TaskStatus {
    match status.state {
        PodState::Created | PodState::Starting => TaskStatus::CREATED,
        PodState::Unknown if status.overdue => TaskStatus::STOPPED,
        // Until the kernel has reported the VMM's exit.
        PodState::Ready | PodState::Stopping | PodState::Unknown => TaskStatus::RUNNING,
        PodState::Stopped => TaskStatus::STOPPED,
    }
}

fn unknown_exit() -> Exit {
    Exit { code: KILLED, at_ns: sandboxer_base::clock::now_ns(), reason: String::new() }
}

fn state_error(action: &'static str, pod: &PodHandle, status: &PodStatus) -> PodError {
    PodError::State { action, subject: format!("pod {}", pod.id()), state: status.state.to_string() }
}
