//! containerd's task service: the containers of all pods, on one socket. Pods created by a containerd without a sandbox
//! controller have a sandbox container, too: [`SandboxContainers`]. Containers that no pod of CRI has are pods by
//! themselves: [`Alone`].

use std::{collections::HashMap, path::Path, sync::Arc, time::Duration};

use async_trait::async_trait;
use containerd_shim_protos::{
    api::{
        CheckpointTaskRequest, CloseIORequest, ConnectRequest, ConnectResponse, CreateTaskRequest,
        CreateTaskResponse, DeleteRequest, DeleteResponse, Empty, ExecProcessRequest, KillRequest,
        PauseRequest, PidsRequest, PidsResponse, ProcessInfo, ResizePtyRequest, ResumeRequest,
        ShutdownRequest, StartRequest, StartResponse, StateRequest, StateResponse, StatsRequest,
        StatsResponse, Status, UpdateTaskRequest, WaitRequest, WaitResponse,
    },
    protobuf::well_known_types::any::Any,
    shim_async::{Task, create_task},
};
use sandboxer_base::{Code, chain};
use sandboxer_front::frame::REPEATED;
use sandboxer_guest::Signal;
use sandboxer_host::rootfs::Mount;
use sandboxer_protocol::id::{ContainerId, ExecId, SandboxId};
use ttrpc::{
    Result,
    asynchronous::{Service, TtrpcContext},
};

use super::{
    alone::{Alone, Waiting, root},
    bundle::{self, Bundle},
    convert::{id, optional_id, ttrpc_status, ttrpc_time},
    cri_o,
    sandbox::SandboxService,
    sandbox_container::SandboxContainers,
    traced,
};
use crate::{
    error::PodError,
    front,
    pod::{
        DaemonState, PodHandle, ProcessView,
        container::{Exit, NewContainer, Phase, StdioPaths, resources, start::OUT_OF_MEMORY, stats},
        spec::is_cri_os,
    },
};

/// Names of the service in containerd 2.x, and in 1.6 and 1.7: the messages are the same.
const NAMES: [&str; 2] = ["containerd.task.v3.Task", "containerd.task.v2.Task"];

/// Returns `tasks` under the names that all versions of containerd use.
pub fn services(tasks: Arc<TaskService>) -> HashMap<String, Service> {
    let [generated, _] = NAMES;
    let of = |name: &str| Some((name.to_owned(), create_task(tasks.clone()).remove(generated)?));
    NAMES.into_iter().filter_map(of).collect()
}

/// Serves [`Task`] for the containers of a node.
#[derive(Debug)]
pub struct TaskService {
    node: Arc<DaemonState>,
    sandboxes: SandboxContainers,
    alone: Arc<Alone>,
}

/// Metadata key of containerd's namespace.
const NAMESPACE: &str = "containerd-namespace-ttrpc";
/// Namespace of CRI, used if the metadata names none.
const CRI_NAMESPACE: &str = "k8s.io";

impl TaskService {
    /// Creates the service for the pods of `node`, which `controller` serves.
    pub fn new(node: Arc<DaemonState>, controller: Arc<SandboxService>) -> Self {
        let alone = Arc::new(Alone::new(node.clone(), controller.clone()));
        Self { sandboxes: SandboxContainers::new(node.clone(), controller), alone, node }
    }

    /// Removes what is left of containers that containerd has removed. Runs as long as the daemon, and searches every
    /// `interval`.
    pub async fn tidy(self: Arc<Self>, interval: Duration) {
        self.alone.tidy(interval).await;
    }

    fn pod_of(&self, container: &ContainerId) -> std::result::Result<PodHandle, PodError> {
        self.node.registry.pod_of(container)
    }

    /// Returns the container that waits for its start, if the request is about its init.
    fn waiting(&self, container: &str, exec: &str) -> Option<Arc<Waiting>> {
        self.alone.waiting(container).filter(|_| exec.is_empty())
    }

    /// Returns an error if a container of another of containerd's namespaces has this id: containerd has the launcher
    /// remove a container also if it could not be created, because its id was taken.
    async fn is_of_the_caller(&self, context: &TtrpcContext, container: &str) -> Result<()> {
        let Some(asked) = context.metadata.get(NAMESPACE).and_then(|values| values.first()) else {
            return Ok(());
        };
        let of = id("container id", container)?;
        let is_theirs = match (self.alone.waiting(container), self.pod_of(&of)) {
            (Some(waiting), _) => waiting.is_of(Some(asked)),
            (None, Ok(pod)) => match pod.process(of.clone(), None).await {
                Ok(view) => bundle::namespace(&view.bundle).is_none_or(|namespace| namespace == asked),
                Err(_) => true,
            },
            (None, Err(_)) => true,
        };
        if is_theirs { Ok(()) } else { Err(PodError::NoContainer(of).into()) }
    }

    /// Returns whether the request may be a repetition: an earlier worker may have executed it.
    fn again(context: &TtrpcContext) -> bool {
        context.mh.flags & REPEATED != 0
    }

    /// Returns the pod of the container, if this is a repeated create and the container exists.
    async fn made(&self, request: &CreateTaskRequest) -> Option<PodHandle> {
        let (pod, view) = self.process(&request.id, "").await.ok()?;
        (view.bundle == Path::new(&request.bundle)).then_some(pod)
    }

    /// Returns the exit from the earlier deletion, if this request is a repetition.
    fn deleted(&self, container: &ContainerId, exec: Option<&ExecId>) -> Option<Exit> {
        self.node.front.peek(&front::key(front::DELETED, container, exec))
    }

    async fn create_container(
        &self,
        container: ContainerId,
        sandbox: SandboxId,
        request: CreateTaskRequest,
        is_of_cri_o: bool,
    ) -> std::result::Result<PodHandle, PodError> {
        check(&container, &request)?;
        let pod = self.node.registry.pod(&sandbox)?;
        let dir = Path::new(&request.bundle);
        let mut root = None;
        if is_of_cri_o {
            cri_o::check_pod(&container, dir, &sandbox, pod.bundle())?;
            // It has mounted the root file system, as docker does.
            root = Some(root::of(&container, &bundle::spec(&container, dir)?, dir)?);
        }
        self.node.registry.insert_container(&container, &sandbox)?;
        let new = NewContainer {
            id: container.clone(),
            bundle: request.bundle.into(),
            mounts: request
                .rootfs
                .into_iter()
                .map(|mount| Mount { fstype: mount.type_, source: mount.source, options: mount.options })
                .collect(),
            root,
            stdio: StdioPaths {
                stdin: request.stdin.into(),
                stdout: request.stdout.into(),
                stderr: request.stderr.into(),
                terminal: request.terminal,
            },
            beside: Vec::new(),
        };
        let created = pod.create_container(new).await;
        if created.is_err() {
            self.node.registry.remove_container(&container);
        }
        created.map(|()| pod)
    }

    fn create_alone(
        &self,
        container: &ContainerId,
        request: &CreateTaskRequest,
        namespace: &str,
        again: bool,
    ) -> std::result::Result<u32, PodError> {
        check(container, request)?;
        self.alone.create(container, request, namespace, again)
    }

    async fn process(
        &self,
        container: &str,
        exec: &str,
    ) -> std::result::Result<(PodHandle, ProcessView), PodError> {
        let of = id("container id", container)?;
        let exec = optional_id("exec id", exec)?;
        let pod = self.pod_of(&of)?;
        let view = pod.process(of, exec).await?;
        Ok((pod, view))
    }
}

/// Checks what the request for a container asks for, before anything is created.
fn check(container: &ContainerId, request: &CreateTaskRequest) -> std::result::Result<(), PodError> {
    if !request.checkpoint.is_empty() {
        let text =
            format!("container {container}: a pod with its own kernel cannot be restored from a checkpoint");
        return Err(PodError::Unsupported(text));
    }
    match bundle::resources(Path::new(&request.bundle)) {
        Some(asked) => resources::check(container, &asked),
        None => Ok(()),
    }
}

/// Returns the error for a container that cannot be created. UNIMPLEMENTED would make containerd retry in an older API,
/// and report the error of that second call to its user.
fn refused(error: ttrpc::Error) -> ttrpc::Error {
    match error {
        ttrpc::Error::RpcStatus(mut status) if status.code() == ttrpc::Code::UNIMPLEMENTED => {
            status.set_code(ttrpc::Code::INVALID_ARGUMENT);
            ttrpc::Error::RpcStatus(status)
        }
        error => error,
    }
}

/// Implementations of the requests that are traced.
impl TaskService {
    async fn create_task(
        &self,
        context: &TtrpcContext,
        request: CreateTaskRequest,
    ) -> Result<CreateTaskResponse> {
        if Self::again(context)
            && let Some(pod) = self.made(&request).await
        {
            return Ok(CreateTaskResponse { pid: pod.status().vmm_pid, ..Default::default() });
        }
        let of = id("container id", &request.id)?;
        let namespace = context.metadata.get(NAMESPACE).and_then(|values| values.first());
        let namespace = namespace.map_or(CRI_NAMESPACE, String::as_str);
        match bundle::read(&of, Path::new(&request.bundle))? {
            Bundle::Alone => {
                let pid = self.create_alone(&of, &request, namespace, Self::again(context));
                let pid = pid.map_err(|error| refused(error.into()))?;
                Ok(CreateTaskResponse { pid, ..Default::default() })
            }
            kind @ (Bundle::Sandbox | Bundle::SandboxOfCriO) => {
                let by = (kind == Bundle::Sandbox).then_some(namespace);
                let pid = self.sandboxes.create(&of, &request, by, Self::again(context)).await;
                let pid = pid.map_err(|status| refused(ttrpc_status(&status)))?;
                Ok(CreateTaskResponse { pid, ..Default::default() })
            }
            Bundle::Container(sandbox) => self.create_of(of, sandbox, request, false).await,
            Bundle::ContainerOfCriO(sandbox) => self.create_of(of, sandbox, request, true).await,
        }
    }

    /// Creates a container of a pod. Returns the VMM's PID.
    async fn create_of(
        &self,
        container: ContainerId,
        sandbox: SandboxId,
        request: CreateTaskRequest,
        is_of_cri_o: bool,
    ) -> Result<CreateTaskResponse> {
        let pod = self.create_container(container, sandbox, request, is_of_cri_o).await;
        let pod = pod.map_err(|error| refused(error.into()))?;
        Ok(CreateTaskResponse { pid: pod.status().vmm_pid, ..Default::default() })
    }

    async fn start_task(&self, context: &TtrpcContext, request: StartRequest) -> Result<StartResponse> {
        if let Some(pod) = self.sandboxes.pod(&request.id) {
            no_exec(&pod, &request.exec_id)?;
            let pid = self.sandboxes.started(&pod)?;
            return Ok(StartResponse { pid, ..Default::default() });
        }
        if let Some(waiting) = self.waiting(&request.id, &request.exec_id) {
            let (alone, again) = (self.alone.clone(), Self::again(context));
            // A caller that gives up must not leave half of it.
            let started = tokio::spawn(async move { alone.start(&waiting, again).await }).await;
            let started = started.map_err(|error| ttrpc::Error::Others(error.to_string()))?;
            let pod = started.map_err(|error| refused(error.into()))?;
            return Ok(StartResponse { pid: pod.status().vmm_pid, ..Default::default() });
        }
        let of = id("container id", &request.id)?;
        let pod = self.pod_of(&of)?;
        let exec = optional_id("exec id", &request.exec_id)?;
        match Self::again(context) {
            true => pod.start_process_again(of, exec).await?,
            false => pod.start_process(of, exec).await?,
        }
        Ok(StartResponse { pid: pod.status().vmm_pid, ..Default::default() })
    }

    async fn kill_task(&self, context: &TtrpcContext, request: KillRequest) -> Result<Empty> {
        if let Some(pod) = self.sandboxes.pod(&request.id) {
            no_exec(&pod, &request.exec_id)?;
            let killed = self.sandboxes.kill(&pod, &request).await;
            return killed.map(|()| Empty::new()).map_err(|status| ttrpc_status(&status));
        }
        self.is_of_the_caller(context, &request.id).await?;
        if let Some(waiting) = self.waiting(&request.id, &request.exec_id) {
            let killed = self.alone.kill(&waiting, request.signal).await;
            return Ok(killed.map(|()| Empty::new())?);
        }
        if let Some(of) = self.unknown(&request.id)
            && self.sandboxes.kill_held(&of).await.map_err(|status| ttrpc_status(&status))?
        {
            return Ok(Empty::new());
        }
        let of = id("container id", &request.id)?;
        let exec = optional_id("exec id", &request.exec_id)?;
        let signal = Signal {
            number: request.signal,
            all: request.all,
            request: format!("{} {}", self.node.front.identity(), context.mh.stream_id),
            again: Self::again(context),
        };
        let asks_politely = exec.is_none() && signal.number != Signal::KILL;
        match self.pod_of(&of)?.deliver(of.clone(), exec, signal).await {
            // The guest hangs. After an error, containerd would never send the KILL that ends it.
            Err(error) if asks_politely && error.code() == Code::DeadlineExceeded => {
                tracing::warn!(container = %of, signal = request.signal, error = chain(&error), "guest did not acknowledge a signal");
            }
            delivered => delivered?,
        }
        Ok(Empty::new())
    }

    async fn delete_task(&self, context: &TtrpcContext, request: DeleteRequest) -> Result<DeleteResponse> {
        if let Some(pod) = self.sandboxes.pod(&request.id) {
            no_exec(&pod, &request.exec_id)?;
            return self.sandboxes.delete(&pod).await.map_err(|status| ttrpc_status(&status));
        }
        self.is_of_the_caller(context, &request.id).await?;
        if let Some(waiting) = self.waiting(&request.id, &request.exec_id) {
            return Ok(self.alone.delete(&waiting)?);
        }
        self.not_held(&request.id).await?;
        let of = id("container id", &request.id)?;
        let exec = optional_id("exec id", &request.exec_id)?;
        let deleted = async {
            let pod = self.pod_of(&of)?;
            let exit = pod.delete(of.clone(), exec.clone()).await?;
            Ok::<_, PodError>((pod.status().vmm_pid, exit))
        };
        let (pid, exit) = match deleted.await {
            Err(error) if Self::again(context) && error.code() == Code::NotFound => {
                self.deleted(&of, exec.as_ref()).map(|exit| (0, exit)).ok_or(error)?
            }
            deleted => deleted?,
        };
        // The id of such a pod is its container's.
        let alone = self.node.registry.pod(&of).ok().filter(|pod| pod.is_alone() && exec.is_none());
        if let Some(pod) = alone {
            self.alone.deleted(&pod).await?;
        }
        Ok(DeleteResponse {
            pid,
            exit_status: exit.code,
            exited_at: ttrpc_time(exit.at_ns),
            ..Default::default()
        })
    }
}

#[async_trait]
impl Task for TaskService {
    async fn create(&self, context: &TtrpcContext, request: CreateTaskRequest) -> Result<CreateTaskResponse> {
        let container = request.id.clone();
        let mut span = traced::by_ttrpc(&self.node, "containerd.task.v3.Task/Create", context, &container);
        let result = span.run(self.create_task(context, request)).await;
        if let Ok(pod) = id("container id", &container).and_then(|id| self.pod_of(&id)) {
            traced::of_pod(&mut span, &pod);
        }
        traced::ttrpc_ended(span, &result);
        result
    }

    async fn start(&self, context: &TtrpcContext, request: StartRequest) -> Result<StartResponse> {
        let container = request.id.clone();
        let span = traced::by_ttrpc(&self.node, "containerd.task.v3.Task/Start", context, &container);
        let result = span.run(self.start_task(context, request)).await;
        traced::ttrpc_ended(span, &result);
        result
    }

    async fn exec(&self, context: &TtrpcContext, request: ExecProcessRequest) -> Result<Empty> {
        self.nothing_runs_in_it("exec", &request.id)?;
        self.has_started("exec in it", &request.id)?;
        let of = id("container id", &request.id)?;
        let exec = id("exec id", &request.exec_id)?;
        let pod = self.pod_of(&of)?;
        let stdio = StdioPaths {
            stdin: request.stdin.into(),
            stdout: request.stdout.into(),
            stderr: request.stderr.into(),
            terminal: request.terminal,
        };
        if Self::again(context) && pod.process(of.clone(), Some(exec.clone())).await.is_ok() {
            return Ok(Empty::new());
        }
        let process = request.spec.into_option().map(|any| any.value).unwrap_or_default();
        pod.create_exec(of, exec, process, stdio).await?;
        Ok(Empty::new())
    }

    async fn state(&self, _: &TtrpcContext, request: StateRequest) -> Result<StateResponse> {
        if let Some(pod) = self.sandboxes.pod(&request.id) {
            no_exec(&pod, &request.exec_id)?;
            return Ok(self.sandboxes.state(&pod));
        }
        if let Some(waiting) = self.waiting(&request.id, &request.exec_id) {
            return Ok(waiting.state());
        }
        self.not_held(&request.id).await?;
        let (pod, view) = self.process(&request.id, &request.exec_id).await?;
        let phase = view.phase.borrow().clone();
        let exit = phase.exit();
        if exit.is_some_and(|exit| exit.reason == OUT_OF_MEMORY) && is_cri_os(&view.bundle) {
            cri_o::note_oom(&view.bundle);
        }
        let is_exec = !request.exec_id.is_empty();
        Ok(StateResponse {
            id: request.id,
            exec_id: request.exec_id,
            bundle: text(&view.bundle),
            pid: pod.status().vmm_pid,
            status: status(&phase, view.paused, is_exec).into(),
            stdin: text(&view.stdio.stdin),
            stdout: text(&view.stdio.stdout),
            stderr: text(&view.stdio.stderr),
            terminal: view.stdio.terminal,
            exit_status: exit.map_or(0, |exit| exit.code),
            exited_at: ttrpc_time(exit.map_or(0, |exit| exit.at_ns)),
            ..Default::default()
        })
    }

    async fn wait(&self, _: &TtrpcContext, request: WaitRequest) -> Result<WaitResponse> {
        if let Some(pod) = self.sandboxes.pod(&request.id) {
            no_exec(&pod, &request.exec_id)?;
            return Ok(self.sandboxes.wait(&pod).await);
        }
        if let Some(waiting) = self.waiting(&request.id, &request.exec_id)
            && let Some(exit) = waiting.over().await
        {
            let exited_at = ttrpc_time(exit.at_ns);
            return Ok(WaitResponse { exit_status: exit.code, exited_at, ..Default::default() });
        }
        if let Some(of) = self.unknown(&request.id) {
            self.sandboxes.wait_held(&of).await;
        }
        let (_, mut view) = self.process(&request.id, &request.exec_id).await?;
        let ended = view.phase.wait_for(|phase| phase.exit().is_some()).await;
        let exit = match &ended {
            Ok(phase) => phase.exit().cloned(),
            // The process was deleted; its last phase is known.
            Err(_) => None,
        };
        drop(ended);
        let exit = exit.or_else(|| view.phase.borrow().exit().cloned());
        let Some(exit) = exit else {
            let of = id("container id", &request.id)?;
            return Err(PodError::NoContainer(of).into());
        };
        Ok(WaitResponse { exit_status: exit.code, exited_at: ttrpc_time(exit.at_ns), ..Default::default() })
    }

    async fn kill(&self, context: &TtrpcContext, request: KillRequest) -> Result<Empty> {
        let container = request.id.clone();
        let span = traced::by_ttrpc(&self.node, "containerd.task.v3.Task/Kill", context, &container);
        let result = span.run(self.kill_task(context, request)).await;
        traced::ttrpc_ended(span, &result);
        result
    }

    async fn delete(&self, context: &TtrpcContext, request: DeleteRequest) -> Result<DeleteResponse> {
        let container = request.id.clone();
        let span = traced::by_ttrpc(&self.node, "containerd.task.v3.Task/Delete", context, &container);
        let result = span.run(self.delete_task(context, request)).await;
        traced::ttrpc_ended(span, &result);
        result
    }

    async fn pids(&self, _: &TtrpcContext, request: PidsRequest) -> Result<PidsResponse> {
        if let Some(pod) = self.sandboxes.pod(&request.id) {
            let processes = self.sandboxes.pids(&pod);
            return Ok(PidsResponse { processes, ..Default::default() });
        }
        let of = id("container id", &request.id)?;
        let processes = match self.alone.waiting(&request.id) {
            Some(waiting) => vec![waiting.pid()],
            None => match self.pod_of(&of)? {
                // Its caller looks for them on the host (docker top), where it is one process.
                pod if pod.is_alone() => vec![pod.status().vmm_pid],
                pod => pod.pids(of).await?,
            },
        };
        let processes = processes.into_iter();
        let processes = processes.map(|pid| ProcessInfo { pid, ..Default::default() }).collect();
        Ok(PidsResponse { processes, ..Default::default() })
    }

    async fn pause(&self, _: &TtrpcContext, request: PauseRequest) -> Result<Empty> {
        self.set_paused(&request.id, true).await
    }

    async fn resume(&self, _: &TtrpcContext, request: ResumeRequest) -> Result<Empty> {
        self.set_paused(&request.id, false).await
    }

    async fn resize_pty(&self, _: &TtrpcContext, request: ResizePtyRequest) -> Result<Empty> {
        self.nothing_runs_in_it("resize the terminal of", &request.id)?;
        if let Some(waiting) = self.waiting(&request.id, &request.exec_id) {
            self.alone.resize(&waiting, request.width, request.height)?;
            return Ok(Empty::new());
        }
        let of = id("container id", &request.id)?;
        let exec = optional_id("exec id", &request.exec_id)?;
        self.pod_of(&of)?.resize(of, exec, request.width, request.height).await?;
        Ok(Empty::new())
    }

    async fn close_io(&self, _: &TtrpcContext, request: CloseIORequest) -> Result<Empty> {
        if self.sandboxes.pod(&request.id).is_some() {
            return Ok(Empty::new());
        }
        if let Some(waiting) = self.waiting(&request.id, &request.exec_id) {
            if request.stdin {
                self.alone.close_stdin(&waiting)?;
            }
            return Ok(Empty::new());
        }
        let of = id("container id", &request.id)?;
        let exec = optional_id("exec id", &request.exec_id)?;
        let pod = self.pod_of(&of)?;
        if request.stdin {
            pod.close_stdin(of, exec).await?;
        }
        Ok(Empty::new())
    }

    async fn update(&self, _: &TtrpcContext, request: UpdateTaskRequest) -> Result<Empty> {
        self.nothing_runs_in_it("update", &request.id)?;
        self.has_started("update it", &request.id)?;
        let of = id("container id", &request.id)?;
        let asked = request.resources.into_option().map(|any| any.value).unwrap_or_default();
        let pod = self.pod_of(&of)?;
        resources::check_json(&of, &asked)?;
        pod.update(of, asked).await?;
        Ok(Empty::new())
    }

    async fn stats(&self, _: &TtrpcContext, request: StatsRequest) -> Result<StatsResponse> {
        self.has_started("measure it", &request.id)?;
        let readings = match self.sandboxes.pod(&request.id) {
            Some(pod) => self.sandboxes.stats(&pod).await?,
            None => {
                let of = id("container id", &request.id)?;
                self.pod_of(&of)?.stats(Some(of)).await?
            }
        };
        let value = stats::encode(&readings).map_err(|error| ttrpc::Error::Others(error.to_string()))?;
        let any = Any { type_url: stats::TYPE_URL.to_owned(), value, ..Default::default() };
        Ok(StatsResponse { stats: Some(any).into(), ..Default::default() })
    }

    async fn connect(&self, _: &TtrpcContext, request: ConnectRequest) -> Result<ConnectResponse> {
        let answer = |task_pid| ConnectResponse {
            shim_pid: self.node.front.pid(),
            task_pid,
            version: "3".to_owned(),
            ..Default::default()
        };
        if let Some(waiting) = self.alone.waiting(&request.id) {
            return Ok(answer(waiting.pid()));
        }
        let pod = match self.sandboxes.pod(&request.id) {
            Some(pod) => pod,
            None => {
                let of = id("container id", &request.id)?;
                self.not_held(&request.id).await?;
                self.pod_of(&of)?
            }
        };
        Ok(answer(pod.status().vmm_pid))
    }

    async fn checkpoint(&self, _: &TtrpcContext, request: CheckpointTaskRequest) -> Result<Empty> {
        let text = format!("Checkpoint of container {}: not available in a microVM pod", request.id);
        Err(PodError::Unsupported(text).into())
    }

    /// Does nothing: containerd no longer needs a task server for this container, but one server serves all. The
    /// container may be unknown.
    async fn shutdown(&self, _: &TtrpcContext, _: ShutdownRequest) -> Result<Empty> {
        Ok(Empty::new())
    }
}

impl TaskService {
    /// Returns an error if `container` is a sandbox container.
    fn nothing_runs_in_it(&self, action: &str, container: &str) -> Result<()> {
        match self.sandboxes.pod(container) {
            None => Ok(()),
            Some(pod) => Err(PodError::Unsupported(format!(
                "cannot {action} the sandbox container of pod {}: it is the pod, and no process runs in it",
                pod.id()
            ))
            .into()),
        }
    }

    /// Returns an error if a container waits for its start.
    fn has_started(&self, action: &'static str, container: &str) -> Result<()> {
        match self.alone.waiting(container) {
            None => Ok(()),
            Some(waiting) => Err(waiting.refused(action).into()),
        }
    }

    /// Returns the id, if no container has it.
    fn unknown(&self, container: &str) -> Option<ContainerId> {
        id("container id", container).ok().filter(|of| self.pod_of(of).is_err())
    }

    /// Returns an error if `container` is the sandbox container of a pod whose record is in quarantine and whose VM
    /// runs.
    async fn not_held(&self, container: &str) -> Result<()> {
        let Some(of) = self.unknown(container) else { return Ok(()) };
        match self.sandboxes.held(&of).await {
            Ok(None) => Ok(()),
            Ok(Some(status)) | Err(status) => Err(ttrpc_status(&status)),
        }
    }

    async fn set_paused(&self, container: &str, paused: bool) -> Result<Empty> {
        self.nothing_runs_in_it("pause", container)?;
        self.has_started("pause it", container)?;
        let of = id("container id", container)?;
        self.pod_of(&of)?.set_paused(of, paused).await?;
        Ok(Empty::new())
    }
}

/// Returns an error for an exec of a sandbox container, which has none.
fn no_exec(pod: &PodHandle, exec: &str) -> Result<()> {
    let Some(exec) = optional_id("exec id", exec)? else { return Ok(()) };
    Err(PodError::NoExec { container: pod.id().clone(), exec }.into())
}

/// Returns what containerd is told of a process. All execs of a paused container are paused, as its control group is.
fn status(phase: &Phase, paused: bool, is_exec: bool) -> Status {
    match phase {
        _ if paused && is_exec => Status::PAUSED,
        Phase::Created | Phase::Starting => Status::CREATED,
        Phase::Running if paused => Status::PAUSED,
        Phase::Running => Status::RUNNING,
        Phase::Exited(_) => Status::STOPPED,
    }
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
