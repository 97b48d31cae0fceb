//! The specification of a pod, independent of wire formats.

use std::{collections::BTreeMap, net::IpAddr, path::PathBuf};

use sandboxer_config::{StartPath, VmmName};
use sandboxer_host::network::NetLimits;
use sandboxer_process::cgroup::Unlimited;
use sandboxer_protocol::{agent as wire, id::SandboxId};
use sandboxer_vmm::DiskLimits;
use serde::{Deserialize, Serialize};

use crate::template::Shape;

/// The requested pod, with all defaults filled in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodSpec {
    /// containerd's id of the sandbox.
    pub id: SandboxId,
    /// Bundle of its sandbox container, by which a containerd without a sandbox controller knows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bundle: Option<PathBuf>,
    /// Kubernetes' name of the pod.
    pub name: String,
    /// Kubernetes' namespace of the pod.
    pub namespace: String,
    /// Kubernetes' uid of the pod.
    pub uid: String,
    /// Hostname in the guest; never empty.
    pub hostname: String,
    /// The pod's network namespace; none for hostNetwork.
    pub netns: Option<PathBuf>,
    /// Its IP addresses, from containerd; empty for a pod without a network.
    #[serde(default)]
    pub ips: Vec<IpAddr>,
    /// Content of `/etc/resolv.conf` in the guest, if the pod has a DNS configuration.
    pub resolv_conf: Option<String>,
    /// Its containers share a PID namespace.
    #[serde(default)]
    pub shared_pids: bool,
    /// Parent control group of its VMM on the host; empty if CRI named none.
    #[serde(default)]
    pub cgroup_parent: String,
    /// Kernel parameters of the guest.
    pub sysctls: BTreeMap<String, String>,
    /// The fastest start path that it may use.
    // Its name in records of all releases.
    #[serde(default, rename = "way")]
    pub start_path: StartPath,
    /// The VMM that its runtime handler names; none: the configured one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vmm: Option<VmmName>,
    /// Virtual CPUs.
    pub vcpus: u32,
    /// Guest memory, MiB.
    pub memory_mib: u64,
    /// Its VM's memory is in huge pages of the host.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub huge_pages: bool,
    /// Host ports that are forwarded to the same ports of its loopback (hostNetwork only).
    #[serde(default)]
    pub host_ports: Vec<u16>,
    /// Limits of all containers together.
    #[serde(default)]
    pub limits: Limits,
    /// Disk sizes for its containers' writes.
    #[serde(default)]
    pub room: Room,
    /// Limits of each of its disks.
    #[serde(default, skip_serializing_if = "DiskLimits::is_none")]
    pub disk_limits: DiskLimits,
    /// Limits of each of its network interfaces.
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
    /// Memory, bytes.
    pub memory_bytes: i64,
}

impl Limits {
    /// Returns the same limits without the unlimited ones.
    pub fn without(self, unlimited: Unlimited) -> Self {
        Self {
            cpu_quota_us: if unlimited.cpu { -1 } else { self.cpu_quota_us },
            memory_bytes: if unlimited.memory { -1 } else { self.memory_bytes },
            ..self
        }
    }

    /// Returns these limits after a change to those of `others` that are specified.
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

/// Disk sizes that a pod requested; none: the configured ones.
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
            start_path: StartPath::default(),
            vmm: None,
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

    /// Returns the shape of its VM with this number of network interfaces.
    pub fn shape(&self, nics: usize) -> Shape {
        // Cannot overflow: a pod with more than a few is rejected.
        let nics = u8::try_from(nics).unwrap_or(u8::MAX);
        Shape { vcpus: self.vcpus, memory_mib: self.memory_mib, nics }
    }
}
