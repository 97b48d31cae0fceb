//! The rehearsal: a guest gets an identity and runs a container before it has a pod.
//!
//! Whatever a guest does for the first time is slow: it reads its program's pages, fills its caches and takes memory
//! for them; under emulation the code must be translated first; and every restored guest gets private copies of the
//! pages it writes. Measured under emulation: a guest's first container takes five times as long as its second. So the
//! rehearsal runs the first one: once in the guest of a template, for all its copies, and again in each copy that waits
//! in the pool. It uses the same code path as every container, with a spec like containerd's, since only repeated work
//! gets faster. Its container prints one line and leaves nothing.

mod program;

use std::{
    fs, io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use async_trait::async_trait;
use nix::{errno::Errno, sys::stat::Mode, unistd::mkfifo};
use sandboxer_base::clock::now_ns;
use sandboxer_guest::Agent;
use sandboxer_host::{
    rootfs::{Mount, RootfsError, RootfsStore},
    volume::VolumeStore,
};
use sandboxer_protocol::{
    agent::{self as wire, ConfigurePodRequest},
    id::{ContainerId, SandboxId},
};
use sandboxer_vmm::{DiskLimits, DiskRecord, Vm};
use serde_json::json;
use tokio::sync::OnceCell;
use tokio_util::sync::CancellationToken;

use super::spare;
use crate::{
    error::PodError,
    front::Front,
    pod::{
        container::{
            NewContainer, StdioPaths,
            io::Subject,
            spec as container_spec,
            start::{self, CreateContext},
        },
        running_vm::RunningVm,
        spec::PodSpec,
        stages::Stages,
        volumes::Volumes,
    },
    share::Shares,
    template::{Preparation, ScratchDisks, template_id},
};

const PROGRAM: &str = "rehearsal";
const STDOUT: &str = "stdout";
const STDERR: &str = "stderr";

/// The rehearsal's container, as a bundle and an image on the host.
#[derive(Debug)]
pub struct Rehearsal {
    state_dir: PathBuf,
    /// The container's bundle and image, created at the first rehearsal.
    container: OnceCell<(PathBuf, Mount)>,
    rootfs: Arc<RootfsStore>,
    volumes: Arc<VolumeStore>,
    /// Limits of each disk.
    disk_limits: DiskLimits,
}

impl Rehearsal {
    /// Creates a rehearsal whose container is below the state directory.
    pub fn new(
        state_dir: &Path,
        rootfs: Arc<RootfsStore>,
        volumes: Arc<VolumeStore>,
        disk_limits: DiskLimits,
    ) -> Self {
        let (state_dir, container) = (state_dir.to_owned(), OnceCell::new());
        Self { state_dir, container, rootfs, volumes, disk_limits }
    }

    /// Returns the container's bundle and image; creates them at the first call.
    async fn container(&self, pod: &SandboxId) -> Result<&(PathBuf, Mount), PodError> {
        let made = self.container.get_or_try_init(async || {
            let state_dir = self.state_dir.clone();
            tokio::task::spawn_blocking(move || container(&state_dir)).await.map_err(io::Error::other)?
        });
        made.await.map_err(|source| PodError::Path {
            pod: pod.clone(),
            action: "prepare the rehearsal in",
            path: self.state_dir.clone(),
            source,
        })
    }

    /// Gives the guest of `vm` an identity with `nics` network interfaces, runs the container, which uses up `spare`,
    /// and provides another spare disk, which it returns.
    pub async fn run(
        &self,
        id: &SandboxId,
        vm: &Arc<dyn Vm>,
        agent: &Agent,
        nics: u8,
        spare: Option<DiskRecord>,
    ) -> Result<Option<DiskRecord>, PodError> {
        agent.configure_pod(ConfigurePodRequest { interfaces: interfaces(nics), ..identity(id) }).await?;
        let live = RunningVm { vm: vm.clone(), agent: agent.clone(), disk_limits: self.disk_limits };
        self.run_container(id, &live, spare).await?;
        let spare = spare::plug(&self.rootfs, id, &live).await?;
        agent.configure_pod(identity(id)).await?;
        Ok(spare)
    }

    /// Creates the container in a VM, runs it and removes it.
    async fn run_container(
        &self,
        id: &SandboxId,
        live: &RunningVm,
        spare: Option<DiskRecord>,
    ) -> Result<(), PodError> {
        let container: ContainerId = id.clone();
        let pod = PodSpec::plain(id.clone(), 0, 0);
        let (bundle, image) = self.container(id).await?;
        let new = NewContainer {
            id: container.clone(),
            bundle: bundle.clone(),
            mounts: vec![image.clone()],
            root: None,
            stdio: StdioPaths {
                stdout: bundle.join(STDOUT),
                stderr: bundle.join(STDERR),
                ..StdioPaths::default()
            },
            beside: Vec::new(),
        };
        // Not counted among the times of pods.
        let stages = Stages::new(id.clone(), Arc::default());
        let helpers = &self.volumes.helpers;
        let shares = Shares::new(id.clone(), bundle.clone(), 0, None, helpers.clone());
        let volumes = Volumes::new(self.volumes.clone(), shares, None);
        // A second disk on the same controller would make the guest wait, now and at the pod's first container.
        volumes.spare.put(spare);
        let front = Front::none();
        let means = CreateContext {
            front: &front,
            rootfs: &self.rootfs,
            volumes: &volumes,
            stages: &stages,
            place: None,
            cancel: &CancellationToken::new(),
        };
        let guest_spec = container_spec::read(&pod, &new, helpers, false).await?;
        let created = start::create(&pod, live, means, &new, guest_spec).await?;
        let subject = Subject { container: container.clone(), exec: None };
        let (running, _) = created.io.run(&live.agent, &subject, false);
        start::release(live, &subject).await?;
        let exit = start::follow(live, &subject, 0, None, helpers).await;
        running.drained().await;
        if exit.code != 0 {
            let reason = format!("it ended with code {} {}", exit.code, exit.reason);
            return Err(PodError::Failed { subject: format!("rehearsal in {id}"), reason });
        }
        start::delete(live, &container, &start::serials(&created.disks)).await
    }
}

#[async_trait]
impl Preparation for Rehearsal {
    async fn scratch_disks(&self) -> Result<Option<ScratchDisks>, PodError> {
        let empty = self.rootfs.empty_scratch().await.map_err(|source| RootfsError::Scratch {
            pod: template_id(),
            container: template_id(),
            source: Box::new(source),
        })?;
        Ok(empty.map(|empty| ScratchDisks { empty, limits: self.disk_limits }))
    }

    async fn prepare(
        &self,
        id: &SandboxId,
        vm: &Arc<dyn Vm>,
        agent: &Agent,
        nics: u8,
    ) -> Result<(), PodError> {
        self.run(id, vm, agent, nics, None).await.map(drop)
    }
}

/// Creates the container's bundle and image below `state_dir`. Returns both.
fn container(state_dir: &Path) -> io::Result<(PathBuf, Mount)> {
    let bundle = state_dir.join("rehearsal");
    let within = |name: &str| bundle.join(name);
    for name in ["lower", "upper", "work"] {
        fs::create_dir_all(within(name))?;
    }
    let path = within("lower").join(PROGRAM);
    let program = program::elf();
    // Not rewritten if unchanged: the cached image is identified by the file's modification time.
    if fs::read(&path).ok().as_ref() != Some(&program) {
        let mut file = fs::File::options().write(true).create(true).truncate(true).mode(0o755).open(path)?;
        io::Write::write_all(&mut file, &program)?;
    }
    for stream in [STDOUT, STDERR] {
        match mkfifo(&within(stream), Mode::S_IRUSR | Mode::S_IWUSR) {
            Ok(()) | Err(Errno::EEXIST) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    let (config, spec) = (within("config.json"), spec().to_string());
    if fs::read(&config).ok().as_deref() != Some(spec.as_bytes()) {
        fs::write(config, spec)?;
    }
    let image = Mount {
        fstype: "overlay".into(),
        source: "overlay".into(),
        options: [("lowerdir", "lower"), ("upperdir", "upper"), ("workdir", "work")]
            .map(|(option, name)| format!("{option}={}", within(name).display()))
            .to_vec(),
    };
    Ok((bundle, image))
}

/// Returns an identity without network interfaces, so that the next configuration has nothing to clear.
fn identity(id: &SandboxId) -> ConfigurePodRequest {
    let entropy: [u8; 64] = rand::random();
    ConfigurePodRequest {
        hostname: id.to_string(),
        realtime_ns: now_ns(),
        entropy: entropy.to_vec(),
        ..Default::default()
    }
}

/// Returns a spec like containerd's, with every kind of entry, so that the guest has processed each once.
fn spec() -> serde_json::Value {
    let capabilities = [
        "CAP_CHOWN",
        "CAP_DAC_OVERRIDE",
        "CAP_FSETID",
        "CAP_FOWNER",
        "CAP_MKNOD",
        "CAP_NET_RAW",
        "CAP_SETGID",
        "CAP_SETUID",
        "CAP_SETFCAP",
        "CAP_SETPCAP",
        "CAP_NET_BIND_SERVICE",
        "CAP_SYS_CHROOT",
        "CAP_KILL",
        "CAP_AUDIT_WRITE",
    ];
    let mount = |at: &str, kind: &str, more: &[&str]| {
        let options = [&["nosuid", "noexec"], more].concat();
        json!({"destination": at, "type": kind, "source": kind, "options": options})
    };
    let pts = ["newinstance", "ptmxmode=0666", "mode=0620", "gid=5"];
    json!({
        "ociVersion": "1.3.0",
        "process": {
            "user": {"uid": 0, "gid": 0, "additionalGids": [0]},
            "args": [format!("/{PROGRAM}")],
            "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOSTNAME=rehearsal"],
            "cwd": "/",
            "oomScoreAdj": 1000,
            "capabilities": {"bounding": capabilities, "effective": capabilities, "permitted": capabilities},
        },
        "root": {"path": "rootfs"},
        "mounts": [
            mount("/proc", "proc", &["nodev"]),
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs",
             "options": ["nosuid", "strictatime", "mode=755", "size=65536k"]},
            mount("/dev/pts", "devpts", &pts),
            mount("/dev/mqueue", "mqueue", &["nodev"]),
            mount("/sys", "sysfs", &["nodev", "ro"]),
            mount("/sys/fs/cgroup", "cgroup", &["nodev", "relatime", "ro"]),
        ],
        "linux": {
            "resources": {
                "devices": [{"allow": false, "access": "rwm"}],
                "memory": {"limit": 128 << 20},
                "cpu": {"shares": 102, "quota": 100_000, "period": 100_000},
            },
            "namespaces": [{"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}, {"type": "network"}],
            "maskedPaths": ["/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
            "seccomp": {
                "defaultAction": "SCMP_ACT_ALLOW",
                "architectures": ["SCMP_ARCH_X86_64"],
                "syscalls": [
                    {"names": ["kexec_load", "reboot", "swapon"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1},
                    {"names": ["personality"], "action": "SCMP_ACT_ERRNO",
                     "args": [{"index": 0, "value": 0x20000, "op": "SCMP_CMP_EQ"}]},
                ],
            },
        },
    })
}

/// Returns interfaces like a pod's, for a VM with this many. They connect to nothing.
fn interfaces(nics: u8) -> Vec<wire::Interface> {
    // The documentation network, and its first address.
    let (network, router) = (vec![192, 0, 2, 0], vec![192, 0, 2, 1]);
    let interface = |nic: u8| wire::Interface {
        nic: nic.into(),
        name: format!("eth{nic}"),
        mac: vec![0x02, 0, 0, 0, 0, nic],
        mtu: 1400,
        addresses: vec![wire::Address {
            ip: vec![192, 0, 2, 2 + nic],
            prefix_length: 24,
            ..Default::default()
        }],
        routes: vec![
            wire::Route {
                destination: network.clone(),
                prefix_length: 24,
                scope: libc::RT_SCOPE_LINK.into(),
                ..Default::default()
            },
            wire::Route { destination: vec![0; 4], gateway: router.clone(), ..Default::default() },
        ],
        ..Default::default()
    };
    (0..nics).map(interface).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_prints_a_line_and_ends_well() {
        let dir = tempfile::tempdir().unwrap();
        let (bundle, _) = container(dir.path()).unwrap();
        let path = bundle.join("lower").join(PROGRAM);
        // Run from a copy made by another process: this one may have forked while it was open for writing.
        let copy = dir.path().join("program");
        assert!(std::process::Command::new("cp").args([&path, &copy]).status().unwrap().success());
        let output = std::process::Command::new(copy).output().unwrap();
        assert_eq!((output.stdout.as_slice(), output.status.code()), (&b"\n"[..], Some(0)));
        let made = path.metadata().unwrap().modified().unwrap();
        container(dir.path()).unwrap();
        assert_eq!(path.metadata().unwrap().modified().unwrap(), made, "it is written once");
    }
}
