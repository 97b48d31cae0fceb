//! A client of containerd's own services, as `ctr` and CRI use them below kubelet's interface: containers, snapshots, tasks, events.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use containerd_client::services::v1::containers_client::ContainersClient;
use containerd_client::services::v1::events_client::EventsClient;
use containerd_client::services::v1::snapshots::snapshots_client::SnapshotsClient;
use containerd_client::services::v1::snapshots::{
    PrepareSnapshotRequest, RemoveSnapshotRequest, StatSnapshotRequest,
};
use containerd_client::services::v1::tasks_client::TasksClient;
use containerd_client::services::v1::{
    CloseIoRequest, Container, CreateContainerRequest, DeleteContainerRequest, DeleteProcessRequest,
    DeleteTaskRequest, ExecProcessRequest, GetContainerRequest, GetRequest, KillRequest, ListPidsRequest,
    ListTasksRequest, MetricsRequest, PauseTaskRequest, PublishRequest, ResizePtyRequest, ResumeTaskRequest,
    StartRequest, SubscribeRequest, UpdateTaskRequest, WaitRequest,
};
use containerd_client::types::{Envelope, Mount};
use prost_types::Any;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::metadata::AsciiMetadataValue;
use tonic::transport::Channel;
use tonic::{Code, Request, Streaming};

use crate::cri::{Answer, channel};
use crate::stack::Stack;

/// The namespace of CRI's objects.
const NAMESPACE: &str = "k8s.io";

/// containerd answers every call but a Wait sooner; one that takes longer has no answer.
const LIMIT: Duration = Duration::from_secs(45);

/// The type of a process's description in an exec.
const PROCESS: &str = "types.containerd.io/opencontainers/runtime-spec/1/Process";

/// The type of the limits in an update.
const RESOURCES: &str = "types.containerd.io/opencontainers/runtime-spec/1/LinuxResources";

/// A client; clones share the connection.
#[derive(Clone)]
pub struct Containerd {
    channel: Channel,
    /// Where the tasks of a pod with its own controller are served.
    task_socket: PathBuf,
}

/// Where a process's streams are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stdio {
    /// FIFO, or empty.
    pub stdin: String,
    /// FIFO, or empty.
    pub stdout: String,
    /// FIFO, or empty.
    pub stderr: String,
    /// Whether the process has a terminal.
    pub terminal: bool,
}

/// What containerd says of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct State {
    /// `created`, `running`, `stopped`, `paused` or another.
    pub name: &'static str,
    /// Of one that is stopped.
    pub exit: u32,
}

/// As the client crate has it, with the fields that are newer.
#[derive(Clone, PartialEq, prost::Message)]
struct CreateTaskRequest {
    #[prost(string, tag = "1")]
    container_id: String,
    #[prost(message, repeated, tag = "3")]
    rootfs: Vec<Mount>,
    #[prost(string, tag = "4")]
    stdin: String,
    #[prost(string, tag = "5")]
    stdout: String,
    #[prost(string, tag = "6")]
    stderr: String,
    #[prost(bool, tag = "7")]
    terminal: bool,
    #[prost(string, tag = "11")]
    task_api_address: String,
    #[prost(uint32, tag = "12")]
    task_api_version: u32,
}

/// Returns a request in CRI's namespace.
fn in_namespace<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("containerd-namespace", AsciiMetadataValue::from_static(NAMESPACE));
    request
}

/// Waits for an answer, though not for ever.
async fn answered<T>(
    call: impl Future<Output = Result<tonic::Response<T>, tonic::Status>> + Send,
) -> Answer<T> {
    match tokio::time::timeout(LIMIT, call).await {
        Ok(answer) => answer.map(tonic::Response::into_inner),
        Err(_) => Err(tonic::Status::deadline_exceeded(format!("no answer within {LIMIT:?}"))),
    }
}

impl Containerd {
    /// Returns a client for containerd's socket, and the daemon's task socket.
    pub fn connect(socket: PathBuf, task_socket: PathBuf) -> Result<Self> {
        Ok(Self { channel: channel(socket)?, task_socket })
    }

    /// Returns a client for a stack.
    pub fn of_stack(stack: &Stack) -> Result<Self> {
        let task_socket = Path::new(stack.env("SANDBOXER_SOCKET")?).with_file_name("task.sock");
        Self::connect(stack.containerd_socket()?, task_socket)
    }

    fn tasks(&self) -> TasksClient<Channel> {
        TasksClient::new(self.channel.clone())
    }

    fn snapshots(&self) -> SnapshotsClient<Channel> {
        SnapshotsClient::new(self.channel.clone())
    }

    fn containers(&self) -> ContainersClient<Channel> {
        ContainersClient::new(self.channel.clone())
    }

    /// Returns a container's record.
    pub async fn container(&self, id: &str) -> Result<Container> {
        let request = in_namespace(GetContainerRequest { id: id.to_owned() });
        answered(self.containers().get(request)).await?.container.context("an answer without a container")
    }

    /// Makes a container's record.
    pub async fn create_container(&self, container: Container) -> Answer<()> {
        let request = in_namespace(CreateContainerRequest { container: Some(container) });
        answered(self.containers().create(request)).await.map(drop)
    }

    /// Removes a container's record.
    pub async fn delete_container(&self, id: &str) -> Answer<()> {
        let request = in_namespace(DeleteContainerRequest { id: id.to_owned() });
        answered(self.containers().delete(request)).await.map(drop)
    }

    /// Returns the snapshot that this one is made from.
    pub async fn parent(&self, snapshotter: &str, key: &str) -> Result<String> {
        let request = StatSnapshotRequest { snapshotter: snapshotter.to_owned(), key: key.to_owned() };
        let answer = answered(self.snapshots().stat(in_namespace(request))).await?;
        Ok(answer.info.context("an answer without a snapshot")?.parent)
    }

    /// Makes a snapshot to write to.
    pub async fn prepare(&self, snapshotter: &str, key: &str, parent: &str) -> Answer<Vec<Mount>> {
        let request = PrepareSnapshotRequest {
            snapshotter: snapshotter.to_owned(),
            key: key.to_owned(),
            parent: parent.to_owned(),
            labels: [("containerd.io/gc.root".to_owned(), "test".to_owned())].into(),
        };
        Ok(answered(self.snapshots().prepare(in_namespace(request))).await?.mounts)
    }

    /// Removes a snapshot.
    pub async fn remove_snapshot(&self, snapshotter: &str, key: &str) -> Answer<()> {
        let request = RemoveSnapshotRequest { snapshotter: snapshotter.to_owned(), key: key.to_owned() };
        answered(self.snapshots().remove(in_namespace(request))).await.map(drop)
    }

    /// Creates the task of a container; `own_controller` for a pod of the daemon. A `deadline` is the caller's: it goes along with the request.
    pub async fn create_task(
        &self,
        id: &str,
        rootfs: Vec<Mount>,
        stdio: Stdio,
        own_controller: bool,
        deadline: Option<Duration>,
    ) -> Answer<()> {
        let address = format!("ttrpc+unix://{}", self.task_socket.display());
        let message = CreateTaskRequest {
            container_id: id.to_owned(),
            rootfs,
            stdin: stdio.stdin,
            stdout: stdio.stdout,
            stderr: stdio.stderr,
            terminal: stdio.terminal,
            task_api_address: if own_controller { address } else { String::new() },
            task_api_version: if own_controller { 3 } else { 0 },
        };
        let path = PathAndQuery::from_static("/containerd.services.tasks.v1.Tasks/Create");
        let mut request = in_namespace(message);
        if let Some(deadline) = deadline {
            request.set_timeout(deadline);
        }
        let mut connection = tonic::client::Grpc::new(self.channel.clone());
        connection.ready().await.map_err(|error| tonic::Status::unavailable(error.to_string()))?;
        let codec = tonic_prost::ProstCodec::<_, CreateTaskRequest>::default();
        answered(connection.unary(request, path, codec)).await.map(drop)
    }

    /// Starts a container's process, or an exec.
    pub async fn start(&self, id: &str, exec: &str) -> Answer<()> {
        let request = StartRequest { container_id: id.to_owned(), exec_id: exec.to_owned() };
        answered(self.tasks().start(in_namespace(request))).await.map(drop)
    }

    /// Deletes a task, or an exec, and returns its exit code.
    pub async fn delete(&self, id: &str, exec: &str) -> Answer<u32> {
        let container_id = id.to_owned();
        if exec.is_empty() {
            let request = in_namespace(DeleteTaskRequest { container_id });
            return Ok(answered(self.tasks().delete(request)).await?.exit_status);
        }
        let request = in_namespace(DeleteProcessRequest { container_id, exec_id: exec.to_owned() });
        Ok(answered(self.tasks().delete_process(request)).await?.exit_status)
    }

    /// Sends a signal.
    pub async fn kill(&self, id: &str, exec: &str, signal: u32, all: bool) -> Answer<()> {
        let request = KillRequest { container_id: id.to_owned(), exec_id: exec.to_owned(), signal, all };
        answered(self.tasks().kill(in_namespace(request))).await.map(drop)
    }

    /// Adds an exec, which does not start yet; `process` is its description as JSON.
    pub async fn exec(&self, id: &str, exec: &str, process: Vec<u8>, stdio: Stdio) -> Answer<()> {
        let request = ExecProcessRequest {
            container_id: id.to_owned(),
            stdin: stdio.stdin,
            stdout: stdio.stdout,
            stderr: stdio.stderr,
            terminal: stdio.terminal,
            spec: Some(Any { type_url: PROCESS.to_owned(), value: process }),
            exec_id: exec.to_owned(),
        };
        answered(self.tasks().exec(in_namespace(request))).await.map(drop)
    }

    /// Closes a process's stdin.
    pub async fn close_io(&self, id: &str, exec: &str) -> Answer<()> {
        let request = CloseIoRequest { container_id: id.to_owned(), exec_id: exec.to_owned(), stdin: true };
        answered(self.tasks().close_io(in_namespace(request))).await.map(drop)
    }

    /// Freezes a container.
    pub async fn pause(&self, id: &str) -> Answer<()> {
        let request = PauseTaskRequest { container_id: id.to_owned() };
        answered(self.tasks().pause(in_namespace(request))).await.map(drop)
    }

    /// Thaws a container.
    pub async fn resume(&self, id: &str) -> Answer<()> {
        let request = ResumeTaskRequest { container_id: id.to_owned() };
        answered(self.tasks().resume(in_namespace(request))).await.map(drop)
    }

    /// Changes a container's limits, which are JSON.
    pub async fn update(&self, id: &str, resources: &str) -> Answer<()> {
        let resources = Any { type_url: RESOURCES.to_owned(), value: resources.as_bytes().to_vec() };
        let request = UpdateTaskRequest {
            container_id: id.to_owned(),
            resources: Some(resources),
            annotations: Default::default(),
        };
        answered(self.tasks().update(in_namespace(request))).await.map(drop)
    }

    /// Sets the size of a process's terminal.
    pub async fn resize(&self, id: &str, exec: &str) -> Answer<()> {
        let request =
            ResizePtyRequest { container_id: id.to_owned(), exec_id: exec.to_owned(), width: 80, height: 25 };
        answered(self.tasks().resize_pty(in_namespace(request))).await.map(drop)
    }

    /// Returns how many processes containerd lists.
    pub async fn pids(&self, id: &str) -> Answer<usize> {
        let request = ListPidsRequest { container_id: id.to_owned() };
        Ok(answered(self.tasks().list_pids(in_namespace(request))).await?.processes.len())
    }

    /// Returns whether there are metrics of a container.
    pub async fn metrics(&self, id: &str) -> Answer<bool> {
        let request = MetricsRequest { filters: vec![format!("id=={id}")] };
        let answer = answered(self.tasks().metrics(in_namespace(request))).await?;
        Ok(answer.metrics.iter().any(|metric| metric.data.is_some()))
    }

    /// Waits for the end of a process, without a limit, and returns its exit code.
    pub async fn wait(&self, id: &str, exec: &str) -> Answer<u32> {
        let request = WaitRequest { container_id: id.to_owned(), exec_id: exec.to_owned() };
        Ok(self.tasks().wait(in_namespace(request)).await?.into_inner().exit_status)
    }

    /// Returns the state of a process.
    pub async fn state(&self, id: &str, exec: &str) -> Answer<State> {
        let request = GetRequest { container_id: id.to_owned(), exec_id: exec.to_owned() };
        let process = answered(self.tasks().get(in_namespace(request))).await?.process;
        let process =
            process.ok_or_else(|| tonic::Status::new(Code::Internal, "an answer without a process"))?;
        let name = match process.status {
            1 => "created",
            2 => "running",
            3 => "stopped",
            4 => "paused",
            5 => "pausing",
            _ => "unknown",
        };
        Ok(State { name, exit: process.exit_status })
    }

    /// Returns the ids of all tasks.
    pub async fn list(&self) -> Answer<Vec<String>> {
        let request = in_namespace(ListTasksRequest::default());
        let tasks = answered(self.tasks().list(request)).await?.tasks;
        Ok(tasks.into_iter().map(|task| task.id).collect())
    }

    /// Subscribes to all events. containerd answers with the first one, so some are made.
    pub async fn events(&self) -> Answer<Streaming<Envelope>> {
        let mut client = EventsClient::new(self.channel.clone());
        let mut publisher = client.clone();
        let subscribed = client.subscribe(in_namespace(SubscribeRequest::default()));
        let published = async {
            loop {
                tokio::time::sleep(Duration::from_millis(20)).await;
                let event = Some(Any { type_url: "sandboxer.test/Heard".to_owned(), value: Vec::new() });
                let request = PublishRequest { topic: "/test/heard".to_owned(), event };
                if let Err(error) = publisher.publish(in_namespace(request)).await {
                    break error;
                }
            }
        };
        tokio::select! {
            answer = answered(subscribed) => answer,
            error = published => Err(error),
        }
    }
}
