//! The configuration as the daemon uses it: every value set, checked and absolute.

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf, time::Duration};

use sandboxer_base::Cpus;

/// The whole configuration.
#[derive(Debug, Clone)]
pub struct Config {
    /// Directory of sockets and per-pod runtime files, which are gone after a reboot. Default: `/run/sandboxer`.
    pub run_dir: PathBuf,
    /// Directory of the journal and the rootfs cache, which are kept. Default: `/var/lib/sandboxer`.
    pub state_dir: PathBuf,
    /// Settings of VMs.
    pub vm: VmConfig,
    /// Settings of templates: frozen VMs of which pods are copies.
    pub templates: TemplateConfig,
    /// Settings of checkpoints: pods that were saved while they ran.
    pub checkpoints: CheckpointsConfig,
    /// Settings of the pool: VMs that wait for pods.
    pub pool: PoolConfig,
    /// Runtime handlers by name. A handler that is not listed has the default.
    pub handlers: BTreeMap<String, Handler>,
    /// Settings of root file systems.
    pub rootfs: RootfsConfig,
    /// Settings of volumes.
    pub volumes: VolumeConfig,
    /// Settings of the pods' networks.
    pub network: NetworkConfig,
    /// Settings of placement: which of the host's CPUs and memory pods use.
    pub placement: PlacementConfig,
    /// Limits of a pod's use of the host's devices.
    pub limits: LimitsConfig,
    /// Settings that containers take from their node.
    pub containers: ContainersConfig,
    /// Destination of traces; `None`: no traces are sent.
    pub traces: Option<TracesConfig>,
    /// Path of containerd's ttrpc socket for events; `None`: only the admin API gets events.
    pub containerd_ttrpc: Option<PathBuf>,
    /// Maximum number of VMs that boot or are restored at the same time; the others queue.
    pub concurrent_starts: usize,
    /// Maximum number of containers that are created at the same time; the others queue.
    pub concurrent_containers: usize,
    /// Maximum time for which a shutdown waits for requests in progress.
    pub drain_timeout: Duration,
    /// Listening address for Prometheus metrics; `None`: no metrics.
    pub metrics_listen: Option<SocketAddr>,
    /// Program whose processes access volumes for the daemon. It is the daemon's own, not a key of the file. `None`:
    /// the daemon's threads access them.
    pub helper_program: Option<PathBuf>,
}

/// Settings of VMs.
#[derive(Debug, Clone)]
pub struct VmConfig {
    /// The VMM, or its choice.
    pub vmm: VmmChoice,
    /// Program of QEMU. `None`: the smallest that is installed and has the accelerator.
    pub qemu: Option<PathBuf>,
    /// Program of Cloud Hypervisor.
    pub cloud_hypervisor: PathBuf,
    /// Program of Firecracker.
    pub firecracker: PathBuf,
    /// The accelerator, or its choice.
    pub accelerator: Accelerator,
    /// Path of the guest kernel.
    pub kernel: PathBuf,
    /// Path of the initramfs with the agent.
    pub initramfs: PathBuf,
    /// Number of vCPUs of a pod that has no limit and no request.
    pub default_vcpus: u32,
    /// Memory of a pod that has no limit and no request, MiB.
    pub default_memory_mib: u64,
    /// Maximum number of vCPUs that a pod may request.
    pub max_vcpus: u32,
    /// Maximum memory that a pod may request, MiB.
    pub max_memory_mib: u64,
    /// Memory that a VM can get while it runs, MiB: 0, or a multiple of 128.
    pub hotplug_memory_mib: u64,
    /// Number of vCPUs that a VM can get while it runs.
    pub hotplug_vcpus: u32,
    /// Timeout until a VM's agent is ready. For a pod it covers all start paths, but not the time in the queue.
    pub boot_timeout: Duration,
    /// Timeout of one call to a VMM.
    pub call_timeout: Duration,
    /// Timeout of one short call to an agent.
    pub agent_timeout: Duration,
    /// Time that a guest has for writing data to disks before it powers off.
    pub stop_timeout: Duration,
    /// Guest console that is kept per pod, bytes.
    pub console_log_bytes: u64,
    /// Whether the host's kernel carries the packets of QEMU's VMs.
    pub vhost_net: VhostNet,
    /// Whether VMMs are jailed: always, except in tests with a script as VMM.
    pub jail: bool,
    /// Filter of the agents' logs, in the syntax of `RUST_LOG`; `None`: the default.
    pub agent_log: Option<String>,
    /// Control group of VMs without a pod, as a path below the hierarchy's root; empty: the daemon's own.
    pub idle_cgroup: String,
}

/// The configured VMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VmmChoice {
    /// Cloud Hypervisor if it and KVM can be used, else QEMU.
    Auto,
    /// QEMU on any accelerator.
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

/// The carrier of packets between a VM's taps and its guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VhostNet {
    /// The host's kernel if possible, else the VMM.
    Auto,
    /// The VMM always.
    Off,
}

/// The name of a VMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VmmName {
    /// QEMU, `qemu`.
    Qemu,
    /// Cloud Hypervisor, `cloud-hypervisor`.
    CloudHypervisor,
    /// Firecracker, `firecracker`.
    Firecracker,
}

impl VmmName {
    /// All VMMs.
    pub const ALL: [VmmName; 3] = [VmmName::Qemu, VmmName::CloudHypervisor, VmmName::Firecracker];

    /// Returns the name in the configuration, logs, records and responses.
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

/// The settings of a runtime handler's pods.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Handler {
    /// The fastest start path of the pods.
    pub start_path: StartPath,
    /// The VMM of the pods; `None`: the VMM of [`VmConfig::vmm`].
    pub vmm: Option<VmmName>,
}

/// The configured accelerator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accelerator {
    /// KVM if a measurement finds it usable, else TCG.
    Auto,
    /// KVM; an error if it is not usable.
    Kvm,
    /// Emulation by QEMU.
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
    /// All start paths, slowest first.
    pub const ALL: [StartPath; 3] = [StartPath::Boot, StartPath::Template, StartPath::Pool];

    /// Returns the name in the configuration, logs, metrics and responses.
    pub const fn as_str(self) -> &'static str {
        match self {
            StartPath::Boot => "boot",
            StartPath::Template => "template",
            StartPath::Pool => "pool",
        }
    }

    /// Returns the next slower path; the slowest path returns itself.
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

/// Settings of templates.
#[derive(Debug, Clone)]
pub struct TemplateConfig {
    /// Whether templates are used.
    pub enabled: bool,
    /// Maximum number of templates.
    pub most: usize,
    /// Maximum size of all templates on disk, bytes. They take about as much memory.
    pub most_bytes: u64,
}

/// Settings of checkpoints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointsConfig {
    /// Maximum size of all checkpoints on disk, bytes.
    pub most_bytes: u64,
    /// Age at which a checkpoint is removed; `None`: never.
    pub max_age: Option<Duration>,
    /// Namespaces whose checkpoints pods of all namespaces may be restored from.
    pub share_from: Vec<String>,
}

/// Settings of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolConfig {
    /// Minimum number of VMs of the default size, unless memory is short.
    pub min: usize,
    /// Maximum number of VMs of all sizes; 0: no pool.
    pub max: usize,
}

/// Settings of the pods' networks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NetworkConfig {
    /// Handling of netfilter rules in a pod's network namespace.
    pub foreign_rules: ForeignRules,
}

/// Settings of placement: which of the host's CPUs and memory pods use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacementConfig {
    /// The policy by which pods are placed.
    pub policy: PlacementPolicy,
    /// CPUs that no VMM gets, except by CRI; `None`: no CPU is reserved.
    pub reserved_cpus: Option<Cpus>,
    /// Whether the memory of pods is in huge pages of the host, unless a pod requests otherwise.
    pub huge_pages: bool,
    /// Directory in which the kernel describes its NUMA nodes; not a key of the file.
    pub nodes_dir: PathBuf,
}

/// The policy by which pods are placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PlacementPolicy {
    /// Pods are not placed.
    Off,
    /// A pod that fits on one NUMA node is placed on one.
    Numa,
}

impl PlacementPolicy {
    /// Returns the name in the configuration and responses.
    pub const fn as_str(self) -> &'static str {
        match self {
            PlacementPolicy::Off => "off",
            PlacementPolicy::Numa => "numa",
        }
    }
}

/// Maximum rates of each disk and each network interface of a pod; `None`: no limit.
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

/// Settings that containers take from their node, as under a runtime that shares the node's kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainersConfig {
    /// Resource limits, soft and hard, by OCI's name. They replace the limits of the containerd that creates the
    /// container.
    pub rlimits: BTreeMap<String, [u64; 2]>,
    /// Sysctls of a pod that has a network of its own and does not set them.
    pub sysctls: BTreeMap<String, String>,
    /// Names of sysctls of which a guest gets the node's value.
    pub node_sysctls: Vec<String>,
}

/// OCI's names of the resource limits of setrlimit(2).
pub const RLIMITS: [&str; 16] = [
    "RLIMIT_AS",
    "RLIMIT_CORE",
    "RLIMIT_CPU",
    "RLIMIT_DATA",
    "RLIMIT_FSIZE",
    "RLIMIT_LOCKS",
    "RLIMIT_MEMLOCK",
    "RLIMIT_MSGQUEUE",
    "RLIMIT_NICE",
    "RLIMIT_NOFILE",
    "RLIMIT_NPROC",
    "RLIMIT_RSS",
    "RLIMIT_RTPRIO",
    "RLIMIT_RTTIME",
    "RLIMIT_SIGPENDING",
    "RLIMIT_STACK",
];

/// Sysctls that containerd sets for a pod by default, in the specification of the pause container, which does not
/// exist here.
const POD_SYSCTLS: [(&str, &str); 2] =
    [("net.ipv4.ip_unprivileged_port_start", "0"), ("net.ipv4.ping_group_range", "0 2147483647")];

/// Sysctls that programs rely on, and that have no namespace or are copied from the node into a new one.
const NODE_SYSCTLS: [&str; 22] = [
    "fs.aio-max-nr",
    "fs.file-max",
    "fs.inotify.max_queued_events",
    "fs.inotify.max_user_instances",
    "fs.inotify.max_user_watches",
    "fs.nr_open",
    "fs.pipe-max-size",
    "kernel.keys.maxbytes",
    "kernel.keys.maxkeys",
    "kernel.pid_max",
    "kernel.threads-max",
    "net.core.rmem_default",
    "net.core.rmem_max",
    "net.core.somaxconn",
    "net.core.wmem_default",
    "net.core.wmem_max",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
    "net.netfilter.nf_conntrack_max",
    "user.max_user_namespaces",
    "vm.max_map_count",
    "vm.overcommit_memory",
];

/// Settings of traces.
#[derive(Debug, Clone, PartialEq)]
pub struct TracesConfig {
    /// Address of the collector, `http://HOST:PORT`, which takes OTLP over gRPC.
    pub endpoint: String,
    /// Fraction of the requests that begin a trace, among those whose caller has none: 0 to 1.
    pub sampling_ratio: f64,
}

/// Range of a limit of bytes per second of a disk.
pub const DISK_BPS: std::ops::RangeInclusive<u64> = 64 << 10..=1 << 40;
/// Range of a limit of a network interface, bytes per second. At the minimum, one second's bytes hold the largest
/// packet of an Ethernet with jumbo frames.
pub const NET_BPS: std::ops::RangeInclusive<u64> = 16 << 10..=1 << 40;
/// Range of a limit of operations per second of a disk.
pub const DISK_IOPS: std::ops::RangeInclusive<u64> = 10..=10_000_000;

/// The handling of netfilter rules in a pod's network namespace, through which a guest's packets do not pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ForeignRules {
    /// The pod is refused.
    Refuse,
    /// The pod runs, and the rules have no effect.
    Ignore,
}

/// Settings of root file systems.
#[derive(Debug, Clone)]
pub struct RootfsConfig {
    /// Program that makes EROFS images.
    pub mkfs_erofs: PathBuf,
    /// Maximum size of the image cache, bytes.
    pub cache_bytes: u64,
    /// Destination of a container's writes to its root file system.
    pub writable: WritableTo,
    /// Maximum size of these writes, bytes. In memory, 0 means half of the guest's memory.
    pub writable_bytes: u64,
}

/// The destination of containers' writes to their root file systems.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WritableTo {
    /// A disk of the container, which is removed with the container.
    Disk,
    /// The guest's memory.
    Memory,
}

/// Default maximum of a container's writes to its root file system on a disk, bytes.
pub const DEFAULT_SCRATCH: u64 = 10 << 30;

/// Settings of volumes.
#[derive(Debug, Clone)]
pub struct VolumeConfig {
    /// Path of kubelet's root directory.
    pub kubelet_root: PathBuf,
    /// Default size of an emptyDir's disk, bytes.
    pub empty_dir_bytes: u64,
    /// Timeout of one lookup on a volume.
    pub timeout: Duration,
}

/// Default maximum number of vCPUs of a pod without a limit: each one costs boot time and memory.
const DEFAULT_VCPUS: u32 = 4;
/// Maximum memory of a pod without a limit, MiB, and its maximum fraction of the node's memory. Untouched guest memory
/// costs the host only the guest's page structures, a 64th, which copies of a template share.
const DEFAULT_MEMORY_MIB: u64 = 2048;
const DEFAULT_MEMORY_PART: u64 = 4;
/// Minimum and step of the memory of a pod without a limit, MiB.
const MIN_DEFAULT_MEMORY_MIB: u64 = 256;
const DEFAULT_MEMORY_STEP_MIB: u64 = 64;

/// Returns the memory of a pod without a limit on a node with `node_mib` MiB.
fn default_memory_mib(node_mib: u64) -> u64 {
    let part = node_mib / DEFAULT_MEMORY_PART / DEFAULT_MEMORY_STEP_MIB * DEFAULT_MEMORY_STEP_MIB;
    part.clamp(MIN_DEFAULT_MEMORY_MIB, DEFAULT_MEMORY_MIB)
}

fn node_memory_mib() -> u64 {
    let info = rustix::system::sysinfo();
    let bytes = info.totalram.saturating_mul(u64::from(info.mem_unit));
    (bytes >> 20).max(MIN_DEFAULT_MEMORY_MIB)
}

impl Config {
    /// Returns a runtime handler for each VMM that handlers name, in the order of VMMs.
    pub fn named_vmms(&self) -> BTreeMap<VmmName, &str> {
        let named = self.handlers.iter().filter_map(|(name, handler)| Some((handler.vmm?, name.as_str())));
        // The first handler of each VMM wins.
        named.rev().collect()
    }

    /// Returns the configured choice for `vmm`: the VMM itself if a handler names it, else [`VmConfig::vmm`].
    pub fn choice_of(&self, vmm: VmmName) -> VmmChoice {
        if self.handlers.values().any(|handler| handler.vmm == Some(vmm)) { vmm.into() } else { self.vm.vmm }
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
            checkpoints: CheckpointsConfig { most_bytes: 20 << 30, max_age: None, share_from: Vec::new() },
            pool: PoolConfig { min: 0, max: 0 },
            handlers: BTreeMap::new(),
            rootfs: RootfsConfig {
                mkfs_erofs: "mkfs.erofs".into(),
                cache_bytes: 10 << 30,
                writable: WritableTo::Disk,
                writable_bytes: DEFAULT_SCRATCH,
            },
            volumes: VolumeConfig {
                kubelet_root: "/var/lib/kubelet".into(),
                empty_dir_bytes: 10 << 30,
                timeout: Duration::from_secs(10),
            },
            network: NetworkConfig { foreign_rules: ForeignRules::Refuse },
            placement: PlacementConfig {
                policy: PlacementPolicy::Numa,
                reserved_cpus: None,
                huge_pages: false,
                nodes_dir: "/sys/devices/system/node".into(),
            },
            limits: LimitsConfig::default(),
            containers: ContainersConfig {
                rlimits: BTreeMap::new(),
                sysctls: POD_SYSCTLS.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
                node_sysctls: NODE_SYSCTLS.map(str::to_owned).into(),
            },
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
