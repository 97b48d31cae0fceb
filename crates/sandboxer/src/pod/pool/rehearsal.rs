//! The rehearsal: a container is created, run and removed in a VM before the VM waits.
//!
//! What a guest does for the first time is slow: under emulation the code must be translated first, and every
//! restored guest gets private copies of the pages it writes. Measured under emulation: a guest's first container
//! takes five times as long as its second. So the rehearsal is the first. It uses the same code path as every
//! container, with a spec like containerd's, since only repeated work gets faster; it prints one line and leaves
//! nothing.

use std::{
    fs, io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use nix::{errno::Errno, sys::stat::Mode, unistd::mkfifo};
use sandboxer_host::rootfs::Mount;
use sandboxer_protocol::{
    agent as wire,
    id::{ContainerId, SandboxId},
};
use serde_json::json;

use super::program;
use crate::{
    error::PodError,
    front::Front,
    pod::{
        DaemonState,
        container::{
            NewContainer, StdioPaths,
            io::Subject,
            spec as container_spec,
            start::{self, CreateContext, RunningVm},
        },
        spec::PodSpec,
        stages::Stages,
        volumes::Volumes,
    },
    share::Shares,
};

const PROGRAM: &str = "rehearsal";
const STDOUT: &str = "stdout";
const STDERR: &str = "stderr";

/// A bundle and an image on the host.
#[derive(Debug)]
pub struct Rehearsal {
    bundle: PathBuf,
    image: Mount,
}

impl Rehearsal {
    /// Creates both below the state directory.
    pub fn new(state_dir: &Path) -> io::Result<Self> {
        let bundle = state_dir.join("rehearsal");
        let within = |name: &str| bundle.join(name);
        for name in ["lower", "upper", "work"] {
            fs::create_dir_all(within(name))?;
        }
        let path = within("lower").join(PROGRAM);
        let program = program::elf();
        // Not rewritten if unchanged: the cached image of it is identified by the modification time.
        if fs::read(&path).ok().as_ref() != Some(&program) {
            let mut file =
                fs::File::options().write(true).create(true).truncate(true).mode(0o755).open(path)?;
            io::Write::write_all(&mut file, &program)?;
        }
        for stream in [STDOUT, STDERR] {
            match mkfifo(&within(stream), Mode::S_IRUSR | Mode::S_IWUSR) {
                Ok(()) | Err(Errno::EEXIST) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        fs::write(within("config.json"), spec().to_string())?;
        let image = Mount {
            fstype: "overlay".into(),
            source: "overlay".into(),
            options: [("lowerdir", "lower"), ("upperdir", "upper"), ("workdir", "work")]
                .map(|(option, name)| format!("{option}={}", within(name).display()))
                .to_vec(),
        };
        Ok(Self { bundle, image })
    }

    /// Creates the container in a VM, runs it and removes it.
    pub async fn run(
        &self,
        node: &Arc<DaemonState>,
        id: &SandboxId,
        live: &RunningVm,
    ) -> Result<(), PodError> {
        let container: ContainerId = id.clone();
        let pod = PodSpec::plain(id.clone(), 0, 0);
        let new = NewContainer {
            id: container.clone(),
            bundle: self.bundle.clone(),
            mounts: vec![self.image.clone()],
            stdio: StdioPaths {
                stdout: self.bundle.join(STDOUT),
                stderr: self.bundle.join(STDERR),
                ..StdioPaths::default()
            },
            beside: Vec::new(),
        };
        // Not counted among the times of pods.
        let stages = Stages::new(id.clone(), Arc::default());
        let shares = Shares::new(id.clone(), self.bundle.clone(), 0, None, node.volumes.helpers.clone());
        let volumes = Volumes::new(node.volumes.clone(), shares, None);
        let front = Front::none();
        let means = CreateContext {
            front: &front,
            rootfs: &node.rootfs,
            volumes: &volumes,
            stages: &stages,
            place: None,
        };
        let guest_spec = container_spec::read(&pod, &new, &node.volumes.helpers).await?;
        let created = start::create(&pod, live, means, &new, guest_spec).await?;
        let subject = Subject { container: container.clone(), exec: None };
        let (running, _) = created.io.run(&live.agent, &subject, false);
        start::release(live, &subject).await?;
        let exit = start::follow(live, &subject, 0, running, None, &node.volumes.helpers).await;
        if exit.code != 0 {
            let reason = format!("it ended with code {} {}", exit.code, exit.reason);
            return Err(PodError::Failed { subject: format!("rehearsal in {id}"), reason });
        }
        start::delete(live, &container, &created.disks).await
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

/// Returns interfaces like those of pods, for a VM with this many. They connect to nothing.
pub fn interfaces(nics: u8) -> Vec<wire::Interface> {
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
        let rehearsal = Rehearsal::new(dir.path()).unwrap();
        let path = rehearsal.bundle.join("lower").join(PROGRAM);
        // Run from a copy made by another process: this one may have forked with it open for writing.
        let copy = dir.path().join("program");
        assert!(std::process::Command::new("cp").args([&path, &copy]).status().unwrap().success());
        let output = std::process::Command::new(copy).output().unwrap();
        assert_eq!((output.stdout.as_slice(), output.status.code()), (&b"\n"[..], Some(0)));
        let made = path.metadata().unwrap().modified().unwrap();
        Rehearsal::new(dir.path()).unwrap();
        assert_eq!(path.metadata().unwrap().modified().unwrap(), made, "it is written once");
    }
}
