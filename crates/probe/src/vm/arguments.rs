//! QEMU's command line.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::ping::GUEST_MAC;
use super::{Accelerator, Image};

/// Memory for translated code of an emulated guest, MiB. QEMU's default is 1 GiB.
const TRANSLATED_MIB: u32 = 128;

/// A disk of a VM besides its root disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// Serial number, by which the guest finds the disk.
    pub serial: &'static str,
    /// Raw file or block device of the host.
    pub path: PathBuf,
    /// Whether requests bypass the host's cache.
    pub direct: bool,
    /// Whether the guest may not write to it.
    pub read_only: bool,
}

/// A TCP and UDP port of this host that QEMU forwards to the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forward {
    /// Address on this host.
    pub address: String,
    /// Port number, the same on both sides.
    pub port: u16,
}

/// A VM to start.
#[derive(Debug, Clone)]
pub struct Machine<'a> {
    /// Disk, kernel and initrd.
    pub image: &'a Image,
    /// Whether KVM or QEMU executes the guest's instructions.
    pub accelerator: &'a Accelerator,
    /// Number of processors.
    pub cpus: u32,
    /// Memory, bytes.
    pub memory: u64,
    /// Disks besides the root disk.
    pub disks: Vec<Disk>,
    /// Forwarded port, for clients of a server.
    pub forward: Option<Forward>,
    /// Socket of the only other station on the VM's network; without one, the VM has QEMU's user-mode network.
    pub station: Option<PathBuf>,
}

impl Machine<'_> {
    /// Returns the arguments. QEMU's stdin is the socket of the guest's port; its stdout receives the guest's console.
    pub fn arguments(&self) -> Vec<OsString> {
        let mut words: Vec<OsString> = Vec::new();
        let mut add = |name: &str, value: OsString| words.extend([name.into(), value]);
        let (accelerator, processor) = match self.accelerator.kvm {
            true => ("kvm".to_owned(), "host"),
            false => (format!("tcg,tb-size={TRANSLATED_MIB}"), "max"),
        };
        add("-machine", "q35".into());
        add("-accel", accelerator.into());
        add("-cpu", processor.into());
        add("-smp", self.cpus.to_string().into());
        add("-m", format!("{}M", self.memory >> 20).into());
        add("-kernel", self.image.kernel.clone().into());
        add("-initrd", self.image.initrd.clone().into());
        add("-append", "console=ttyS0 quiet systemd.show_status=error".into());
        // Writes to the root go to a temporary file that QEMU deletes.
        add("-drive", drive("root", "snapshot=on", &self.image.disk));
        add("-device", device("root"));
        for disk in &self.disks {
            let cache = if disk.direct { "cache=none" } else { "cache=writeback" };
            let read_only = if disk.read_only { "on" } else { "off" };
            add("-drive", drive(disk.serial, &format!("{cache},read-only={read_only}"), &disk.path));
            add("-device", device(disk.serial));
        }
        let forwarded = |kind: &str| {
            let rule = |forward: &Forward| {
                format!(",hostfwd={kind}:{}:{}-:{}", forward.address, forward.port, forward.port)
            };
            self.forward.as_ref().map(rule).unwrap_or_default()
        };
        add(
            "-netdev",
            match &self.station {
                Some(socket) => with_path("stream,id=net,server=off,addr.type=unix,addr.path=", socket),
                None => format!("user,id=net{}{}", forwarded("tcp"), forwarded("udp")).into(),
            },
        );
        let mac = GUEST_MAC.map(|byte| format!("{byte:02x}")).join(":");
        add("-device", format!("virtio-net-pci,netdev=net,mac={mac}").into());
        add("-device", "virtio-serial-pci".into());
        add("-chardev", "socket,id=bench,fd=0".into());
        add("-device", "virtserialport,chardev=bench,name=bench".into());
        add("-chardev", "file,id=console,path=/dev/stdout".into());
        add("-serial", "chardev:console".into());
        add("-display", "none".into());
        words.extend(["-nodefaults", "-no-user-config", "-no-reboot"].map(OsString::from));
        words
    }
}

/// Returns the value of `-drive`.
fn drive(id: &str, options: &str, path: &Path) -> OsString {
    with_path(&format!("if=none,id={id},format=raw,{options},file="), path)
}

/// Returns an option that ends with a path. Doubles each comma in the path.
fn with_path(option: &str, path: &Path) -> OsString {
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    let mut value = option.as_bytes().to_vec();
    for byte in path.as_os_str().as_bytes() {
        value.extend(std::iter::repeat_n(*byte, if *byte == b',' { 2 } else { 1 }));
    }
    OsString::from_vec(value)
}

fn device(id: &str) -> OsString {
    format!("virtio-blk-pci,drive={id},serial={id}").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(kvm: bool, disks: Vec<Disk>, forward: Option<Forward>) -> String {
        with_station(kvm, disks, forward, None)
    }

    fn with_station(
        kvm: bool,
        disks: Vec<Disk>,
        forward: Option<Forward>,
        station: Option<PathBuf>,
    ) -> String {
        let image = Image::new(Path::new("/images/a,b/disk.raw"));
        let accelerator = Accelerator { kvm, reason: String::new() };
        let machine = Machine {
            image: &image,
            accelerator: &accelerator,
            cpus: 2,
            memory: 768 << 20,
            disks,
            forward,
            station,
        };
        machine.arguments().join(" ".as_ref()).into_string().unwrap()
    }

    #[test]
    fn a_vm_has_the_size_of_the_containers() {
        let line = line(true, Vec::new(), None);
        for words in [
            "-machine q35 -accel kvm -cpu host -smp 2 -m 768M",
            "snapshot=on",
            "-chardev socket,id=bench,fd=0",
        ] {
            assert!(line.contains(words), "{line}");
        }
        assert!(
            line.contains("file=/images/a,,b/disk.raw") && line.contains("-kernel /images/a,b/vmlinuz"),
            "{line}"
        );
        assert!(!line.contains("hostfwd"), "{line}");
    }

    #[test]
    fn a_vm_that_is_pinged_has_a_network_of_its_own() {
        let line = with_station(true, Vec::new(), None, Some("/v,m/net".into()));
        let network = "-netdev stream,id=net,server=off,addr.type=unix,addr.path=/v,,m/net";
        assert!(line.contains(network) && !line.contains("-netdev user"), "{line}");
        assert!(line.contains("-device virtio-net-pci,netdev=net,mac=52:54:00:12:34:56"), "{line}");
    }

    #[test]
    fn an_emulated_vm_says_so() {
        assert!(line(false, Vec::new(), None).contains("-accel tcg,tb-size=128 -cpu max"));
    }

    #[test]
    fn disks_and_ports_are_the_requested_ones() {
        let disk = |serial, direct, read_only| Disk { serial, path: "/v/disk".into(), direct, read_only };
        let forward = Forward { address: "192.0.2.1".into(), port: 6379 };
        let line = line(true, vec![disk("command", false, true), disk("bench", true, false)], Some(forward));
        assert!(line.contains("id=command,format=raw,cache=writeback,read-only=on,file=/v/disk"), "{line}");
        assert!(line.contains("id=bench,format=raw,cache=none,read-only=off,file=/v/disk"), "{line}");
        assert!(line.contains("virtio-blk-pci,drive=bench,serial=bench"), "{line}");
        assert!(line.contains("hostfwd=tcp:192.0.2.1:6379-:6379,hostfwd=udp:192.0.2.1:6379-:6379"), "{line}");
    }
}
