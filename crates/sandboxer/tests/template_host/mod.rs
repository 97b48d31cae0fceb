//! A host for tests of templates: its files are real, its VMM and agents are doubles.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use sandboxer::{
    daemon,
    error::PodError,
    front::Front,
    pod::pool::{Meminfo, Pool},
    pod::{self, DaemonState, PodHandle, spec::PodSpec},
    state::PodStatus,
    template::{Shape, TemplateKey},
};
use sandboxer_config::{Config, PoolConfig, StartPath};
use sandboxer_protocol::link::LinkKey;
use sandboxer_vmm_fake::FakeVmm;
use tempfile::TempDir;

use crate::fake_agent::FakeAgent;

pub const SHAPE: Shape = Shape { vcpus: 1, memory_mib: 128, nics: 0 };
/// Two more sizes.
pub const LARGER: Shape = Shape { memory_mib: 256, ..SHAPE };
pub const LARGEST: Shape = Shape { memory_mib: 512, ..SHAPE };
/// Longer than any test takes.
pub const LONG: Duration = Duration::from_secs(60);

/// A host with a kernel and an initramfs, whose daemon can be restarted.
pub struct Host {
    pub dir: TempDir,
    pub vmm: Arc<FakeVmm>,
    pub most: usize,
    pub most_bytes: u64,
    pub pool: usize,
    /// Written to by the next VM whose agent is connected.
    pub meddles_with: Arc<Mutex<Option<PathBuf>>>,
}

impl Host {
    pub fn new() -> Self {
        let agent = FakeAgent::default();
        let meddles_with = Arc::<Mutex<Option<PathBuf>>>::default();
        let meddles = meddles_with.clone();
        let boot = move |guest| {
            if let Some(path) = meddles.lock().unwrap().take() {
                fs::write(path, "was replaced meanwhile").unwrap();
            }
            agent.serve(guest);
        };
        let host = Self {
            dir: tempfile::tempdir().unwrap(),
            vmm: Arc::new(FakeVmm::new(boot)),
            most: 4,
            most_bytes: u64::MAX,
            pool: 0,
            meddles_with,
        };
        fs::write(host.path("kernel"), "a kernel").unwrap();
        fs::write(host.path("initramfs"), "an initramfs").unwrap();
        host
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Starts a daemon's node.
    pub fn node(&self) -> Arc<DaemonState> {
        let mut config =
            Config { run_dir: self.path("run"), state_dir: self.path("state"), ..Config::default() };
        config.vm.kernel = self.path("kernel");
        config.vm.initramfs = self.path("initramfs");
        config.vm.default_vcpus = SHAPE.vcpus;
        config.vm.default_memory_mib = SHAPE.memory_mib;
        config.templates.most = self.most;
        config.templates.most_bytes = self.most_bytes;
        config.vm.idle_cgroup.clear();
        config.pool = PoolConfig { min: self.pool, max: self.pool };
        let node = Arc::into_inner(daemon::node(config, self.vmm.clone(), Front::none()).unwrap()).unwrap();
        // These tests' pods have no network namespace, and so no interface.
        Arc::new(DaemonState { pool: Pool::new(node.config.pool, SHAPE, Meminfo::of_host()), ..node })
    }

    pub fn templates(&self) -> Vec<PathBuf> {
        fs::read_dir(self.path("state/templates")).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    pub fn template(&self, key: &TemplateKey) -> PathBuf {
        self.path("state/templates").join(key.to_string())
    }

    /// Asserts that exactly these are on disk.
    pub fn assert_stored(&self, keys: &[&TemplateKey]) {
        let (mut left, mut expected) =
            (self.templates(), keys.iter().map(|key| self.template(key)).collect::<Vec<_>>());
        left.sort();
        expected.sort();
        assert_eq!(left, expected);
    }

    /// Returns the size of a template's files on disk, bytes.
    pub fn taken(&self, key: &TemplateKey) -> u64 {
        fs::read_dir(self.template(key))
            .unwrap()
            .map(|file| file.unwrap().metadata().unwrap().blocks() * 512)
            .sum()
    }
}

/// The captured log.
#[derive(Clone, Default)]
pub struct Log(pub Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Returns how many lines contain `words`.
    pub fn lines(&self, words: &str) -> usize {
        let log = self.0.lock().unwrap();
        String::from_utf8_lossy(&log).lines().filter(|line| line.contains(words)).count()
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Lets time pass, for templates only.
pub async fn later(by: Duration) {
    tokio::time::pause();
    tokio::time::advance(by).await;
    tokio::time::resume();
}

pub async fn started(node: &Arc<DaemonState>, id: &str) -> PodHandle {
    started_at_best(node, id, StartPath::Pool).await
}

pub async fn started_at_best(node: &Arc<DaemonState>, id: &str, start_path: StartPath) -> PodHandle {
    let pod = spawned(node, id, start_path);
    pod.start().await.unwrap();
    pod
}

pub async fn try_started(node: &Arc<DaemonState>, id: &str) -> Result<(), PodError> {
    spawned(node, id, StartPath::Pool).start().await.map(drop)
}

pub fn spawned(node: &Arc<DaemonState>, id: &str, start_path: StartPath) -> PodHandle {
    let spec = PodSpec { start_path, ..PodSpec::plain(id.parse().unwrap(), SHAPE.vcpus, SHAPE.memory_mib) };
    let spawn = || {
        pod::spawn(node.clone(), spec.clone(), LinkKey::random(), PodStatus::created(1), Default::default())
    };
    node.registry.insert(&spec.id.clone(), spawn).unwrap()
}

pub fn missed(node: &DaemonState, start_path: StartPath, reason: &'static str) -> u64 {
    node.start_paths.counts().missed.get(&(start_path, reason)).copied().unwrap_or(0)
}

/// Waits until the pool has this many VMs.
pub async fn filled(node: &DaemonState, count: usize) {
    let full = async {
        while node.pool.list().len() != count {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONG, full).await.expect("the pool gets its size");
}
