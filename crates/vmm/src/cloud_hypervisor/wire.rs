//! What is said over the API: the parts of Cloud Hypervisor's types that are used here.
//!
//! Names and meanings are those of its published description (OpenAPI, v0.3.0); what is left out has
//! its default there.

use std::{collections::HashMap, path::PathBuf};

use serde::{Deserialize, Serialize, de::IgnoredAny};

/// `vm.create`.
#[derive(Debug, Clone, Serialize)]
pub struct VmConfig {
    /// Virtual CPUs.
    pub cpus: Cpus,
    /// Guest memory.
    pub memory: Memory,
    /// What boots.
    pub payload: Payload,
    /// Disks of the first moment.
    pub disks: Vec<Disk>,
    /// Where the guest's randomness comes from.
    pub rng: Rng,
    /// The legacy serial port.
    pub serial: Console,
    /// The virtio console.
    pub console: Console,
    /// The way to the agent.
    pub vsock: Vsock,
    /// From here on, the VMM opens what the rules allow and nothing else.
    pub landlock_enable: bool,
    /// Beside what this configuration names itself.
    pub landlock_rules: Vec<LandlockRule>,
}

/// Virtual CPUs.
#[derive(Debug, Clone, Serialize)]
pub struct Cpus {
    /// At boot.
    pub boot_vcpus: u32,
    /// At most.
    pub max_vcpus: u32,
}

/// Guest memory.
#[derive(Debug, Clone, Serialize)]
pub struct Memory {
    /// Bytes; 0 where there are zones.
    pub size: u64,
    /// Other processes may map it; `vm.add-fs` needs that.
    pub shared: bool,
    /// Parts of it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub zones: Vec<MemoryZone>,
}

/// A part of the memory.
#[derive(Debug, Clone, Serialize)]
pub struct MemoryZone {
    /// Its name.
    pub id: &'static str,
    /// Bytes.
    pub size: u64,
    /// Existing file of that size.
    pub file: PathBuf,
    /// What is written goes into the file.
    pub shared: bool,
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

/// A disk, `vm.add-disk` too.
#[derive(Debug, Clone, Serialize)]
pub struct Disk {
    /// Name of the device.
    pub id: String,
    /// By which the guest finds it.
    pub serial: String,
    /// File or block device.
    pub path: PathBuf,
    /// The guest can't write to it.
    pub readonly: bool,
    /// What is in the file. Left to look for itself, the VMM would take a guest's word for it.
    pub image_type: ImageType,
}

/// What is in the file of a disk.
#[derive(Debug, Clone, Copy, Serialize)]
pub enum ImageType {
    /// The disk, byte by byte.
    Raw,
}

/// Where randomness comes from.
#[derive(Debug, Clone, Serialize)]
pub struct Rng {
    /// A device of the host.
    pub src: &'static str,
}

/// A serial port or console.
#[derive(Debug, Clone, Serialize)]
pub struct Console {
    /// Where it leads.
    pub mode: ConsoleMode,
}

/// Where a console leads.
#[derive(Debug, Clone, Copy, Serialize)]
pub enum ConsoleMode {
    /// There is none.
    Off,
    /// The VMM's stdout, and stdin if that is a terminal.
    Tty,
}

/// A vsock of the hybrid kind, see [`super::vsock`].
#[derive(Debug, Clone, Serialize)]
pub struct Vsock {
    /// The guest's address.
    pub cid: u32,
    /// Where the VMM listens for connections to the guest.
    pub socket: PathBuf,
}

/// A path that the VMM may open, with all below it.
#[derive(Debug, Clone, Serialize)]
pub struct LandlockRule {
    /// File or directory.
    pub path: PathBuf,
    /// "r", "w" or "rw".
    pub access: &'static str,
}

/// `vm.add-net`, the taps being passed beside it.
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
    /// By which the guest mounts it.
    pub tag: String,
    /// Where a vhost-user file server listens.
    pub socket: PathBuf,
    /// Request queues.
    pub num_queues: u32,
    /// Requests that fit into one.
    pub queue_size: u32,
}

/// `vm.remove-device`.
#[derive(Debug, Clone, Serialize)]
pub struct Device<'a> {
    /// Its name.
    pub id: &'a str,
}

/// `vm.resize`. What is not set stays.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Resize {
    /// Virtual CPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub desired_vcpus: Option<u32>,
    /// Memory, bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub desired_ram: Option<u64>,
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
    /// Read all memory at once instead of page by page as it is needed.
    pub prefault: bool,
}

/// Answer to `vmm.ping`.
#[derive(Debug, Clone, Deserialize)]
pub struct Ping {
    /// Such as "53.0.0".
    pub version: String,
    /// The VMM's process.
    pub pid: Option<i64>,
}

/// Answer to `vm.info`.
#[derive(Debug, Clone, Deserialize)]
pub struct VmInfo {
    /// What the VM is doing.
    pub state: VmState,
    /// Its devices by name; none before it has booted.
    #[serde(default)]
    pub device_tree: Option<HashMap<String, IgnoredAny>>,
}

/// What a VM is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub enum VmState {
    /// Not booted.
    Created,
    /// Its CPUs run.
    Running,
    /// It was shut down.
    Shutdown,
    /// Its CPUs stand still.
    Paused,
}

/// Answer to the calls that add a device to a VM that runs.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct PciDevice {
    /// Its name.
    pub id: String,
    /// Where the guest sees it, as in `0000:00:05.0`.
    pub bdf: String,
}

/// Answer to `vm.counters`: by device, by counter.
pub type Counters = HashMap<String, HashMap<String, u64>>;
