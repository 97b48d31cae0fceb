//! The description of a VM, independent of the VMM.

use std::{
    fs::File,
    io::{self, Seek, SeekFrom},
    os::{
        fd::OwnedFd,
        unix::fs::{FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
    sync::Arc,
    thread,
};

use sandboxer_config::VmConfig;
use sandboxer_process::cgroup::{Cgroup, CgroupEntries};
use sandboxer_protocol::{
    boot::{BootParams, first_mac},
    id::SandboxId,
    link::LinkKey,
};
use serde::{Deserialize, Serialize};

use super::{DiskLimits, VmmError, hotplug};

/// The shape of a VM. VMs of one shape differ only in what pods do with them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Shape {
    /// Number of virtual CPUs.
    pub vcpus: u32,
    /// Size of the memory, MiB.
    pub memory_mib: u64,
    /// Number of network interfaces.
    pub nics: u8,
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} vCPU, {} MiB", self.vcpus, self.memory_mib)?;
        match self.nics {
            1 => Ok(()),
            nics => write!(f, ", {nics} network interfaces"),
        }
    }
}

/// The complete description of a VM. Every host resource that it names exists before a VMM sees it.
#[derive(Debug, Clone)]
pub struct VmSpec {
    /// The pod that the VM is for, whose name is in every error.
    pub pod: SandboxId,
    /// Existing directory of mode 0700 for the VM's sockets and logs, for this pod only.
    pub run_dir: PathBuf,
    /// Number of virtual CPUs, at least 1.
    pub vcpus: u32,
    /// Size of the guest's boot memory, MiB.
    pub memory_mib: u64,
    /// Memory that the guest can get while it runs, MiB: 0, or a multiple of [`crate::HOTPLUG_STEP_MIB`]. Not every
    /// VMM supports this.
    pub growth_mib: u64,
    /// Number of vCPUs that the guest can get while it runs. Not every VMM supports this.
    pub growth_vcpus: u32,
    /// Number of network interfaces.
    pub nics: u8,
    /// Taps of the network interfaces, in order, which the VMM inherits. Empty while the VM is only described.
    pub taps: Vec<Arc<OwnedFd>>,
    /// Taps for a VMM that opens them itself: see [`super::Vmm::opens_taps`]. `None`: there are none, or the VMM
    /// inherits them.
    pub named_taps: Option<NamedTaps>,
    /// Path of the uncompressed kernel, an ELF file with a PVH note.
    pub kernel: PathBuf,
    /// Path of the initramfs that holds the agent.
    pub initramfs: PathBuf,
    /// Parameters that the agent reads from the kernel command line.
    pub boot: BootParams,
    /// Whether the guest's memory is in huge pages of the host, 2 MiB each. Then [`VmSpec::memory_mib`] is even, and
    /// the VM neither grows nor is frozen. Not every VMM supports this: see [`super::Vmm::has_huge_pages`].
    pub huge_pages: bool,
    /// File for the guest's memory, created by the VMM and shared, if the VM is to be frozen. `None`: private memory
    /// of the VMM.
    pub memory_file: Option<PathBuf>,
    /// Disks present at boot. On restore: the template's disks, each backed by its own file; VMMs that snapshot rate
    /// limits keep the snapshot's limits.
    pub disks: Vec<DiskSpec>,
    /// Whether no caller waits for the VM. Its processes then have low priority until it is assigned to a pod.
    pub background: bool,
    /// Maximum number of bytes of guest console that are kept.
    pub console_log_bytes: u64,
    /// Existing control group in which the VMM starts. `None`: the daemon's.
    pub cgroup: Option<Cgroup>,
}

impl VmSpec {
    /// Returns the spec of a VM as configured, with foreground priority.
    pub fn new(config: &VmConfig, pod: SandboxId, run_dir: PathBuf, shape: Shape, link_key: LinkKey) -> Self {
        Self {
            pod,
            run_dir,
            vcpus: shape.vcpus,
            memory_mib: shape.memory_mib,
            growth_mib: config.hotplug_memory_mib,
            growth_vcpus: config.hotplug_vcpus.min(config.max_vcpus.saturating_sub(shape.vcpus)),
            nics: shape.nics,
            taps: Vec::new(),
            named_taps: None,
            kernel: config.kernel.clone(),
            initramfs: config.initramfs.clone(),
            boot: BootParams { link_key, log: config.agent_log.clone(), template: false },
            huge_pages: false,
            memory_file: None,
            disks: Vec::new(),
            background: false,
            console_log_bytes: config.console_log_bytes,
            cgroup: None,
        }
    }

    /// Returns the shape of the VM.
    pub fn shape(&self) -> Shape {
        Shape { vcpus: self.vcpus, memory_mib: self.memory_mib, nics: self.nics }
    }

    /// Returns the words on the kernel command line that let the VM get memory, each followed by a space.
    pub(super) fn hotplug_parameters(&self) -> String {
        if self.growth_mib == 0 { String::new() } else { format!("{} ", hotplug::KERNEL_PARAMETERS) }
    }

    /// Returns the names of [`VmSpec::named_taps`].
    pub(super) fn tap_names(&self) -> &[String] {
        self.named_taps.as_ref().map_or(&[][..], |taps| &taps.names)
    }

    /// Duplicates each of [`VmSpec::taps`], for the VMM to inherit.
    pub(super) fn own_taps(&self) -> io::Result<Vec<OwnedFd>> {
        self.taps.iter().map(|tap| tap.try_clone()).collect()
    }

    /// Opens the files through which the VMM enters [`VmSpec::cgroup`].
    pub(super) fn entries(&self) -> Result<CgroupEntries, VmmError> {
        let opened = self.cgroup.as_ref().map(Cgroup::entries).transpose();
        let opened = opened.map_err(|(path, source)| VmmError::Path {
            pod: self.pod.clone(),
            action: "open control group",
            path,
            source,
        });
        Ok(opened?.unwrap_or_default())
    }

    /// Returns this VM without anything that differs from pod to pod, except `pod` itself. The result is to be frozen,
    /// in a file without a name.
    pub fn without_pod(&self) -> Self {
        Self {
            run_dir: PathBuf::new(),
            taps: Vec::new(),
            named_taps: None,
            cgroup: None,
            boot: BootParams { link_key: LinkKey::from_bytes([0; LinkKey::LEN]), ..self.boot.clone() },
            memory_file: Some(PathBuf::new()),
            ..self.clone()
        }
    }
}

/// Returns the [`first_mac`] of a network interface in the notation of VMMs: `02:73:62:78:00:00`.
pub(super) fn first_mac_text(nic: u8) -> String {
    first_mac(nic).map(|byte| format!("{byte:02x}")).join(":")
}

/// Taps in a network namespace of the VM's own, in which the VMM runs. No process holds them.
#[derive(Debug, Clone)]
pub struct NamedTaps {
    /// The network namespace.
    pub namespace: Arc<OwnedFd>,
    /// Names of the taps, one for each network interface of the VM.
    pub names: Vec<String>,
}

/// Serial of the image of a pod's first container. A VM may have a device for this disk and for [`SPARE`] from its
/// boot on. The guest then has no device to find when they are attached, and the device stays when they are detached.
/// Every VM accepts disks of these names.
pub const FIRST_IMAGE: &str = "image-0";
/// Serial of the disk for the writes of a pod's first container. See [`FIRST_IMAGE`].
pub const SPARE: &str = "spare-0";

/// A disk of a VM.
#[derive(Debug, Clone)]
pub struct DiskSpec {
    /// Name by which the guest finds the disk: 1 to 20 letters, digits and `-`, unique within the VM.
    pub serial: String,
    /// The disk's content, open as the disk is used: a VMM's driver opens nothing by a path.
    pub file: DiskFile,
    /// Whether the guest cannot write to the disk.
    pub read_only: bool,
    /// Limits of the guest's reads and writes.
    pub limits: DiskLimits,
}

impl DiskSpec {
    /// Returns what is recorded of the disk once a VMM has it.
    pub fn record(&self) -> DiskRecord {
        let path = self.file.name().to_owned();
        DiskRecord { serial: self.serial.clone(), path, read_only: self.read_only }
    }

    /// Returns the name in errors of the call that attaches the disk.
    pub(super) fn attaching(&self) -> String {
        format!("attaching {} as disk {}", self.file.name().display(), self.serial)
    }
}

/// The record of a disk that a VM has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskRecord {
    /// The value of [`DiskSpec::serial`].
    pub serial: String,
    /// Path at which the disk's file was opened.
    pub path: PathBuf,
    /// The value of [`DiskSpec::read_only`].
    pub read_only: bool,
}

/// An open regular file (raw image) or block device. Clones share the open file.
#[derive(Debug, Clone)]
pub struct DiskFile(Arc<Opened>);

#[derive(Debug)]
struct Opened {
    /// The open file; `None` only while it is dropped.
    file: Option<File>,
    name: PathBuf,
    is_device: bool,
}

impl DiskFile {
    /// Returns a disk of the open `file`; `name` is for messages and records.
    pub fn new(file: File, name: PathBuf) -> io::Result<Self> {
        let kind = file.metadata()?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "neither a file nor a block device"));
        }
        Ok(Self(Arc::new(Opened { file: Some(file), name, is_device: kind.is_block_device() })))
    }

    /// Returns the name of the file, which may lead elsewhere by now.
    pub fn name(&self) -> &Path {
        &self.0.name
    }

    /// Returns whether the file is a block device.
    pub fn is_device(&self) -> bool {
        self.0.is_device
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> io::Result<u64> {
        // A block device's metadata has no length, but its end can be sought.
        self.0.file()?.seek(SeekFrom::End(0))
    }

    /// Returns the device and inode of the file.
    pub fn inode(&self) -> io::Result<(u64, u64)> {
        let meta = self.0.file()?.metadata()?;
        Ok((meta.dev(), meta.ino()))
    }

    /// Duplicates the descriptor.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        Ok(self.0.file()?.try_clone()?.into())
    }
}

impl Opened {
    fn file(&self) -> io::Result<&File> {
        self.file.as_ref().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let file = self.file.take();
        if self.is_device {
            // Closing a device may block, so it is left to a thread of its own, or done here if none can be started.
            let _ = thread::Builder::new().name("close-device".to_owned()).spawn(move || drop(file));
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Returns a spec that no test boots.
    pub fn spec() -> VmSpec {
        VmSpec {
            pod: "pod".parse().unwrap(),
            run_dir: "/run".into(),
            vcpus: 1,
            memory_mib: 1,
            growth_mib: 0,
            growth_vcpus: 0,
            nics: 0,
            taps: Vec::new(),
            named_taps: None,
            kernel: "/new/kernel".into(),
            initramfs: "/new/initramfs".into(),
            boot: BootParams { link_key: LinkKey::random(), log: None, template: false },
            huge_pages: false,
            memory_file: None,
            disks: Vec::new(),
            background: false,
            console_log_bytes: 0,
            cgroup: None,
        }
    }

    #[test]
    fn pods_of_one_kind_are_the_same_vm() {
        let (one, other) = (spec(), VmSpec { run_dir: "/other".into(), ..spec() });
        assert_ne!(one.boot.link_key.to_hex(), other.boot.link_key.to_hex());
        assert_eq!(format!("{:?}", one.without_pod()), format!("{:?}", other.without_pod()));
    }
}
