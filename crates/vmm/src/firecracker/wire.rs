//! The types of Firecracker's API that are used here.
//!
//! Names and meanings follow its published description (OpenAPI, v1.16); fields that are left out have the defaults
//! given there.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::rate::RateLimiter;

/// The body of `PUT /machine-config`.
#[derive(Debug, Clone, Serialize)]
pub struct Machine {
    /// Number of virtual CPUs.
    pub vcpu_count: u32,
    /// Size of the guest memory, MiB.
    pub mem_size_mib: u64,
}

/// The body of `PUT /boot-source`.
#[derive(Debug, Clone, Serialize)]
pub struct BootSource {
    /// Path of the kernel, an ELF file with a PVH note.
    pub kernel_image_path: PathBuf,
    /// Path of the initramfs.
    pub initrd_path: PathBuf,
    /// The kernel command line.
    pub boot_args: String,
}

/// The body of `PUT /drives/ID`.
#[derive(Debug, Clone, Serialize)]
pub struct Drive {
    /// Name of the drive.
    pub drive_id: String,
    /// Path of a file or block device.
    pub path_on_host: PathBuf,
    /// Whether the drive is the kernel's root; none is.
    pub is_root_device: bool,
    /// Whether the guest cannot write to the drive.
    pub is_read_only: bool,
    /// Effect of a flush by the guest.
    pub cache_type: Cache,
}

/// The effect of a flush by the guest.
#[derive(Debug, Clone, Copy, Serialize)]
pub enum Cache {
    /// A flush writes the file to the host's storage.
    Writeback,
}

/// The body of `PATCH /drives/ID`.
#[derive(Debug, Clone, Serialize)]
pub struct DrivePatch {
    /// Name of the drive.
    pub drive_id: String,
    /// Path of the drive's new file.
    pub path_on_host: PathBuf,
    /// New limits of reading and writing; `None`: as before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate_limiter: Option<RateLimiter>,
}

/// The body of `PUT /vsock`: a hybrid vsock, see [`crate::vsock`].
#[derive(Debug, Clone, Serialize)]
pub struct Vsock {
    /// The guest's address.
    pub guest_cid: u32,
    /// Path of the socket on which the VMM listens for connections to the guest.
    pub uds_path: PathBuf,
}

/// The body of `PUT /entropy`: a source of randomness with the defaults.
#[derive(Debug, Clone, Serialize)]
pub struct Entropy {}

/// The body of `PUT /balloon`: a balloon, which takes memory from the guest. A balloon of size 0 takes none.
#[derive(Debug, Clone, Serialize)]
pub struct Balloon {
    /// Size of the balloon, MiB.
    pub amount_mib: u32,
    /// Whether the balloon shrinks when the guest lacks memory.
    pub deflate_on_oom: bool,
    /// Whether the guest reports freed pages, which the VMM then drops.
    pub free_page_reporting: bool,
}

/// The body of `PUT /hotplug/memory`: memory that the guest can get while it runs. At first the guest has none of it.
#[derive(Debug, Clone, Serialize)]
pub struct MemoryHotplug {
    /// Maximum size, MiB.
    pub total_size_mib: u64,
    /// Unit in which the guest plugs and unplugs memory, MiB.
    pub block_size_mib: u64,
    /// Unit in which the VMM adds memory to the VM and removes it, MiB.
    pub slot_size_mib: u64,
}

/// The body of `PATCH /hotplug/memory`.
#[derive(Debug, Clone, Serialize)]
pub struct MemoryRequest {
    /// Size that the guest is to have, MiB.
    pub requested_size_mib: u64,
}

/// The response to `GET /hotplug/memory`.
#[derive(Debug, Clone, Deserialize)]
pub struct MemoryStatus {
    /// The maximum in [`MemoryHotplug`], MiB.
    pub total_size_mib: u64,
    /// Size that the guest has, MiB.
    pub plugged_size_mib: u64,
    /// The size of the last [`MemoryRequest`], MiB.
    pub requested_size_mib: u64,
}

/// The body of `PUT /network-interfaces/ID`.
#[derive(Debug, Clone, Serialize)]
pub struct Net {
    /// Name of the interface.
    pub iface_id: String,
    /// The guest's address, as in `02:00:00:00:00:01`.
    pub guest_mac: String,
    /// Name of the interface's tap in the VMM's network namespace.
    pub host_dev_name: String,
}

/// The body of `PUT /actions`.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(tag = "action_type")]
pub enum Action {
    /// Boots the VM.
    InstanceStart,
}

/// The body of `PATCH /vm`.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(tag = "state")]
pub enum VmState {
    /// The CPUs are stopped.
    Paused,
    /// The CPUs run.
    Resumed,
}

/// The body of `PUT /snapshot/create`.
#[derive(Debug, Clone, Serialize)]
pub struct SnapshotCreate {
    /// Path of the file for the state of CPUs and devices.
    pub snapshot_path: PathBuf,
    /// Path of the file for the memory.
    pub mem_file_path: PathBuf,
}

/// The body of `PUT /snapshot/load`.
#[derive(Debug, Clone, Serialize)]
pub struct SnapshotLoad {
    /// Path of the file with the state.
    pub snapshot_path: PathBuf,
    /// Source of the memory.
    pub mem_backend: MemoryBackend,
    /// Taps that replace those of the frozen VM.
    pub network_overrides: Vec<NetworkOverride>,
}

/// The source of a copy's memory.
#[derive(Debug, Clone, Serialize)]
pub struct MemoryBackend {
    /// Kind of the source.
    pub backend_type: Backend,
    /// Path of the file.
    pub backend_path: PathBuf,
}

/// A kind of memory source.
#[derive(Debug, Clone, Copy, Serialize)]
pub enum Backend {
    /// A file, mapped privately.
    File,
}

/// A tap that replaces a tap of the frozen VM.
#[derive(Debug, Clone, Serialize)]
pub struct NetworkOverride {
    /// Name of the interface.
    pub iface_id: String,
    /// Name of the new tap.
    pub host_dev_name: String,
}

/// The response to `GET /`.
#[derive(Debug, Clone, Deserialize)]
pub struct Instance {
    /// State of the VM.
    pub state: InstanceState,
    /// Version of the VMM, such as "1.16.1".
    pub vmm_version: String,
}

/// The state of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub enum InstanceState {
    /// The VM has not been booted.
    #[serde(rename = "Not started")]
    NotStarted,
    /// The VM's CPUs run.
    Running,
    /// The VM's CPUs are stopped.
    Paused,
}
