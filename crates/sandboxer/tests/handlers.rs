//! Two VMMs in one daemon, both doubles: pods run in the VMM of their runtime handler, also after the daemon's end.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails where it stands")]

mod fake_agent;

use std::{fs, sync::Arc, time::Duration};

use fake_agent::FakeAgent;
use sandboxer::{
    daemon,
    front::Front,
    pod::{self, DaemonState, PodHandle, recover, spec::PodSpec},
    state::{PodState, PodStatus},
    template::{Kind, Shape},
};
use sandboxer_base::Code;
use sandboxer_config::{Config, PoolConfig, StartPath, VmmName};
use sandboxer_protocol::link::LinkKey;
use sandboxer_vmm::Vmms;
use sandboxer_vmm_fake::FakeVmm;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

/// The shape of all pods here, which have no network.
const SHAPE: Shape = Shape { vcpus: 1, memory_mib: 128, nics: 0 };
const FIRECRACKER: Option<VmmName> = Some(VmmName::Firecracker);

struct Host {
    dir: TempDir,
    qemu: Arc<FakeVmm>,
    firecracker: Arc<FakeVmm>,
}

fn double(name: VmmName) -> Arc<FakeVmm> {
    let agent = FakeAgent::default();
    Arc::new(FakeVmm::named(name.as_str(), move |guest| agent.serve(guest)))
}

impl Host {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("kernel"), "a kernel").unwrap();
        fs::write(dir.path().join("initramfs"), "an initramfs").unwrap();
        Self { dir, qemu: double(VmmName::Qemu), firecracker: double(VmmName::Firecracker) }
    }

    fn config(&self) -> Config {
        let path = |name: &str| self.dir.path().join(name);
        let mut config = Config { run_dir: path("run"), state_dir: path("state"), ..Config::default() };
        config.vm.kernel = path("kernel");
        config.vm.initramfs = path("initramfs");
        config.vm.idle_cgroup.clear();
        config.pool = PoolConfig { min: 0, max: 2 };
        config
    }

    /// Starts a daemon's node, whose configured VMM is QEMU.
    fn node(&self) -> Arc<DaemonState> {
        let vmms = Vmms::new(self.qemu.clone(), vec![self.firecracker.clone()]);
        daemon::node(self.config(), vmms, Front::none()).unwrap()
    }

    /// Returns how many VMs run in each VMM.
    fn running(&self) -> (usize, usize) {
        (self.qemu.running().len(), self.firecracker.running().len())
    }
}

fn pod(node: &Arc<DaemonState>, id: &str, vmm: Option<VmmName>, start_path: StartPath) -> PodHandle {
    let spec = PodSpec { vmm, start_path, ..PodSpec::plain(id.parse().unwrap(), 1, 128) };
    let spawn = || {
        pod::spawn(node.clone(), spec.clone(), LinkKey::random(), PodStatus::created(1), Default::default())
    };
    node.registry.insert(&spec.id, spawn).unwrap()
}

fn kind(node: &DaemonState, vmm: Option<VmmName>) -> Kind {
    Kind { vmm: node.vmms.key(vmm).unwrap(), shape: SHAPE }
}

#[tokio::test]
async fn pods_of_two_handlers_run_in_their_vmms() {
    let host = Host::new();
    let node = host.node();
    let plain = pod(&node, "plain", None, StartPath::Boot);
    plain.start().await.unwrap();
    assert_eq!((host.running(), plain.inspect().await.unwrap().vmm.as_str()), ((1, 0), "qemu"));
    let named = pod(&node, "named", FIRECRACKER, StartPath::Boot);
    named.start().await.unwrap();
    assert_eq!((host.running(), named.inspect().await.unwrap().vmm.as_str()), ((1, 1), "firecracker"));
    let same = pod(&node, "same", Some(VmmName::Qemu), StartPath::Boot);
    same.start().await.unwrap();
    assert_eq!(host.running(), (2, 1), "the configured VMM may be named, too");
    named.remove().await.unwrap();
    assert_eq!(host.running(), (2, 0));
}

#[tokio::test]
async fn each_vmm_has_its_templates() {
    let host = Host::new();
    let node = host.node();
    let [usual, named] = [None, FIRECRACKER].map(|vmm| kind(&node, vmm));
    assert_eq!(kind(&node, Some(VmmName::Qemu)), usual);
    let usual = node.templates.prepare(usual).await.unwrap();
    let named = node.templates.prepare(named).await.unwrap();
    assert_ne!(usual.key, named.key);
    let listed = node.templates.list().unwrap();
    assert!(listed.len() == 2 && listed.iter().all(|view| view.in_use), "{listed:?}");
    let copy = pod(&node, "copy", FIRECRACKER, StartPath::Template);
    copy.start().await.unwrap();
    assert_eq!((host.running(), copy.status().start_path), ((0, 1), Some(StartPath::Template)));
    // A template that one VMM refuses is not the other's.
    assert_eq!(node.templates.get(SHAPE).unwrap().key, usual.key);
}

#[tokio::test]
async fn each_vmm_has_its_part_of_the_pool() {
    let host = Host::new();
    let node = host.node();
    let shutdown = CancellationToken::new();
    let (daemon, until) = (node.clone(), shutdown.clone());
    let filling = tokio::spawn(async move { daemon.pool.keep_filled(&daemon, &until).await });
    let first = pod(&node, "first", FIRECRACKER, StartPath::Pool);
    first.start().await.unwrap();
    let waits = async {
        while node.pool.list().is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), waits).await.expect("no VM waits");
    assert!(node.pool.list().iter().all(|view| view.vmm == "firecracker"), "{:?}", node.pool.list());
    let usual = pod(&node, "usual", None, StartPath::Pool);
    usual.start().await.unwrap();
    assert_ne!(usual.status().start_path, Some(StartPath::Pool), "it got a VM of the other VMM");
    assert_eq!(usual.inspect().await.unwrap().vmm, "qemu");
    let second = pod(&node, "second", FIRECRACKER, StartPath::Pool);
    second.start().await.unwrap();
    assert_eq!(second.status().start_path, Some(StartPath::Pool));
    assert_eq!(second.inspect().await.unwrap().vmm, "firecracker");
    shutdown.cancel();
    filling.await.unwrap();
    node.pool.drain().await;
}

#[tokio::test]
async fn the_next_daemon_finds_each_pod_in_its_vmm() {
    let host = Host::new();
    let node = host.node();
    for (id, vmm) in [("plain", None), ("named", FIRECRACKER)] {
        pod(&node, id, vmm, StartPath::Boot).start().await.unwrap();
        node.registry.remove(&id.parse().unwrap());
    }
    // By then the other is the configured one.
    let vmms = Vmms::new(host.firecracker.clone(), vec![host.qemu.clone()]);
    let next = daemon::node(host.config(), vmms, Front::none()).unwrap();
    let recovered = recover::recover(&next, recover::Records::read(&next).unwrap()).await;
    assert_eq!(recovered.alive, 2, "{recovered:?}");
    for (id, vmm) in [("plain", "qemu"), ("named", "firecracker")] {
        let pod = next.registry.pod(&id.parse().unwrap()).unwrap();
        assert_eq!((pod.status().state, pod.inspect().await.unwrap().vmm.as_str()), (PodState::Ready, vmm));
        pod.remove().await.unwrap();
    }
    assert_eq!(host.running(), (0, 0));
}

#[tokio::test]
async fn a_pod_whose_vmm_is_configured_no_more_is_refused_by_name() {
    let host = Host::new();
    let node = daemon::node(host.config(), host.qemu.clone(), Front::none()).unwrap();
    let pod = pod(&node, "late", FIRECRACKER, StartPath::Pool);
    let error = pod.start().await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    let text = error.to_string();
    assert!(text.contains("pod late") && text.contains("its VMM is firecracker"), "{text}");
    assert_eq!(host.running(), (0, 0));
    assert!(!node.run_dir(&"late".parse().unwrap()).exists());
}
