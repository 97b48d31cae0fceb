//! The description of a VM, independent of the VMM.

use std::{io, os::fd::OwnedFd, path::PathBuf, sync::Arc};

use sandboxer_config::VmConfig;
use sandboxer_process::cgroup::{Cgroup, CgroupEntries};
use sandboxer_protocol::{
    boot::{BootParams, first_mac},
    id::SandboxId,
    link::LinkKey,
};
use serde::{Deserialize, Serialize};

use super::{DiskLimits, VmmError, hotplug};

/// The shape of a VM: VMs of one shape differ only in what pods do with them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Shape {
    /// Virtual CPUs.
    pub vcpus: u32,
    /// Memory, MiB.
    pub memory_mib: u64,
    /// Network interfaces.
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

/// A VM, complete: every host resource it names exists before a VMM sees it.
#[derive(Debug, Clone)]
pub struct VmSpec {
    /// The pod it is for; names the VM in every error.
    pub pod: SandboxId,
    /// Existing directory of mode 0700 for the VM's sockets and logs, for this pod only.
    pub run_dir: PathBuf,
    /// Virtual CPUs, at least 1.
    pub vcpus: u32,
    /// Guest memory, MiB.
    pub memory_mib: u64,
    /// Memory that it can get while it runs, MiB: 0, or a multiple of [`crate::HOTPLUG_STEP_MIB`]. Not every VMM can do that.
    pub growth_mib: u64,
    /// vCPUs that it can get while it runs. Not every VMM can do that.
    pub growth_vcpus: u32,
    /// Network interfaces.
    pub nics: u8,
    /// The taps behind them, in order; the VMM inherits them. Empty while the VM is only described.
    pub taps: Vec<Arc<OwnedFd>>,
    /// The same for a VMM that opens its taps: see [`super::Vmm::opens_taps`]. `None`: there are none, or it inherits
    /// them.
    pub named_taps: Option<NamedTaps>,
    /// Uncompressed kernel (ELF with a PVH note).
    pub kernel: PathBuf,
    /// The initramfs that holds the agent.
    pub initramfs: PathBuf,
    /// What the agent learns from the kernel command line.
    pub boot: BootParams,
    /// Its memory is in huge pages of the host, 2 MiB each: [`VmSpec::memory_mib`] is even, it neither grows nor is frozen. Not every
    /// VMM can do that: see [`super::Vmm::has_huge_pages`].
    pub huge_pages: bool,
    /// File for the guest's memory, created by the VMM and shared, if the VM is to be frozen. `None`: private
    /// memory of the VMM.
    pub memory_file: Option<PathBuf>,
    /// Disks that the VM boots with. A VM that is restored: those that the frozen one had, each with a file of
    /// its own. A VMM whose frozen VM remembers limits keeps those.
    pub disks: Vec<DiskSpec>,
    /// No caller waits for it: its processes get low priority until it is assigned to a pod.
    pub background: bool,
    /// Most bytes of guest console that are kept.
    pub console_log_bytes: u64,
    /// Existing control group in which its VMM starts. `None`: the daemon's.
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

    /// Returns its shape.
    pub fn shape(&self) -> Shape {
        Shape { vcpus: self.vcpus, memory_mib: self.memory_mib, nics: self.nics }
    }

    /// Returns the words on the kernel command line that let it get memory, with a space behind them.
    pub(super) fn hotplug_words(&self) -> String {
        if self.growth_mib == 0 { String::new() } else { format!("{} ", hotplug::KERNEL_WORDS) }
    }

    /// Duplicates each of [`VmSpec::taps`], for its VMM to inherit.
    pub(super) fn own_taps(&self) -> io::Result<Vec<OwnedFd>> {
        self.taps.iter().map(|tap| tap.try_clone()).collect()
    }

    /// Opens the files through which its VMM enters [`VmSpec::cgroup`].
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

    /// Returns this VM without anything that differs from pod to pod, except `pod` itself. It is to be frozen,
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

/// Taps in a network namespace of their VM's own, in which its VMM runs. No process holds them.
#[derive(Debug, Clone)]
pub struct NamedTaps {
    /// The namespace.
    pub namespace: Arc<OwnedFd>,
    /// The taps in it, one for each interface of the VM.
    pub names: Vec<String>,
}

/// Serial of the image of a pod's first container. For this disk and for [`SPARE`] a VM may have a device from its boot on: the guest
/// then has no device to find when they are attached, and its device stays when they are detached. Every VM takes disks of these names.
pub const FIRST_IMAGE: &str = "image-0";
/// Serial of the disk for the writes of a pod's first container. See [`FIRST_IMAGE`].
pub const SPARE: &str = "spare-0";

/// A disk of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskSpec {
    /// The guest finds the disk by it: 1 to 20 letters, digits and `-`, unique within the VM.
    pub serial: String,
    /// Regular file (raw image) or block device.
    pub path: PathBuf,
    /// The guest cannot write to it.
    pub read_only: bool,
    /// How fast the guest may read and write it.
    // Part of no record: it is the pod's.
    #[serde(skip)]
    pub limits: DiskLimits,
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
