//! A CRI client like kubelet's: one connection to containerd, generated messages, no policy. It is separate from
//! the probe's client on purpose: one may find errors that the other misses.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use hyper_util::rt::TokioIo;
use k8s_cri::v1::image_service_client::ImageServiceClient;
use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use k8s_cri::v1::{
    AttachRequest, ContainerConfig, ContainerFilter, ContainerStats, ContainerStatsRequest, ContainerStatus,
    ContainerStatusRequest, CreateContainerRequest, ExecRequest, ExecSyncRequest, ExecSyncResponse,
    ImageSpec, ImageStatusRequest, LinuxContainerResources, ListContainersRequest, ListPodSandboxRequest,
    PodSandbox, PodSandboxConfig, PodSandboxFilter, PodSandboxState, PodSandboxStatsRequest,
    PodSandboxStatus, PodSandboxStatusRequest, PortForwardRequest, RemoveContainerRequest,
    RemovePodSandboxRequest, ReopenContainerLogRequest, RunPodSandboxRequest, StartContainerRequest,
    StopContainerRequest, StopPodSandboxRequest, UpdateContainerResourcesRequest,
};
use tonic::Status;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint, Uri};

/// A client; clones share the connection.
#[derive(Clone)]
pub struct Cri {
    channel: Channel,
    runtime: RuntimeServiceClient<Channel>,
}

/// Of CRI since Kubernetes 1.32, which the generated messages are older than.
#[derive(Clone, PartialEq, prost::Message)]
struct UpdatePodSandboxResourcesRequest {
    #[prost(string, tag = "1")]
    pod_sandbox_id: String,
    #[prost(message, optional, tag = "2")]
    overhead: Option<LinuxContainerResources>,
    #[prost(message, optional, tag = "3")]
    resources: Option<LinuxContainerResources>,
}

/// Of CRI since Kubernetes 1.37, as are the next ones.
#[derive(Clone, PartialEq, prost::Message)]
struct CheckpointPodRequest {
    #[prost(string, tag = "1")]
    pod_sandbox_id: String,
    #[prost(string, tag = "2")]
    output_path: String,
    #[prost(string, repeated, tag = "3")]
    container_ids: Vec<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct RestorePodRequest {
    #[prost(string, tag = "1")]
    checkpoint_path: String,
    #[prost(message, optional, tag = "2")]
    config: Option<PodSandboxConfig>,
    #[prost(string, tag = "3")]
    runtime_handler: String,
    #[prost(message, repeated, tag = "5")]
    container_configs: Vec<ContainerConfig>,
}

/// A pod that goes on.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RestorePodResponse {
    /// The sandbox id.
    #[prost(string, tag = "1")]
    pub pod_sandbox_id: String,
    /// The pod's containers.
    #[prost(message, repeated, tag = "2")]
    pub restored_containers: Vec<RestoredContainer>,
}

/// A container that waits for its start.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RestoredContainer {
    /// Name of the container in its pod.
    #[prost(string, tag = "1")]
    pub name: String,
    /// The container id.
    #[prost(string, tag = "2")]
    pub container_id: String,
}

/// Result of a call: errors stay gRPC's, because users read their text.
pub type Answer<T> = std::result::Result<T, Status>;

/// Returns a connection to the Unix socket at `path`, which is made at the first call and again after a loss.
pub(crate) fn channel(path: PathBuf) -> Result<Channel> {
    let connect = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { Ok::<_, std::io::Error>(TokioIo::new(tokio::net::UnixStream::connect(path).await?)) }
    });
    Ok(Endpoint::try_from("http://containerd")?.connect_with_connector_lazy(connect))
}

impl Cri {
    /// Returns a client for the Unix socket at `path`; connects at the first call, reconnects after a loss.
    pub fn connect(path: PathBuf) -> Result<Self> {
        let channel = channel(path)?;
        let runtime = RuntimeServiceClient::new(channel.clone()).max_decoding_message_size(64 << 20);
        Ok(Self { channel, runtime })
    }

    fn client(&self) -> RuntimeServiceClient<Channel> {
        self.runtime.clone()
    }

    /// ImageStatus; returns whether the image is known: CRI sees what is imported a moment later.
    pub async fn has_image(&self, name: &str) -> Answer<bool> {
        Ok(self.image(name).await?.is_some())
    }

    /// ImageStatus; returns the image's id, if the image is known.
    pub async fn image(&self, name: &str) -> Answer<Option<String>> {
        let image = Some(ImageSpec { image: name.to_owned(), ..Default::default() });
        let request = ImageStatusRequest { image, verbose: false };
        let mut client = ImageServiceClient::new(self.channel.clone());
        Ok(client.image_status(request).await?.into_inner().image.map(|image| image.id))
    }

    /// RunPodSandbox; returns the pod's id.
    pub async fn run_pod(&self, config: &PodSandboxConfig, handler: &str) -> Answer<String> {
        let request =
            RunPodSandboxRequest { config: Some(config.clone()), runtime_handler: handler.to_owned() };
        Ok(self.client().run_pod_sandbox(request).await?.into_inner().pod_sandbox_id)
    }

    /// StopPodSandbox; leaves the pod as stopped.
    pub async fn stop_pod(&self, id: &str) -> Answer<()> {
        let request = StopPodSandboxRequest { pod_sandbox_id: id.to_owned() };
        self.client().stop_pod_sandbox(request).await.map(drop)
    }

    /// RemovePodSandbox; stops the pod first, if it runs.
    pub async fn remove_pod(&self, id: &str) -> Answer<()> {
        let request = RemovePodSandboxRequest { pod_sandbox_id: id.to_owned() };
        self.client().remove_pod_sandbox(request).await.map(drop)
    }

    /// PodSandboxStatus, with the verbose part.
    pub async fn pod_status(&self, id: &str) -> Answer<(PodSandboxStatus, String)> {
        let request = PodSandboxStatusRequest { pod_sandbox_id: id.to_owned(), verbose: true };
        let mut answer = self.client().pod_sandbox_status(request).await?.into_inner();
        let info = answer.info.remove("info").unwrap_or_default();
        Ok((answer.status.unwrap_or_default(), info))
    }

    /// Returns whether the pod is ready.
    pub async fn pod_ready(&self, id: &str) -> Answer<bool> {
        Ok(self.pod_status(id).await?.0.state() == PodSandboxState::SandboxReady)
    }

    /// ListPodSandbox: those with this label.
    pub async fn pods(&self, label: (&str, &str)) -> Answer<Vec<PodSandbox>> {
        let filter = PodSandboxFilter {
            label_selector: [(label.0.to_owned(), label.1.to_owned())].into(),
            ..Default::default()
        };
        let request = ListPodSandboxRequest { filter: Some(filter) };
        Ok(self.client().list_pod_sandbox(request).await?.into_inner().items)
    }

    /// PodSandboxStats: memory working set in bytes and cpu time in nanoseconds, where the runtime says them.
    pub async fn pod_stats(&self, id: &str) -> Answer<(Option<u64>, Option<u64>)> {
        let request = PodSandboxStatsRequest { pod_sandbox_id: id.to_owned() };
        let stats = self.client().pod_sandbox_stats(request).await?.into_inner().stats.unwrap_or_default();
        let linux = stats.linux.unwrap_or_default();
        Ok((
            linux.memory.and_then(|memory| memory.working_set_bytes).map(|value| value.value),
            linux.cpu.and_then(|cpu| cpu.usage_core_nano_seconds).map(|value| value.value),
        ))
    }

    /// CreateContainer; returns the container's id.
    pub async fn create(
        &self,
        pod: &str,
        config: ContainerConfig,
        sandbox: &PodSandboxConfig,
    ) -> Answer<String> {
        let request = CreateContainerRequest {
            pod_sandbox_id: pod.to_owned(),
            config: Some(config),
            sandbox_config: Some(sandbox.clone()),
        };
        Ok(self.client().create_container(request).await?.into_inner().container_id)
    }

    /// StartContainer; returns once it runs.
    pub async fn start(&self, id: &str) -> Answer<()> {
        let request = StartContainerRequest { container_id: id.to_owned() };
        self.client().start_container(request).await.map(drop)
    }

    /// StopContainer: SIGTERM, `grace` seconds later SIGKILL.
    pub async fn stop(&self, id: &str, grace: i64) -> Answer<()> {
        let request = StopContainerRequest { container_id: id.to_owned(), timeout: grace };
        self.client().stop_container(request).await.map(drop)
    }

    /// UpdateContainerResources, for a container that runs.
    pub async fn update(&self, id: &str, limits: LinuxContainerResources) -> Answer<()> {
        let container_id = id.to_owned();
        let request =
            UpdateContainerResourcesRequest { container_id, linux: Some(limits), ..Default::default() };
        self.client().update_container_resources(request).await.map(drop)
    }

    /// UpdatePodSandboxResources, for a pod that runs.
    pub async fn update_pod(&self, pod: &str, limits: LinuxContainerResources) -> Answer<()> {
        let request = UpdatePodSandboxResourcesRequest {
            pod_sandbox_id: pod.to_owned(),
            overhead: None,
            resources: Some(limits),
        };
        self.unary("/runtime.v1.RuntimeService/UpdatePodSandboxResources", request).await
    }

    /// CheckpointPod of the daemon.
    pub async fn checkpoint_pod(&self, pod: &str, to: &Path, containers: &[&str]) -> Answer<()> {
        let request = CheckpointPodRequest {
            pod_sandbox_id: pod.to_owned(),
            output_path: to.display().to_string(),
            container_ids: containers.iter().map(|&id| id.to_owned()).collect(),
        };
        self.unary("/runtime.v1.RuntimeService/CheckpointPod", request).await
    }

    /// RestorePod of the daemon.
    pub async fn restore_pod(
        &self,
        from: &Path,
        config: &PodSandboxConfig,
        handler: &str,
        containers: Vec<ContainerConfig>,
    ) -> Answer<RestorePodResponse> {
        let request = RestorePodRequest {
            checkpoint_path: from.display().to_string(),
            config: Some(config.clone()),
            runtime_handler: handler.to_owned(),
            container_configs: containers,
        };
        self.unary("/runtime.v1.RuntimeService/RestorePod", request).await
    }

    /// Makes a call that the generated client does not have.
    async fn unary<Q, A>(&self, path: &'static str, request: Q) -> Answer<A>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        let mut connection = tonic::client::Grpc::new(self.channel.clone());
        connection.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
        let codec = tonic_prost::ProstCodec::<Q, A>::default();
        let path = PathAndQuery::from_static(path);
        connection.unary(tonic::Request::new(request), path, codec).await.map(tonic::Response::into_inner)
    }

    /// ReopenContainerLog, after the log was moved.
    pub async fn reopen_log(&self, id: &str) -> Answer<()> {
        let request = ReopenContainerLogRequest { container_id: id.to_owned() };
        self.client().reopen_container_log(request).await.map(drop)
    }

    /// RemoveContainer; kills it first, if it runs.
    pub async fn remove(&self, id: &str) -> Answer<()> {
        let request = RemoveContainerRequest { container_id: id.to_owned() };
        self.client().remove_container(request).await.map(drop)
    }

    /// ContainerStatus, with the verbose part.
    pub async fn status(&self, id: &str) -> Answer<(ContainerStatus, String)> {
        let request = ContainerStatusRequest { container_id: id.to_owned(), verbose: true };
        let mut answer = self.client().container_status(request).await?.into_inner();
        let info = answer.info.remove("info").unwrap_or_default();
        Ok((answer.status.unwrap_or_default(), info))
    }

    /// ListContainers: the ids of those in this pod.
    pub async fn containers(&self, pod: &str) -> Answer<Vec<String>> {
        let filter = ContainerFilter { pod_sandbox_id: pod.to_owned(), ..Default::default() };
        let request = ListContainersRequest { filter: Some(filter) };
        let answer = self.client().list_containers(request).await?.into_inner();
        Ok(answer.containers.into_iter().map(|container| container.id).collect())
    }

    /// ContainerStats of one container.
    pub async fn stats(&self, id: &str) -> Answer<ContainerStats> {
        let request = ContainerStatsRequest { container_id: id.to_owned() };
        Ok(self.client().container_stats(request).await?.into_inner().stats.unwrap_or_default())
    }

    /// ExecSync; without `limit` there is no timeout.
    pub async fn exec_sync(
        &self,
        id: &str,
        cmd: &[&str],
        limit: Option<Duration>,
    ) -> Answer<ExecSyncResponse> {
        let request = ExecSyncRequest {
            container_id: id.to_owned(),
            cmd: cmd.iter().map(|&word| word.to_owned()).collect(),
            timeout: limit.map_or(0, |limit| limit.as_secs() as i64),
        };
        Ok(self.client().exec_sync(request).await?.into_inner())
    }

    /// Exec; returns the URL of the streams.
    pub async fn exec(&self, id: &str, cmd: &[&str], tty: bool) -> Answer<String> {
        let request = ExecRequest {
            container_id: id.to_owned(),
            cmd: cmd.iter().map(|&word| word.to_owned()).collect(),
            tty,
            stdin: true,
            stdout: true,
            stderr: !tty,
        };
        Ok(self.client().exec(request).await?.into_inner().url)
    }

    /// PortForward; returns the URL of the streams.
    pub async fn port_forward(&self, pod: &str, port: u16) -> Answer<String> {
        let request = PortForwardRequest { pod_sandbox_id: pod.to_owned(), port: vec![port.into()] };
        Ok(self.client().port_forward(request).await?.into_inner().url)
    }

    /// Attach; returns the URL of the streams.
    pub async fn attach(&self, id: &str, tty: bool) -> Answer<String> {
        let request =
            AttachRequest { container_id: id.to_owned(), stdin: true, tty, stdout: true, stderr: !tty };
        Ok(self.client().attach(request).await?.into_inner().url)
    }
}
