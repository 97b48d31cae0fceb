//! The configuration as the daemon uses it: every value set, checked and absolute.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

/// Everything that can be set.
#[derive(Debug, Clone)]
pub struct Config {
    /// Sockets and per-pod runtime files; gone after a reboot. `/run/sandboxer`.
    pub run_dir: PathBuf,
    /// Journal and rootfs cache; kept. `/var/lib/sandboxer`.
    pub state_dir: PathBuf,
    /// Machines.
    pub vm: VmConfig,
    /// Root file systems.
    pub rootfs: RootfsConfig,
    /// containerd's ttrpc socket, for events; none: events go nowhere but the admin API.
    pub containerd_ttrpc: Option<PathBuf>,
    /// Pods that may start at the same time; the others queue.
    pub concurrent_starts: usize,
    /// How long a shutdown waits for requests under way.
    pub drain_timeout: Duration,
    /// Where Prometheus may read metrics; none: nowhere.
    pub metrics_listen: Option<SocketAddr>,
}

/// How machines are made.
#[derive(Debug, Clone)]
pub struct VmConfig {
    /// Which VMM.
    pub vmm: VmmChoice,
    /// Program of QEMU.
    pub qemu: PathBuf,
    /// Program of Cloud Hypervisor.
    pub cloud_hypervisor: PathBuf,
    /// Which accelerator.
    pub accelerator: Accelerator,
    /// Guest kernel.
    pub kernel: PathBuf,
    /// Initramfs with the agent.
    pub initramfs: PathBuf,
    /// vCPUs of a pod that doesn't ask.
    pub default_vcpus: u32,
    /// Memory of a pod that doesn't ask, MiB.
    pub default_memory_mib: u64,
    /// Most vCPUs a pod may ask for.
    pub max_vcpus: u32,
    /// Most memory a pod may ask for, MiB.
    pub max_memory_mib: u64,
    /// From spawn to the agent's ready message.
    pub boot_timeout: Duration,
    /// For one call to a VMM.
    pub call_timeout: Duration,
    /// For one short call to an agent.
    pub agent_timeout: Duration,
    /// Guest console kept per pod, bytes.
    pub console_log_bytes: u64,
    /// Filter of the agents' logs, as in `RUST_LOG`.
    pub agent_log: Option<String>,
}

/// Who runs the machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VmmChoice {
    /// Cloud Hypervisor if it and KVM can be used, else QEMU.
    Auto,
    /// QEMU.
    Qemu,
    /// Cloud Hypervisor; an error where it can't be used.
    CloudHypervisor,
}

/// Whether guests run on hardware.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accelerator {
    /// KVM if a measurement finds it usable, else TCG.
    Auto,
    /// Hardware; an error where it doesn't work.
    Kvm,
    /// Emulation.
    Tcg,
}

/// How root file systems become disks.
#[derive(Debug, Clone)]
pub struct RootfsConfig {
    /// Program that makes EROFS images.
    pub mkfs_erofs: PathBuf,
    /// Most bytes the cache of images may take.
    pub cache_bytes: u64,
    /// Most bytes a container may write to its root file system (guest memory);
    /// 0: half of the guest's memory.
    pub writable_bytes: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            run_dir: "/run/sandboxer".into(),
            state_dir: "/var/lib/sandboxer".into(),
            vm: VmConfig {
                vmm: VmmChoice::Auto,
                qemu: "qemu-system-x86_64".into(),
                cloud_hypervisor: "cloud-hypervisor".into(),
                accelerator: Accelerator::Auto,
                kernel: "/usr/lib/sandboxer/vmlinux".into(),
                initramfs: "/usr/lib/sandboxer/initramfs.cpio".into(),
                default_vcpus: 1,
                default_memory_mib: 256,
                max_vcpus: 64,
                max_memory_mib: 1 << 20,
                boot_timeout: Duration::from_secs(30),
                call_timeout: Duration::from_secs(10),
                agent_timeout: Duration::from_secs(10),
                console_log_bytes: 1 << 20,
                agent_log: None,
            },
            rootfs: RootfsConfig {
                mkfs_erofs: "mkfs.erofs".into(),
                cache_bytes: 10 << 30,
                writable_bytes: 0,
            },
            containerd_ttrpc: None,
            concurrent_starts: 2 * std::thread::available_parallelism().map_or(1, usize::from),
            drain_timeout: Duration::from_secs(10),
            metrics_listen: None,
        }
    }
}
