//! CRI's calls that save and restore pods, with a double of containerd that makes pods of this node.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, OnceLock},
};

use k8s_cri::v1::{
    ContainerConfig, ContainerMetadata, CreateContainerRequest, CreateContainerResponse, ImageSpec,
    Int64Value, LinuxContainerConfig, LinuxContainerSecurityContext, PodSandboxConfig, PodSandboxMetadata,
    RemovePodSandboxRequest, RemovePodSandboxResponse, RunPodSandboxRequest, RunPodSandboxResponse,
    StopPodSandboxRequest, StopPodSandboxResponse,
};
use nix::errno::Errno;
use sandboxer::{
    api::cri_checkpoints::CriCheckpoints,
    front::Front,
    pod::{self, DaemonState, PodHandle, container::Phase},
    state::{PodState, PodStatus},
};
use sandboxer_base::failpoint::inject;
use sandboxer_protocol::{
    cri::{
        CheckpointPodRequest, CheckpointPodResponse, RestorePodRequest, RestorePodResponse,
        runtime_service_server::RuntimeService,
    },
    link::LinkKey,
};
use tonic::{Code, Request, Response, Status};

use crate::{FakeContainerd, NAMESPACE, TestNode, beside, id, named, phase, running, spec};

type Answer<T> = Result<Response<T>, Status>;

/// CRI of the double of containerd.
#[derive(Clone, Default)]
pub struct FakeCri {
    node: Arc<OnceLock<Arc<DaemonState>>>,
    /// Containers that were requested; a request for the container with the name of the first field fails.
    pub containers: Arc<Mutex<(&'static str, Vec<CreateContainerRequest>)>>,
}

impl FakeCri {
    fn pod(&self, id: &str) -> PodHandle {
        self.node.get().unwrap().registry.pod(&id.parse().unwrap()).unwrap()
    }
}

fn unknown() -> Status {
    Status::unimplemented("not a part of the double")
}

#[tonic::async_trait]
impl RuntimeService for FakeCri {
    async fn run_pod_sandbox(&self, request: Request<RunPodSandboxRequest>) -> Answer<RunPodSandboxResponse> {
        let RunPodSandboxRequest { config, runtime_handler } = request.into_inner();
        assert_eq!(runtime_handler, "sandboxer");
        let config = config.unwrap();
        let from = config.annotations.get("io.sandboxer.restore-from").unwrap();
        let spec = spec(&config.metadata.unwrap().name, Some(from));
        let (node, key) = (self.node.get().unwrap().clone(), LinkKey::random());
        let id = spec.id.clone();
        let make = || pod::spawn(node.clone(), spec, key, PodStatus::created(1), Default::default());
        let pod = node.registry.insert(&id, make).unwrap();
        pod.start().await?;
        Ok(Response::new(RunPodSandboxResponse { pod_sandbox_id: id.to_string() }))
    }

    async fn stop_pod_sandbox(
        &self,
        request: Request<StopPodSandboxRequest>,
    ) -> Answer<StopPodSandboxResponse> {
        self.pod(&request.into_inner().pod_sandbox_id).stop().await?;
        Ok(Response::new(StopPodSandboxResponse {}))
    }

    async fn remove_pod_sandbox(
        &self,
        request: Request<RemovePodSandboxRequest>,
    ) -> Answer<RemovePodSandboxResponse> {
        self.pod(&request.into_inner().pod_sandbox_id).remove().await?;
        Ok(Response::new(RemovePodSandboxResponse {}))
    }

    async fn create_container(
        &self,
        request: Request<CreateContainerRequest>,
    ) -> Answer<CreateContainerResponse> {
        let request = request.into_inner();
        let name = request.config.as_ref().unwrap().metadata.as_ref().unwrap().name.clone();
        let mut containers = self.containers.lock().unwrap();
        if containers.0 == name {
            return Err(Status::unavailable("injected refusal"));
        }
        containers.1.push(request);
        Ok(Response::new(CreateContainerResponse { container_id: format!("new-{name}") }))
    }

    async fn checkpoint_pod(&self, _: Request<CheckpointPodRequest>) -> Answer<CheckpointPodResponse> {
        Err(unknown())
    }

    async fn restore_pod(&self, _: Request<RestorePodRequest>) -> Answer<RestorePodResponse> {
        Err(unknown())
    }
}

fn node() -> (TestNode, FakeCri, CriCheckpoints) {
    let containerd = FakeContainerd::default();
    let (test, _) = beside(Some(&containerd), |_| (), Front::none);
    let cri = containerd.cri;
    assert!(cri.node.set(test.node.clone()).is_ok());
    let calls = CriCheckpoints::new(test.node.clone());
    (test, cri, calls)
}

fn names(dir: &Path) -> Vec<String> {
    fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

fn refused<T: std::fmt::Debug>(answer: Answer<T>, code: Code, says: &str) {
    let error = answer.unwrap_err();
    assert_eq!(error.code(), code, "{error}");
    assert!(error.message().contains(says), "{says:?} is not in {error}");
}

fn save(to: &Path) -> CheckpointPodRequest {
    CheckpointPodRequest {
        pod_sandbox_id: "source".into(),
        output_path: to.display().to_string(),
        container_ids: vec!["c2".into(), "c1".into()],
        options: Default::default(),
    }
}

fn container(name: &str) -> ContainerConfig {
    ContainerConfig {
        metadata: Some(ContainerMetadata { name: name.into(), attempt: 0 }),
        image: Some(ImageSpec { image: "registry/counter:1".into(), ..Default::default() }),
        command: vec!["count".into()],
        ..Default::default()
    }
}

fn restore(from: &Path) -> RestorePodRequest {
    let metadata =
        PodSandboxMetadata { name: "copy".into(), namespace: NAMESPACE.into(), ..Default::default() };
    RestorePodRequest {
        checkpoint_path: from.display().to_string(),
        config: Some(PodSandboxConfig { metadata: Some(metadata), ..Default::default() }),
        runtime_handler: "sandboxer".into(),
        options: Default::default(),
        container_configs: vec![container("counter"), container("beside")],
    }
}

fn output(test: &TestNode) -> PathBuf {
    let to = test.dir.path().join("output");
    fs::create_dir(&to).unwrap();
    to
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_is_saved_into_a_directory_and_goes_on_from_there() {
    let (test, cri, calls) = node();
    let source = running(&test).await;
    let to = output(&test);
    calls.checkpoint_pod(Request::new(save(&to))).await.unwrap();
    assert_eq!(phase(&source, "c1").await, Phase::Running);
    assert_eq!(names(&to), ["pod.checkpoint"]);
    let file = to.join("pod.checkpoint");
    let (mode, bytes) = (fs::metadata(&file).unwrap().permissions().mode(), fs::read(&file).unwrap());
    assert_eq!(mode & 0o077, 0);
    assert!(test.node.checkpoints.list().unwrap().is_empty());

    let restored = calls.restore_pod(Request::new(restore(&to))).await.unwrap().into_inner();
    assert_eq!(restored.pod_sandbox_id, "copy");
    let made: Vec<_> = restored
        .restored_containers
        .iter()
        .map(|one| (one.name.as_str(), one.container_id.as_str()))
        .collect();
    assert_eq!(made, [("beside", "new-beside"), ("counter", "new-counter")]);
    assert!(cri.containers.lock().unwrap().1.iter().all(|request| request.pod_sandbox_id == "copy"));
    assert_eq!(fs::read(&file).unwrap(), bytes);
    assert!(test.node.checkpoints.list().unwrap().is_empty());
    // As containerd does when they are started.
    let pod = cri.pod("copy");
    for name in ["counter", "beside"] {
        let new = format!("new-{name}");
        pod.create_container(named(&test, &new, name, "count")).await.unwrap();
        pod.start_process(id(&new), None).await.unwrap();
        assert_eq!(phase(&pod, &new).await, Phase::Running);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_save_that_is_asked_for_wrongly_or_fails_leaves_the_directory_empty_and_the_pod_running() {
    let (test, _, calls) = node();
    let source = running(&test).await;
    let to = output(&test);
    type Change = fn(&mut CheckpointPodRequest);
    let wrong: [(Code, &str, Change); 9] = [
        (Code::InvalidArgument, "option \"tcp\" is not known", |request| {
            request.options.insert("tcp".into(), "close".into());
        }),
        (Code::NotFound, "nosuch", |request| request.pod_sandbox_id = "nosuch".into()),
        (Code::InvalidArgument, "sandbox id", |request| request.pod_sandbox_id = "../x".into()),
        (Code::InvalidArgument, "is not absolute", |request| request.output_path = "output".into()),
        (Code::InvalidArgument, "cannot be read", |request| request.output_path.push_str("/nosuch")),
        (Code::InvalidArgument, "each once", |request| request.container_ids.clear()),
        (Code::InvalidArgument, "each once", |request| request.container_ids.push("c1".into())),
        (Code::InvalidArgument, "it has no container \"c3\"", |request| {
            request.container_ids.push("c3".into())
        }),
        (Code::FailedPrecondition, "container c1 runs and is not named", |request| {
            request.container_ids.truncate(1)
        }),
    ];
    for (code, says, change) in wrong {
        let mut request = save(&to);
        change(&mut request);
        refused(calls.checkpoint_pod(Request::new(request)).await, code, says);
    }
    for point in ["a checkpoint is written", "a checkpoint is written for CRI"] {
        let _full = inject(point, test.dir.path().to_str().unwrap(), Errno::ENOSPC as i32, 1);
        let failed = calls.checkpoint_pod(Request::new(save(&to))).await;
        refused(failed, Code::Internal, "No space left on device");
        assert!(names(&to).is_empty(), "{point}");
        assert!(test.node.checkpoints.list().unwrap().is_empty(), "{point}");
        assert_eq!(phase(&source, "c1").await, Phase::Running, "{point}");
    }
    fs::write(to.join("of the caller"), "").unwrap();
    refused(calls.checkpoint_pod(Request::new(save(&to))).await, Code::FailedPrecondition, "is not empty");
    assert_eq!(names(&to), ["of the caller"]);
    fs::remove_file(to.join("of the caller")).unwrap();
    source.signal(id("c2"), None, 9, false).await.unwrap();
    let mut view = source.process(id("c2"), None).await.unwrap();
    view.phase.wait_for(|phase| phase.exit().is_some()).await.unwrap();
    refused(
        calls.checkpoint_pod(Request::new(save(&to))).await,
        Code::FailedPrecondition,
        "container c2 does not run",
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restore_that_does_not_fit_or_fails_leaves_no_pod() {
    let (test, cri, calls) = node();
    running(&test).await;
    let to = output(&test);
    refused(calls.restore_pod(Request::new(restore(&to))).await, Code::InvalidArgument, "cannot open");
    calls.checkpoint_pod(Request::new(save(&to))).await.unwrap();
    type Change = fn(&mut RestorePodRequest);
    let user = |uid| {
        let security_context = LinuxContainerSecurityContext {
            run_as_user: Some(Int64Value { value: uid }),
            ..Default::default()
        };
        Some(LinuxContainerConfig { security_context: Some(security_context), ..Default::default() })
    };
    let wrong: [(Code, &str, Change); 13] = [
        (Code::InvalidArgument, "option \"lazy\" is not known", |request| {
            request.options.insert("lazy".into(), "1".into());
        }),
        (Code::InvalidArgument, "is not absolute", |request| request.checkpoint_path = "output".into()),
        (Code::InvalidArgument, "has no config", |request| request.config = None),
        (Code::InvalidArgument, "no container_configs", |request| request.container_configs.clear()),
        (Code::InvalidArgument, "has no name", |request| request.container_configs[0].metadata = None),
        (Code::InvalidArgument, "two containers have the name \"beside\"", |request| {
            request.container_configs[0] = container("beside");
        }),
        (
            Code::FailedPrecondition,
            "it has the containers beside, counter, and those given are counter",
            |request| {
                request.container_configs.truncate(1);
            },
        ),
        (Code::FailedPrecondition, "those given are beside, counter, third", |request| {
            request.container_configs.push(container("third"));
        }),
        (Code::FailedPrecondition, "it is of the namespace shop", |request| {
            request.config.as_mut().unwrap().metadata.as_mut().unwrap().namespace = "bank".into();
        }),
        (Code::FailedPrecondition, "\"counter\" is another one: its image is counter:2", |request| {
            request.container_configs[0].image.as_mut().unwrap().user_specified_image = "counter:2".into();
        }),
        (
            Code::FailedPrecondition,
            "its image registry/counter:1 is sha256:bb, and was sha256:aa",
            |request| {
                let image = request.container_configs[0].image.as_mut().unwrap();
                image.user_specified_image = std::mem::replace(&mut image.image, "sha256:bb".into());
            },
        ),
        (Code::FailedPrecondition, "its command is [\"sleep\"], and was [\"count\"]", |request| {
            request.container_configs[0].command = vec!["sleep".into()];
        }),
        (Code::FailedPrecondition, "its working directory is /tmp, and was /", |request| {
            request.container_configs[0].working_dir = "/tmp".into();
        }),
    ];
    for (code, says, change) in wrong {
        let mut request = restore(&to);
        change(&mut request);
        refused(calls.restore_pod(Request::new(request)).await, code, says);
    }
    let mut request = restore(&to);
    request.container_configs[0].linux = user(7);
    refused(
        calls.restore_pod(Request::new(request)).await,
        Code::FailedPrecondition,
        "its user is 7, and was 0",
    );
    let file = to.join("pod.checkpoint");
    let whole = fs::read(&file).unwrap();
    fs::write(&file, &whole[..whole.len() - 20]).unwrap();
    refused(calls.restore_pod(Request::new(restore(&to))).await, Code::InvalidArgument, "it is cut off");
    fs::write(&file, whole).unwrap();
    cri.containers.lock().unwrap().0 = "counter";
    refused(calls.restore_pod(Request::new(restore(&to))).await, Code::Unavailable, "injected refusal");
    assert_eq!(test.node.registry.pods().len(), 1, "a pod is left");
    assert!(test.node.checkpoints.list().unwrap().is_empty());
    cri.containers.lock().unwrap().0 = "";
    calls.restore_pod(Request::new(restore(&to))).await.unwrap();
    assert_eq!(cri.pod("copy").status().state, PodState::Ready);
}
