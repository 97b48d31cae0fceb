//! Containers that no pod of CRI has, by the task service as containerd calls it for `ctr` and docker. Doubles for the VMM and the
//! agent; the network namespaces are real.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails where it stands")]

mod fake_agent;
mod test_node;

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use containerd_shim_protos::{
    api::{
        CreateTaskRequest, DeleteRequest, KillRequest, PauseRequest, PidsRequest, StartRequest, StateRequest,
        StateResponse, Status, WaitRequest, WaitResponse,
    },
    shim_async::Task,
};
use fake_agent::FakeAgent;
use sandboxer::{
    api::{sandbox::SandboxService, task::TaskService},
    pod::{DaemonState, recover},
    state::PodState,
};
use sandboxer_front::frame::REPEATED;
use sandboxer_host::network::namespace;
use sandboxer_vmm_fake::FakeVmm;
use serde_json::json;
use test_node::{TestNode, find_share_server, id, phase};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use ttrpc::{Code, asynchronous::TtrpcContext};

/// More than any step takes.
const LONG: Duration = Duration::from_secs(30);
const C: &str = "c1";

struct Place {
    agent: FakeAgent,
    test: TestNode,
    tasks: Arc<TaskService>,
}

impl Place {
    fn new() -> Self {
        let agent = FakeAgent::default();
        let serving = agent.clone();
        let test = TestNode::with(Arc::new(FakeVmm::new(move |guest| serving.serve(guest))), |_| {});
        let tasks = tasks(&test.node);
        Self { agent, test, tasks }
    }

    /// Makes the bundle of a container in a namespace of containerd, as containerd lays it out.
    fn bundle(&self, of: &str, edit: impl FnOnce(&mut serde_json::Value)) -> PathBuf {
        let made = self.test.container(C, "sleep").bundle;
        let bundle = self.test.dir.path().join("io.containerd.runtime.v2.task").join(of).join(C);
        fs::create_dir_all(&bundle).unwrap();
        let mut spec: serde_json::Value =
            serde_json::from_slice(&fs::read(made.join("config.json")).unwrap()).unwrap();
        let kinds = ["pid", "ipc", "uts", "mount", "network"];
        spec["linux"]["namespaces"] = kinds.iter().map(|kind| json!({"type": kind})).collect();
        edit(&mut spec);
        fs::write(bundle.join("config.json"), spec.to_string()).unwrap();
        bundle
    }

    fn request(&self, bundle: &Path) -> CreateTaskRequest {
        let [stdout, stderr] =
            ["stdout", "stderr"].map(|name| self.test.dir.path().join("bundles").join(C).join(name));
        CreateTaskRequest {
            id: C.into(),
            bundle: bundle.display().to_string(),
            stdout: stdout.display().to_string(),
            stderr: stderr.display().to_string(),
            rootfs: vec![containerd_shim_protos::types::mount::Mount {
                type_: "bind".into(),
                source: self.test.dir.path().join("rootfs").display().to_string(),
                options: vec!["rbind".into(), "rw".into()],
                ..Default::default()
            }],
            ..Default::default()
        }
    }

    /// Creates the container in the namespace `web` of containerd. Returns the pid that stands for its process.
    async fn create(&self) -> u32 {
        let bundle = self.bundle("web", |_| ());
        self.tasks.create(&from("web"), self.request(&bundle)).await.unwrap().pid
    }

    async fn refused(&self, edit: impl FnOnce(&mut serde_json::Value)) -> String {
        let bundle = self.bundle("web", edit);
        let (code, text) = failed(self.tasks.create(&from("web"), self.request(&bundle)).await);
        assert_ne!(code, Code::UNIMPLEMENTED, "containerd would try an older API: {text}");
        assert!(self.test.node.registry.pods().is_empty());
        text
    }

    async fn start(&self) -> u32 {
        let request = StartRequest { id: C.into(), ..Default::default() };
        self.tasks.start(&from("web"), request).await.unwrap().pid
    }

    async fn state(&self) -> StateResponse {
        self.tasks.state(&from("web"), StateRequest { id: C.into(), ..Default::default() }).await.unwrap()
    }

    fn waiting(&self) -> tokio::task::JoinHandle<WaitResponse> {
        let tasks = self.tasks.clone();
        let request = WaitRequest { id: C.into(), ..Default::default() };
        tokio::spawn(async move { tasks.wait(&from("web"), request).await.unwrap() })
    }

    fn netns(&self) -> PathBuf {
        self.test.node.config.run_dir.join("netns").join(C)
    }
}

/// What a test leaves, as when it fails, is no mount in its directory.
impl Drop for Place {
    fn drop(&mut self) {
        let _ = namespace::release(&self.netns());
    }
}

fn tasks(node: &Arc<DaemonState>) -> Arc<TaskService> {
    let address = "ttrpc+unix:///task.sock".into();
    let controller = SandboxService::new(node.clone(), address, CancellationToken::new()).unwrap();
    Arc::new(TaskService::new(node.clone(), Arc::new(controller)))
}

fn context(namespace: &str, flags: u8) -> TtrpcContext {
    TtrpcContext {
        mh: ttrpc::MessageHeader { flags, ..Default::default() },
        metadata: HashMap::from([("containerd-namespace-ttrpc".to_owned(), vec![namespace.to_owned()])]),
        timeout_nano: 0,
        connection_data: Arc::default(),
    }
}

/// Returns the context of a request from a namespace of containerd.
fn from(namespace: &str) -> TtrpcContext {
    context(namespace, 0)
}

fn failed<T>(answer: ttrpc::Result<T>) -> (Code, String) {
    match answer {
        Err(ttrpc::Error::RpcStatus(status)) => (status.code(), status.message().to_owned()),
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("it was answered"),
    }
}

async fn until(mut is_so: impl FnMut() -> bool) {
    let waited = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(LONG, waited).await.unwrap();
}

fn kill(signal: u32) -> KillRequest {
    KillRequest { id: C.into(), signal, ..Default::default() }
}

fn delete() -> DeleteRequest {
    DeleteRequest { id: C.into(), ..Default::default() }
}

#[tokio::test]
async fn a_container_is_a_pod_from_its_start_to_its_deletion() {
    let place = Place::new();
    let pid = place.create().await;
    let waits = place.waiting();
    let state = place.state().await;
    assert_eq!((state.status(), state.pid), (Status::CREATED, pid));
    assert!(place.test.vmm.running().is_empty() && place.test.node.registry.pods().is_empty());
    let found = PathBuf::from(format!("/proc/{pid}/ns/net"));
    assert!(namespace::is_same(&found, &place.netns()).unwrap(), "its process is in its network namespace");

    let vmm = place.start().await;
    let pod = place.test.node.registry.pod(&id(C)).unwrap();
    let spec = pod.inspect().await.unwrap().spec;
    assert_eq!((spec.alone, spec.namespace.as_str(), spec.netns), (true, "web", Some(place.netns())));
    assert_eq!((pod.status().state, pod.status().vmm_pid), (PodState::Ready, vmm));
    assert_eq!(place.agent.containers(), [C]);
    until(|| !found.exists()).await;
    let state = place.state().await;
    assert_eq!((state.status(), state.pid), (Status::RUNNING, vmm));
    let pids = PidsRequest { id: C.into(), ..Default::default() };
    let pids = place.tasks.pids(&from("web"), pids).await.unwrap();
    assert_eq!(pids.processes.iter().map(|of| of.pid).collect::<Vec<_>>(), [vmm]);

    assert!(!waits.is_finished());
    place.tasks.kill(&from("web"), kill(9)).await.unwrap();
    assert_eq!(timeout(LONG, waits).await.unwrap().unwrap().exit_status, 137);
    assert_eq!(place.state().await.status(), Status::STOPPED);
    assert_eq!(place.tasks.delete(&from("web"), delete()).await.unwrap().exit_status, 137);
    assert!(place.test.node.registry.pods().is_empty() && place.test.vmm.running().is_empty());
    assert!(!place.netns().exists());
    assert_eq!(failed(place.tasks.delete(&from("web"), delete()).await).0, Code::NOT_FOUND);
    // Its id is free again.
    place.create().await;
}

#[tokio::test]
async fn a_root_that_its_caller_has_mounted_is_a_live_share() {
    let place = Place::new();
    find_share_server();
    let root = place.test.dir.path().join("rootfs");
    let bundle = place.bundle("web", |spec| spec["root"]["path"] = json!(root));
    let request = CreateTaskRequest { rootfs: Vec::new(), ..place.request(&bundle) };
    place.tasks.create(&from("web"), request).await.unwrap();
    place.start().await;
    let seen = place.agent.roots.lock().unwrap().pop().unwrap();
    assert!(seen.lower.is_empty() && seen.share().starts_with("/run/sandboxer/shares/"), "{seen}");
    let pod = place.test.node.registry.pod(&id(C)).unwrap();
    assert!(pod.inspect().await.unwrap().containers.iter().all(|container| container.disks.is_empty()));
    place.tasks.kill(&from("web"), kill(9)).await.unwrap();
    place.tasks.delete(&from("web"), delete()).await.unwrap();
    assert!(place.test.vmm.running().is_empty());
}

#[tokio::test]
async fn a_container_that_is_not_started_ends_by_a_signal() {
    let place = Place::new();
    place.create().await;
    let waits = place.waiting();
    place.tasks.kill(&from("web"), kill(28)).await.unwrap();
    assert_eq!(place.state().await.status(), Status::CREATED, "a window that changes ends nothing");
    let pause = PauseRequest { id: C.into(), ..Default::default() };
    let (code, text) = failed(place.tasks.pause(&from("web"), pause).await);
    assert_eq!(code, Code::FAILED_PRECONDITION);
    assert!(text.contains("cannot pause it while container c1 is created"), "{text}");
    place.tasks.kill(&from("web"), kill(15)).await.unwrap();
    assert_eq!(timeout(LONG, waits).await.unwrap().unwrap().exit_status, 2);
    let state = place.state().await;
    assert_eq!((state.status(), state.exit_status), (Status::STOPPED, 2));
    assert_eq!(failed(place.tasks.kill(&from("web"), kill(15)).await).0, Code::NOT_FOUND);
    let start = StartRequest { id: C.into(), ..Default::default() };
    assert_eq!(failed(place.tasks.start(&from("web"), start).await).0, Code::FAILED_PRECONDITION);
    assert_eq!(place.tasks.delete(&from("web"), delete()).await.unwrap().exit_status, 2);
    assert!(!place.netns().exists() && place.test.vmm.running().is_empty());
}

#[tokio::test]
async fn a_start_that_fails_leaves_no_vm() {
    let place = Place::new();
    let bundle = place.bundle("web", |spec| {
        spec["linux"]["devices"] = json!([{"path": "/dev/x", "type": "c", "major": 4, "minor": 64}]);
    });
    place.tasks.create(&from("web"), place.request(&bundle)).await.unwrap();
    let start = StartRequest { id: C.into(), ..Default::default() };
    let (code, text) = failed(place.tasks.start(&from("web"), start).await);
    assert_eq!(code, Code::INVALID_ARGUMENT, "{text}");
    assert!(text.contains("device /dev/x (C 4:64) is not available in a microVM pod"), "{text}");
    assert!(place.test.node.registry.pods().is_empty() && place.test.vmm.running().is_empty());
    let state = place.state().await;
    assert_eq!((state.status(), state.exit_status), (Status::STOPPED, 128));
    place.tasks.delete(&from("web"), delete()).await.unwrap();
    assert!(!place.netns().exists());
}

#[tokio::test]
async fn a_network_namespace_is_given_by_its_path_to_one_container() {
    let place = Place::new();
    let at = |path: PathBuf| {
        move |spec: &mut serde_json::Value| spec["linux"]["namespaces"][4]["path"] = json!(path)
    };
    let given = place.test.dir.path().join("given");
    let occupant = namespace::Occupant::enter(None).unwrap();
    occupant.keep_at(&given).unwrap();
    let other = place.test.pod_of(sandboxer::pod::spec::PodSpec {
        netns: Some(given.clone()),
        ..sandboxer::pod::spec::PodSpec::plain(id("other"), 1, 128)
    });
    let bundle = place.bundle("web", at(given.clone()));
    let (_, text) = failed(place.tasks.create(&from("web"), place.request(&bundle)).await);
    assert!(text.contains("is that of container or pod other (--network=container:…)"), "{text}");
    other.remove().await.unwrap();
    let created = place.tasks.create(&from("web"), place.request(&bundle)).await.unwrap();
    let found = PathBuf::from(format!("/proc/{}/ns/net", created.pid));
    assert!(namespace::is_same(&found, &given).unwrap());
    place.tasks.kill(&from("web"), kill(9)).await.unwrap();
    place.tasks.delete(&from("web"), delete()).await.unwrap();
    assert!(given.exists(), "it is its caller's");
    namespace::release(&given).unwrap();

    let gone = place.refused(at("/run/netns/gone".into())).await;
    assert!(gone.contains("cannot open the network namespace \"/run/netns/gone\" for pod c1"), "{gone}");
    let of_host = place.refused(at("/proc/self/ns/net".into())).await;
    assert!(of_host.contains("is the host's (--network=host, --net-host)"), "{of_host}");
}

#[tokio::test]
async fn what_a_guest_cannot_share_is_refused_before_there_is_one() {
    let place = Place::new();
    for (at, says) in [(0, "--pid=host"), (1, "--ipc=host"), (2, "--uts=host"), (4, "--net-host")] {
        let text =
            place.refused(|spec| drop(spec["linux"]["namespaces"].as_array_mut().unwrap().remove(at))).await;
        assert!(text.contains("container c1") && text.contains(says), "{text}");
    }
    let text = place.refused(|spec| spec["hooks"] = json!({"createRuntime": [{"path": "/bin/false"}]})).await;
    assert!(text.contains("an OCI hook is not available"), "{text}");
    let bundle = place.bundle("web", |_| ());
    let restored = CreateTaskRequest { checkpoint: "/c".into(), ..place.request(&bundle) };
    let (_, text) = failed(place.tasks.create(&from("web"), restored).await);
    assert!(text.contains("cannot be restored from a checkpoint"), "{text}");
    let logged = CreateTaskRequest { stdout: "binary:///bin/logger".into(), ..place.request(&bundle) };
    let (_, text) = failed(place.tasks.create(&from("web"), logged).await);
    assert!(text.contains("the log URI \"binary:///bin/logger\" is not available"), "{text}");
    assert!(!place.netns().exists());
}

#[tokio::test]
async fn a_container_of_another_namespace_is_not_touched() {
    let place = Place::new();
    place.create().await;
    let elsewhere = place.bundle("other", |_| ());
    let (code, _) = failed(place.tasks.create(&from("other"), place.request(&elsewhere)).await);
    assert_eq!(code, Code::ALREADY_EXISTS);
    // As the launcher does after a creation that failed.
    for _ in 0..2 {
        assert_eq!(failed(place.tasks.kill(&from("other"), kill(9)).await).0, Code::NOT_FOUND);
        assert_eq!(failed(place.tasks.delete(&from("other"), delete()).await).0, Code::NOT_FOUND);
        if place.state().await.status() == Status::CREATED {
            place.start().await;
        }
    }
    assert_eq!(place.state().await.status(), Status::RUNNING);
}

#[tokio::test]
async fn the_next_worker_knows_a_running_one_and_tidies_up_after_those_that_are_gone() {
    let place = Place::new();
    place.create().await;
    let vmm = place.start().await;
    let pod = place.test.node.registry.pod(&id(C)).unwrap();
    assert_eq!(phase(&pod, C).await.as_str(), "running");
    let node = place.test.killed([pod]);
    recover::recover(&node, recover::Records::read(&node).unwrap()).await;
    let tasks = tasks(&node);
    let state = StateRequest { id: C.into(), ..Default::default() };
    let state = tasks.state(&context("web", REPEATED), state).await.unwrap();
    assert_eq!((state.status(), state.pid), (Status::RUNNING, vmm));

    // As if containerd had removed it while there was no daemon.
    let interval = Duration::from_millis(20);
    let tidying = tokio::spawn(tasks.clone().tidy(interval));
    tokio::time::sleep(5 * interval).await;
    assert!(place.netns().exists(), "its pod uses it");
    node.registry.pod(&id(C)).unwrap().remove().await.unwrap();
    until(|| !place.netns().exists()).await;
    tidying.abort();
}
