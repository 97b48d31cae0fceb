//! The types of Cloud Hypervisor's API, the parts that are used here.
//!
//! Names and meanings are those of its published description (OpenAPI, v0.3.0); fields that are left out have
//! the defaults given there.

use std::{collections::HashMap, path::PathBuf};

use serde::{Deserialize, Serialize, de::IgnoredAny};

use crate::rate::RateLimiter;

/// `vm.create`.
#[derive(Debug, Clone, Serialize)]
pub struct VmConfig {
    /// Virtual CPUs.
    pub cpus: Cpus,
    /// Guest memory.
    pub memory: Memory,
    /// What boots.
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
    /// From then on, the VMM opens only what the rules allow.
    pub landlock_enable: bool,
    /// Rules beside the paths in this configuration.
    pub landlock_rules: Vec<LandlockRule>,
}

/// Virtual CPUs.
#[derive(Debug, Clone, Serialize)]
pub struct Cpus {
    /// At boot.
    pub boot_vcpus: u32,
    /// Maximum.
    pub max_vcpus: u32,
}

/// Guest memory.
#[derive(Debug, Clone, Serialize)]
pub struct Memory {
    /// Bytes; 0 if there are zones.
    pub size: u64,
    /// Other processes may map it; `vm.add-fs` needs that.
    pub shared: bool,
    /// How it can grow; the description's default is "Acpi".
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hotplug_method: Option<HotplugMethod>,
    /// Parts of it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub zones: Vec<MemoryZone>,
}

/// How memory grows and shrinks.
#[derive(Debug, Clone, Copy, Serialize)]
pub enum HotplugMethod {
    /// By a virtio-mem device for each zone.
    VirtioMem,
}

/// A part of the memory.
#[derive(Debug, Clone, Serialize)]
pub struct MemoryZone {
    /// Its name.
    pub id: &'static str,
    /// Bytes.
    pub size: u64,
    /// Existing file of that size; none: private memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    /// Writes go to the file.
    pub shared: bool,
    /// Bytes that it can grow by. They are never in the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hotplug_size: Option<u64>,
}

/// What boots.
#[derive(Debug, Clone, Serialize)]
pub struct Payload {
    /// ELF with a PVH note.
    pub kernel: PathBuf,
    /// Its initramfs.
    pub initramfs: PathBuf,
    /// Its command line.
    pub cmdline: String,
}

/// A disk; also for `vm.add-disk`.
#[derive(Debug, Clone, Serialize)]
pub struct Disk {
    /// Name of the device.
    pub id: String,
    /// Serial number by which the guest finds it.
    pub serial: String,
    /// File or block device.
    pub path: PathBuf,
    /// The guest cannot write to it.
    pub readonly: bool,
    /// Format of the file. If the VMM detected it, a guest could forge it.
    pub image_type: ImageType,
    /// How fast it may be read and written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate_limiter_config: Option<RateLimiter>,
}

/// Format of a disk's file.
#[derive(Debug, Clone, Copy, Serialize)]
pub enum ImageType {
    /// The disk, byte by byte.
    Raw,
}

/// A source of randomness.
#[derive(Debug, Clone, Serialize)]
pub struct Rng {
    /// A device of the host.
    pub src: &'static str,
}

/// A serial port or console.
#[derive(Debug, Clone, Serialize)]
pub struct Console {
    /// Its destination.
    pub mode: ConsoleMode,
}

/// The destination of a console.
#[derive(Debug, Clone, Copy, Serialize)]
pub enum ConsoleMode {
    /// There is none.
    Off,
    /// The VMM's stdout, and stdin if that is a terminal.
    Tty,
}

/// A hybrid vsock, see [`super::vsock`].
#[derive(Debug, Clone, Serialize)]
pub struct Vsock {
    /// The guest's address.
    pub cid: u32,
    /// The VMM listens here for connections to the guest.
    pub socket: PathBuf,
}

/// A balloon, which takes memory from the guest; one of size 0 takes none.
#[derive(Debug, Clone, Serialize)]
pub struct Balloon {
    /// Bytes.
    pub size: u64,
    /// The guest reports pages that it has freed, and the VMM drops them.
    pub free_page_reporting: bool,
}

/// A path that the VMM may open, with everything below it.
#[derive(Debug, Clone, Serialize)]
pub struct LandlockRule {
    /// File or directory.
    pub path: PathBuf,
    /// "r", "w" or "rw".
    pub access: &'static str,
}

/// `vm.add-net`; the taps are passed beside it.
#[derive(Debug, Clone, Serialize)]
pub struct Net {
    /// Name of the device.
    pub id: String,
    /// The guest's address, as in `02:00:00:00:00:01`.
    pub mac: String,
    /// Two for each tap.
    pub num_queues: usize,
}

/// `vm.add-fs`.
#[derive(Debug, Clone, Serialize)]
pub struct Fs {
    /// Name of the device.
    pub id: String,
    /// Tag by which the guest mounts it.
    pub tag: String,
    /// Socket of a vhost-user file server.
    pub socket: PathBuf,
    /// Request queues.
    pub num_queues: u32,
    /// Size of a queue, requests.
    pub queue_size: u32,
}

/// `vm.remove-device`.
#[derive(Debug, Clone, Serialize)]
pub struct Device<'a> {
    /// Its name.
    pub id: &'a str,
}

/// `vm.resize`. Fields that are not set stay as they are.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Resize {
    /// Virtual CPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub desired_vcpus: Option<u32>,
    /// Memory, bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub desired_ram: Option<u64>,
}

/// `vm.resize-zone`.
#[derive(Debug, Clone, Serialize)]
pub struct ResizeZone<'a> {
    /// Name of the zone.
    pub id: &'a str,
    /// Memory, bytes.
    pub desired_ram: u64,
}

/// `vm.snapshot`.
#[derive(Debug, Clone, Serialize)]
pub struct Snapshot {
    /// `file://` and an existing directory.
    pub destination_url: String,
}

/// `vm.restore`.
#[derive(Debug, Clone, Serialize)]
pub struct Restore {
    /// `file://` and the directory of a snapshot.
    pub source_url: String,
    /// Read all memory at once, not page by page on demand.
    pub prefault: bool,
}

/// Answer to `vmm.ping`.
#[derive(Debug, Clone, Deserialize)]
pub struct Ping {
    /// Such as "53.0.0".
    pub version: String,
    /// Process id of the VMM.
    pub pid: Option<i64>,
}

/// Answer to `vm.info`.
#[derive(Debug, Clone, Deserialize)]
pub struct VmInfo {
    /// Its configuration now.
    pub config: InfoConfig,
    /// Its state.
    pub state: VmState,
    /// The memory that the guest has now, bytes.
    #[serde(default)]
    pub memory_actual_size: u64,
    /// Its devices by name; none before it has booted.
    #[serde(default)]
    pub device_tree: Option<HashMap<String, IgnoredAny>>,
}

/// The parts that are read of a VM's configuration.
#[derive(Debug, Clone, Deserialize)]
pub struct InfoConfig {
    /// Virtual CPUs.
    pub cpus: InfoCpus,
    /// Guest memory.
    #[serde(default)]
    pub memory: InfoMemory,
}

/// Its virtual CPUs.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct InfoCpus {
    /// As many as were last requested.
    pub boot_vcpus: u32,
    /// Maximum.
    pub max_vcpus: u32,
}

/// The parts that are read of its memory's configuration.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct InfoMemory {
    /// Parts of it.
    #[serde(default)]
    pub zones: Option<Vec<InfoZone>>,
}

/// A part of the memory.
#[derive(Debug, Clone, Deserialize)]
pub struct InfoZone {
    /// Its name.
    pub id: String,
    /// Bytes at boot.
    pub size: u64,
    /// Bytes that it can grow by.
    #[serde(default)]
    pub hotplug_size: Option<u64>,
    /// Bytes that it was last requested to grow by.
    #[serde(default)]
    pub hotplugged_size: Option<u64>,
}

/// The state of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub enum VmState {
    /// Not booted.
    Created,
    /// Its CPUs run.
    Running,
    /// It was shut down.
    Shutdown,
    /// Its CPUs are stopped.
    Paused,
}

/// Answer to the calls that add a device to a running VM.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct PciDevice {
    /// Its name.
    pub id: String,
    /// Its PCI address in the guest, as in `0000:00:05.0`.
    pub bdf: String,
}

/// Answer to `vm.counters`: by device, by counter.
pub type Counters = HashMap<String, HashMap<String, u64>>;
