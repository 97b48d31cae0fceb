//! A CRI v1 client over a Unix socket, for any runtime handler.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use k8s_cri::v1 as cri;
use k8s_cri::v1::image_service_client::ImageServiceClient;
use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Response, Status};

pub use self::answer::{ContainerState, ExecOutput, Image, Listed, Phase, PodState, Usage, Version};
pub use self::error::RuntimeError;
use crate::options::{ContainerOptions, PodOptions};

mod answer;
mod error;

/// Maximum size of a response, bytes: verbose responses contain whole specs.
const MAX_ANSWER: usize = 64 << 20;

/// Result of a CRI call.
pub type Result<T> = std::result::Result<T, RuntimeError>;

/// A connection to a runtime, which clones share. Connects at the first call and reconnects after a loss.
#[derive(Debug, Clone)]
pub struct Runtime {
    socket: PathBuf,
    runtime: RuntimeServiceClient<Channel>,
    images: ImageServiceClient<Channel>,
}

impl Runtime {
    /// Creates a client of `endpoint`: `unix:///path`, `unix:/path` or a path.
    pub fn connect(endpoint: &str) -> Result<Self> {
        let bad = |reason| RuntimeError::Endpoint { endpoint: endpoint.to_owned(), reason };
        let path = match endpoint.split_once(':') {
            Some(("unix", rest)) => rest.strip_prefix("//").unwrap_or(rest),
            Some((scheme, _)) if !scheme.contains('/') => return Err(bad("it is not a Unix socket")),
            _ => endpoint,
        };
        if !path.starts_with('/') {
            return Err(bad("its path is not absolute"));
        }
        let socket = PathBuf::from(path);
        let channel = channel(socket.clone());
        Ok(Self {
            socket,
            runtime: RuntimeServiceClient::new(channel.clone()).max_decoding_message_size(MAX_ANSWER),
            images: ImageServiceClient::new(channel).max_decoding_message_size(MAX_ANSWER),
        })
    }

    /// Returns the socket of the runtime.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns the name and versions of the runtime.
    pub async fn version(&self) -> Result<Version> {
        let request = cri::VersionRequest { version: "v1".into() };
        let answer = self.runtime.clone().version(request).await;
        let answer = self.check("Version", "the runtime", answer)?;
        Ok(Version {
            name: answer.runtime_name,
            version: answer.runtime_version,
            api: answer.runtime_api_version,
        })
    }

    /// Returns the runtime's verbose status as JSON texts: handlers, configuration and more.
    pub async fn describe(&self) -> Result<(Vec<String>, HashMap<String, String>)> {
        let request = cri::StatusRequest { verbose: true };
        let answer = self.runtime.clone().status(request).await;
        let answer = self.check("Status", "the runtime", answer)?;
        Ok((answer.runtime_handlers.into_iter().map(|handler| handler.name).collect(), answer.info))
    }

    /// Runs a pod and returns its id.
    pub async fn run_pod(&self, pod: &PodOptions) -> Result<String> {
        let request =
            cri::RunPodSandboxRequest { config: Some(pod.to_cri()), runtime_handler: pod.handler.clone() };
        let answer = self.runtime.clone().run_pod_sandbox(request).await;
        let answer =
            self.check("RunPodSandbox", &format!("{} on handler '{}'", pod.name, pod.handler), answer)?;
        self.named("RunPodSandbox", &pod.name, answer.pod_sandbox_id)
    }

    /// Stops a pod and its containers. Stopping a stopped pod is no error.
    pub async fn stop_pod(&self, id: &str) -> Result<()> {
        let request = cri::StopPodSandboxRequest { pod_sandbox_id: id.to_owned() };
        let answer = self.runtime.clone().stop_pod_sandbox(request).await;
        self.check("StopPodSandbox", id, answer).map(drop)
    }

    /// Removes a pod and its containers. Removing an unknown pod is no error.
    pub async fn remove_pod(&self, id: &str) -> Result<()> {
        let request = cri::RemovePodSandboxRequest { pod_sandbox_id: id.to_owned() };
        let answer = self.runtime.clone().remove_pod_sandbox(request).await;
        self.check("RemovePodSandbox", id, answer).map(drop)
    }

    /// Returns the status of a pod; `verbose` adds the runtime's own information.
    pub async fn pod(&self, id: &str, verbose: bool) -> Result<PodState> {
        let request = cri::PodSandboxStatusRequest { pod_sandbox_id: id.to_owned(), verbose };
        let answer = self.runtime.clone().pod_sandbox_status(request).await;
        let answer = self.check("PodSandboxStatus", id, answer)?;
        let status = self.part("PodSandboxStatus", id, "a status", answer.status)?;
        let ready = status.state() == cri::PodSandboxState::SandboxReady;
        let metadata = status.metadata.unwrap_or_default();
        let network = status.network.unwrap_or_default();
        let first = Some(network.ip).filter(|ip| !ip.is_empty());
        Ok(PodState {
            id: status.id,
            name: metadata.name,
            namespace: metadata.namespace,
            ready,
            handler: status.runtime_handler,
            addresses: first.into_iter().chain(network.additional_ips.into_iter().map(|ip| ip.ip)).collect(),
            labels: status.labels,
            created_at: status.created_at,
            info: answer.info,
        })
    }

    /// Returns the pods that have all of these labels; without labels, all pods.
    pub async fn pods(&self, labels: &HashMap<String, String>) -> Result<Vec<Listed>> {
        let filter = cri::PodSandboxFilter { label_selector: labels.clone(), ..Default::default() };
        let request = cri::ListPodSandboxRequest { filter: Some(filter) };
        let answer = self.runtime.clone().list_pod_sandbox(request).await;
        let answer = self.check("ListPodSandbox", "the runtime", answer)?;
        Ok(answer
            .items
            .into_iter()
            .map(|pod| Listed {
                running: pod.state() == cri::PodSandboxState::SandboxReady,
                pod: pod.id.clone(),
                id: pod.id,
                name: pod.metadata.unwrap_or_default().name,
                handler: pod.runtime_handler,
                labels: pod.labels,
            })
            .collect())
    }

    /// Creates a container in a pod that was run with these options; returns the container's id.
    pub async fn create_container(
        &self,
        pod_id: &str,
        pod: &PodOptions,
        container: &ContainerOptions,
    ) -> Result<String> {
        let request = cri::CreateContainerRequest {
            pod_sandbox_id: pod_id.to_owned(),
            config: Some(container.to_cri(pod.network)),
            sandbox_config: Some(pod.to_cri()),
        };
        let answer = self.runtime.clone().create_container(request).await;
        let subject = format!("{} ({}) in pod {}", container.name, container.image, pod.name);
        let answer = self.check("CreateContainer", &subject, answer)?;
        self.named("CreateContainer", &subject, answer.container_id)
    }

    /// Starts a created container.
    pub async fn start_container(&self, id: &str) -> Result<()> {
        let request = cri::StartContainerRequest { container_id: id.to_owned() };
        let answer = self.runtime.clone().start_container(request).await;
        self.check("StartContainer", id, answer).map(drop)
    }

    /// Stops a container; the runtime kills it after `grace`, rounded up to CRI's whole seconds.
    pub async fn stop_container(&self, id: &str, grace: Duration) -> Result<()> {
        let request = cri::StopContainerRequest { container_id: id.to_owned(), timeout: seconds(grace) };
        let answer = self.runtime.clone().stop_container(request).await;
        self.check("StopContainer", id, answer).map(drop)
    }

    /// Removes a container, running or not. Removing an unknown container is no error.
    pub async fn remove_container(&self, id: &str) -> Result<()> {
        let request = cri::RemoveContainerRequest { container_id: id.to_owned() };
        let answer = self.runtime.clone().remove_container(request).await;
        self.check("RemoveContainer", id, answer).map(drop)
    }

    /// Returns the status of a container; `verbose` adds the runtime's own information.
    pub async fn container(&self, id: &str, verbose: bool) -> Result<ContainerState> {
        let request = cri::ContainerStatusRequest { container_id: id.to_owned(), verbose };
        let answer = self.runtime.clone().container_status(request).await;
        let answer = self.check("ContainerStatus", id, answer)?;
        let status = self.part("ContainerStatus", id, "a status", answer.status)?;
        Ok(ContainerState {
            phase: phase(status.state()),
            id: status.id,
            name: status.metadata.unwrap_or_default().name,
            exit_code: status.exit_code,
            reason: status.reason,
            message: status.message,
            image: status.image_ref,
            log_path: status.log_path.into(),
            started_at: status.started_at,
            finished_at: status.finished_at,
            info: answer.info,
        })
    }

    /// Returns the containers of a pod, or all containers if `pod` is `None`.
    pub async fn containers(&self, pod: Option<&str>) -> Result<Vec<Listed>> {
        let filter =
            cri::ContainerFilter { pod_sandbox_id: pod.unwrap_or_default().to_owned(), ..Default::default() };
        let request = cri::ListContainersRequest { filter: Some(filter) };
        let answer = self.runtime.clone().list_containers(request).await;
        let answer = self.check("ListContainers", pod.unwrap_or("every pod"), answer)?;
        Ok(answer
            .containers
            .into_iter()
            .map(|container| Listed {
                running: container.state() == cri::ContainerState::ContainerRunning,
                id: container.id,
                pod: container.pod_sandbox_id,
                name: container.metadata.unwrap_or_default().name,
                handler: String::new(),
                labels: container.labels,
            })
            .collect())
    }

    /// Runs a command in a running container until the command ends or `limit` expires.
    pub async fn exec_sync<S: Into<String>>(
        &self,
        id: &str,
        command: impl IntoIterator<Item = S>,
        limit: Option<Duration>,
    ) -> Result<ExecOutput> {
        let request = cri::ExecSyncRequest {
            container_id: id.to_owned(),
            cmd: command.into_iter().map(Into::into).collect(),
            timeout: limit.map_or(0, seconds),
        };
        let answer = self.runtime.clone().exec_sync(request).await;
        let answer = self.check("ExecSync", id, answer)?;
        Ok(ExecOutput { stdout: answer.stdout, stderr: answer.stderr, exit_code: answer.exit_code })
    }

    /// Returns the resource usage of a container.
    pub async fn usage(&self, id: &str) -> Result<Usage> {
        let request = cri::ContainerStatsRequest { container_id: id.to_owned() };
        let answer = self.runtime.clone().container_stats(request).await;
        let answer = self.check("ContainerStats", id, answer)?;
        let stats = self.part("ContainerStats", id, "stats", answer.stats)?;
        Ok(Usage {
            cpu_ns: stats.cpu.and_then(|cpu| cpu.usage_core_nano_seconds).map(|value| value.value),
            memory_bytes: stats.memory.and_then(|memory| memory.working_set_bytes).map(|value| value.value),
        })
    }

    /// Returns an image of the node; `None` if it is missing.
    pub async fn image(&self, reference: &str) -> Result<Option<Image>> {
        let image = cri::ImageSpec { image: reference.to_owned(), ..Default::default() };
        let request = cri::ImageStatusRequest { image: Some(image), verbose: false };
        let answer = self.images.clone().image_status(request).await;
        let answer = self.check("ImageStatus", reference, answer)?;
        Ok(answer.image.map(|image| Image { id: image.id, digests: image.repo_digests, size: image.size }))
    }

    /// Converts a gRPC status to an error.
    fn check<T>(
        &self,
        call: &'static str,
        subject: &str,
        answer: std::result::Result<Response<T>, Status>,
    ) -> Result<T> {
        let status = match answer {
            Ok(answer) => return Ok(answer.into_inner()),
            Err(status) => status,
        };
        // A transport error means that the runtime did not respond.
        let io = std::iter::successors(std::error::Error::source(&status), |error| error.source())
            .find_map(|error| error.downcast_ref::<std::io::Error>());
        if let (Code::Unavailable | Code::Unknown, Some(io)) = (status.code(), io) {
            return Err(RuntimeError::Unreachable { endpoint: self.socket.clone(), reason: io.to_string() });
        }
        Err(RuntimeError::Refused {
            call,
            subject: subject.to_owned(),
            code: status.code(),
            message: status.message().to_owned(),
        })
    }

    fn part<T>(
        &self,
        call: &'static str,
        subject: &str,
        lacking: &'static str,
        part: Option<T>,
    ) -> Result<T> {
        part.ok_or_else(|| RuntimeError::Incomplete { call, subject: subject.to_owned(), lacking })
    }

    fn named(&self, call: &'static str, subject: &str, id: String) -> Result<String> {
        self.part(call, subject, "an id", Some(id).filter(|id| !id.is_empty()))
    }
}

/// Returns a lazily connected channel to a Unix socket.
pub(crate) fn channel(socket: PathBuf) -> Channel {
    Endpoint::from_static("http://socket").connect_with_connector_lazy(tower::service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move { Ok::<_, std::io::Error>(TokioIo::new(tokio::net::UnixStream::connect(socket).await?)) }
    }))
}

fn seconds(time: Duration) -> i64 {
    i64::try_from(time.as_millis().div_ceil(1000)).unwrap_or(i64::MAX)
}

fn phase(state: cri::ContainerState) -> Phase {
    match state {
        cri::ContainerState::ContainerCreated => Phase::Created,
        cri::ContainerState::ContainerRunning => Phase::Running,
        cri::ContainerState::ContainerExited => Phase::Exited,
        cri::ContainerState::ContainerUnknown => Phase::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_as_people_write_them() {
        for endpoint in ["unix:///run/c.sock", "unix:/run/c.sock", "/run/c.sock"] {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let _inside = runtime.enter();
            assert_eq!(Runtime::connect(endpoint).unwrap().socket(), Path::new("/run/c.sock"), "{endpoint}");
        }
        for endpoint in ["tcp://1.2.3.4:5", "run/c.sock", "", "unix://relative"] {
            assert!(matches!(Runtime::connect(endpoint), Err(RuntimeError::Endpoint { .. })), "{endpoint}");
        }
    }

    #[tokio::test]
    async fn a_dead_endpoint_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("nobody.sock");
        let error = Runtime::connect(socket.to_str().unwrap()).unwrap().version().await.unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, RuntimeError::Unreachable { .. }), "{text}");
        assert!(text.contains("nobody.sock") && text.contains("No such file"), "{text}");
    }

    #[test]
    fn times_are_rounded_up_to_cri_seconds() {
        assert_eq!(seconds(Duration::ZERO), 0);
        assert_eq!(seconds(Duration::from_millis(1)), 1);
        assert_eq!(seconds(Duration::from_secs(2)), 2);
    }
}
