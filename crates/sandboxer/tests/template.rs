//! Templates and the pool, with doubles for the VMM and the agent: what is on disk is real.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that can't go on fails where it stands")]

mod fake_agent;

use std::{
    fs,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use fake_agent::FakeAgent;
use sandboxer::{
    config::{Config, PoolConfig, Way},
    daemon,
    front::Front,
    pod::{self, Node, PodHandle, spec::PodSpec, state::PodStatus},
    pool::{Meminfo, Pool},
    template::{Shape, Template, TemplateError},
    vmm::fake::{FakeVmm, Fault},
};
use sandboxer_protocol::link::LinkKey;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

const SHAPE: Shape = Shape { vcpus: 1, memory_mib: 128, nics: 0 };
/// Longer than any test takes.
const LONG: Duration = Duration::from_secs(60);

/// A host with a kernel and an initramfs, whose daemon can be restarted.
struct Host {
    dir: TempDir,
    vmm: Arc<FakeVmm>,
    most: usize,
    pool: usize,
}

impl Host {
    fn new() -> Self {
        let agent = FakeAgent::default();
        let host = Self {
            dir: tempfile::tempdir().unwrap(),
            vmm: Arc::new(FakeVmm::new(move |guest| agent.serve(guest))),
            most: 4,
            pool: 0,
        };
        fs::write(host.path("kernel"), "a kernel").unwrap();
        fs::write(host.path("initramfs"), "an initramfs").unwrap();
        host
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// What a daemon has that starts now.
    fn node(&self) -> Arc<Node> {
        let mut config =
            Config { run_dir: self.path("run"), state_dir: self.path("state"), ..Config::default() };
        config.vm.kernel = self.path("kernel");
        config.vm.initramfs = self.path("initramfs");
        config.vm.default_memory_mib = SHAPE.memory_mib;
        config.templates.most = self.most;
        config.pool = PoolConfig { min: self.pool, max: self.pool };
        let node = Arc::into_inner(daemon::node(config, self.vmm.clone(), Front::none()).unwrap()).unwrap();
        // These tests' pods have no network namespace, and so no interface.
        Arc::new(Node { pool: Pool::new(node.config.pool, SHAPE, Meminfo::of_host()), ..node })
    }

    fn templates(&self) -> Vec<PathBuf> {
        fs::read_dir(self.path("state/templates")).unwrap().map(|entry| entry.unwrap().path()).collect()
    }
}

async fn started(node: &Arc<Node>, id: &str) -> PodHandle {
    started_at_best(node, id, Way::Pool).await
}

async fn started_at_best(node: &Arc<Node>, id: &str, way: Way) -> PodHandle {
    let spec = PodSpec { way, ..PodSpec::plain(id.parse().unwrap(), SHAPE.vcpus, SHAPE.memory_mib) };
    let of = node.clone();
    let spawn = || pod::spawn(of, spec.clone(), LinkKey::random(), PodStatus::created(1), Default::default());
    let pod = node.registry.insert(&spec.id.clone(), spawn).unwrap();
    pod.start().await.unwrap();
    pod
}

fn missed(node: &Node, way: Way, reason: &'static str) -> u64 {
    node.ways.counts().missed.get(&(way, reason)).copied().unwrap_or(0)
}

/// Waits until the pool has so many machines.
async fn filled(node: &Node, count: usize) {
    let full = async {
        while node.pool.list().len() != count {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONG, full).await.expect("the pool gets its size");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_pod_boots_and_the_next_is_a_copy_with_a_key_of_its_own() {
    let host = Host::new();
    let node = host.node();
    let first = started(&node, "first").await;
    assert_eq!(first.status().way, Some(Way::Boot));
    assert_eq!((missed(&node, Way::Pool, "off"), missed(&node, Way::Template, "preparing")), (1, 1));

    let template = node.templates.prepare(SHAPE).await.unwrap();
    let second = started(&node, "second").await;
    assert_eq!(second.status().way, Some(Way::Template));
    let cold = started_at_best(&node, "cold", Way::Boot).await;
    assert_eq!(cold.status().way, Some(Way::Boot));

    // The copy answers to its own key after a restart, as only it does.
    let records: Vec<_> = node.journal.records().unwrap().into_iter().map(Result::unwrap).collect();
    let second = records.into_iter().find(|record| record.spec.id.as_str() == "second").unwrap();
    assert_ne!(second.link_key, template.link_key);
    let later = host.node();
    assert_eq!(pod::recover::recover(&later, pod::recover::Records::read(&later).unwrap()).await.alive, 3);
    assert!(host.path("run/pods/second").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_outlives_its_daemon_and_no_other_is_made() {
    let host = Host::new();
    let made = host.node().templates.prepare(SHAPE).await.unwrap();
    let found = host.node().templates.prepare(SHAPE).await.unwrap();
    assert_eq!((&found.key, &found.link_key), (&made.key, &made.link_key), "it was made anew");
    assert_eq!(host.templates().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_is_wrong_with_a_template_is_named_and_it_is_made_anew() {
    type Damage = fn(&Path);
    let damages: [(&str, Damage); 6] = [
        ("memory\" is damaged: its checksum is another", |dir| flip_bit(&dir.join("memory"))),
        ("state\" is damaged: its checksum is another", |dir| flip_bit(&dir.join("state"))),
        ("memory\" is damaged: it has 7 bytes", |dir| truncate(&dir.join("memory"), 7)),
        ("memory\" of a template", |dir| fs::remove_file(dir.join("memory")).unwrap()),
        ("template.json\" is damaged", |dir| truncate(&dir.join("template.json"), 40)),
        ("template.json\" is damaged", |dir| {
            replace(&dir.join("template.json"), "\"vcpus\":1", "\"vcpus\":2")
        }),
    ];
    let host = Host::new();
    for (says, damage) in damages {
        let before = host.node().templates.prepare(SHAPE).await.unwrap();
        let [dir] = host.templates().try_into().unwrap();
        damage(&dir);
        let node = host.node();
        let error = verify(&node, &before).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
        let after = node.templates.prepare(SHAPE).await.unwrap();
        assert_eq!(after.key, before.key);
        assert_ne!(after.link_key, before.link_key, "{says}: the damaged one was used");
        verify(&node, &after).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_of_another_name_is_a_foreign_one() {
    let host = Host::new();
    let made = host.node().templates.prepare(SHAPE).await.unwrap();
    let [dir] = host.templates().try_into().unwrap();
    // By its name, it is what this host needs next; by its content, it is what it needed before.
    fs::write(host.path("initramfs"), "another initramfs").unwrap();
    let node = host.node();
    let next = node.templates.prepare(SHAPE).await.unwrap();
    let next_dir = dir.with_file_name(next.key.to_string());
    fs::remove_dir_all(&next_dir).unwrap();
    fs::rename(&dir, &next_dir).unwrap();
    let error = verify(&node, &next).unwrap_err();
    assert!(matches!(&error, TemplateError::Foreign { key, .. } if *key == made.key), "{error}");
    let rebuilt = host.node().templates.prepare(SHAPE).await.unwrap();
    assert_ne!(rebuilt.link_key, made.link_key, "the foreign one was used");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_template_depends_on_is_looked_at_before_each_start() {
    let host = Host::new();
    let node = host.node();
    let old = node.templates.prepare(SHAPE).await.unwrap();
    assert_eq!(started(&node, "copy").await.status().way, Some(Way::Template));
    fs::write(host.path("initramfs"), "an upgraded initramfs").unwrap();
    assert_eq!(started(&node, "after-upgrade").await.status().way, Some(Way::Boot), "an old agent runs");
    let new = node.templates.prepare(SHAPE).await.unwrap();
    assert_ne!(new.key, old.key);
    assert_eq!(started(&node, "copy-of-new").await.status().way, Some(Way::Template));

    host.vmm.upgrade("1");
    let node = host.node();
    assert_ne!(node.templates.prepare(SHAPE).await.unwrap().key, new.key, "it is of another version's VMM");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vmm_that_refuses_templates_costs_time_and_no_pod() {
    let host = Host::new();
    let node = host.node();
    node.templates.prepare(SHAPE).await.unwrap();
    host.vmm.inject(Fault::RefusesTemplates);
    let pod = started(&node, "pod").await;
    assert_eq!(pod.status().way, Some(Way::Boot));
    assert_eq!(missed(&node, Way::Template, "failed"), 1);
    pod.remove().await.unwrap();
    assert!(!host.path("run/pods/pod").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_least_recently_used_template_goes_first() {
    let host = Host { most: 2, ..Host::new() };
    let node = host.node();
    let mut keys = Vec::new();
    for memory_mib in [128, 256, 512] {
        let shape = Shape { memory_mib, ..SHAPE };
        keys.push(node.templates.prepare(shape).await.unwrap().key.clone());
        if memory_mib == 256 {
            // Read again, by another daemon: from now on the second is the older one.
            host.node().templates.prepare(SHAPE).await.unwrap();
        }
    }
    let mut left: Vec<_> = node.templates.list().unwrap().into_iter().map(|view| view.key).collect();
    left.sort();
    let mut expected = [keys[0].clone(), keys[2].clone()];
    expected.sort();
    assert_eq!(left, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_fills_gives_and_is_filled_again() {
    let host = Host { pool: 2, ..Host::new() };
    let node = host.node();
    let of = node.clone();
    let shutdown = CancellationToken::new();
    let until = shutdown.clone();
    let filling = tokio::spawn(async move { of.pool.keep_filled(&of, &until).await });
    filled(&node, 2).await;
    let waiting = host.vmm.running();
    let pod = started(&node, "claims").await;
    assert_eq!(pod.status().way, Some(Way::Pool));
    assert_eq!(
        host.vmm.running().iter().filter(|id| waiting.contains(id)).count(),
        1,
        "no machine was taken"
    );
    assert!(host.path("run/pods/claims").exists());
    filled(&node, 2).await;

    // One that died while it waited is no pod's concern.
    let doomed = host.vmm.running().into_iter().find(|id| id.as_str().starts_with("pool-")).unwrap();
    host.vmm.crash(&doomed);
    for id in ["one", "two", "three"] {
        started(&node, id).await;
    }
    filled(&node, 2).await;

    // What a stale template was made of waits no longer.
    let before = host.vmm.running();
    fs::write(host.path("initramfs"), "an upgraded initramfs").unwrap();
    assert_ne!(started(&node, "after-upgrade").await.status().way, Some(Way::Pool), "an old agent runs");
    filled(&node, 2).await;
    let renewed = || {
        node.pool.list().len() == 2
            && !host.vmm.running().iter().any(|id| is_pooled(id) && before.contains(id))
    };
    let all = async {
        while !renewed() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONG, all).await.expect("machines of the old template are replaced");

    // One more is asked for, and the end comes while it is made.
    started(&node, "last").await;
    shutdown.cancel();
    filling.await.unwrap();
    node.pool.drain().await;
    assert!(host.vmm.running().iter().all(|id| !is_pooled(id)), "a machine still waits");
    let left: Vec<_> = fs::read_dir(host.path("run/pool")).unwrap().collect();
    assert!(left.is_empty(), "left behind: {left:?}");
}

fn is_pooled(id: &sandboxer_protocol::id::SandboxId) -> bool {
    id.as_str().starts_with("pool-")
}

fn verify(node: &Node, template: &Template) -> Result<(), TemplateError> {
    node.templates.verify(&template.key)
}

fn flip_bit(path: &Path) {
    let file = fs::File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 9).unwrap();
    file.write_all_at(&[byte[0] ^ 1], 9).unwrap();
}

fn truncate(path: &Path, bytes: u64) {
    fs::File::options().write(true).open(path).unwrap().set_len(bytes).unwrap();
}

fn replace(path: &Path, from: &str, to: &str) {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.contains(from), "{text}");
    fs::write(path, text.replacen(from, to, 1)).unwrap();
}
