//! The series `vm`: a conventional VM beside containers, for comparison. It has QEMU's machine q35 with its firmware,
//! Debian's kernel, systemd as init, and one unit that runs a command.
//!
//! | module | what it holds |
//! |---|---|
//! | [`arguments`] | QEMU's command line |
//! | [`ping`] | the first answered ping |
//! | [`port`] | what the guest sends: output and exit code |
//! | [`process`] | a VM from its start to its end |

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::manifest::Facts;

pub mod arguments;
pub mod ping;
pub mod port;
pub mod process;

/// Name of the series, in place of a handler's name.
pub const VM: &str = "vm";
/// Program of the VMM.
const QEMU: &str = "qemu-system-x86_64";
/// Memory of the VMM itself, bytes. Its cgroup's limit is this plus the guest's memory.
pub const VMM_MEMORY: u64 = 512 << 20;
/// Processors of a VM if no option sets their number.
pub const DEFAULT_CPUS: u32 = 1;
/// Memory of a VM if no option sets it, bytes.
pub const DEFAULT_MEMORY: u64 = 512 << 20;

/// Why a VM cannot be used.
#[derive(Debug, Clone, thiserror::Error)]
pub enum VmError {
    /// No image was named.
    #[error("series vm needs a disk: make one with `make bench-vm` and name it with --vm-image")]
    NoImage,
    /// A file of the image is missing.
    #[error(
        "cannot use the VM image: {path} is not a file; `make bench-vm` makes disk.raw, vmlinuz and initrd in one directory"
    )]
    Missing {
        /// Path of the missing file.
        path: PathBuf,
    },
    /// A step on the host failed.
    #[error("cannot {action}: {reason}")]
    Host {
        /// The attempted step.
        action: &'static str,
        /// The system's error, as text.
        reason: String,
    },
    /// The guest sent something other than frames, or too much.
    #[error("the guest's output is unusable: {0}")]
    Output(#[from] port::PortError),
    /// QEMU exited before the command ended.
    #[error("QEMU exited before the command ended ({status}); its last output: {last_output}")]
    Exited {
        /// QEMU's exit status.
        status: String,
        /// Last output of QEMU or of the guest's console.
        last_output: String,
    },
    /// The guest did not start its unit in time.
    #[error("the guest did not start its unit within {limit:?}; its last output: {last_output}")]
    NoUnit {
        /// The timeout.
        limit: std::time::Duration,
        /// Last output of QEMU or of the guest's console.
        last_output: String,
    },
}

/// A root disk, with the kernel and initrd in the same directory.
#[derive(Debug, Clone)]
pub struct Image {
    /// Path of the root disk, raw.
    pub disk: PathBuf,
    /// Path of the kernel.
    pub kernel: PathBuf,
    /// Path of the initrd.
    pub initrd: PathBuf,
}

impl Image {
    /// Returns the image of the root disk `disk`.
    pub fn new(disk: &Path) -> Self {
        Self {
            disk: disk.to_owned(),
            kernel: disk.with_file_name("vmlinuz"),
            initrd: disk.with_file_name("initrd"),
        }
    }

    /// Checks that the image's files exist.
    pub fn check(&self) -> Result<(), VmError> {
        let missing = [&self.disk, &self.kernel, &self.initrd].into_iter().find(|path| !path.is_file());
        missing.map_or(Ok(()), |path| Err(VmError::Missing { path: path.clone() }))
    }
}

/// Whether KVM or QEMU executes the guest's instructions.
#[derive(Debug, Clone)]
pub struct Accelerator {
    /// Whether KVM is used; else QEMU emulates the processor.
    pub kvm: bool,
    /// Why KVM is or is not used.
    pub reason: String,
}

/// Configuration of the series' VMs.
#[derive(Debug, Clone)]
pub struct Vm {
    /// Disk, kernel and initrd.
    pub image: Image,
    /// Program of the VMM.
    pub program: PathBuf,
    /// Whether KVM or QEMU executes the guest's instructions.
    pub accelerator: Accelerator,
    /// Address of this host at which clients in pods reach servers in the VM.
    pub address: Option<String>,
    /// Directory of the cgroup file system; tests use another one.
    pub groups: PathBuf,
}

impl Vm {
    /// Returns the configuration of VMs with this root disk.
    pub fn new(disk: &Path, accelerator: Accelerator, address: Option<String>) -> Self {
        let (program, groups) = (QEMU.into(), "/sys/fs/cgroup".into());
        Self { image: Image::new(disk), program, accelerator, address, groups }
    }

    /// Returns the remark that the guests are emulated; `None` if they are not.
    pub fn remark(&self) -> Option<String> {
        let reason = &self.accelerator.reason;
        (!self.accelerator.kvm)
            .then(|| format!("{VM}: QEMU emulates the guest's processor, so its figures say nothing about a VM on KVM: {reason}"))
    }

    /// Returns the properties of the VMs for a result.
    pub fn facts(&self, cpus: u32, memory: u64) -> Facts {
        let accelerator = if self.accelerator.kvm { "kvm" } else { "tcg" };
        let facts: [(&str, Value); 11] = [
            ("type", json!("conventional VM: QEMU, machine q35, SeaBIOS, Debian's kernel, systemd")),
            ("accelerator", json!(accelerator)),
            ("accelerator_reason", json!(self.accelerator.reason)),
            ("vmm", json!(self.program)),
            ("disk", json!(self.image.disk)),
            (
                "boot",
                json!("QEMU's -kernel passes kernel and initrd to the firmware: there is no boot loader"),
            ),
            ("cpus", json!(cpus)),
            ("memory_bytes", json!(memory)),
            ("memory_limit_of_vmm_bytes", json!(memory + VMM_MEMORY)),
            ("network", json!("QEMU's user-mode network; one port of this host is forwarded to a server")),
            ("address_of_servers", json!(self.address)),
        ];
        facts.map(|(name, fact)| (name.to_owned(), fact)).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_file_of_the_image_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let image = Image::new(&dir.path().join("disk.raw"));
        for name in ["disk.raw", "vmlinuz", "initrd"] {
            let error = image.check().unwrap_err().to_string();
            assert!(error.contains(&format!("/{name} is not a file")), "{error}");
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        image.check().unwrap();
    }

    #[test]
    fn an_emulated_guest_is_said_to_be_one() {
        let accelerator = Accelerator { kvm: false, reason: "no /dev/kvm".into() };
        let vm = Vm::new(Path::new("/d/disk.raw"), accelerator, None);
        let facts = vm.facts(1, 512 << 20);
        assert_eq!(
            (&facts["accelerator"], &facts["accelerator_reason"]),
            (&json!("tcg"), &json!("no /dev/kvm"))
        );
        assert!(vm.remark().unwrap().ends_with(": no /dev/kvm"));
        let on_kvm = Vm { accelerator: Accelerator { kvm: true, reason: String::new() }, ..vm };
        assert_eq!(on_kvm.remark(), None);
    }
}
