//! The specification of a pod, independent of wire formats.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    path::{Path, PathBuf},
};

use sandboxer_config::{StartPath, VmmName};
use sandboxer_host::network::NetLimits;
use sandboxer_process::{cgroup::Unlimited, rlimits::Rlimits};
use sandboxer_protocol::{
    agent as wire,
    id::{Id, SandboxId},
};
use sandboxer_vmm::DiskLimits;
use serde::{Deserialize, Serialize};

use crate::template::Shape;

/// Name of the directory of a bundle of CRI-O, `…/<id>/userdata`.
const OF_CRI_O: &str = "userdata";

/// Returns whether the bundle of a pod's sandbox container is CRI-O's: containerd's has the pod's id for a name.
pub fn is_cri_os(bundle: &Path) -> bool {
    bundle.ends_with(OF_CRI_O)
}

/// The requested pod, with all defaults filled in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodSpec {
    /// The sandbox's id at containerd.
    pub id: SandboxId,
    /// Bundle of the container that stands for the pod: for a containerd without a sandbox controller, the sandbox
    /// container; for a pod of one container, that one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bundle: Option<PathBuf>,
    /// Whether the pod is one container, which no pod of CRI has: id and bundle are the container's.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub alone: bool,
    /// Name of the pod in Kubernetes.
    pub name: String,
    /// Namespace of the pod in Kubernetes; if it is one container, the container's namespace in containerd.
    pub namespace: String,
    /// UID of the pod in Kubernetes.
    pub uid: String,
    /// Hostname in the guest; never empty.
    pub hostname: String,
    /// The pod's network namespace; `None` for hostNetwork.
    pub netns: Option<PathBuf>,
    /// The pod's IP addresses, from containerd; empty for a pod without a network.
    #[serde(default)]
    pub ips: Vec<IpAddr>,
    /// Content of `/etc/resolv.conf` in the guest, if the pod has a DNS configuration.
    pub resolv_conf: Option<String>,
    /// Whether the pod's containers share a PID namespace.
    #[serde(default)]
    pub shared_pids: bool,
    /// Parent cgroup of the pod's VMM on the host; empty if CRI named none.
    #[serde(default)]
    pub cgroup_parent: String,
    /// Kernel parameters of the guest.
    pub sysctls: BTreeMap<String, String>,
    /// Kernel parameters that the guest takes from the node, as far as its kernel accepts them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub node_sysctls: BTreeMap<String, String>,
    /// Resource limits of the pod's containers whose specification has none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub rlimits: Rlimits,
    /// Whether image volumes are on the containers' disks in the guest instead of being live shares.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub image_volumes_on_disk: bool,
    /// Maximum number of processes and threads of the pod's containers together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_processes: Option<u64>,
    /// The fastest start path that the pod may use.
    // The field's name in records of all releases.
    #[serde(default, rename = "way")]
    pub start_path: StartPath,
    /// Whether the pod cannot use a VM of the pool, though its runtime handler may, since its memory is in huge pages:
    /// copies of a template share its memory, which is not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub misses_pool: bool,
    /// The VMM that the pod's runtime handler names; `None`: the configured one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vmm: Option<VmmName>,
    /// Name of the checkpoint from which the pod is restored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restore_from: Option<Id>,
    /// Namespace of that checkpoint; `None`: the pod's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restore_namespace: Option<Id>,
    /// Signal that the init of each restored container gets when it goes on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restore_signal: Option<u32>,
    /// Number of virtual CPUs.
    pub vcpus: u32,
    /// Guest memory, MiB.
    pub memory_mib: u64,
    /// Whether the VM's memory is in huge pages of the host.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub huge_pages: bool,
    /// Host ports that are forwarded to the same ports of the guest's loopback (hostNetwork only).
    #[serde(default)]
    pub host_ports: Vec<u16>,
    /// Limits of all containers together.
    #[serde(default)]
    pub limits: Limits,
    /// Disk sizes for the containers' writes.
    #[serde(default)]
    pub room: Room,
    /// Limits of each of the pod's disks.
    #[serde(default, skip_serializing_if = "DiskLimits::is_none")]
    pub disk_limits: DiskLimits,
    /// Limits of each of the pod's network interfaces.
    #[serde(default, skip_serializing_if = "NetLimits::is_none")]
    pub net_limits: NetLimits,
}

/// Limits of all containers of a pod together. 0: not specified; negative: no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// CPU time in each period, µs.
    pub cpu_quota_us: i64,
    /// Length of a period, µs; 0: the kernel's default.
    pub cpu_period_us: u64,
    /// Memory limit, bytes.
    pub memory_bytes: i64,
}

impl Limits {
    /// Returns these limits; the `unlimited` ones become -1, no limit.
    pub fn without(self, unlimited: Unlimited) -> Self {
        Self {
            cpu_quota_us: if unlimited.cpu { -1 } else { self.cpu_quota_us },
            memory_bytes: if unlimited.memory { -1 } else { self.memory_bytes },
            ..self
        }
    }

    /// Returns these limits, replaced where `others` specifies a limit.
    pub fn changed_by(self, others: Self) -> Self {
        let (cpu, memory) = (others.cpu_quota_us != 0, others.memory_bytes != 0);
        Self {
            cpu_quota_us: if cpu { others.cpu_quota_us } else { self.cpu_quota_us },
            cpu_period_us: if cpu { others.cpu_period_us } else { self.cpu_period_us },
            memory_bytes: if memory { others.memory_bytes } else { self.memory_bytes },
        }
    }

    /// Converts the limits for the agent.
    pub fn for_guest(&self) -> wire::PodLimits {
        let Self { cpu_quota_us, cpu_period_us, memory_bytes } = *self;
        wire::PodLimits { cpu_quota_us, cpu_period_us, memory_bytes, ..Default::default() }
    }
}

/// Disk sizes that a pod requested; `None`: the configured ones.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Room {
    /// Maximum bytes that each container may write to its root file system.
    pub rootfs_bytes: Option<u64>,
    /// Size of each emptyDir's disk, bytes.
    pub empty_dir_bytes: Option<u64>,
}

impl PodSpec {
    /// Returns the spec of a pod with only a VM of this size; its id is its name.
    pub fn plain(id: SandboxId, vcpus: u32, memory_mib: u64) -> Self {
        Self {
            bundle: None,
            alone: false,
            name: id.to_string(),
            namespace: String::new(),
            uid: String::new(),
            hostname: id.to_string(),
            id,
            netns: None,
            ips: Vec::new(),
            resolv_conf: None,
            shared_pids: false,
            cgroup_parent: String::new(),
            sysctls: BTreeMap::new(),
            node_sysctls: BTreeMap::new(),
            rlimits: Rlimits::new(),
            image_volumes_on_disk: false,
            max_processes: None,
            start_path: StartPath::default(),
            misses_pool: false,
            vmm: None,
            restore_from: None,
            restore_namespace: None,
            restore_signal: None,
            vcpus,
            memory_mib,
            huge_pages: false,
            host_ports: Vec::new(),
            limits: Limits::default(),
            room: Room::default(),
            disk_limits: DiskLimits::default(),
            net_limits: NetLimits::default(),
        }
    }

    /// Returns whether CRI-O has created the pod.
    pub fn is_of_cri_o(&self) -> bool {
        !self.alone && self.bundle.as_deref().is_some_and(is_cri_os)
    }

    /// Returns the shape of the pod's VM with this number of network interfaces.
    pub fn shape(&self, nics: usize) -> Shape {
        // Cannot overflow: a pod with more than a few is rejected.
        let nics = u8::try_from(nics).unwrap_or(u8::MAX);
        Shape { vcpus: self.vcpus, memory_mib: self.memory_mib, nics }
    }
}
