//! Kernel devices that VMMs use.

use std::io;

use super::{
    host::Host,
    verdict::{Check, Fix, Subject},
};

/// A device and its purpose.
#[derive(Debug)]
pub struct Device {
    subject: Subject,
    path: &'static str,
    module: &'static str,
    /// The effect if the device is missing.
    without: &'static str,
}

/// The device for vsock connections to agents.
pub const VSOCK: Device = Device {
    subject: Subject { name: "vsock", why: "connections from the host to a guest" },
    path: "/dev/vhost-vsock",
    module: "vhost_vsock",
    without: "not needed: agents use a serial port",
};

/// The device for network interfaces of VMs.
pub const TUN: Device = Device {
    subject: Subject { name: "tun", why: "a VM's network interface is a tap" },
    path: "/dev/net/tun",
    module: "tun",
    without: "pods that have a network interface do not start",
};

/// The device for packets that bypass the VMM.
pub const VHOST_NET: Device = Device {
    subject: Subject { name: "vhost-net", why: "packets of VMs on QEMU with KVM bypass the VMM" },
    path: "/dev/vhost-net",
    module: "vhost_net",
    without: "packets pass through the VMM, which is slower",
};

/// Opens the device.
pub fn read(host: &Host, device: &Device) -> io::Result<()> {
    host.device(device.path)
}

/// Checks that a device opens if it exists. The daemon can do without vsock and vhost-net.
pub fn judge(device: &Device, reading: &io::Result<()>) -> Check {
    let Device { subject, path, module, without } = device;
    match reading {
        Ok(()) => subject.ok(format!("{path} can be opened")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            subject.not_applicable(format!("no {path}; {without}"))
        }
        Err(error) => subject.warning(
            format!("{path}: {error}"),
            Fix::commands("load the module, and run this as root", [format!("modprobe {module}")]),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Verdict;

    #[test]
    fn a_device_that_is_there_must_open() {
        for (reading, verdict) in [
            (Ok(()), Verdict::Ok),
            (Err(io::ErrorKind::NotFound.into()), Verdict::NotApplicable),
            (Err(io::ErrorKind::PermissionDenied.into()), Verdict::Warning),
            (Err(io::Error::other("not a device")), Verdict::Warning),
        ] {
            for device in [VSOCK, TUN, VHOST_NET] {
                assert_eq!(judge(&device, &reading).verdict, verdict, "{device:?}");
            }
        }
    }
}
