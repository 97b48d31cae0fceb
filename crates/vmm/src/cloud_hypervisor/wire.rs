//! The types of Cloud Hypervisor's API that are used here.
//!
//! Names and meanings follow its published description (OpenAPI, v0.3.0); fields that are left out have the defaults
//! given there.

use std::{collections::HashMap, path::PathBuf};

use serde::{Deserialize, Serialize, de::IgnoredAny};

use crate::rate::RateLimiter;

/// The body of `vm.create`.
#[derive(Debug, Clone, Serialize)]
pub struct VmConfig {
    /// Virtual CPUs.
    pub cpus: Cpus,
    /// Guest memory.
    pub memory: Memory,
    /// The kernel, with its initramfs and command line.
    pub payload: Payload,
    /// Disks that the VM boots with.
    pub disks: Vec<Disk>,
    /// The guest's source of randomness.
    pub rng: Rng,
    /// The legacy serial port.
    pub serial: Console,
    /// The virtio console.
    pub console: Console,
    /// The vsock to the agent.
    pub vsock: Vsock,
    /// The device by which the guest reports pages that it has freed.
    pub balloon: Balloon,
    /// Whether the VMM confines itself with Landlock: from then on it opens only what the rules allow.
    pub landlock_enable: bool,
    /// Landlock rules in addition to the paths in this configuration.
    pub landlock_rules: Vec<LandlockRule>,
}

/// Virtual CPUs.
#[derive(Debug, Clone, Serialize)]
pub struct Cpus {
    /// Number of virtual CPUs at boot.
    pub boot_vcpus: u32,
    /// Maximum number of virtual CPUs.
    pub max_vcpus: u32,
}

/// Guest memory.
#[derive(Debug, Clone, Serialize)]
pub struct Memory {
    /// Size in bytes; 0 if there are zones.
    pub size: u64,
    /// Whether other processes may map the memory.
    pub shared: bool,
    /// How the memory can grow; the description's default is "Acpi".
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hotplug_method: Option<HotplugMethod>,
    /// Zones of the memory; may be empty.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub zones: Vec<MemoryZone>,
}

/// How memory grows and shrinks.
#[derive(Debug, Clone, Copy, Serialize)]
pub enum HotplugMethod {
    /// Growth by one virtio-mem device per zone.
    VirtioMem,
}

/// A zone of the memory.
#[derive(Debug, Clone, Serialize)]
pub struct MemoryZone {
    /// Name of the zone.
    pub id: &'static str,
    /// Size at boot, bytes.
    pub size: u64,
    /// Existing file of that size; `None`: private memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    /// Whether writes go to the file.
    pub shared: bool,
    /// Number of bytes by which the zone can grow. They are never in the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hotplug_size: Option<u64>,
}

/// The kernel, with its initramfs and command line.
#[derive(Debug, Clone, Serialize)]
pub struct Payload {
    /// Path of the kernel, an ELF file with a PVH note.
    pub kernel: PathBuf,
    /// Path of the initramfs.
    pub initramfs: PathBuf,
    /// The kernel command line.
    pub cmdline: String,
}

/// A disk; also the body of `vm.add-disk`.
#[derive(Debug, Clone, Serialize)]
pub struct Disk {
    /// Name of the device.
    pub id: String,
    /// Serial number by which the guest finds the disk.
    pub serial: String,
    /// Path of a file or block device.
    pub path: PathBuf,
    /// Whether the guest cannot write to the disk.
    pub readonly: bool,
    /// Format of the file. If the VMM detected the format, a guest could forge it.
    pub image_type: ImageType,
    /// Limits of reading and writing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate_limiter_config: Option<RateLimiter>,
}

/// The format of a disk's file.
#[derive(Debug, Clone, Copy, Serialize)]
pub enum ImageType {
    /// The disk's content, byte by byte.
    Raw,
}

/// A source of randomness.
#[derive(Debug, Clone, Serialize)]
pub struct Rng {
    /// Path of a device of the host.
    pub src: &'static str,
}

/// A serial port or console.
#[derive(Debug, Clone, Serialize)]
pub struct Console {
    /// Destination of the output.
    pub mode: ConsoleMode,
}

/// The destination of a console's output.
#[derive(Debug, Clone, Copy, Serialize)]
pub enum ConsoleMode {
    /// No console.
    Off,
    /// The VMM's stdout, and its stdin if that is a terminal.
    Tty,
}

/// A hybrid vsock; see [`super::vsock`].
#[derive(Debug, Clone, Serialize)]
pub struct Vsock {
    /// The guest's address.
    pub cid: u32,
    /// Path of the socket on which the VMM listens for connections to the guest.
    pub socket: PathBuf,
}

/// A balloon, which takes memory from the guest. A balloon of size 0 takes none.
#[derive(Debug, Clone, Serialize)]
pub struct Balloon {
    /// Size in bytes.
    pub size: u64,
    /// Whether the guest reports freed pages, which the VMM then drops.
    pub free_page_reporting: bool,
}

/// A path that the VMM may open, with everything below it.
#[derive(Debug, Clone, Serialize)]
pub struct LandlockRule {
    /// Path of a file or directory.
    pub path: PathBuf,
    /// Permitted access: "r", "w" or "rw".
    pub access: &'static str,
}

/// The body of `vm.add-net`. The taps are passed beside it.
#[derive(Debug, Clone, Serialize)]
pub struct Net {
    /// Name of the device.
    pub id: String,
    /// The guest's address, as in `02:00:00:00:00:01`.
    pub mac: String,
    /// Number of queues, two for each tap.
    pub num_queues: usize,
}

/// The body of `vm.remove-device`.
#[derive(Debug, Clone, Serialize)]
pub struct Device<'a> {
    /// Name of the device.
    pub id: &'a str,
}

/// The body of `vm.resize`. Fields that are not set stay as they are.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Resize {
    /// Number of virtual CPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub desired_vcpus: Option<u32>,
    /// Size of the memory, bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub desired_ram: Option<u64>,
}

/// The body of `vm.resize-zone`.
#[derive(Debug, Clone, Serialize)]
pub struct ResizeZone<'a> {
    /// Name of the zone.
    pub id: &'a str,
    /// Size of the zone, bytes.
    pub desired_ram: u64,
}

/// The body of `vm.snapshot`.
#[derive(Debug, Clone, Serialize)]
pub struct Snapshot {
    /// URL of an existing directory, with `file://`.
    pub destination_url: String,
}

/// The body of `vm.restore`.
#[derive(Debug, Clone, Serialize)]
pub struct Restore {
    /// URL of the directory of a snapshot, with `file://`.
    pub source_url: String,
    /// Whether to read all memory at once, not page by page on demand.
    pub prefault: bool,
    /// Network cards of the snapshot. Their taps are passed beside it. The published description lacks this.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub net_fds: Vec<RestoredNet>,
}

/// A network card of a snapshot.
#[derive(Debug, Clone, Serialize)]
pub struct RestoredNet {
    /// Name of the device.
    pub id: String,
    /// Number of taps that are passed for the device.
    pub num_fds: usize,
}

/// The response to `vmm.ping`.
#[derive(Debug, Clone, Deserialize)]
pub struct Ping {
    /// Version of the VMM, such as "53.0.0".
    pub version: String,
    /// Process ID of the VMM.
    pub pid: Option<i64>,
}

/// The response to `vm.info`.
#[derive(Debug, Clone, Deserialize)]
pub struct VmInfo {
    /// The VM's current configuration.
    pub config: InfoConfig,
    /// The VM's state.
    pub state: VmState,
    /// Current size of the guest's memory, bytes.
    #[serde(default)]
    pub memory_actual_size: u64,
    /// The VM's devices by name; empty before it has booted.
    #[serde(default)]
    pub device_tree: Option<HashMap<String, IgnoredAny>>,
}

/// The parts of a VM's configuration that are read.
#[derive(Debug, Clone, Deserialize)]
pub struct InfoConfig {
    /// Virtual CPUs.
    pub cpus: InfoCpus,
    /// Guest memory.
    #[serde(default)]
    pub memory: InfoMemory,
}

/// The virtual CPUs of a VM.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct InfoCpus {
    /// Number of virtual CPUs that was last requested.
    pub boot_vcpus: u32,
    /// Maximum number of virtual CPUs.
    pub max_vcpus: u32,
}

/// The parts of a memory's configuration that are read.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct InfoMemory {
    /// Zones of the memory; may be empty.
    #[serde(default)]
    pub zones: Option<Vec<InfoZone>>,
}

/// A zone of the memory.
#[derive(Debug, Clone, Deserialize)]
pub struct InfoZone {
    /// Name of the zone.
    pub id: String,
    /// Size at boot, bytes.
    pub size: u64,
    /// Number of bytes by which the zone can grow.
    #[serde(default)]
    pub hotplug_size: Option<u64>,
    /// Number of bytes of growth that was last requested.
    #[serde(default)]
    pub hotplugged_size: Option<u64>,
}

/// The state of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub enum VmState {
    /// The VM has not been booted.
    Created,
    /// The VM's CPUs run.
    Running,
    /// The VM was shut down.
    Shutdown,
    /// The VM's CPUs are stopped.
    Paused,
}

/// The response to calls that add a device to a running VM.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct PciDevice {
    /// Name of the device.
    pub id: String,
    /// PCI address of the device in the guest, such as `0000:00:05.0`.
    pub bdf: String,
}
