//! How QEMU is told what VM to be.
//!
//! The VM is `microvm` with virtio-mmio devices only; why, and what each choice below was
//! measured to save, is in docs/decisions/0001-VM-type.md.

use std::{
    ffi::OsString,
    fs,
    os::{fd::RawFd, unix::fs::FileTypeExt},
};

use sandboxer_protocol::{boot::AGENT_PORT, share::DISK_SERIAL};
use serde_json::{Value, json};

use super::super::{
    VmSpec,
    qmp::{BlockFile, BlockNode, NbdNode, UnixServer},
    spec::{DiskSpec, first_mac_text},
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

/// Numbers of the listening sockets, the taps and the disks that QEMU inherits.
#[derive(Debug, Clone, Default)]
pub struct Sockets {
    /// For QMP.
    pub control: RawFd,
    /// The agent's port.
    pub agent: RawFd,
    /// The serial console.
    pub console: RawFd,
    /// One for each network interface.
    pub taps: Vec<RawFd>,
    /// One for each disk it has from the start.
    pub disks: Vec<RawFd>,
}

/// Sets of descriptors in which QEMU finds the disks it has from the start; that of the first has this number.
pub const FIRST_DISK_SET: u64 = 1000;

/// What the guest does when QEMU starts.
#[derive(Debug, Clone, Copy)]
pub enum Begin {
    /// Boots.
    Boot {
        /// Number of a file for its memory, which QEMU inherits; none: memory is of its own.
        memory: Option<RawFd>,
    },
    /// Waits for the state of a frozen VM.
    Restore {
        /// Number of the file of that VM's memory, which QEMU inherits.
        memory: RawFd,
    },
}

/// Returns what makes a VM of `spec` what it is, nothing in it being of one pod.
///
/// The frequency of the time stamp counter is left out: it is measured anew by each daemon, never to the
/// same figure, and follows from the model of the host's processor.
pub fn vm(spec: &VmSpec, execution: Execution) -> Vec<String> {
    let execution = match execution {
        Execution::Kvm => Execution::Kvm,
        Execution::Tcg { .. } => Execution::Tcg { tsc_khz: 0 },
    };
    let zeroes = |count: usize| vec![0; count];
    let sockets =
        Sockets { taps: zeroes(spec.nics.into()), disks: zeroes(spec.disks.len()), ..Sockets::default() };
    let begin = Begin::Boot { memory: Some(0) };
    let mut arguments = arguments(&spec.of_no_pod(), execution, &sockets, begin);
    // The name comes first, and is the pod's.
    arguments.drain(..2);
    arguments.into_iter().map(|argument| argument.to_string_lossy().into_owned()).collect()
}

/// QEMU's arguments for `spec`.
pub fn arguments(spec: &VmSpec, execution: Execution, sockets: &Sockets, begin: Begin) -> Vec<OsString> {
    let socket = |id: &str, fd: RawFd| format!("socket,id={id},fd={fd},server=on,wait=off");
    let (accelerator, cpu, processors) = match execution {
        Execution::Kvm => ("kvm", "host", spec.vcpus.to_string()),
        // A smaller code buffer than QEMU's choice boots sooner and is paid for right afterwards.
        //
        // To an emulator a string instruction is a loop over bytes. A guest that is not told that they are fast
        // takes eight bytes or a vector at a time to clear, copy and fill: of the 18.0 million instructions from a
        // container's creation to its first output, 2.0 million were single bytes.
        //
        // Up to version 8.0 QEMU leaves a guest's memory barriers out where there can be one processor only, though
        // devices look at the guest's queues meanwhile (mended by 8.1's "Do not elide memory barriers for !CF_PARALLEL
        // in system mode"). So there is always room for one more, which the kernel is told not to prepare for.
        Execution::Tcg { .. } => {
            ("tcg", "max,-erms,-fsrm", format!("{},maxcpus={}", spec.vcpus, spec.vcpus.max(2)))
        }
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
    let mut vm =
        "microvm,acpi=on,pcie=off,usb=off,pit=off,pic=off,rtc=on,isa-serial=on,auto-kernel-cmdline=off"
            .to_owned();
    let memory_in = |file: RawFd, share: &str| {
        let size = spec.memory_mib;
        format!("memory-backend-file,id=memory0,size={size}M,mem-path=/proc/self/fd/{file},share={share}")
    };
    let memory = match begin {
        Begin::Boot { memory } => memory.map(|file| memory_in(file, "on")),
        // Every write makes a copy of the page for this VM alone.
        Begin::Restore { memory } => Some(memory_in(memory, "off")),
    };
    if let Some(memory) = &memory {
        add(&[&"-object", memory]);
        vm += ",memory-backend=memory0";
    }
    add(&[&"-machine", &vm]);
    add(&[&"-accel", &accelerator, &"-cpu", &cpu]);
    add(&[&"-smp", &processors, &"-m", &format!("{}M", spec.memory_mib)]);
    match begin {
        Begin::Boot { .. } => {
            let line = kernel_line(spec, execution);
            add(&[&"-kernel", &spec.kernel, &"-initrd", &spec.initramfs, &"-append", &line]);
        }
        // The kernel is in the memory. Not to load it again saves 10 of 48 ms.
        Begin::Restore { .. } => add(&[&"-S", &"-incoming", &"defer"]),
    }
    add(&[&"-chardev", &socket("control", sockets.control), &"-mon", &"chardev=control,mode=control"]);
    add(&[&"-chardev", &socket("console", sockets.console), &"-serial", &"chardev:console"]);
    // Two ports, the first being reserved for a console: queues for 31 cost the guest 4.5 MB.
    add(&[&"-device", &"virtio-serial-device,id=serial0,max_ports=2"]);
    add(&[&"-chardev", &socket("agent", sockets.agent)]);
    add(&[&"-device", &format!("virtserialport,bus=serial0.0,nr=1,chardev=agent,name={AGENT_PORT}")]);
    add(&[&"-device", &"virtio-scsi-device,id=scsi0"]);
    for (nic, tap) in (0..).zip(&sockets.taps) {
        let mac = first_mac_text(nic);
        add(&[&"-netdev", &format!("tap,id=tap{nic},fd={tap}")]);
        // A copy of a template would announce an address that is every copy's.
        add(&[
            &"-device",
            &format!("virtio-net-device,id=nic{nic},netdev=tap{nic},mac={mac},guest_announce=off"),
        ]);
    }
    for ((disk, file), set) in spec.disks.iter().zip(&sockets.disks).zip(FIRST_DISK_SET..) {
        add(&[&"-add-fd", &format!("fd={file},set={set}")]);
        let node = block_node(disk, set);
        add(&[&"-blockdev", &serde_json::to_string(&node).unwrap_or_default()]);
        add(&[&"-device", &disk_device(&disk.serial).to_string()]);
    }
    arguments
}

/// Returns the kernel's command line.
fn kernel_line(spec: &VmSpec, execution: Execution) -> String {
    // A panic resets the VM, and `-no-reboot` makes that its end. Grace periods of RCU are short in a
    // guest of few processors when somebody asks for that; mounts and control groups wait for many.
    let mut line = "console=ttyS0 quiet panic=-1 reboot=t pci=off random.trust_cpu=on no_timer_check \
                    rcupdate.rcu_expedited=1"
        .to_owned();
    if let Execution::Tcg { tsc_khz } = execution {
        // Without the frequency a guest times its TSC against the emulated PIT, which fails and
        // leaves the guest without a clock, for ever, as soon as the host is busy.
        line += &format!(" tsc=reliable tsc_early_khz={tsc_khz} nr_cpus={}", spec.vcpus);
        // The guest's own code never runs on the processor, so what it does against speculation only takes
        // time: 9 of the 110 ms of a container_create.
        line += " mitigations=off";
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

/// Returns a disk's image, open in QEMU's set of descriptors `set`.
pub fn block_node(disk: &DiskSpec, set: u64) -> BlockNode {
    let is_device = fs::metadata(&disk.path).is_ok_and(|meta| meta.file_type().is_block_device());
    let discard = if disk.read_only { "ignore" } else { "unmap" };
    BlockNode {
        driver: "raw",
        node_name: node_name(&disk.serial),
        read_only: disk.read_only,
        discard,
        file: BlockFile {
            driver: if is_device { "host_device" } else { "file" },
            filename: format!("/dev/fdset/{set}"),
            read_only: disk.read_only,
            discard,
        },
    }
}

/// Returns the disk by which the guest's requests for files go, served at the socket that QEMU has open under `number`.
pub fn shares_node(number: u64) -> NbdNode {
    NbdNode {
        driver: "nbd",
        node_name: node_name(DISK_SERIAL),
        server: UnixServer { r#type: "unix", path: format!("/proc/self/fd/{number}") },
    }
}

/// Returns a disk's device. Its LUN is 1, for a guest that scans by hand takes no notice of a LUN 0. What the host can't
/// write, such as to a full file system, the guest is told; by default QEMU would stop it.
pub fn disk_device(serial: &str) -> Value {
    json!({
        "driver": "scsi-hd",
        "id": device_id(serial),
        "bus": DISK_BUS,
        "lun": 1,
        "drive": node_name(serial),
        "serial": serial,
        "werror": "report",
        "rerror": "report",
    })
}
