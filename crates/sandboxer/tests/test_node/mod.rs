//! A node without a VMM, for tests of pods' tasks.

#![allow(dead_code, reason = "several test programs use different parts of it")]

use std::{fs, path::Path, sync::Arc};

use nix::{sys::stat::Mode, unistd::mkfifo};
use sandboxer::{
    daemon,
    front::Front,
    pod::{
        self, DaemonState, PodHandle,
        container::{NewContainer, Phase, StdioPaths},
        spec::PodSpec,
    },
    state::PodStatus,
};
use sandboxer_config::Config;
use sandboxer_host::rootfs::Mount;
use sandboxer_protocol::{
    id::{ContainerId, Id},
    link::LinkKey,
};
use sandboxer_vmm_fake::FakeVmm;
use tempfile::TempDir;

/// A node whose VMs run nothing.
pub struct TestNode {
    pub node: Arc<DaemonState>,
    pub vmm: Arc<FakeVmm>,
    pub dir: TempDir,
    config: Config,
    fronts: Box<dyn Fn() -> Arc<Front> + Send + Sync>,
}

impl TestNode {
    /// Creates a node in a directory of its own, with the default configuration as changed by `configure`.
    pub fn with(vmm: Arc<FakeVmm>, configure: impl FnOnce(&mut Config)) -> Self {
        Self::behind(vmm, configure, Front::none)
    }

    /// Creates a node whose daemons are behind what `fronts` returns.
    pub fn behind(
        vmm: Arc<FakeVmm>,
        configure: impl FnOnce(&mut Config),
        fronts: impl Fn() -> Arc<Front> + Send + Sync + 'static,
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (run_dir, state_dir) = (dir.path().join("run"), dir.path().join("state"));
        let mut config = Config { run_dir, state_dir, ..Config::default() };
        config.vm.idle_cgroup.clear();
        configure(&mut config);
        let node = daemon::node(config.clone(), vmm.clone(), fronts()).unwrap();
        Self { node, vmm, dir, config, fronts: Box::new(fronts) }
    }

    /// Returns the node of a daemon that was killed and started again.
    pub fn restarted(&self) -> Arc<DaemonState> {
        daemon::node(self.config.clone(), self.vmm.clone(), (self.fronts)()).unwrap()
    }

    /// Returns the same after the tasks of these pods of the earlier daemon have ended; there must be no other handles
    /// to them.
    pub fn killed(&self, pods: impl IntoIterator<Item = PodHandle>) -> Arc<DaemonState> {
        pods.into_iter().for_each(|pod| self.node.registry.remove(pod.id()));
        self.restarted()
    }

    pub fn pod(&self, id: &str) -> PodHandle {
        self.pod_of(PodSpec::plain(id.parse().unwrap(), 1, 128))
    }

    pub fn pod_of(&self, spec: PodSpec) -> PodHandle {
        let status = PodStatus::created(1);
        let node = self.node.clone();
        let key = LinkKey::random();
        self.node
            .registry
            .insert(&spec.id.clone(), || pod::spawn(node, spec, key, status, Default::default()))
            .unwrap()
    }

    /// Returns a container whose bundle and FIFOs exist, as containerd creates them.
    pub fn container(&self, id: &str, program: &str) -> NewContainer {
        let bundle = self.dir.path().join("bundles").join(id);
        let rootfs = self.dir.path().join("rootfs");
        fs::create_dir_all(&bundle).unwrap();
        // Only once: another container's disk may be built from it at this moment.
        if !rootfs.exists() {
            fs::create_dir_all(&rootfs).unwrap();
            fs::write(rootfs.join("file"), "content").unwrap();
        }
        let spec = serde_json::json!({
            "ociVersion": "1.1.0",
            "root": {"path": "rootfs"},
            "process": {"user": {"uid": 0, "gid": 0}, "args": [program], "cwd": "/"},
            "linux": {"namespaces": [{"type": "pid"}, {"type": "mount"}]}
        });
        fs::write(bundle.join("config.json"), spec.to_string()).unwrap();
        let fifo = |name: &str| {
            let path = bundle.join(name);
            let _ = mkfifo(&path, Mode::S_IRWXU);
            path
        };
        NewContainer {
            id: id.parse().unwrap(),
            root: None,
            stdio: StdioPaths {
                stdin: Default::default(),
                stdout: fifo("stdout"),
                stderr: fifo("stderr"),
                terminal: false,
            },
            beside: Vec::new(),
            mounts: vec![Mount {
                fstype: "bind".into(),
                source: rootfs.to_string_lossy().into_owned(),
                options: vec!["rbind".into(), "rw".into()],
            }],
            bundle,
        }
    }
}

/// Gives the container's image a volume at `/data`, as containerd does.
pub fn with_image_volume(container: NewContainer, dir: &Path) -> NewContainer {
    let volume = dir.join("containers").join(container.id.as_str()).join("volumes/0a");
    fs::create_dir_all(&volume).unwrap();
    with_bind(container, "/data", &volume)
}

/// Makes `dir` of the host appear in the container at `/host`, live.
pub fn with_share(container: NewContainer, dir: &Path) -> NewContainer {
    with_bind(container, "/host", dir)
}

fn with_bind(container: NewContainer, at: &str, dir: &Path) -> NewContainer {
    find_share_server();
    let path = container.bundle.join("config.json");
    let mut spec: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    spec["mounts"] = serde_json::json!([
        {"destination": at, "type": "bind", "source": dir, "options": ["rbind", "rw"]}
    ]);
    fs::write(&path, spec.to_string()).unwrap();
    container
}

/// The daemon starts the share server from beside its own program: here, from beside this test's.
pub fn find_share_server() {
    const PROGRAM: &str = "sandboxer-share";
    let own = std::env::current_exe().unwrap();
    let beside = own.with_file_name(PROGRAM);
    if beside.is_file() {
        return;
    }
    let target = own.parent().and_then(Path::parent).and_then(Path::parent).unwrap();
    let built = ["debug", "quick", "release"].map(|profile| target.join(profile).join(PROGRAM));
    let built = built.iter().find(|path| path.is_file());
    let built = built.unwrap_or_else(|| panic!("{PROGRAM} is missing: run `make build`"));
    let _ = std::os::unix::fs::symlink(built, beside);
}

/// Returns a reader that keeps its end of a FIFO open, as containerd does.
pub fn reader(path: &Path) -> tokio::net::unix::pipe::Receiver {
    tokio::net::unix::pipe::OpenOptions::new().open_receiver(path).unwrap()
}

pub fn id(text: &str) -> ContainerId {
    text.parse::<Id>().unwrap()
}

pub async fn phase(pod: &PodHandle, container: &str) -> Phase {
    pod.process(id(container), None).await.unwrap().phase.borrow().clone()
}
