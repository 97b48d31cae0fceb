//! QEMU's arguments for a VM.
//!
//! The VM is `microvm` with virtio-mmio devices only. docs/decisions/0001-machine-type.md explains why, and lists the
//! measured saving of each choice below.

use std::{
    ffi::{OsStr, OsString},
    os::fd::RawFd,
};

use sandboxer_protocol::{
    boot::{AGENT_PORT, KERNEL_WORDS},
    share::DISK_SERIAL,
};
use serde::Serialize;
use serde_json::{Value, json};

use super::{
    super::{
        VmSpec,
        qmp::{BlockNode, NbdNode, UnixServer},
        spec::{DiskSpec, first_mac_text},
    },
    slots,
};

/// How the guest's CPUs are executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Execution {
    /// Execution on the hardware.
    Kvm,
    /// Emulation, on a host whose time stamp counter runs at `tsc_khz`.
    Tcg {
        /// Frequency of the host's time stamp counter, kHz.
        tsc_khz: u64,
    },
}

/// Numbers of the descriptors that QEMU inherits: listening sockets, taps and disks.
#[derive(Debug, Clone, Default)]
pub struct Sockets {
    /// Descriptor of the listening socket for QMP.
    pub control: RawFd,
    /// Descriptor of the listening socket of the agent's port.
    pub agent: RawFd,
    /// Descriptor of the listening socket of the serial console.
    pub console: RawFd,
    /// Descriptors of taps, one for each network interface.
    pub taps: Vec<RawFd>,
    /// Descriptors of `/dev/vhost-net`, one for each network interface; empty: QEMU carries the packets.
    pub vhosts: Vec<RawFd>,
    /// Descriptors of disks, one for each disk that the VM boots with.
    pub disks: Vec<RawFd>,
}

/// Returns the number of the descriptor set of the disk `serial`, if the VM begins with it. The number is a hash,
/// above those that QEMU chooses itself, so that a later daemon can compute it, too.
pub fn set_of(serial: &str) -> u64 {
    const FIRST: u64 = 1000;
    if let Some(slot) = slots::of(serial) {
        return slot.set;
    }
    let mut hash = 0x811c_9dc5_u32;
    for byte in serial.bytes() {
        hash = (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    }
    FIRST + u64::from(hash >> 1)
}

/// The controller of the disks that a guest only reads; [`WRITABLE_DISKS`] is the controller of the others.
///
/// When a controller gets a second disk, Linux makes the two share its queue. For that it waits for the users of the
/// first disk's queue: three ticks of an idle guest, 10 of the 24 ms of a `container_create`. A container has an image
/// and a disk for its writes, so the first container's two disks are on different controllers.
pub const READ_ONLY_DISKS: &str = "scsi0";
/// The controller of the disks that a guest writes. See [`READ_ONLY_DISKS`].
pub const WRITABLE_DISKS: &str = "scsi1";

/// A word of the kernel command line that reduces the commands by which the guest probes a QEMU disk. Each command is
/// an exit to QEMU, of about 0.15 ms on KVM. The kernel reads a page of the disk's data at once (0x2000) instead of
/// the list of pages and the page's length first. It requests the disk's name only once (0x400) and does not query
/// which commands the disk supports (0x20000000). The last flag (0x10000000) is the driver's own default, which would
/// be lost otherwise.
const FEW_QUESTIONS: &str = r#"scsi_mod.dev_flags="QEMU:QEMU HARDDISK:0x30002400""#;

/// Arguments that turn on QEMU's own filter of system calls. QEMU runs a hostile guest and needs none of these calls.
/// The filter costs under 5 % of the boot.
pub const FILTER: [&str; 2] =
    ["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"];

/// The device by which a guest reports freed pages, which QEMU returns to the host.
///
/// In a copy of a template, such a page has the template's content again, not zeroes. A kernel that relies on zeroes
/// has to report that to the device (`init_on_free`). Without `page-poison` it cannot, and then it reports no pages.
const BALLOON: &str = "virtio-balloon-device,id=balloon0,free-page-reporting=on,page-poison=off";

/// The part of a network argument before the number of a `/dev/vhost-net` descriptor.
pub const VHOST: &str = ",vhost=on,vhostfd=";

/// What the guest does when QEMU starts.
#[derive(Debug, Clone, Copy)]
pub enum Begin {
    /// The guest boots.
    Boot {
        /// Number of the inherited descriptor of the VM's memory file; `None`: private memory.
        memory: Option<RawFd>,
    },
    /// The guest waits for the state of a frozen VM.
    Restore {
        /// Number of the inherited descriptor of the frozen VM's memory file.
        memory: RawFd,
    },
}

/// Returns the arguments that define a VM of `spec`, without anything specific to one pod. `vhost`: the host's kernel
/// carries the VM's packets.
///
/// The frequency of the time stamp counter is left out: each daemon measures a slightly different value, and the
/// frequency follows from the model of the host's processor.
pub fn vm(spec: &VmSpec, execution: Execution, vhost: bool) -> Vec<String> {
    let execution = match execution {
        Execution::Kvm => Execution::Kvm,
        Execution::Tcg { .. } => Execution::Tcg { tsc_khz: 0 },
    };
    let zeroes = |count: usize| vec![0; count];
    let nics = usize::from(spec.nics);
    let sockets = Sockets {
        taps: zeroes(nics),
        vhosts: zeroes(if vhost { nics } else { 0 }),
        disks: zeroes(spec.disks.len()),
        ..Sockets::default()
    };
    let begin = Begin::Boot { memory: Some(0) };
    let mut arguments = arguments(&spec.without_pod(), execution, &sockets, begin);
    // The name comes first and is specific to the pod.
    arguments.drain(..2);
    arguments.into_iter().map(|argument| argument.to_string_lossy().into_owned()).collect()
}

/// Returns QEMU's arguments for `spec`.
pub fn arguments(spec: &VmSpec, execution: Execution, sockets: &Sockets, begin: Begin) -> Vec<OsString> {
    let mut line = CommandLine::default();
    line.add(&[&"-name", &format!("guest={}", spec.pod)]);
    line.add(&[&"-nodefaults", &"-no-user-config", &"-display", &"none", &"-no-reboot"]);
    line.add_board(spec, execution, begin);
    line.add_processors(spec, execution);
    match begin {
        Begin::Boot { .. } => {
            let kernel_line = kernel_line(spec, execution);
            line.add(&[&"-kernel", &spec.kernel, &"-initrd", &spec.initramfs, &"-append", &kernel_line]);
        }
        // The kernel is already in the memory. Not loading it again saves 10 of 48 ms.
        Begin::Restore { .. } => line.add(&[&"-S", &"-incoming", &"defer"]),
    }
    line.add_devices(spec, sockets);
    line.0
}

/// QEMU's arguments, in order.
#[derive(Default)]
struct CommandLine(Vec<OsString>);

impl CommandLine {
    fn add(&mut self, words: &[&dyn AsRef<OsStr>]) {
        self.0.extend(words.iter().map(|word| word.as_ref().to_owned()));
    }

    /// Adds the board, and the memory file of `begin`.
    fn add_board(&mut self, spec: &VmSpec, execution: Execution, begin: Begin) {
        // Neither PIT nor PIC: the kernel gets its clock's frequency and needs no ticks to measure it. The RTC stays,
        // because a kernel without one probes for it for one second.
        let mut board = "microvm,pcie=off,usb=off,pit=off,pic=off,rtc=on,isa-serial=on".to_owned();
        board += if has_acpi(spec, execution) {
            ",acpi=on,auto-kernel-cmdline=off"
        } else {
            // QEMU passes the places of the virtio devices to the kernel.
            ",acpi=off,auto-kernel-cmdline=on,ioapic2=off"
        };
        let memory_in = |file: RawFd, share: &str| {
            let size = spec.memory_mib;
            format!("memory-backend-file,id=memory0,size={size}M,mem-path=/proc/self/fd/{file},share={share}")
        };
        let memory = match begin {
            Begin::Boot { memory } => memory.map(|file| memory_in(file, "on")),
            // Each write copies the page, for this VM only. Alignment lets the template's huge pages be mapped as
            // such.
            Begin::Restore { memory } => Some(memory_in(memory, "off") + ",align=2M"),
        };
        if let Some(memory) = &memory {
            self.add(&[&"-object", memory]);
            // Set here because QMP takes longer. The migration has events, and makes no announcements for a network
            // interface that is not the pod's yet.
            self.add(&[&"-global", &"migration.x-events=on", &"-global", &"migration.announce-rounds=0"]);
            board += ",memory-backend=memory0";
        }
        self.add(&[&"-machine", &board]);
    }

    /// Adds the processors, and the size of the memory.
    fn add_processors(&mut self, spec: &VmSpec, execution: Execution) {
        let (accelerator, cpu, processors) = match execution {
            Execution::Kvm if interrupts_in_kernel(spec) => {
                ("kvm,kernel-irqchip=on", "host", spec.vcpus.to_string())
            }
            Execution::Kvm => ("kvm,kernel-irqchip=split", "host", spec.vcpus.to_string()),
            // A code buffer smaller than QEMU's default boots sooner, but costs time right afterwards.
            //
            // To an emulator a string instruction is a loop over bytes. Without `erms` the guest clears, copies and
            // fills eight bytes or a vector at a time instead. Of the 18.0 million instructions from a container's
            // creation to its first output, 2.0 million were single bytes.
            //
            // QEMU up to version 8.0 drops the guest's memory barriers if there can be only one processor, although
            // devices read the guest's queues at the same time (fixed in 8.1: "Do not elide memory barriers for
            // !CF_PARALLEL in system mode"). So one more processor is always possible; `nr_cpus` limits the kernel.
            Execution::Tcg { .. } => {
                ("tcg", "max,-erms,-fsrm", format!("{},maxcpus={}", spec.vcpus, spec.vcpus.max(2)))
            }
        };
        self.add(&[&"-accel", &accelerator, &"-cpu", &cpu]);
        self.add(&[&"-smp", &processors, &"-m", &format!("{}M", spec.memory_mib)]);
    }

    /// Adds the control socket and the devices.
    fn add_devices(&mut self, spec: &VmSpec, sockets: &Sockets) {
        let socket = |id: &str, fd: RawFd| format!("socket,id={id},fd={fd},server=on,wait=off");
        self.add(&[
            &"-chardev",
            &socket("control", sockets.control),
            &"-mon",
            &"chardev=control,mode=control",
        ]);
        self.add(&[&"-chardev", &socket("console", sockets.console), &"-serial", &"chardev:console"]);
        // Two ports, the first of which is reserved for a console: queues for 31 ports cost the guest 4.5 MB.
        self.add(&[&"-device", &"virtio-serial-device,id=serial0,max_ports=2"]);
        self.add(&[&"-chardev", &socket("agent", sockets.agent)]);
        self.add(&[
            &"-device",
            &format!("virtserialport,bus=serial0.0,nr=1,chardev=agent,name={AGENT_PORT}"),
        ]);
        for controller in [READ_ONLY_DISKS, WRITABLE_DISKS] {
            self.add(&[&"-device", &format!("virtio-scsi-device,id={controller}")]);
        }
        // A huge page that the guest has reported in parts could be dropped as a whole, together with its reservation.
        if !spec.huge_pages {
            self.add(&[&"-device", &BALLOON]);
        }
        for (nic, tap) in (0..).zip(&sockets.taps) {
            let mac = first_mac_text(nic);
            let vhost = sockets.vhosts.get(usize::from(nic)).map(|file| format!("{VHOST}{file}"));
            self.add(&[&"-netdev", &format!("tap,id=tap{nic},fd={tap}{}", vhost.unwrap_or_default())]);
            // A copy of a template would announce an address that all copies have.
            self.add(&[
                &"-device",
                &format!("virtio-net-device,id=nic{nic},netdev=tap{nic},mac={mac},guest_announce=off"),
            ]);
        }
        self.add_disks(spec, &sockets.disks);
    }

    /// Adds the slots, and the disks that the VM begins with.
    fn add_disks(&mut self, spec: &VmSpec, files: &[RawFd]) {
        for (disk, file) in spec.disks.iter().zip(files) {
            let set = set_of(&disk.serial);
            self.add(&[&"-add-fd", &format!("fd={file},set={set}")]);
            self.add_node(&block_node(disk, set));
            if !is_in_slot(spec, disk) {
                self.add(&[&"-device", &disk_device(&disk.serial, controller(disk)).to_string()]);
            }
        }
        if has_slots(spec) {
            for slot in &slots::ALL {
                self.add_node(&slot.empty_node());
                self.add_node(&slot.first_node(&spec.disks));
                self.add(&[&"-device", &slot.device(&device_id(slot.serial()))]);
            }
        }
    }

    fn add_node(&mut self, node: &impl Serialize) {
        self.add(&[&"-blockdev", &serde_json::to_string(node).unwrap_or_default()]);
    }
}

fn has_slots(spec: &VmSpec) -> bool {
    spec.nics <= slots::MOST_NICS
}

fn is_in_slot(spec: &VmSpec, disk: &DiskSpec) -> bool {
    has_slots(spec) && slots::of(&disk.serial).is_some()
}

/// Returns whether KVM can provide the interrupt controller: it has no second one, and its only one has lines for
/// eight virtio devices.
///
/// QEMU's own controller passes each change of a line to KVM as a table of all lines, and KVM waits for the table's
/// readers each time. That takes 22 of the 330 virtual ms of a boot, and the end of each interrupt is an exit to QEMU.
fn interrupts_in_kernel(spec: &VmSpec) -> bool {
    const LINES: u8 = 8;
    /// Number of other devices: the agent's port, the disks' controllers and the balloon. A VM has slots only if there
    /// are lines left.
    const OTHERS: u8 = 4;
    spec.nics <= LINES - OTHERS
}

/// Returns whether the guest finds its devices by ACPI. Without ACPI, QEMU makes no tables and the guest reads none:
/// the firmware's table of processors and interrupts suffices for the lines of KVM's first interrupt controller. An
/// emulated guest without ACPI did not get to its init.
fn has_acpi(spec: &VmSpec, execution: Execution) -> bool {
    !(matches!(execution, Execution::Kvm) && interrupts_in_kernel(spec))
}

/// Returns the kernel command line.
fn kernel_line(spec: &VmSpec, execution: Execution) -> String {
    // With `-no-reboot` a reset ends the VM.
    let mut line = format!("{KERNEL_WORDS} reboot=t pci=off no_timer_check {FEW_QUESTIONS}");
    if !has_acpi(spec, execution) {
        line += " acpi=off";
    }
    if let Execution::Tcg { tsc_khz } = execution {
        // Without the frequency a guest times its TSC against the emulated PIT. On a busy host this fails, and the
        // guest then never has a usable clock.
        line += &format!(" tsc=reliable tsc_early_khz={tsc_khz} nr_cpus={}", spec.vcpus);
        // The guest's own code never runs on the processor, so mitigations against speculation only take time: 9 of
        // the 110 ms of a container_create.
        line += " mitigations=off";
    }
    if spec.disks.iter().all(|disk| is_in_slot(spec, disk)) {
        // There are no disks to find: not scanning 256 targets saves 13 % of the boot's CPU time and 6 MB. Disks that
        // are attached later arrive by event.
        line += " scsi_mod.scan=manual";
    }
    format!("{line} {}", spec.boot)
}

/// Returns the name of a disk's device.
pub fn device_id(serial: &str) -> String {
    format!("disk-{serial}")
}

/// Returns the name of a disk's image.
pub fn node_name(serial: &str) -> String {
    slots::of(serial).map_or_else(|| format!("node-{serial}"), |slot| slot.image.to_owned())
}

/// Returns the image of a disk that is open in QEMU's descriptor set `set`.
pub fn block_node(disk: &DiskSpec, set: u64) -> BlockNode {
    BlockNode {
        driver: if disk.file.is_device() { "host_device" } else { "file" },
        node_name: node_name(&disk.serial),
        filename: format!("/dev/fdset/{set}"),
        read_only: disk.read_only,
        discard: (!disk.read_only).then_some("unmap"),
    }
}

/// Returns the disk that carries the guest's file requests. QEMU has the server's socket open as descriptor `number`.
pub fn shares_node(number: u64) -> NbdNode {
    NbdNode {
        driver: "nbd",
        node_name: node_name(DISK_SERIAL),
        server: UnixServer { r#type: "unix", path: format!("/proc/self/fd/{number}") },
    }
}

/// Returns the controller of a disk.
pub fn controller(disk: &DiskSpec) -> &'static str {
    if disk.read_only { READ_ONLY_DISKS } else { WRITABLE_DISKS }
}

/// Returns a disk's device. Its LUN is 1, because a guest with manual scan ignores LUN 0. Write errors of the host,
/// such as a full file system, are reported to the guest, as read errors are; by default QEMU would pause the guest.
pub fn disk_device(serial: &str, controller: &str) -> Value {
    json!({
        "driver": "scsi-hd",
        "id": device_id(serial),
        "bus": bus(controller),
        "lun": 1,
        "drive": node_name(serial),
        "serial": serial,
        "werror": "report",
    })
}

/// Returns the bus of a controller.
fn bus(controller: &str) -> String {
    format!("{controller}.0")
}

/// Returns whether QEMU refused a device because the VM, which an earlier daemon started, lacks the controller.
pub fn lacks_controller(reason: &str, controller: &str) -> bool {
    reason == format!("Bus '{}' not found", bus(controller))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DiskFile, DiskLimits, SPARE, spec::tests::spec};

    #[test]
    fn memory_in_huge_pages_is_in_a_file_and_none_of_it_is_dropped() {
        let line = |huge_pages| {
            let spec = VmSpec { huge_pages, ..spec() };
            let words = arguments(
                &spec,
                Execution::Kvm,
                &Sockets::default(),
                Begin::Boot { memory: huge_pages.then_some(7) },
            );
            words.join(OsStr::new(" ")).into_string().unwrap()
        };
        assert!(line(false).contains("virtio-balloon") && !line(false).contains("memory-backend"));
        assert!(!line(true).contains("virtio-balloon"));
        assert!(line(true).contains("size=1M,mem-path=/proc/self/fd/7,share=on"), "{}", line(true));
    }

    #[test]
    fn a_guest_has_acpi_where_it_needs_it() {
        let line = |execution, nics| {
            let spec = VmSpec { nics, ..spec() };
            let sockets = Sockets { taps: vec![0; nics.into()], ..Sockets::default() };
            let words = arguments(&spec, execution, &sockets, Begin::Boot { memory: None });
            words.join(OsStr::new(" ")).into_string().unwrap()
        };
        // More network interfaces than lines of KVM's first interrupt controller: only ACPI's tables contain the lines
        // of the second one.
        for (line, acpi) in [
            (line(Execution::Kvm, 4), false),
            (line(Execution::Kvm, 5), true),
            (line(Execution::Tcg { tsc_khz: 1 }, 1), true),
        ] {
            assert_eq!(line.contains(",acpi=on,auto-kernel-cmdline=off"), acpi, "{line}");
            assert_eq!(line.contains(",acpi=off,auto-kernel-cmdline=on,ioapic2=off"), !acpi, "{line}");
            assert_eq!(line.contains(" acpi=off "), !acpi, "the kernel would look for the tables: {line}");
        }
    }

    #[test]
    fn slots_take_no_line_from_the_network_and_hold_the_disks_that_are_there_at_first() {
        let spare = DiskSpec {
            serial: SPARE.into(),
            file: DiskFile::new(tempfile::tempfile().unwrap(), "/spare".into()).unwrap(),
            read_only: false,
            limits: DiskLimits::default(),
        };
        let line = |nics, disks: &[DiskSpec]| {
            let spec = VmSpec { nics, disks: disks.to_vec(), ..spec() };
            let sockets =
                Sockets { taps: vec![0; nics.into()], disks: vec![7; disks.len()], ..Sockets::default() };
            let words = arguments(&spec, Execution::Kvm, &sockets, Begin::Boot { memory: None });
            words.join(OsStr::new(" ")).into_string().unwrap()
        };
        let devices = |line: &str| line.matches("virtio-blk-device").count();
        assert_eq!([0, 2, 3].map(|nics| devices(&line(nics, &[]))), [2, 2, 0]);
        assert!(line(1, &[]).contains(r#""node-name":"t9","file":"e9""#));
        let line = line(1, &[spare]);
        assert!(line.contains(r#""node-name":"t9","file":"f9""#) && line.contains("fd=7,set=9"), "{line}");
        assert!(!line.contains("scsi-hd") && line.contains("scsi_mod.scan=manual"), "{line}");
    }

    #[test]
    fn the_hosts_kernel_carries_packets_of_an_interface_that_has_a_file_for_it() {
        let netdevs = |vhosts: &[RawFd]| {
            let sockets = Sockets { taps: vec![5, 6], vhosts: vhosts.to_vec(), ..Sockets::default() };
            let begin = Begin::Boot { memory: None };
            let words = arguments(&VmSpec { nics: 2, ..spec() }, Execution::Kvm, &sockets, begin);
            let text = |word: &OsString| word.to_str().unwrap().to_owned();
            let named = words.windows(2).filter(|pair| pair[0] == "-netdev");
            named.map(|pair| text(&pair[1])).collect::<Vec<_>>()
        };
        assert_eq!(netdevs(&[]), ["tap,id=tap0,fd=5", "tap,id=tap1,fd=6"]);
        assert_eq!(
            netdevs(&[7, 8]),
            ["tap,id=tap0,fd=5,vhost=on,vhostfd=7", "tap,id=tap1,fd=6,vhost=on,vhostfd=8"]
        );
    }

    #[test]
    fn who_carries_its_packets_makes_another_template() {
        let spec = VmSpec { nics: 1, ..spec() };
        let with = |vhost| vm(&spec, Execution::Kvm, vhost);
        assert_ne!(with(true), with(false));
        assert_eq!(with(true), with(true));
    }

    /// A refusal in QEMU's words is recognized.
    #[test]
    fn a_vm_of_an_earlier_daemon_is_told_by_the_controller_that_it_lacks() {
        assert!(lacks_controller("Bus 'scsi1.0' not found", WRITABLE_DISKS));
        for other in ["Bus 'scsi0.0' not found", "Failed to get \"write\" lock", ""] {
            assert!(!lacks_controller(other, WRITABLE_DISKS), "{other}");
        }
    }
}
