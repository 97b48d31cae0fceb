//! The configuration as the daemon uses it: every value set, checked and absolute.

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf, time::Duration};

use sandboxer_base::Cpus;

/// The whole configuration.
#[derive(Debug, Clone)]
pub struct Config {
    /// Sockets and per-pod runtime files; gone after a reboot. `/run/sandboxer`.
    pub run_dir: PathBuf,
    /// Journal and rootfs cache; kept. `/var/lib/sandboxer`.
    pub state_dir: PathBuf,
    /// VMs.
    pub vm: VmConfig,
    /// Frozen VMs of which pods are copies.
    pub templates: TemplateConfig,
    /// VMs that wait for pods.
    pub pool: PoolConfig,
    /// Runtime handlers; one that is not listed has the default.
    pub handlers: BTreeMap<String, Handler>,
    /// Root file systems.
    pub rootfs: RootfsConfig,
    /// Volumes.
    pub volumes: VolumeConfig,
    /// Pods' networks.
    pub network: NetworkConfig,
    /// Which of the host's CPUs and memory pods use.
    pub placement: PlacementConfig,
    /// What a pod may at most have of the host's devices.
    pub limits: LimitsConfig,
    /// Where traces are sent; `None`: nowhere.
    pub traces: Option<TracesConfig>,
    /// containerd's ttrpc socket for events; `None`: only the admin API gets events.
    pub containerd_ttrpc: Option<PathBuf>,
    /// VMs that may boot or be restored at the same time; the others queue.
    pub concurrent_starts: usize,
    /// Containers that may be created at the same time; the others queue.
    pub concurrent_containers: usize,
    /// How long a shutdown waits for requests in progress.
    pub drain_timeout: Duration,
    /// Address for Prometheus metrics; `None`: no metrics.
    pub metrics_listen: Option<SocketAddr>,
    /// Program whose processes access volumes for the daemon: the daemon's own, not a key of the file. `None`: its threads do.
    pub helper_program: Option<PathBuf>,
}

/// VMs.
#[derive(Debug, Clone)]
pub struct VmConfig {
    /// Which VMM.
    pub vmm: VmmChoice,
    /// Program of QEMU. `None`: the smallest that is installed and has the accelerator.
    pub qemu: Option<PathBuf>,
    /// Program of Cloud Hypervisor.
    pub cloud_hypervisor: PathBuf,
    /// Program of Firecracker.
    pub firecracker: PathBuf,
    /// Which accelerator.
    pub accelerator: Accelerator,
    /// Guest kernel.
    pub kernel: PathBuf,
    /// Initramfs with the agent.
    pub initramfs: PathBuf,
    /// vCPUs of a pod that has no limit and doesn't ask.
    pub default_vcpus: u32,
    /// Memory of a pod that has no limit and doesn't ask, MiB.
    pub default_memory_mib: u64,
    /// Most vCPUs a pod may ask for.
    pub max_vcpus: u32,
    /// Most memory a pod may ask for, MiB.
    pub max_memory_mib: u64,
    /// Memory that a VM can get while it runs, MiB: 0, or a multiple of 128.
    pub hotplug_memory_mib: u64,
    /// vCPUs that a VM can get while it runs.
    pub hotplug_vcpus: u32,
    /// Timeout until a VM's agent is ready; for a pod over all start paths, without its time in the queue.
    pub boot_timeout: Duration,
    /// Timeout of one call to a VMM.
    pub call_timeout: Duration,
    /// Timeout of one short call to an agent.
    pub agent_timeout: Duration,
    /// How long a guest may write data to disks before it powers off.
    pub stop_timeout: Duration,
    /// Guest console kept per pod, bytes.
    pub console_log_bytes: u64,
    /// Whether the host's kernel carries the packets of QEMU's VMs.
    pub vhost_net: VhostNet,
    /// VMMs are jailed: always, except in tests with a script as VMM.
    pub jail: bool,
    /// Filter of the agents' logs, as in `RUST_LOG`.
    pub agent_log: Option<String>,
    /// Control group of VMs that have no pod yet, as a path below the hierarchy's root; empty: the daemon's own.
    pub idle_cgroup: String,
}

/// The VMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VmmChoice {
    /// Cloud Hypervisor if it and KVM can be used, else QEMU.
    Auto,
    /// QEMU.
    Qemu,
    /// Cloud Hypervisor; an error if it is not usable.
    CloudHypervisor,
    /// Firecracker; an error if it is not usable.
    Firecracker,
}

impl From<VmmName> for VmmChoice {
    fn from(name: VmmName) -> Self {
        match name {
            VmmName::Qemu => Self::Qemu,
            VmmName::CloudHypervisor => Self::CloudHypervisor,
            VmmName::Firecracker => Self::Firecracker,
        }
    }
}

/// Who carries packets between a VM's taps and its guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VhostNet {
    /// The host's kernel, if it can.
    Auto,
    /// The VMM.
    Off,
}

/// A certain VMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VmmName {
    /// QEMU.
    Qemu,
    /// Cloud Hypervisor.
    CloudHypervisor,
    /// Firecracker.
    Firecracker,
}

impl VmmName {
    /// Every VMM.
    pub const ALL: [VmmName; 3] = [VmmName::Qemu, VmmName::CloudHypervisor, VmmName::Firecracker];

    /// Returns its name in configuration, logs, records and answers.
    pub const fn as_str(self) -> &'static str {
        match self {
            VmmName::Qemu => "qemu",
            VmmName::CloudHypervisor => "cloud-hypervisor",
            VmmName::Firecracker => "firecracker",
        }
    }
}

impl std::fmt::Display for VmmName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What pods of a runtime handler get.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Handler {
    /// Their fastest start path.
    pub start_path: StartPath,
    /// Their VMM; `None`: that of [`VmConfig::vmm`].
    pub vmm: Option<VmmName>,
}

/// The accelerator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accelerator {
    /// KVM if a measurement finds it usable, else TCG.
    Auto,
    /// KVM; an error if it is not usable.
    Kvm,
    /// Emulation.
    Tcg,
}

/// How a pod gets its VM, slowest first. A path that is not available is replaced by the next slower one.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum StartPath {
    /// The VM boots.
    Boot,
    /// The VM is a new copy of a template.
    Template,
    /// The VM is a copy from the pool.
    #[default]
    Pool,
}

impl StartPath {
    /// Every path, slowest first.
    pub const ALL: [StartPath; 3] = [StartPath::Boot, StartPath::Template, StartPath::Pool];

    /// Returns its name in configuration, logs, metrics and answers.
    pub const fn as_str(self) -> &'static str {
        match self {
            StartPath::Boot => "boot",
            StartPath::Template => "template",
            StartPath::Pool => "pool",
        }
    }

    /// Returns the next slower one; the slowest stays.
    pub const fn slower(self) -> Self {
        match self {
            StartPath::Pool => StartPath::Template,
            StartPath::Template | StartPath::Boot => StartPath::Boot,
        }
    }
}

impl std::fmt::Display for StartPath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Templates.
#[derive(Debug, Clone)]
pub struct TemplateConfig {
    /// Whether templates are used.
    pub enabled: bool,
    /// Maximum number.
    pub most: usize,
    /// Maximum bytes on disk; they take about the same in memory.
    pub most_bytes: u64,
}

/// The pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolConfig {
    /// Minimum VMs of the default size, unless memory is short.
    pub min: usize,
    /// Maximum VMs of all sizes together; 0: no pool.
    pub max: usize,
}

/// Pods' networks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NetworkConfig {
    /// Handling of netfilter rules.
    pub foreign_rules: ForeignRules,
}

/// Which of the host's CPUs and memory pods use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacementConfig {
    /// How pods are placed.
    pub policy: PlacementPolicy,
    /// CPUs that no VMM gets, except by CRI.
    pub reserved_cpus: Option<Cpus>,
    /// Whether the memory of pods is in huge pages of the host, unless a pod asks for something else.
    pub huge_pages: bool,
    /// Where the kernel describes its NUMA nodes: not a key of the file.
    pub nodes_dir: PathBuf,
}

/// How pods are placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PlacementPolicy {
    /// Not at all.
    Off,
    /// A pod that fits one NUMA node gets one.
    Numa,
}

impl PlacementPolicy {
    /// Returns its name in configuration and answers.
    pub const fn as_str(self) -> &'static str {
        match self {
            PlacementPolicy::Off => "off",
            PlacementPolicy::Numa => "numa",
        }
    }
}

/// Most that each disk and each network interface of a pod may have; `None`: no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LimitsConfig {
    /// Bytes per second of a disk.
    pub disk_bps: Option<u64>,
    /// Operations per second of a disk.
    pub disk_iops: Option<u64>,
    /// Bytes per second that an interface receives.
    pub net_bps_rx: Option<u64>,
    /// Bytes per second that an interface sends.
    pub net_bps_tx: Option<u64>,
}

/// Where traces are sent, and which.
#[derive(Debug, Clone, PartialEq)]
pub struct TracesConfig {
    /// The collector: `http://HOST:PORT`, OTLP by gRPC.
    pub endpoint: String,
    /// Part of the requests without a trace of their caller's that begin one, 0 to 1.
    pub sampling_ratio: f64,
}

/// Values that a limit of bytes per second can have.
pub const DISK_BPS: std::ops::RangeInclusive<u64> = 64 << 10..=1 << 40;
/// Values that a limit of a network interface can have, bytes per second. The least is such that a second's bytes hold the largest
/// packet of an Ethernet with jumbo frames.
pub const NET_BPS: std::ops::RangeInclusive<u64> = 16 << 10..=1 << 40;
/// Values that a limit of operations per second can have.
pub const DISK_IOPS: std::ops::RangeInclusive<u64> = 10..=10_000_000;

/// Handling of netfilter rules in a pod's network namespace, which a guest's packets do not pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ForeignRules {
    /// The pod is refused.
    Refuse,
    /// The pod runs, and the rules have no effect.
    Ignore,
}

/// How root file systems become disks.
#[derive(Debug, Clone)]
pub struct RootfsConfig {
    /// Program that makes EROFS images.
    pub mkfs_erofs: PathBuf,
    /// Maximum bytes of the image cache.
    pub cache_bytes: u64,
    /// Where a container's writes to its root file system go.
    pub writable: WritableTo,
    /// Maximum bytes of these writes. In memory, 0 means half of the guest's memory.
    pub writable_bytes: u64,
}

/// Where containers' writes to their root file systems go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WritableTo {
    /// To a disk of the container, which is removed with it.
    Disk,
    /// To the guest's memory.
    Memory,
}

/// Default maximum of a container's writes to its root file system on a disk, bytes.
pub const DEFAULT_SCRATCH: u64 = 10 << 30;

/// Volumes.
#[derive(Debug, Clone)]
pub struct VolumeConfig {
    /// Default size of an emptyDir's disk, bytes.
    pub empty_dir_bytes: u64,
    /// Timeout of one lookup on a volume.
    pub timeout: Duration,
}

/// Default maximum of vCPUs of a pod without a limit: each one costs boot time and memory.
const DEFAULT_VCPUS: u32 = 4;
/// Maximum memory of such a pod, MiB, and maximum fraction of the node's. Untouched guest memory costs the host only
/// the guest's page structures, a 64th, which copies of a template share.
const DEFAULT_MEMORY_MIB: u64 = 2048;
const DEFAULT_MEMORY_PART: u64 = 4;
/// Minimum and step of this memory, MiB.
const MIN_DEFAULT_MEMORY_MIB: u64 = 256;
const DEFAULT_MEMORY_STEP_MIB: u64 = 64;

/// Returns the memory of a pod without a limit on a node with `node_mib`.
fn default_memory_mib(node_mib: u64) -> u64 {
    let part = node_mib / DEFAULT_MEMORY_PART / DEFAULT_MEMORY_STEP_MIB * DEFAULT_MEMORY_STEP_MIB;
    part.clamp(MIN_DEFAULT_MEMORY_MIB, DEFAULT_MEMORY_MIB)
}

/// Returns the memory of this node, MiB.
fn node_memory_mib() -> u64 {
    let info = rustix::system::sysinfo();
    let bytes = info.totalram.saturating_mul(u64::from(info.mem_unit));
    (bytes >> 20).max(MIN_DEFAULT_MEMORY_MIB)
}

impl Config {
    /// Returns the runtime handlers that name a VMM, in the order of VMMs: one handler for each.
    pub fn named_vmms(&self) -> BTreeMap<VmmName, &str> {
        let named = self.handlers.iter().filter_map(|(name, of)| Some((of.vmm?, name.as_str())));
        // The first handler of each VMM.
        named.rev().collect()
    }

    /// Returns what the configuration says of a VMM: it is named by a handler, else what [`VmConfig::vmm`] says.
    pub fn choice_of(&self, vmm: VmmName) -> VmmChoice {
        if self.handlers.values().any(|of| of.vmm == Some(vmm)) { vmm.into() } else { self.vm.vmm }
    }
}

impl Default for Config {
    fn default() -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let node_vcpus = u32::try_from(cpus).unwrap_or(u32::MAX);
        let node_memory_mib = node_memory_mib();
        Self {
            run_dir: "/run/sandboxer".into(),
            state_dir: "/var/lib/sandboxer".into(),
            vm: VmConfig {
                vmm: VmmChoice::Auto,
                qemu: None,
                cloud_hypervisor: "cloud-hypervisor".into(),
                firecracker: "firecracker".into(),
                accelerator: Accelerator::Auto,
                kernel: "/usr/lib/sandboxer/vmlinux".into(),
                initramfs: "/usr/lib/sandboxer/initramfs.cpio".into(),
                default_vcpus: node_vcpus.min(DEFAULT_VCPUS),
                default_memory_mib: default_memory_mib(node_memory_mib),
                max_vcpus: node_vcpus,
                max_memory_mib: node_memory_mib,
                hotplug_memory_mib: 0,
                hotplug_vcpus: 0,
                boot_timeout: Duration::from_secs(30),
                call_timeout: Duration::from_secs(10),
                agent_timeout: Duration::from_secs(10),
                stop_timeout: Duration::from_secs(60),
                console_log_bytes: 1 << 20,
                vhost_net: VhostNet::Auto,
                jail: true,
                agent_log: None,
                idle_cgroup: "/sandboxer-idle".to_owned(),
            },
            templates: TemplateConfig { enabled: true, most: 4, most_bytes: 2 << 30 },
            pool: PoolConfig { min: 0, max: 0 },
            handlers: BTreeMap::new(),
            rootfs: RootfsConfig {
                mkfs_erofs: "mkfs.erofs".into(),
                cache_bytes: 10 << 30,
                writable: WritableTo::Disk,
                writable_bytes: DEFAULT_SCRATCH,
            },
            volumes: VolumeConfig { empty_dir_bytes: 10 << 30, timeout: Duration::from_secs(10) },
            network: NetworkConfig { foreign_rules: ForeignRules::Refuse },
            placement: PlacementConfig {
                policy: PlacementPolicy::Numa,
                reserved_cpus: None,
                huge_pages: false,
                nodes_dir: "/sys/devices/system/node".into(),
            },
            limits: LimitsConfig::default(),
            traces: None,
            containerd_ttrpc: None,
            concurrent_starts: 2 * cpus,
            concurrent_containers: 2 * cpus,
            drain_timeout: Duration::from_secs(10),
            metrics_listen: None,
            helper_program: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_without_a_limit_gets_a_part_of_its_node() {
        for (node_mib, mib) in
            [(0, 256), (512, 256), (2000, 448), (4096, 1024), (8192, 2048), (1 << 20, 2048)]
        {
            assert_eq!(default_memory_mib(node_mib), mib, "{node_mib}");
        }
        let vm = Config::default().vm;
        assert!((1..=4).contains(&vm.default_vcpus) && vm.default_vcpus <= vm.max_vcpus, "{vm:?}");
        assert!(vm.default_memory_mib <= vm.max_memory_mib, "{vm:?}");
    }
}
