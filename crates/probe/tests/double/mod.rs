//! A double of a container runtime: answers CRI after delays that it draws, fails as often as it is told to,
//! writes a container's first line as a runtime would, and keeps the truth about all of it.

use std::collections::{BTreeSet, HashMap};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use k8s_cri::v1::image_service_server::{ImageService, ImageServiceServer};
use k8s_cri::v1::runtime_service_server::{RuntimeService, RuntimeServiceServer};
use k8s_cri::v1::*;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use tokio::net::UnixListener;
use tokio::sync::{Barrier, oneshot};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};

/// The only image there is.
pub const IMAGE: &str = "double/image:1";

/// How a container ended: exit code, stdout and stderr; `None` if it never does.
pub type Ended = Option<(i32, String, String)>;
/// What a container does with its command.
pub type Tool = fn(&[String]) -> Ended;

/// How pods of a handler behave.
#[derive(Debug, Clone, Default)]
pub struct Behaviour {
    /// Each of the three calls takes between these many ms.
    pub call_ms: (u64, u64),
    /// From StartContainer's beginning to the first line, between these many ms; it may come before the answer.
    pub first_byte_ms: (u64, u64),
    /// Every so-manieth StartContainer fails; 0 for none.
    pub fails_each: usize,
    /// RunPodSandbox never answers.
    pub never: bool,
    /// The first line is on stderr.
    pub on_stderr: bool,
    /// RunPodSandbox answers only after this many concurrent calls; 0: at once.
    pub together: usize,
    /// What its containers do; without it they print a line and stay.
    pub tool: Option<Tool>,
}

/// What really happened.
#[derive(Debug, Default)]
pub struct Truth {
    /// Handlers in the order of RunPodSandbox.
    pub runs: Vec<String>,
    /// By pod name: the drawn time from RunPodSandbox to the first line, ms, if it came to that.
    pub drawn_ms: HashMap<String, f64>,
    /// StartContainer calls that were made to fail.
    pub failed: usize,
    /// Pods that are there.
    pub pods: BTreeSet<String>,
}

struct Pod {
    config: PodSandboxConfig,
    handler: String,
    spent_ms: u64,
}

struct Shared {
    behaviours: HashMap<String, Behaviour>,
    barriers: HashMap<String, Arc<Barrier>>,
    truth: Mutex<Truth>,
    pods: Mutex<HashMap<String, Pod>>,
    logs: Mutex<HashMap<String, PathBuf>>,
    commands: Mutex<HashMap<String, Vec<String>>>,
    ended: Mutex<HashMap<String, i32>>,
    random: Mutex<SmallRng>,
    starts: Mutex<usize>,
}

/// A running double; it ends when it is dropped.
pub struct Double {
    shared: Arc<Shared>,
    socket: PathBuf,
    end: Option<oneshot::Sender<()>>,
    _dir: tempfile::TempDir,
}

impl Double {
    /// Serves these handlers on a socket of its own.
    pub fn serve<const N: usize>(behaviours: [(&str, Behaviour); N]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("cri.sock");
        let behaviours: HashMap<String, Behaviour> =
            behaviours.into_iter().map(|(name, behaviour)| (name.to_owned(), behaviour)).collect();
        let shared = Arc::new(Shared {
            barriers: behaviours
                .iter()
                .filter(|(_, behaviour)| behaviour.together > 0)
                .map(|(name, behaviour)| (name.clone(), Arc::new(Barrier::new(behaviour.together))))
                .collect(),
            behaviours,
            truth: Mutex::default(),
            pods: Mutex::default(),
            logs: Mutex::default(),
            commands: Mutex::default(),
            ended: Mutex::default(),
            random: Mutex::new(SmallRng::seed_from_u64(11)),
            starts: Mutex::default(),
        });
        let incoming = UnixListenerStream::new(UnixListener::bind(&socket).unwrap());
        let (end, ended) = oneshot::channel();
        let service = Service(shared.clone());
        tokio::spawn(
            tonic::transport::Server::builder()
                .add_service(RuntimeServiceServer::new(service.clone()))
                .add_service(ImageServiceServer::new(service))
                .serve_with_incoming_shutdown(incoming, async {
                    let _ = ended.await;
                }),
        );
        Self { shared, socket, end: Some(end), _dir: dir }
    }

    /// Returns where it listens.
    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.socket.display())
    }

    /// Looks at what really happened.
    pub fn truth<T>(&self, look: impl FnOnce(&Truth) -> T) -> T {
        look(&self.shared.truth.lock().unwrap())
    }

    /// Stops listening, as if it had died.
    pub fn die(&mut self) {
        std::fs::remove_file(&self.socket).unwrap();
        self.end.take();
    }
}

#[derive(Clone)]
struct Service(Arc<Shared>);

impl Service {
    fn draw(&self, between: (u64, u64)) -> u64 {
        self.0.random.lock().unwrap().random_range(between.0..=between.1)
    }

    /// Waits as long as a call of this pod takes, and counts it to the pod.
    async fn spend(&self, pod: &str) {
        let behaviour = self.behaviour(pod);
        let ms = self.draw(behaviour.call_ms);
        if let Some(pod) = self.0.pods.lock().unwrap().get_mut(pod) {
            pod.spent_ms += ms;
        }
        tokio::time::sleep(Duration::from_millis(ms)).await;
    }

    fn behaviour(&self, pod: &str) -> Behaviour {
        let pods = self.0.pods.lock().unwrap();
        pods.get(pod).map(|pod| self.0.behaviours[&pod.handler].clone()).unwrap_or_default()
    }
}

impl Service {
    /// Writes what a tool prints into its log, all at once, and keeps how it ended.
    fn run_tool(&self, pod: &str, tool: Tool) {
        let command = self.0.commands.lock().unwrap()[pod].clone();
        let Some((code, stdout, stderr)) = tool(&command) else { return };
        let mut file = std::fs::File::create(&self.0.logs.lock().unwrap()[pod]).unwrap();
        for (stream, text) in [("stderr", stderr), ("stdout", stdout)] {
            for line in text.lines() {
                writeln!(file, "2024-01-01T00:00:00.000000000Z {stream} F {line}").unwrap();
            }
        }
        self.0.ended.lock().unwrap().insert(pod.to_owned(), code);
    }
}

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl RuntimeService for Service {
    async fn version(&self, _: Request<VersionRequest>) -> Answer<VersionResponse> {
        Ok(Response::new(VersionResponse {
            version: "v1".into(),
            runtime_name: "double".into(),
            runtime_version: "1".into(),
            runtime_api_version: "v1".into(),
        }))
    }

    async fn status(&self, _: Request<StatusRequest>) -> Answer<StatusResponse> {
        let name = |name: &String| RuntimeHandler { name: name.clone(), ..Default::default() };
        let runtime_handlers = self.0.behaviours.keys().map(name).collect();
        Ok(Response::new(StatusResponse { runtime_handlers, ..Default::default() }))
    }

    async fn run_pod_sandbox(&self, request: Request<RunPodSandboxRequest>) -> Answer<RunPodSandboxResponse> {
        let request = request.into_inner();
        let config = request.config.unwrap();
        let name = config.metadata.clone().unwrap().name;
        let handler = request.runtime_handler;
        let pod = Pod { config, handler: handler.clone(), spent_ms: 0 };
        self.0.pods.lock().unwrap().insert(name.clone(), pod);
        {
            let mut truth = self.0.truth.lock().unwrap();
            truth.runs.push(handler.clone());
            truth.pods.insert(name.clone());
        }
        if self.0.behaviours[&handler].never {
            std::future::pending::<()>().await;
        }
        if let Some(barrier) = self.0.barriers.get(&handler) {
            barrier.wait().await;
        }
        self.spend(&name).await;
        Ok(Response::new(RunPodSandboxResponse { pod_sandbox_id: name }))
    }

    async fn create_container(
        &self,
        request: Request<CreateContainerRequest>,
    ) -> Answer<CreateContainerResponse> {
        let request = request.into_inner();
        let (pod, config) = (request.pod_sandbox_id, request.config.unwrap());
        let directory = request.sandbox_config.unwrap().log_directory;
        self.0.logs.lock().unwrap().insert(pod.clone(), Path::new(&directory).join(config.log_path));
        self.0.commands.lock().unwrap().insert(pod.clone(), config.command);
        self.spend(&pod).await;
        Ok(Response::new(CreateContainerResponse { container_id: pod }))
    }

    async fn start_container(
        &self,
        request: Request<StartContainerRequest>,
    ) -> Answer<StartContainerResponse> {
        let pod = request.into_inner().container_id;
        let behaviour = self.behaviour(&pod);
        let count = {
            let mut starts = self.0.starts.lock().unwrap();
            *starts += 1;
            *starts
        };
        if behaviour.fails_each > 0 && count.is_multiple_of(behaviour.fails_each) {
            self.0.truth.lock().unwrap().failed += 1;
            return Err(Status::unknown("the double was told to fail"));
        }
        if let Some(tool) = behaviour.tool {
            self.run_tool(&pod, tool);
            return Ok(Response::new(StartContainerResponse {}));
        }
        let line_ms = self.draw(behaviour.first_byte_ms);
        let spent = self.0.pods.lock().unwrap()[&pod].spent_ms;
        self.0.truth.lock().unwrap().drawn_ms.insert(pod.clone(), (spent + line_ms) as f64);
        let log = self.0.logs.lock().unwrap()[&pod].clone();
        let stream = if behaviour.on_stderr { "stderr" } else { "stdout" };
        // Made at once, as containerd does: an empty file is no first byte.
        let mut file = std::fs::File::create(log).unwrap();
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(line_ms)).await;
            writeln!(file, "2024-01-01T00:00:00.000000000Z {stream} F started").unwrap();
        });
        self.spend(&pod).await;
        Ok(Response::new(StartContainerResponse {}))
    }

    async fn stop_pod_sandbox(&self, _: Request<StopPodSandboxRequest>) -> Answer<StopPodSandboxResponse> {
        Ok(Response::new(StopPodSandboxResponse {}))
    }

    async fn remove_pod_sandbox(
        &self,
        request: Request<RemovePodSandboxRequest>,
    ) -> Answer<RemovePodSandboxResponse> {
        let pod = request.into_inner().pod_sandbox_id;
        self.0.truth.lock().unwrap().pods.remove(&pod);
        Ok(Response::new(RemovePodSandboxResponse {}))
    }

    async fn list_pod_sandbox(
        &self,
        request: Request<ListPodSandboxRequest>,
    ) -> Answer<ListPodSandboxResponse> {
        let wanted = request.into_inner().filter.unwrap_or_default().label_selector;
        let there = self.0.truth.lock().unwrap().pods.clone();
        let pods = self.0.pods.lock().unwrap();
        let items = there
            .into_iter()
            .filter(|name| {
                let labels = &pods[name].config.labels;
                wanted.iter().all(|(key, value)| labels.get(key) == Some(value))
            })
            .map(|name| PodSandbox {
                labels: pods[&name].config.labels.clone(),
                runtime_handler: pods[&name].handler.clone(),
                id: name,
                ..Default::default()
            })
            .collect();
        Ok(Response::new(ListPodSandboxResponse { items }))
    }

    async fn list_containers(&self, _: Request<ListContainersRequest>) -> Answer<ListContainersResponse> {
        Ok(Response::new(ListContainersResponse::default()))
    }

    type GetContainerEventsStream = tokio_stream::Empty<Result<ContainerEventResponse, Status>>;
    async fn get_container_events(
        &self,
        _: Request<GetEventsRequest>,
    ) -> Answer<Self::GetContainerEventsStream> {
        Err(Status::unimplemented("not a part of the double"))
    }

    async fn pod_sandbox_status(
        &self,
        _: Request<PodSandboxStatusRequest>,
    ) -> Answer<PodSandboxStatusResponse> {
        let network = PodSandboxNetworkStatus { ip: "192.0.2.1".into(), ..Default::default() };
        let status = PodSandboxStatus { network: Some(network), ..Default::default() };
        Ok(Response::new(PodSandboxStatusResponse { status: Some(status), ..Default::default() }))
    }
    async fn stop_container(&self, _: Request<StopContainerRequest>) -> Answer<StopContainerResponse> {
        Err(Status::unimplemented("not a part of the double"))
    }
    async fn remove_container(&self, _: Request<RemoveContainerRequest>) -> Answer<RemoveContainerResponse> {
        Err(Status::unimplemented("not a part of the double"))
    }
    async fn container_status(
        &self,
        request: Request<ContainerStatusRequest>,
    ) -> Answer<ContainerStatusResponse> {
        let id = request.into_inner().container_id;
        let ended = self.0.ended.lock().unwrap().get(&id).copied();
        let state = match ended {
            Some(_) => k8s_cri::v1::ContainerState::ContainerExited,
            None => k8s_cri::v1::ContainerState::ContainerRunning,
        };
        let status = ContainerStatus {
            id,
            state: state as i32,
            exit_code: ended.unwrap_or_default(),
            ..Default::default()
        };
        Ok(Response::new(ContainerStatusResponse { status: Some(status), ..Default::default() }))
    }
    async fn update_container_resources(
        &self,
        _: Request<UpdateContainerResourcesRequest>,
    ) -> Answer<UpdateContainerResourcesResponse> {
        Err(Status::unimplemented("not a part of the double"))
    }
    async fn reopen_container_log(
        &self,
        _: Request<ReopenContainerLogRequest>,
    ) -> Answer<ReopenContainerLogResponse> {
        Err(Status::unimplemented("not a part of the double"))
    }
    async fn exec_sync(&self, _: Request<ExecSyncRequest>) -> Answer<ExecSyncResponse> {
        Err(Status::unimplemented("not a part of the double"))
    }
    async fn exec(&self, _: Request<ExecRequest>) -> Answer<ExecResponse> {
        Err(Status::unimplemented("not a part of the double"))
    }
    async fn attach(&self, _: Request<AttachRequest>) -> Answer<AttachResponse> {
        Err(Status::unimplemented("not a part of the double"))
    }
    async fn port_forward(&self, _: Request<PortForwardRequest>) -> Answer<PortForwardResponse> {
        Err(Status::unimplemented("not a part of the double"))
    }
    async fn container_stats(&self, _: Request<ContainerStatsRequest>) -> Answer<ContainerStatsResponse> {
        Err(Status::unimplemented("not a part of the double"))
    }
    async fn list_container_stats(
        &self,
        _: Request<ListContainerStatsRequest>,
    ) -> Answer<ListContainerStatsResponse> {
        Err(Status::unimplemented("not a part of the double"))
    }
    async fn pod_sandbox_stats(&self, _: Request<PodSandboxStatsRequest>) -> Answer<PodSandboxStatsResponse> {
        Err(Status::unimplemented("not a part of the double"))
    }
    async fn list_pod_sandbox_stats(
        &self,
        _: Request<ListPodSandboxStatsRequest>,
    ) -> Answer<ListPodSandboxStatsResponse> {
        Err(Status::unimplemented("not a part of the double"))
    }
    async fn update_runtime_config(
        &self,
        _: Request<UpdateRuntimeConfigRequest>,
    ) -> Answer<UpdateRuntimeConfigResponse> {
        Err(Status::unimplemented("not a part of the double"))
    }
    async fn checkpoint_container(
        &self,
        _: Request<CheckpointContainerRequest>,
    ) -> Answer<CheckpointContainerResponse> {
        Err(Status::unimplemented("not a part of the double"))
    }
    async fn list_metric_descriptors(
        &self,
        _: Request<ListMetricDescriptorsRequest>,
    ) -> Answer<ListMetricDescriptorsResponse> {
        Err(Status::unimplemented("not a part of the double"))
    }
    async fn list_pod_sandbox_metrics(
        &self,
        _: Request<ListPodSandboxMetricsRequest>,
    ) -> Answer<ListPodSandboxMetricsResponse> {
        Err(Status::unimplemented("not a part of the double"))
    }
    async fn runtime_config(&self, _: Request<RuntimeConfigRequest>) -> Answer<RuntimeConfigResponse> {
        Err(Status::unimplemented("not a part of the double"))
    }
}

#[tonic::async_trait]
impl ImageService for Service {
    async fn image_status(&self, request: Request<ImageStatusRequest>) -> Answer<ImageStatusResponse> {
        let wanted = request.into_inner().image.unwrap_or_default().image;
        let image = (wanted == IMAGE).then(|| Image { id: "sha256:0".into(), ..Default::default() });
        Ok(Response::new(ImageStatusResponse { image, ..Default::default() }))
    }

    async fn list_images(&self, _: Request<ListImagesRequest>) -> Answer<ListImagesResponse> {
        Err(Status::unimplemented("not a part of the double"))
    }
    async fn pull_image(&self, _: Request<PullImageRequest>) -> Answer<PullImageResponse> {
        Err(Status::unimplemented("not a part of the double"))
    }
    async fn remove_image(&self, _: Request<RemoveImageRequest>) -> Answer<RemoveImageResponse> {
        Err(Status::unimplemented("not a part of the double"))
    }
    async fn image_fs_info(&self, _: Request<ImageFsInfoRequest>) -> Answer<ImageFsInfoResponse> {
        Err(Status::unimplemented("not a part of the double"))
    }
}
