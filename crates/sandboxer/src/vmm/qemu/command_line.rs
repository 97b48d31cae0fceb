//! How QEMU is told what machine to be.
//!
//! The machine is `microvm` with virtio-mmio devices only; why, and what each choice below was
//! measured to save, is in docs/decisions/0001-machine-type.md.

use std::{
    ffi::OsString,
    fs,
    os::{fd::RawFd, unix::fs::FileTypeExt},
    path::Path,
};

use sandboxer_protocol::boot::AGENT_PORT;
use serde_json::{Value, json};

use super::super::{
    VmSpec,
    qmp::{BlockFile, BlockNode},
    spec::DiskSpec,
};

/// Bus that disks hang on.
const DISK_BUS: &str = "scsi0.0";

/// What of the guest's CPU is ours and what is emulated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Execution {
    /// On the hardware.
    Kvm,
    /// Emulated, on a host whose time stamp counter runs at `tsc_khz`.
    Tcg {
        /// kHz.
        tsc_khz: u64,
    },
}

/// Numbers of the listening sockets that QEMU inherits.
#[derive(Debug, Clone, Copy)]
pub struct Sockets {
    /// For QMP.
    pub control: RawFd,
    /// The agent's port.
    pub agent: RawFd,
    /// The serial console.
    pub console: RawFd,
}

/// QEMU's arguments for `spec`.
pub fn arguments(spec: &VmSpec, execution: Execution, sockets: Sockets) -> Vec<OsString> {
    let socket = |id: &str, fd: RawFd| format!("socket,id={id},fd={fd},server=on,wait=off");
    let (accelerator, cpu) = match execution {
        Execution::Kvm => ("kvm", "host"),
        // A smaller code buffer than QEMU's choice boots sooner and is paid for right afterwards.
        Execution::Tcg { .. } => ("tcg", "max"),
    };
    let mut arguments: Vec<OsString> = Vec::new();
    let mut add = |words: &[&dyn AsRef<std::ffi::OsStr>]| {
        arguments.extend(words.iter().map(|word| word.as_ref().to_owned()));
    };
    add(&[&"-name", &format!("guest={}", spec.pod)]);
    add(&[&"-nodefaults", &"-no-user-config", &"-display", &"none", &"-no-reboot"]);
    // QEMU runs beside a hostile guest and needs none of these. Costs under 5 % of the boot.
    add(&[&"-sandbox", &"on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"]);
    // Neither PIT nor PIC: the kernel is told its clock's frequency and needs no ticks to find it.
    // The RTC stays, for a kernel looks for it for a second before it gives up.
    add(&[
        &"-machine",
        &"microvm,acpi=on,pcie=off,usb=off,pit=off,pic=off,rtc=on,isa-serial=on,auto-kernel-cmdline=off",
    ]);
    add(&[&"-accel", &accelerator, &"-cpu", &cpu]);
    add(&[&"-smp", &spec.vcpus.to_string(), &"-m", &format!("{}M", spec.memory_mib)]);
    add(&[&"-kernel", &spec.kernel, &"-initrd", &spec.initramfs, &"-append", &kernel_line(spec, execution)]);
    add(&[&"-chardev", &socket("control", sockets.control), &"-mon", &"chardev=control,mode=control"]);
    add(&[&"-chardev", &socket("console", sockets.console), &"-serial", &"chardev:console"]);
    // Two ports, the first being reserved for a console: queues for 31 cost the guest 4.5 MB.
    add(&[&"-device", &"virtio-serial-device,id=serial0,max_ports=2"]);
    add(&[&"-chardev", &socket("agent", sockets.agent)]);
    add(&[&"-device", &format!("virtserialport,bus=serial0.0,nr=1,chardev=agent,name={AGENT_PORT}")]);
    add(&[&"-device", &"virtio-scsi-device,id=scsi0"]);
    for disk in &spec.disks {
        let node = block_node(disk);
        add(&[&"-blockdev", &serde_json::to_string(&node).unwrap_or_default()]);
        add(&[&"-device", &disk_device(disk).to_string()]);
    }
    arguments
}

/// The kernel's command line.
fn kernel_line(spec: &VmSpec, execution: Execution) -> String {
    // A panic resets the machine, and `-no-reboot` makes that its end.
    let mut line =
        "console=ttyS0 quiet panic=-1 reboot=t pci=off random.trust_cpu=on no_timer_check".to_owned();
    if let Execution::Tcg { tsc_khz } = execution {
        // Without the frequency a guest times its TSC against the emulated PIT, which fails and
        // leaves the guest without a clock, for ever, as soon as the host is busy.
        line += &format!(" tsc=reliable tsc_early_khz={tsc_khz}");
    }
    if spec.disks.is_empty() {
        // Nothing to find: not asking 256 targets saves 13 % of the boot's CPU time and 6 MB. Disks
        // plugged in later come by event.
        line += " scsi_mod.scan=manual";
    }
    format!("{line} {}", spec.boot)
}

/// Name of a disk's device.
pub fn device_id(serial: &str) -> String {
    format!("disk-{serial}")
}

/// Name of a disk's image.
pub fn node_name(serial: &str) -> String {
    format!("node-{serial}")
}

/// A disk's image.
pub fn block_node(disk: &DiskSpec) -> BlockNode {
    let is_device = fs::metadata(&disk.path).is_ok_and(|meta| meta.file_type().is_block_device());
    let discard = if disk.read_only { "ignore" } else { "unmap" };
    BlockNode {
        driver: "raw",
        node_name: node_name(&disk.serial),
        read_only: disk.read_only,
        discard,
        file: BlockFile {
            driver: if is_device { "host_device" } else { "file" },
            filename: path_text(&disk.path),
            read_only: disk.read_only,
            discard,
        },
    }
}

/// A disk's device. Its LUN is 1, for a guest that scans by hand takes no notice of a LUN 0.
pub fn disk_device(disk: &DiskSpec) -> Value {
    json!({
        "driver": "scsi-hd",
        "id": device_id(&disk.serial),
        "bus": DISK_BUS,
        "lun": 1,
        "drive": node_name(&disk.serial),
        "serial": disk.serial,
    })
}

fn path_text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
