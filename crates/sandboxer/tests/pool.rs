//! How many VMs wait in the pool, with doubles for the VMM, the agent and the host's memory.
//!
//! VMs are made while the clock runs, since a program of the host takes part; otherwise the clock is moved
//! forward in jumps.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails where it stands")]

mod fake_agent;

use std::{fs, path::PathBuf, sync::Arc, time::Duration};

use fake_agent::FakeAgent;
use sandboxer::{
    daemon,
    front::Front,
    pod::{
        self, DaemonState, PodHandle,
        pool::{self, Meminfo, Pool},
        spec::PodSpec,
    },
    state::PodStatus,
    template::Shape,
};
use sandboxer_config::{Config, PoolConfig, StartPath};
use sandboxer_protocol::link::LinkKey;
use sandboxer_vmm_fake::{FakeVmm, Fault};
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

const USUAL: Shape = Shape { vcpus: 1, memory_mib: 128, nics: 0 };
const LARGE: Shape = Shape { vcpus: 1, memory_mib: 512, nics: 0 };
/// Interval at which the pool reads the time.
const ROUND: Duration = Duration::from_secs(5);
/// Longer than any test takes.
const LONG: Duration = Duration::from_secs(3600);

/// A daemon's pool that is kept filled.
struct PoolTest {
    node: Arc<DaemonState>,
    vmm: Arc<FakeVmm>,
    meminfo: PathBuf,
    shutdown: CancellationToken,
    filling: tokio::task::JoinHandle<()>,
    dir: TempDir,
}

impl PoolTest {
    fn new(min: usize, max: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(path("kernel"), "a kernel").unwrap();
        fs::write(path("initramfs"), "an initramfs").unwrap();
        let mut config = Config { run_dir: path("run"), state_dir: path("state"), ..Config::default() };
        config.vm.kernel = path("kernel");
        config.vm.initramfs = path("initramfs");
        // The clock may jump while a VM is made.
        [config.vm.boot_timeout, config.vm.call_timeout, config.vm.agent_timeout] = [LONG; 3];
        config.vm.idle_cgroup.clear();
        config.pool = PoolConfig { min, max };
        let meminfo = path("meminfo");
        let agent = FakeAgent::default();
        let vmm = Arc::new(FakeVmm::new(move |guest| agent.serve(guest)));
        let node = Arc::into_inner(daemon::node(config, vmm.clone(), Front::none()).unwrap()).unwrap();
        let pool = Pool::new(node.config.pool, USUAL, Meminfo::at(&meminfo));
        let node = Arc::new(DaemonState { pool, ..node });
        let shutdown = CancellationToken::new();
        let (daemon, until) = (node.clone(), shutdown.clone());
        let filling = tokio::spawn(async move { daemon.pool.keep_filled(&daemon, &until).await });
        let test = Self { node, vmm, meminfo, shutdown, filling, dir };
        test.has_memory(1 << 20);
        test
    }

    /// Sets the memory of the host beyond the reserve, MiB; `None`: there is none.
    fn has_memory(&self, spare_mib: impl Into<Option<u64>>) {
        let available = spare_mib.into().map_or((1 << 20) - 1, |mib: u64| (1 << 20) + (mib << 10));
        let text = format!("MemTotal: {} kB\nMemAvailable: {available} kB\n", 8 << 20);
        // The pool may read it at this moment.
        fs::write(self.meminfo.with_extension("new"), text).unwrap();
        fs::rename(self.meminfo.with_extension("new"), &self.meminfo).unwrap();
    }

    /// Starts and removes this many pods of a size. Returns how many VMs they took from the pool.
    async fn arrive(&self, shape: Shape, times: usize) -> usize {
        let claim = |_| self.node.pool.claim(shape, None, &self.node.templates).ok();
        let claimed: Vec<_> = (0..times).filter_map(claim).collect();
        for warm in &claimed {
            pool::end(warm.vm.as_ref()).await;
        }
        claimed.len()
    }

    fn pod(&self, id: &str) -> PodHandle {
        let spec = PodSpec { start_path: StartPath::Pool, ..PodSpec::plain(id.parse().unwrap(), 1, 128) };
        let (node, key, status) = (self.node.clone(), LinkKey::random(), PodStatus::created(1));
        let id = spec.id.clone();
        self.node.registry.insert(&id, || pod::spawn(node, spec, key, status, Default::default())).unwrap()
    }

    fn waiting(&self, shape: Shape) -> usize {
        self.node.pool.list().iter().filter(|view| view.shape == shape).count()
    }

    /// Waits until this many VMs of each size wait. There are never more than the pool may have.
    async fn has(&self, usual: usize, large: usize) {
        let there = async {
            while (self.waiting(USUAL), self.waiting(LARGE)) != (usual, large) {
                assert!(self.node.pool.list().len() <= self.node.config.pool.max, "more than the bound");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let found = tokio::time::timeout(Duration::from_secs(60), there).await;
        found.unwrap_or_else(|_| {
            let found = (self.waiting(USUAL), self.waiting(LARGE));
            panic!("{found:?} instead of {usual} and {large}")
        });
    }

    /// Asserts that this many VMs of each size wait, also after the pool has acted on its last check.
    async fn stays(&self, usual: usize, large: usize, why: &str) {
        for _ in 0..60 {
            assert_eq!((self.waiting(USUAL), self.waiting(LARGE)), (usual, large), "{why}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits for what one check of the pool causes, but not until its next one.
    async fn soon(&self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let there = async {
            while !is_so(self) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let found = tokio::time::timeout(ROUND - Duration::from_secs(1), there).await;
        found.unwrap_or_else(|_| panic!("{what}: {} wait", self.waiting(USUAL)));
    }

    /// Moves the clock, round by round; the pool has time to act after each.
    async fn rounds(&self, rounds: u32) {
        for _ in 0..rounds {
            tokio::time::pause();
            tokio::time::advance(ROUND).await;
            tokio::time::resume();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Like [`Kept::has`], after as many rounds as it takes.
    async fn comes_to_have(&self, usual: usize, large: usize) {
        for _ in 0..200 {
            if (self.waiting(USUAL), self.waiting(LARGE)) == (usual, large) {
                break;
            }
            self.rounds(1).await;
        }
        self.has(usual, large).await;
    }

    /// Shuts down: nothing remains.
    async fn ends(mut self) {
        self.shutdown.cancel();
        (&mut self.filling).await.unwrap();
        self.node.pool.drain().await;
        assert_eq!(self.waiting(USUAL) + self.waiting(LARGE), 0);
        let left: Vec<_> = fs::read_dir(self.dir.path().join("run/pool")).unwrap().collect();
        assert!(left.is_empty(), "left behind: {left:?}");
    }
}

#[tokio::test]
async fn arrivals_grow_the_pool_and_quiet_shrinks_it() {
    let test = PoolTest::new(1, 3);
    test.has(1, 0).await;
    assert_eq!(test.arrive(USUAL, 2).await, 1, "one waited");
    test.has(2, 0).await;
    assert_eq!(test.arrive(USUAL, 4).await, 2, "two waited");
    test.has(3, 0).await;
    // Most of a minute, and then the rest.
    test.rounds(10).await;
    test.stays(3, 0, "it shrank too early").await;
    test.rounds(4).await;
    test.has(1, 0).await;
    test.ends().await;
}

#[tokio::test]
async fn a_pod_that_no_vm_waits_for_is_counted_by_what_makes_it_another_kind() {
    let test = PoolTest::new(1, 1);
    test.has(1, 0).await;
    // Pools of other usual kinds, in which nothing waits.
    let reason = |usual: Shape| {
        let pool = Pool::new(PoolConfig { min: 1, max: 1 }, usual, Meminfo::at(&test.meminfo));
        pool.claim(USUAL, None, &test.node.templates).unwrap_err()
    };
    assert_eq!(reason(USUAL), "empty");
    assert_eq!(reason(LARGE), "other-size");
    // A pod without a network is no other kind: it waits for the template of VMs with a card.
    assert_eq!(reason(Shape { nics: 1, ..USUAL }), "preparing");
    test.ends().await;
}

#[tokio::test]
async fn sizes_share_one_bound() {
    let test = PoolTest::new(0, 4);
    test.rounds(2).await;
    test.stays(0, 0, "nobody has asked for any").await;
    test.arrive(LARGE, 9).await;
    test.has(0, 4).await;
    test.arrive(USUAL, 1).await;
    test.comes_to_have(1, 3).await;
    test.arrive(USUAL, 8).await;
    test.comes_to_have(2, 2).await;
    test.rounds(13).await;
    test.has(0, 0).await;
    test.ends().await;
}

#[tokio::test]
async fn starts_without_a_pause_hold_up_neither_filling_nor_trimming() {
    let test = PoolTest::new(2, 2);
    test.has(2, 0).await;
    let node = test.node.clone();
    let _start = node.admission.urgent();
    test.vmm.running().iter().for_each(|vm| assert!(test.vmm.crash(vm)));
    test.rounds(1).await;
    test.soon("dead VMs go", |test| test.waiting(USUAL) < 2).await;
    test.comes_to_have(2, 0).await;
    test.arrive(USUAL, 2).await;
    test.comes_to_have(2, 0).await;
    test.ends().await;
}

#[tokio::test]
async fn a_start_that_is_cancelled_when_it_claims_leaves_no_vm() {
    let test = PoolTest::new(2, 2);
    for name in ["a", "b", "c", "d"] {
        test.comes_to_have(2, 0).await;
        let pod = test.pod(name);
        let (started, stopped) = tokio::join!(pod.start(), pod.stop());
        assert!(started.is_err(), "the stop came too late to test anything");
        stopped.unwrap();
        pod.remove().await.unwrap();
    }
    test.comes_to_have(2, 0).await;
    assert_eq!(test.vmm.running().len(), 2, "a VM belongs neither to a pod nor to the pool");
    test.ends().await;
}

#[tokio::test]
async fn a_size_that_fails_holds_up_no_other_and_is_tried_again_in_time() {
    let test = PoolTest::new(0, 4);
    test.vmm.inject(Fault::FailsToBootOver(USUAL.memory_mib));
    test.arrive(LARGE, 3).await;
    for demand in 1..=2 {
        test.arrive(USUAL, 1).await;
        test.has(demand, 0).await;
    }
    // A claim does not cause a retry.
    test.vmm.inject(Fault::None);
    test.arrive(LARGE, 1).await;
    assert_eq!(test.arrive(USUAL, 2).await, 2);
    test.has(2, 0).await;
    test.rounds(5).await;
    test.stays(2, 0, "it was tried again too early").await;
    test.rounds(3).await;
    test.has(2, 2).await;
    test.ends().await;
}

#[tokio::test]
async fn the_pool_gives_way_while_memory_is_short_and_stays_small_until_there_is_enough() {
    let test = PoolTest::new(3, 4);
    test.has(3, 0).await;
    // There is no memory for one more, but enough for those that wait.
    test.has_memory(USUAL.memory_mib - 1);
    assert_eq!(test.arrive(USUAL, 1).await, 1);
    test.rounds(2).await;
    test.stays(2, 0, "there was no room for more, and no reason to have fewer").await;
    test.has_memory(None);
    test.rounds(1).await;
    test.soon("one look is enough to end all that is too many", |test| test.waiting(USUAL) == 0).await;
    assert_eq!(test.arrive(USUAL, 1).await, 0);
    test.rounds(3).await;
    test.stays(0, 0, "memory is short").await;
    test.has_memory(LARGE.memory_mib - 1);
    test.arrive(LARGE, 9).await;
    test.comes_to_have(3, 0).await;
    // Memory may get short when a pod starts: the pool reacts at once.
    test.has_memory(None);
    assert_eq!(test.arrive(USUAL, 1).await, 1);
    test.has(0, 0).await;
    test.ends().await;
}
