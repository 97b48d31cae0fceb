//! The types of Firecracker's API, the parts that are used here.
//!
//! Names and meanings are those of its published description (OpenAPI, v1.16); fields that are left out have the
//! defaults given there.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::rate::RateLimiter;

/// `PUT /machine-config`.
#[derive(Debug, Clone, Serialize)]
pub struct Machine {
    /// Virtual CPUs.
    pub vcpu_count: u32,
    /// Guest memory, MiB.
    pub mem_size_mib: u64,
}

/// `PUT /boot-source`.
#[derive(Debug, Clone, Serialize)]
pub struct BootSource {
    /// ELF with a PVH note.
    pub kernel_image_path: PathBuf,
    /// Its initramfs.
    pub initrd_path: PathBuf,
    /// Its command line.
    pub boot_args: String,
}

/// `PUT /drives/ID`.
#[derive(Debug, Clone, Serialize)]
pub struct Drive {
    /// Name of the drive.
    pub drive_id: String,
    /// File or block device.
    pub path_on_host: PathBuf,
    /// The kernel's root; none is.
    pub is_root_device: bool,
    /// The guest cannot write to it.
    pub is_read_only: bool,
    /// What a flush of the guest does.
    pub cache_type: Cache,
}

/// What a flush of the guest does.
#[derive(Debug, Clone, Copy, Serialize)]
pub enum Cache {
    /// It writes the file to the host's storage.
    Writeback,
}

/// `PATCH /drives/ID`.
#[derive(Debug, Clone, Serialize)]
pub struct DrivePatch {
    /// Name of the drive.
    pub drive_id: String,
    /// Its file from now on.
    pub path_on_host: PathBuf,
    /// How fast it may be read and written from now on; `None`: as before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate_limiter: Option<RateLimiter>,
}

/// `PUT /vsock`: a hybrid vsock, see [`crate::vsock`].
#[derive(Debug, Clone, Serialize)]
pub struct Vsock {
    /// The guest's address.
    pub guest_cid: u32,
    /// The VMM listens here for connections to the guest.
    pub uds_path: PathBuf,
}

/// `PUT /entropy`: a source of randomness with the defaults.
#[derive(Debug, Clone, Serialize)]
pub struct Entropy {}

/// `PUT /balloon`: a balloon, which takes memory from the guest; one of size 0 takes none.
#[derive(Debug, Clone, Serialize)]
pub struct Balloon {
    /// Its size, MiB.
    pub amount_mib: u32,
    /// It shrinks when the guest lacks memory.
    pub deflate_on_oom: bool,
    /// The guest reports pages that it has freed, and the VMM drops them.
    pub free_page_reporting: bool,
}

/// `PUT /hotplug/memory`: memory that the guest can get while it runs; at first it has none of it.
#[derive(Debug, Clone, Serialize)]
pub struct MemoryHotplug {
    /// The most that it can get, MiB.
    pub total_size_mib: u64,
    /// What it plugs and unplugs at once, MiB.
    pub block_size_mib: u64,
    /// What the VMM adds to the VM and takes from it at once, MiB.
    pub slot_size_mib: u64,
}

/// `PATCH /hotplug/memory`.
#[derive(Debug, Clone, Serialize)]
pub struct MemoryRequest {
    /// What the guest is to have, MiB.
    pub requested_size_mib: u64,
}

/// Answer to `GET /hotplug/memory`.
#[derive(Debug, Clone, Deserialize)]
pub struct MemoryStatus {
    /// As in [`MemoryHotplug`].
    pub total_size_mib: u64,
    /// What the guest has, MiB.
    pub plugged_size_mib: u64,
    /// As in [`MemoryRequest`].
    pub requested_size_mib: u64,
}

/// `PUT /network-interfaces/ID`.
#[derive(Debug, Clone, Serialize)]
pub struct Net {
    /// Name of the interface.
    pub iface_id: String,
    /// The guest's address, as in `02:00:00:00:00:01`.
    pub guest_mac: String,
    /// Its tap, in the VMM's network namespace.
    pub host_dev_name: String,
}

/// `PUT /actions`.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(tag = "action_type")]
pub enum Action {
    /// Boots the VM.
    InstanceStart,
}

/// `PATCH /vm`.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(tag = "state")]
pub enum VmState {
    /// The CPUs are stopped.
    Paused,
    /// The CPUs run.
    Resumed,
}

/// `PUT /snapshot/create`.
#[derive(Debug, Clone, Serialize)]
pub struct SnapshotCreate {
    /// File for the state of CPUs and devices.
    pub snapshot_path: PathBuf,
    /// File for the memory.
    pub mem_file_path: PathBuf,
}

/// `PUT /snapshot/load`.
#[derive(Debug, Clone, Serialize)]
pub struct SnapshotLoad {
    /// File with the state.
    pub snapshot_path: PathBuf,
    /// The memory.
    pub mem_backend: MemoryBackend,
    /// Taps in place of those of the frozen VM.
    pub network_overrides: Vec<NetworkOverride>,
}

/// The source of a copy's memory.
#[derive(Debug, Clone, Serialize)]
pub struct MemoryBackend {
    /// Its kind.
    pub backend_type: Backend,
    /// The file.
    pub backend_path: PathBuf,
}

/// A kind of memory source.
#[derive(Debug, Clone, Copy, Serialize)]
pub enum Backend {
    /// A file, mapped privately.
    File,
}

/// A tap in place of that of a frozen VM.
#[derive(Debug, Clone, Serialize)]
pub struct NetworkOverride {
    /// Name of the interface.
    pub iface_id: String,
    /// Its tap.
    pub host_dev_name: String,
}

/// Answer to `GET /`.
#[derive(Debug, Clone, Deserialize)]
pub struct Instance {
    /// Whether it runs.
    pub state: InstanceState,
    /// Such as "1.16.1".
    pub vmm_version: String,
}

/// Whether a VM runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub enum InstanceState {
    /// Not booted.
    #[serde(rename = "Not started")]
    NotStarted,
    /// Its CPUs run.
    Running,
    /// Its CPUs are stopped.
    Paused,
}
