//! Pods of a containerd without a sandbox controller, by the task service as that containerd calls it. Doubles for the VMM, the agent
//! and containerd.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails where it stands")]

mod fake_agent;
mod test_node;

use std::{
    collections::{HashMap, HashSet},
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use containerd_shim_protos::{
    api::{
        ConnectRequest, ConnectResponse, CreateTaskRequest, CreateTaskResponse, DeleteRequest,
        DeleteResponse, ExecProcessRequest, KillRequest, PidsRequest, PidsResponse, ShutdownRequest,
        StartRequest, StartResponse, StateRequest, StateResponse, StatsRequest, StatsResponse, Status,
        WaitRequest, WaitResponse,
    },
    protobuf::Message,
    shim_async::Task,
};
use fake_agent::FakeAgent;
use sandboxer::{
    api::{sandbox::SandboxService, sandbox_container, task, task::TaskService},
    events::{Event, Kind},
    pod::{DaemonState, recover},
    state::PodState,
};
use sandboxer_front::frame::REPEATED;
use sandboxer_protocol::{
    containers::{
        Container, GetContainerRequest, GetContainerResponse,
        containers_server::{Containers, ContainersServer},
    },
    tasks::{
        GetRequest, GetResponse,
        tasks_server::{Tasks, TasksServer},
    },
};
use sandboxer_vmm_fake::FakeVmm;
use serde_json::json;
use test_node::{TestNode, id};
use tokio::{net::UnixListener, sync::broadcast::Receiver, time::timeout};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use ttrpc::{
    Code,
    asynchronous::{Client, TtrpcContext},
};

/// More than any step takes.
const LONG: Duration = Duration::from_secs(30);

const POD: &str = "0a1b";

/// Names of the task service for containerd 1.6 and 1.7, and for 2.x.
const V2: &str = "containerd.task.v2.Task";
const V3: &str = "containerd.task.v3.Task";

/// A test double of containerd: what it keeps with containers.
struct FakeContainerd(HashMap<String, Vec<u8>>);

#[tonic::async_trait]
impl Containers for FakeContainerd {
    async fn get(
        &self,
        request: tonic::Request<GetContainerRequest>,
    ) -> Result<tonic::Response<GetContainerResponse>, tonic::Status> {
        assert_eq!(request.metadata().get("containerd-namespace").unwrap(), "k8s.io");
        let id = request.into_inner().id;
        let kept = self
            .0
            .get(&id)
            .ok_or_else(|| tonic::Status::not_found(format!("container {id:?}: not found")))?;
        let any = prost_types::Any { type_url: "github.com/containerd/cri".into(), value: kept.clone() };
        let extensions = match kept.is_empty() {
            true => HashMap::new(),
            false => [("io.cri-containerd.sandbox.metadata".to_owned(), any)].into(),
        };
        Ok(tonic::Response::new(GetContainerResponse { container: Some(Container { id, extensions }) }))
    }
}

/// The tasks of the sandbox container.
#[derive(Clone, Default)]
struct FakeTasks(Arc<Mutex<HashSet<String>>>);

#[tonic::async_trait]
impl Tasks for FakeTasks {
    async fn get(
        &self,
        request: tonic::Request<GetRequest>,
    ) -> Result<tonic::Response<GetResponse>, tonic::Status> {
        assert_eq!(request.metadata().get("containerd-namespace").unwrap(), "bundles");
        match self.0.lock().unwrap().contains(&request.get_ref().container_id) {
            true => Ok(tonic::Response::new(GetResponse {})),
            false => Err(tonic::Status::not_found("no such task")),
        }
    }
}

/// A daemon with its task service at a socket, and containerd.
struct Place {
    of_containerd: FakeTasks,
    test: TestNode,
    tasks: Arc<TaskService>,
    socket: PathBuf,
    _server: ttrpc::asynchronous::Server,
}

impl Place {
    async fn new() -> Self {
        let agent = FakeAgent::default();
        let test = TestNode::with(Arc::new(FakeVmm::new(move |guest| agent.serve(guest))), |_| {});
        let description = json!({"Version": "v1", "Metadata": {"ID": POD, "RuntimeHandler": "sandboxer",
            "NetNSPath": "", "Config": {"metadata": {"name": "web", "namespace": "e2e", "uid": "u1"}, "hostname": "pod",
                "linux": {"security_context": {"namespace_options": {"network": 2, "pid": 1}}}}}});
        let kept = [(POD.to_owned(), description.to_string().into_bytes()), ("bare".to_owned(), Vec::new())];
        let listener = UnixListener::bind(test.dir.path().join("containerd.sock")).unwrap();
        let containerd = ContainersServer::new(FakeContainerd(kept.into()));
        let incoming = UnixListenerStream::new(listener);
        let of_containerd = FakeTasks::default();
        let server = Server::builder().add_service(containerd);
        let server = server.add_service(TasksServer::new(of_containerd.clone()));
        tokio::spawn(server.serve_with_incoming(incoming));
        let tasks = tasks(&test.node);
        let socket = test.dir.path().join("task.sock");
        let mut server = ttrpc::asynchronous::Server::new()
            .bind(&format!("unix://{}", socket.display()))
            .unwrap()
            .register_service(task::services(tasks.clone()));
        server.start().await.unwrap();
        Self { of_containerd, test, tasks, socket, _server: server }
    }

    /// Makes the bundle of a container as containerd and the launcher do.
    fn bundle(&self, container: &str, annotations: serde_json::Value) -> PathBuf {
        let bundle = self.test.container(container, "sleep").bundle;
        let path = bundle.join("config.json");
        let mut spec: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        spec["annotations"] = annotations;
        fs::write(path, spec.to_string()).unwrap();
        let launched = json!({"containerd": self.test.dir.path().join("containerd.sock")});
        fs::write(bundle.join("sandboxer.json"), launched.to_string()).unwrap();
        bundle
    }

    fn sandbox_bundle(&self, pod: &str) -> PathBuf {
        self.bundle(
            pod,
            json!({"io.kubernetes.cri.container-type": "sandbox", "io.kubernetes.cri.sandbox-id": pod}),
        )
    }

    /// Calls the task service under one of its names.
    async fn call<A: Message>(
        &self,
        service: &str,
        method: &str,
        request: &impl Message,
    ) -> Result<A, (Code, String)> {
        let client = Client::connect(&format!("unix://{}", self.socket.display())).await.unwrap();
        let request = ttrpc::Request {
            service: service.to_owned(),
            method: method.to_owned(),
            payload: request.write_to_bytes().unwrap(),
            timeout_nano: 0,
            ..Default::default()
        };
        match client.request(request).await {
            Ok(answer) => Ok(A::parse_from_bytes(&answer.payload).unwrap()),
            Err(ttrpc::Error::RpcStatus(status)) => Err((status.code(), status.message().to_owned())),
            Err(error) => panic!("{method}: {error}"),
        }
    }

    async fn create(&self, container: &str, bundle: &Path) -> Result<CreateTaskResponse, (Code, String)> {
        self.call(V2, "Create", &create_request(container, bundle)).await
    }

    /// Creates and starts the pod's sandbox container. Returns its pid.
    async fn run_pod(&self) -> u32 {
        let pid = self.create(POD, &self.sandbox_bundle(POD)).await.unwrap().pid;
        let request = StartRequest { id: POD.into(), ..Default::default() };
        let started: StartResponse = self.call(V2, "Start", &request).await.unwrap();
        assert_eq!(started.pid, pid);
        pid
    }

    async fn state(&self, container: &str) -> Result<StateResponse, (Code, String)> {
        self.call(V2, "State", &StateRequest { id: container.into(), ..Default::default() }).await
    }

    async fn kill(&self, container: &str, signal: u32) -> Result<(), (Code, String)> {
        let request = KillRequest { id: container.into(), signal, ..Default::default() };
        self.call::<containerd_shim_protos::api::Empty>(V2, "Kill", &request).await.map(drop)
    }

    async fn wait(&self, container: &str) -> WaitResponse {
        self.call(V2, "Wait", &WaitRequest { id: container.into(), ..Default::default() }).await.unwrap()
    }

    async fn delete(&self, container: &str) -> Result<DeleteResponse, (Code, String)> {
        self.call(V2, "Delete", &DeleteRequest { id: container.into(), ..Default::default() }).await
    }
}

fn tasks(node: &Arc<DaemonState>) -> Arc<TaskService> {
    let controller =
        SandboxService::new(node.clone(), "ttrpc+unix:///task.sock".into(), CancellationToken::new())
            .unwrap();
    Arc::new(TaskService::new(node.clone(), Arc::new(controller)))
}

fn create_request(container: &str, bundle: &Path) -> CreateTaskRequest {
    CreateTaskRequest { id: container.into(), bundle: bundle.display().to_string(), ..Default::default() }
}

/// Returns the context of a request that the front has sent before, to a worker that is dead.
fn repeated() -> TtrpcContext {
    TtrpcContext {
        mh: ttrpc::MessageHeader { flags: REPEATED, ..Default::default() },
        metadata: HashMap::new(),
        timeout_nano: 0,
        connection_data: Arc::default(),
    }
}

async fn next(events: &mut Receiver<Event>, kind: Kind) -> Event {
    loop {
        let event = timeout(LONG, events.recv()).await.unwrap().unwrap();
        if event.kind == kind {
            return event;
        }
    }
}

#[tokio::test]
async fn a_sandbox_container_lives_as_its_pod_does() {
    let place = Place::new().await;
    let mut events = place.test.node.events.listen();
    let pid = place.run_pod().await;
    let pod = place.test.node.registry.pod(&id(POD)).unwrap();
    let spec = pod.inspect().await.unwrap().spec;
    assert_eq!((spec.name.as_str(), spec.hostname.as_str(), spec.uid.as_str()), ("web", "pod", "u1"));
    assert_eq!((pod.status().state, pod.status().vmm_pid), (PodState::Ready, pid));
    assert_eq!(next(&mut events, Kind::PodReady).await.task.unwrap().pid, pid);

    let state = place.state(POD).await.unwrap();
    assert_eq!((state.status(), state.pid, state.exit_status), (Status::RUNNING, pid, 0));
    let connect = ConnectRequest { id: POD.into(), ..Default::default() };
    for service in [V2, V3] {
        let connected: ConnectResponse = place.call(service, "Connect", &connect).await.unwrap();
        assert_eq!(connected.task_pid, pid);
    }
    let pids: PidsResponse =
        place.call(V2, "Pids", &PidsRequest { id: POD.into(), ..Default::default() }).await.unwrap();
    assert_eq!(pids.processes.iter().map(|process| process.pid).collect::<Vec<_>>(), [pid]);
    let stats = StatsRequest { id: POD.into(), ..Default::default() };
    let stats: StatsResponse = place.call(V2, "Stats", &stats).await.unwrap();
    assert!(stats.stats.is_some());

    // A container finds its pod by the annotation.
    let of_pod =
        json!({"io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.sandbox-id": POD});
    let bundle = place.bundle("c1", of_pod);
    let container = CreateTaskRequest {
        rootfs: vec![containerd_shim_protos::types::mount::Mount {
            type_: "bind".into(),
            source: place.test.dir.path().join("rootfs").display().to_string(),
            options: vec!["rbind".into(), "rw".into()],
            ..Default::default()
        }],
        ..create_request("c1", &bundle)
    };
    place.call::<CreateTaskResponse>(V2, "Create", &container).await.unwrap();
    assert_eq!(place.test.node.registry.pod_of(&id("c1")).unwrap().id(), pod.id());

    // Its end is the pod's, and not before.
    let waiting = place.wait(POD);
    tokio::pin!(waiting);
    assert!(timeout(Duration::from_millis(100), &mut waiting).await.is_err(), "a wait for it is over");
    place.kill(POD, 9).await.unwrap();
    let exit = timeout(LONG, waiting).await.unwrap();
    assert_eq!(exit.exit_status, 137);
    let state = place.state(POD).await.unwrap();
    assert_eq!((state.status(), state.exit_status), (Status::STOPPED, 137));
    assert_eq!(state.exited_at.seconds, exit.exited_at.seconds);
    assert_eq!(place.kill(POD, 9).await.unwrap_err().0, Code::NOT_FOUND);
    let stopped = next(&mut events, Kind::PodStopped).await.task.unwrap();
    assert_eq!((stopped.pid, stopped.exit.unwrap().0), (pid, 137));

    assert_eq!(place.delete(POD).await.unwrap().exit_status, 137);
    assert!(place.test.node.registry.pods().is_empty() && place.test.vmm.running().is_empty());
    for gone in
        [place.state(POD).await.map(drop), place.delete(POD).await.map(drop), place.kill(POD, 9).await]
    {
        assert_eq!(gone.unwrap_err().0, Code::NOT_FOUND);
    }
    // As containerd does at the end of each task.
    let shutdown = ShutdownRequest { id: POD.into(), ..Default::default() };
    place.call::<containerd_shim_protos::api::Empty>(V2, "Shutdown", &shutdown).await.unwrap();
}

#[tokio::test]
async fn what_a_pause_program_would_not_do_it_does_not_do() {
    let place = Place::new().await;
    place.run_pod().await;
    assert_eq!(place.delete(POD).await.unwrap_err().0, Code::FAILED_PRECONDITION);
    place.kill(POD, 10).await.unwrap();
    let exec = ExecProcessRequest { id: POD.into(), exec_id: "e1".into(), ..Default::default() };
    let (code, text) = place.call::<containerd_shim_protos::api::Empty>(V2, "Exec", &exec).await.unwrap_err();
    assert_eq!(code, Code::UNIMPLEMENTED);
    assert!(text.contains("no process runs in it"), "{text}");
    let of_exec = StateRequest { id: POD.into(), exec_id: "e1".into(), ..Default::default() };
    let (code, _) = place.call::<StateResponse>(V2, "State", &of_exec).await.unwrap_err();
    assert_eq!(code, Code::NOT_FOUND);
    assert_eq!(place.state(POD).await.unwrap().status(), Status::RUNNING);
    place.kill(POD, 15).await.unwrap();
    assert_eq!(place.state(POD).await.unwrap().status(), Status::STOPPED);
    place.delete(POD).await.unwrap();
}

#[tokio::test]
async fn a_vmm_that_dies_ends_it() {
    let place = Place::new().await;
    place.run_pod().await;
    let (exit, crashed) = tokio::join!(timeout(LONG, place.wait(POD)), async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        place.test.vmm.crash(&id(POD))
    });
    assert!(crashed);
    assert_eq!(exit.unwrap().exit_status, 137);
    assert_eq!(place.state(POD).await.unwrap().status(), Status::STOPPED);
    place.delete(POD).await.unwrap();
    assert!(place.test.node.registry.pods().is_empty());
}

#[tokio::test]
async fn why_a_pod_cannot_be_made_is_told_and_nothing_is_left() {
    let place = Place::new().await;
    let unlaunched = place.sandbox_bundle("0c");
    fs::remove_file(unlaunched.join("sandboxer.json")).unwrap();
    let (code, text) = place.create("0c", &unlaunched).await.unwrap_err();
    assert_eq!(code, Code::INVALID_ARGUMENT, "{text}");
    assert!(text.contains("which the launcher writes"), "{text}");

    let (code, text) = place.create("bare", &place.sandbox_bundle("bare")).await.unwrap_err();
    assert_eq!(code, Code::INVALID_ARGUMENT, "{text}");
    assert!(text.contains("only CRI makes pods"), "{text}");

    let (code, text) = place.create("0d", &place.sandbox_bundle("0d")).await.unwrap_err();
    assert_eq!(code, Code::UNAVAILABLE, "{text}");
    assert!(text.contains("cannot ask containerd at") && text.contains("not found"), "{text}");

    let of_no_pod = json!({"io.kubernetes.cri.container-type": "container"});
    let (code, text) = place.create("0e", &place.bundle("0e", of_no_pod)).await.unwrap_err();
    assert_eq!(code, Code::INVALID_ARGUMENT, "{text}");
    assert!(text.contains("does not say of which"), "{text}");
    assert!(place.test.node.registry.pods().is_empty());
}

#[tokio::test]
async fn a_repeated_request_is_answered_by_what_was_done() {
    let place = Place::new().await;
    let pid = place.run_pod().await;
    let bundle = place.sandbox_bundle(POD);
    let again = place.tasks.create(&repeated(), create_request(POD, &bundle)).await.unwrap();
    assert_eq!(again.pid, pid);
    // Not repeated, it is a second pod of the same id.
    assert_eq!(place.create(POD, &bundle).await.unwrap_err().0, Code::ALREADY_EXISTS);
    place.kill(POD, 9).await.unwrap();
    // As after a worker that died during its start: the pod is made anew.
    let anew = place.tasks.create(&repeated(), create_request(POD, &bundle)).await.unwrap();
    assert_ne!(anew.pid, 0);
    assert_eq!(place.state(POD).await.unwrap().status(), Status::RUNNING);
    place.kill(POD, 9).await.unwrap();
    place.delete(POD).await.unwrap();
}

#[tokio::test]
async fn the_next_worker_knows_it() {
    let place = Place::new().await;
    let pid = place.run_pod().await;
    let pod = place.test.node.registry.pod(&id(POD)).unwrap();
    let node = place.test.killed([pod]);
    recover::recover(&node, recover::Records::read(&node).unwrap()).await;
    let tasks = tasks(&node);
    let request = StateRequest { id: POD.into(), ..Default::default() };
    let state = tasks.state(&repeated(), request).await.unwrap();
    assert_eq!((state.status(), state.pid), (Status::RUNNING, pid));
    node.registry.pod(&id(POD)).unwrap().remove().await.unwrap();
}

#[tokio::test]
async fn a_pod_that_containerd_has_forgotten_is_removed_and_no_other() {
    const INTERVAL: Duration = Duration::from_millis(20);
    let place = Place::new().await;
    place.run_pod().await;
    place.of_containerd.0.lock().unwrap().insert(POD.to_owned());
    let mut events = place.test.node.events.listen();
    let searching = tokio::spawn(sandbox_container::remove_abandoned(place.test.node.clone(), INTERVAL));
    let stays = async |why: &str| {
        tokio::time::sleep(10 * INTERVAL).await;
        assert_eq!(place.state(POD).await.unwrap().status(), Status::RUNNING, "{why}");
    };
    stays("its bundle is there").await;

    // As when containerd's state directory is unmounted.
    let bundles = place.test.dir.path().join("bundles");
    let aside = place.test.dir.path().join("aside");
    fs::rename(&bundles, &aside).unwrap();
    place.of_containerd.0.lock().unwrap().clear();
    stays("the bundles of all are gone").await;
    fs::rename(&aside, &bundles).unwrap();
    place.of_containerd.0.lock().unwrap().insert(POD.to_owned());

    fs::remove_dir_all(bundles.join(POD)).unwrap();
    stays("containerd has its task").await;
    place.of_containerd.0.lock().unwrap().clear();
    next(&mut events, Kind::PodRemoved).await;
    assert!(place.test.vmm.running().is_empty());
    searching.abort();
}

/// Makes the bundle of a container as CRI-O and the launcher do: `userdata` in the container's own directory.
fn bundle_of_cri_o(place: &Place, container: &str, kind: &str, uts: &str) -> PathBuf {
    let bundle = place.test.container(container, "sleep").bundle.join("userdata");
    fs::create_dir_all(&bundle).unwrap();
    let spec = json!({
        "ociVersion": "1.2.1",
        "root": {"path": place.test.dir.path().join("rootfs")},
        "process": {"user": {"uid": 0, "gid": 0}, "args": ["/pause"], "cwd": "/"},
        "hostname": "pod",
        "annotations": {
            "io.kubernetes.cri-o.ContainerType": kind, "io.kubernetes.cri-o.SandboxID": "0f",
            "io.kubernetes.pod.name": "web", "io.kubernetes.pod.namespace": "shop", "io.kubernetes.pod.uid": "u1",
        },
        "linux": {"namespaces": [{"type": "pid"}, {"type": "ipc", "path": "/run/ipcns/0"}, {"type": "uts", "path": uts}]},
    });
    fs::write(bundle.join("config.json"), spec.to_string()).unwrap();
    fs::write(bundle.join("sandboxer.json"), r#"{"containerd": ""}"#).unwrap();
    bundle
}

/// There is no containerd that knows it: its bundle describes it, and says when it is forgotten.
#[tokio::test]
async fn a_pod_of_cri_o_is_the_one_that_its_bundle_describes() {
    const INTERVAL: Duration = Duration::from_millis(20);
    let place = Place::new().await;
    let bundle = bundle_of_cri_o(&place, "0f", "sandbox", "/run/utsns/0");
    let pid = place.create("0f", &bundle).await.unwrap().pid;
    let pod = place.test.node.registry.pod(&id("0f")).unwrap();
    let spec = pod.inspect().await.unwrap().spec;
    assert_eq!((spec.name.as_str(), spec.namespace.as_str(), spec.hostname.as_str()), ("web", "shop", "pod"));
    let state = place.state("0f").await.unwrap();
    assert_eq!((state.status(), state.pid), (Status::RUNNING, pid));
    // CRI-O asks so whether it lives.
    place.kill("0f", 0).await.unwrap();

    let stranger = bundle_of_cri_o(&place, "c1", "container", "/run/utsns/1");
    let (code, text) = place.create("c1", &stranger).await.unwrap_err();
    assert_eq!(code, Code::INVALID_ARGUMENT, "{text}");
    assert!(text.contains("another UTS namespace"), "{text}");

    let mut events = place.test.node.events.listen();
    let searching = tokio::spawn(sandbox_container::remove_abandoned(place.test.node.clone(), INTERVAL));
    tokio::time::sleep(10 * INTERVAL).await;
    assert_eq!(place.state("0f").await.unwrap().status(), Status::RUNNING, "its bundle is there");
    // CRI-O removes the directory around it, too.
    fs::remove_dir_all(bundle.parent().unwrap()).unwrap();
    next(&mut events, Kind::PodRemoved).await;
    assert!(place.test.vmm.running().is_empty());
    searching.abort();
}
