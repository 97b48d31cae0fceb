//! Devices of the kernel's that VMMs use.

use std::io;

use super::{
    host::Host,
    verdict::{Check, Fix, Subject},
};

/// A device, and what it is for.
#[derive(Debug)]
pub struct Device {
    subject: Subject,
    path: &'static str,
    module: &'static str,
    /// What happens without it.
    without: &'static str,
}

/// The way to agents over vsock.
pub const VSOCK: Device = Device {
    subject: Subject { name: "vsock", why: "a way from the host to a guest" },
    path: "/dev/vhost-vsock",
    module: "vhost_vsock",
    without: "not needed: agents are reached by a serial port",
};

/// Interfaces of virtual machines.
pub const TUN: Device = Device {
    subject: Subject { name: "tun", why: "a machine's network interface is a tap" },
    path: "/dev/net/tun",
    module: "tun",
    without: "pods that have a network interface do not start",
};

/// Packets without a detour by the VMM.
pub const VHOST_NET: Device = Device {
    subject: Subject { name: "vhost-net", why: "packets of a machine then pass without its VMM" },
    path: "/dev/vhost-net",
    module: "vhost_net",
    without: "not used yet: packets pass by the VMM",
};

/// Opens it.
pub fn read(host: &Host, device: &Device) -> io::Result<()> {
    host.device(device.path)
}

/// Returns one that is there must open; none is needed by what the daemon does so far.
pub fn judge(device: &Device, reading: &io::Result<()>) -> Check {
    let Device { subject, path, module, without } = device;
    match reading {
        Ok(()) => subject.ok(format!("{path} opens")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            subject.not_applicable(format!("no {path}; {without}"))
        }
        Err(error) => subject.warning(
            format!("{path}: {error}"),
            Fix::commands("run this as root, with the module loaded", [format!("modprobe {module}")]),
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
            (Err(io::Error::other("it is no device")), Verdict::Warning),
        ] {
            for device in [VSOCK, TUN, VHOST_NET] {
                assert_eq!(judge(&device, &reading).verdict, verdict, "{device:?}");
            }
        }
    }
}
