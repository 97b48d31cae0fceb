//! Placement of pods on the NUMA nodes and in the control groups of a host that the test describes, with doubles for VMM
//! and agent. What the kernel does with it is shown in a node VM: scripts/test-placement.sh.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails where it stands")]

mod fake_agent;
mod test_node;

use std::{fs, path::PathBuf, sync::Arc, time::Duration};

use fake_agent::FakeAgent;
use sandboxer::{
    daemon,
    error::PodError,
    front::Front,
    pod::{
        self, DaemonState, PlaceView, PodHandle,
        placer::Placer,
        pool::{Meminfo, Pool},
        recover::{self, Records},
        spec::PodSpec,
    },
    state::{PodState, PodStatus},
    template::Shape,
};
use sandboxer_base::Code;
use sandboxer_config::{Config, PlacementPolicy, PoolConfig, StartPath};
use sandboxer_process::cgroup::Hierarchies;
use sandboxer_protocol::link::LinkKey;
use sandboxer_vmm_fake::FakeVmm;
use test_node::{TestNode, id, reader};
use tokio_util::sync::CancellationToken;

/// A host with two nodes: CPUs 0 to 3 and 4 to 7.
struct TwoNodes {
    test: TestNode,
    node: Arc<DaemonState>,
    config: Config,
}

impl TwoNodes {
    fn new() -> Self {
        Self::configured(|_| ())
    }

    fn configured(configure: impl FnOnce(&mut Config)) -> Self {
        let agent = FakeAgent::default();
        let vmm = Arc::new(FakeVmm::new(move |guest| agent.serve(guest)));
        let mut config = Config::default();
        let test = TestNode::with(vmm, |node_config| {
            node_config.placement.nodes_dir = node_config.run_dir.with_file_name("node");
            fs::create_dir_all(node_config.run_dir.with_file_name("cgroup")).unwrap();
            for (node, cpus) in [(0, "0-3"), (1, "4-7")] {
                let dir = node_config.placement.nodes_dir.join(format!("node{node}"));
                fs::create_dir_all(&dir).unwrap();
                fs::write(dir.join("cpulist"), cpus).unwrap();
            }
            for name in ["kernel", "initramfs"] {
                fs::write(node_config.run_dir.with_file_name(name), name).unwrap();
            }
            node_config.vm.kernel = node_config.run_dir.with_file_name("kernel");
            node_config.vm.initramfs = node_config.run_dir.with_file_name("initramfs");
            configure(node_config);
            config.clone_from(node_config);
        });
        let host = Self { node: test.node.clone(), test, config };
        host.available(0, 1000);
        host.available(1, 900);
        let node = host.daemon();
        Self { node, ..host }
    }

    /// Returns the state of another daemon on this host.
    fn daemon(&self) -> Arc<DaemonState> {
        let node = daemon::node(self.config.clone(), self.test.vmm.clone(), Front::none()).unwrap();
        let cgroups = Hierarchies::unified(&self.path("cgroup"));
        let placer = Arc::new(Placer::new(&self.config.placement, &cgroups, "/idle").prepare(None));
        let shape = Shape { vcpus: 1, memory_mib: 128, nics: 0 };
        let pool = Pool::new(self.config.pool, shape, Meminfo::of_host());
        Arc::new(DaemonState { cgroups, placer, pool, ..Arc::into_inner(node).unwrap() })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.test.dir.path().join(name)
    }

    /// Sets the available memory of a node, MiB.
    fn available(&self, node: u32, mib: u64) {
        let text =
            format!("Node {node} MemTotal: {} kB\nNode {node} MemFree: {} kB\n", 1000 << 10, mib << 10);
        fs::write(self.path(&format!("node/node{node}/meminfo")), text).unwrap();
    }

    fn pod(&self, name: &str, vcpus: u32) -> PodHandle {
        self.pod_by(name, vcpus, StartPath::Boot, "/pods")
    }

    fn pod_by(&self, name: &str, vcpus: u32, start_path: StartPath, parent: &str) -> PodHandle {
        let plain = PodSpec::plain(id(name), vcpus, 128);
        let spec = PodSpec { cgroup_parent: parent.to_owned(), start_path, ..plain };
        let (node, status) = (self.node.clone(), PodStatus::created(1));
        let spawn = || pod::spawn(node, spec, LinkKey::random(), status, Default::default());
        self.node.registry.insert(&id(name), spawn).unwrap()
    }

    async fn started(&self, name: &str, vcpus: u32) -> PodHandle {
        let pod = self.pod(name, vcpus);
        pod.start().await.unwrap();
        pod
    }

    /// Returns a file of the control group of a pod.
    fn group(&self, name: &str, file: &str) -> String {
        let dir = self.path("cgroup/pods").join(format!("sandboxer-{name}"));
        fs::read_to_string(dir.join(file)).unwrap_or_default()
    }

    /// Waits until a file of the control group of a pod has this content.
    async fn comes_to_have(&self, name: &str, file: &str, content: &str) {
        let there = async {
            while self.group(name, file) != content {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let found = tokio::time::timeout(Duration::from_secs(30), there).await;
        found.unwrap_or_else(|_| panic!("{file} is {:?} and not {content:?}", self.group(name, file)));
    }

    /// Creates a container with CPUs and memory nodes from CRI.
    async fn container(&self, pod: &PodHandle, name: &str, cpus: &str, mems: &str) {
        let new = self.test.container(name, "sleep");
        let path = new.bundle.join("config.json");
        let mut spec: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        spec["linux"]["resources"]["cpu"] = serde_json::json!({"cpus": cpus, "mems": mems});
        fs::write(&path, spec.to_string()).unwrap();
        let _stdout = reader(&new.stdio.stdout);
        pod.create_container(new).await.unwrap();
    }
}

async fn place(pod: &PodHandle) -> PlaceView {
    pod.inspect().await.unwrap().place
}

#[tokio::test]
async fn a_pod_gets_a_node_and_its_group_the_cpus() {
    let host = TwoNodes::new();
    let (one, two) = (host.started("one", 2).await, host.started("two", 1).await);
    let (at, other) = (place(&one).await, place(&two).await);
    assert_eq!((at.node, other.node), (Some(0), Some(1)), "{at:?} {other:?}");
    assert_eq!(
        (host.group("one", "cpuset.cpus"), host.group("two", "cpuset.cpus")),
        ("0-3".into(), "4-7".into())
    );
    assert_eq!(at.bounds.cpus.unwrap().to_string(), "0-3");
    assert!(!at.by_cri && at.reason.contains("most room"), "{}", at.reason);
    // Memory is not bound: a pod whose node is full goes on with another one's.
    assert_eq!(host.group("one", "cpuset.mems"), "");

    let large = host.started("large", 5).await;
    let at = place(&large).await;
    assert_eq!((at.node, at.reason.as_str()), (None, "it is larger than a node"));
    assert_eq!(host.group("large", "cpuset.cpus"), "");
    let alone = host.pod_by("alone", 1, StartPath::Boot, "");
    alone.start().await.unwrap();
    let at = place(&alone).await;
    assert!(at.node.is_none() && at.reason.contains("CRI named no parent"), "{at:?}");

    // A place is free again when its pod has stopped.
    assert_eq!((host.node.placer.load(0).vcpus, host.node.placer.load(1).vcpus), (2, 1));
    one.stop().await.unwrap();
    assert_eq!(host.node.placer.load(0).vms, 0);
}

#[tokio::test]
async fn huge_pages_are_refused_by_name_with_a_vmm_that_does_not_reserve_them() {
    let host = TwoNodes::new();
    let spec =
        PodSpec { huge_pages: true, cgroup_parent: "/pods".to_owned(), ..PodSpec::plain(id("huge"), 1, 128) };
    let (node, status) = (host.node.clone(), PodStatus::created(1));
    let spawn = || pod::spawn(node, spec, LinkKey::random(), status, Default::default());
    let pod = host.node.registry.insert(&id("huge"), spawn).unwrap();
    let error = pod.start().await.unwrap_err();
    assert_eq!(error.code(), Code::Unimplemented, "{error}");
    let text = error.to_string();
    assert!(
        ["pod huge", "huge pages", "VMM fake", "[handlers]"].iter().all(|words| text.contains(words)),
        "{text}"
    );
    assert_eq!(host.node.placer.load(0).vms, 0);
}

#[tokio::test]
async fn without_a_policy_no_file_is_written() {
    let host = TwoNodes::configured(|config| config.placement.policy = PlacementPolicy::Off);
    let pod = host.started("one", 1).await;
    let at = place(&pod).await;
    assert_eq!((at.node, at.reason.as_str()), (None, ""));
    assert_eq!(host.group("one", "cpuset.cpus"), "");
    assert!(!host.path("cgroup/pods/cgroup.subtree_control").exists());
    let error = pod.move_to(1).await.unwrap_err();
    assert!(error.to_string().contains("pods are not placed on this host"), "{error}");
}

#[tokio::test]
async fn the_next_daemon_knows_where_a_pod_is() {
    let host = TwoNodes::new();
    host.available(0, 0);
    let pod = host.started("web", 2).await;
    assert_eq!(place(&pod).await.node, Some(1));
    host.node.registry.remove(pod.id());
    drop(pod);
    let next = host.daemon();
    recover::recover(&next, Records::read(&next).unwrap()).await;
    let pod = next.registry.pod(&id("web")).unwrap();
    let at = place(&pod).await;
    assert_eq!((at.node, next.placer.load(1).vcpus), (Some(1), 2));
    assert!(at.reason.contains("most room"), "{}", at.reason);
    pod.stop().await.unwrap();
    assert_eq!(next.placer.load(1).vcpus, 0);
}

/// As when another hierarchy of control groups was mounted since the pod's start.
#[tokio::test]
async fn a_pod_without_its_group_gets_one_from_the_next_daemon_and_lives_on() {
    let host = TwoNodes::new();
    let pod = host.started("web", 2).await;
    host.node.registry.remove(pod.id());
    drop(pod);
    fs::remove_dir_all(host.path("cgroup/pods/sandboxer-web")).unwrap();
    let next = host.daemon();
    recover::recover(&next, Records::read(&next).unwrap()).await;
    host.comes_to_have("web", "cgroup.procs", &std::process::id().to_string()).await;
    assert_eq!(next.registry.pod(&id("web")).unwrap().status().state, PodState::Ready);
}

#[tokio::test]
async fn without_a_policy_the_next_daemon_releases_a_pod() {
    let mut host = TwoNodes::new();
    let pod = host.started("web", 2).await;
    assert_eq!(host.group("web", "cpuset.cpus"), "0-3");
    host.node.registry.remove(pod.id());
    drop(pod);
    host.config.placement.policy = PlacementPolicy::Off;
    let next = host.daemon();
    recover::recover(&next, Records::read(&next).unwrap()).await;
    host.comes_to_have("web", "cpuset.cpus", "").await;
    assert_eq!(place(&next.registry.pod(&id("web")).unwrap()).await.node, None);
}

#[tokio::test]
async fn the_sets_of_cri_win() {
    let host = TwoNodes::new();
    let pod = host.started("web", 2).await;
    assert_eq!(place(&pod).await.node, Some(0));
    host.container(&pod, "c1", "4-5", "").await;
    host.comes_to_have("web", "cpuset.cpus", "4-5").await;
    let at = place(&pod).await;
    assert!(at.by_cri && at.node == Some(1) && at.reason.contains("CRI"), "{at:?}");
    assert_eq!((host.node.placer.load(0).vcpus, host.node.placer.load(1).vcpus), (0, 2));
    // The union, and nodes for memory only if each container has some.
    host.container(&pod, "c2", "7", "1").await;
    host.comes_to_have("web", "cpuset.cpus", "4-5,7").await;
    assert_eq!(host.group("web", "cpuset.mems"), "");
    pod.update(id("c1"), br#"{"cpu": {"cpus": "0", "mems": "0-1"}}"#.to_vec()).await.unwrap();
    host.comes_to_have("web", "cpuset.mems", "0-1").await;
    assert_eq!(host.group("web", "cpuset.cpus"), "0,7");
    assert_eq!(place(&pod).await.node, None, "its CPUs are of two nodes");
    let error = pod.move_to(1).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert!(error.to_string().contains("cannot move pod web: the CPU sets that CRI gave"), "{error}");
}

#[tokio::test]
async fn a_set_of_cri_outlives_the_daemon() {
    let host = TwoNodes::new();
    let pod = host.started("web", 1).await;
    host.container(&pod, "c1", "1", "").await;
    pod.update(id("c1"), br#"{"cpu": {"cpus": "2-3"}}"#.to_vec()).await.unwrap();
    host.comes_to_have("web", "cpuset.cpus", "2-3").await;
    // Its record is written beside the answer.
    let path = host.path("state/pods/web.json");
    while !fs::read_to_string(&path).unwrap().contains("2-3") {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    host.node.registry.remove(pod.id());
    drop(pod);
    fs::remove_file(host.path("cgroup/pods/sandboxer-web/cpuset.cpus")).unwrap();
    let next = host.daemon();
    recover::recover(&next, Records::read(&next).unwrap()).await;
    host.comes_to_have("web", "cpuset.cpus", "2-3").await;
}

/// The double's VMM is this test's process, whose memory is on the only node of most hosts: number 0.
#[tokio::test]
async fn a_pod_is_moved_on_request() {
    let host = TwoNodes::new();
    host.available(0, 0);
    let pod = host.started("web", 2).await;
    assert_eq!(host.group("web", "cpuset.cpus"), "4-7");
    let refused = |error: PodError| (error.code(), error.to_string());
    let (code, text) = refused(pod.move_to(0).await.unwrap_err());
    assert_eq!(code, Code::FailedPrecondition);
    assert_eq!(text, "cannot move pod web: node 0 has 0 MiB available, the pod may use 128");
    assert!(refused(pod.move_to(1).await.unwrap_err()).1.contains("it is on node 1"));
    assert!(refused(pod.move_to(7).await.unwrap_err()).1.contains("no node 7"));

    host.available(0, 500);
    let moved = pod.move_to(0).await.unwrap();
    assert_eq!(moved.from, Some(1));
    assert!(moved.took > Duration::ZERO, "{moved:?}");
    let at = place(&pod).await;
    assert_eq!((at.node, at.reason.as_str()), (Some(0), "moved on request"));
    assert_eq!(host.group("web", "cpuset.cpus"), "0-3");
    assert_eq!((host.node.placer.load(0).vcpus, host.node.placer.load(1).vcpus), (2, 0));
    let record = fs::read_to_string(host.path("state/pods/web.json")).unwrap();
    assert!(record.contains(r#""placement":{"node":0,"reason":"moved on request"}"#), "{record}");
    pod.stop().await.unwrap();
    let error = pod.move_to(1).await.unwrap_err();
    assert_eq!(error.to_string(), "cannot move the pod while pod web is stopped");
}

#[tokio::test]
async fn a_move_that_the_kernel_refuses_leaves_the_pod_where_it_is() {
    // A node that no host has.
    let host = TwoNodes::configured(|config| {
        let dir = config.placement.nodes_dir.join("node900");
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("cpulist"), "8-9").unwrap();
        fs::write(dir.join("meminfo"), "Node 900 MemTotal: 999999 kB\nNode 900 MemFree: 500000 kB\n")
            .unwrap();
    });
    let pod = host.started("web", 2).await;
    let error = pod.move_to(900).await.unwrap_err().to_string();
    assert!(error.contains("cannot move pod web to node 900: the kernel does not move pages"), "{error}");
    assert_eq!((host.group("web", "cpuset.cpus"), place(&pod).await.node), ("0-3".into(), Some(0)));
    assert_eq!(host.node.placer.load(900).vms, 0);
}

#[tokio::test]
async fn vms_of_the_pool_are_on_both_nodes_and_a_pod_takes_one_of_its_own() {
    let host = TwoNodes::configured(|config| config.pool = PoolConfig { min: 3, max: 3 });
    let shutdown = CancellationToken::new();
    let (daemon, until) = (host.node.clone(), shutdown.clone());
    let filling = tokio::spawn(async move { daemon.pool.keep_filled(&daemon, &until).await });
    let nodes = || {
        let mut nodes: Vec<_> = host.node.pool.list().into_iter().map(|warm| warm.node).collect();
        nodes.sort();
        nodes
    };
    let filled = async {
        while nodes().len() < 3 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        shutdown.cancel();
        filling.await.unwrap();
    };
    tokio::time::timeout(Duration::from_secs(60), filled).await.expect("the pool is not filled");
    assert_eq!(nodes(), [Some(0), Some(0), Some(1)]);
    let group =
        |node: &str| fs::read_to_string(host.path("cgroup/idle").join(node).join("cpuset.cpus")).unwrap();
    assert_eq!((group("node0"), group("node1")), ("0-3".into(), "4-7".into()));

    // Node 1 has fewer VMs, then node 0; for the third only one of another node than its own is left.
    let mut reasons = Vec::new();
    for (name, node) in [("one", 1), ("two", 0)] {
        let pod = host.pod_by(name, 1, StartPath::Pool, "/pods");
        pod.start().await.unwrap();
        assert_eq!(pod.status().start_path, Some(StartPath::Pool), "{name}");
        let at = place(&pod).await;
        reasons.push((name, at.node, at.reason));
        assert_eq!(reasons.last().unwrap().1, Some(node), "{reasons:?}");
    }
    host.available(0, 0);
    let pod = host.pod_by("three", 1, StartPath::Pool, "/pods");
    pod.start().await.unwrap();
    let at = place(&pod).await;
    assert_eq!(at.node, Some(0), "{at:?}");
    assert_eq!(at.reason, "a VM of the pool waited there, none on node 1");
    assert_eq!(host.group("three", "cpuset.cpus"), "0-3");
    assert_eq!((host.node.placer.load(0).vms, host.node.placer.load(1).vms), (2, 1));
}
