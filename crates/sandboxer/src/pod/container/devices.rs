//! A container's devices: block devices of the host become disks of its VM, at the requested path.

use std::{
    fs, io,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Component, Path, PathBuf},
};

use nix::libc::{major, minor};
use oci_spec::runtime::{Linux, LinuxDevice, LinuxDeviceCgroup, LinuxDeviceType};
use sandboxer_host::volume::{Content, Needed};
use sandboxer_protocol::{
    agent::{BlockDevice, Owner},
    id::ContainerId,
};

use super::spec::unsupported;
use crate::error::PodError;

/// Character devices that have the same numbers on every kernel, with their paths in the guest.
const IN_EVERY_KERNEL: [((i64, i64), &str); 10] = [
    ((1, 3), "/dev/null"),
    ((1, 5), "/dev/zero"),
    ((1, 7), "/dev/full"),
    ((1, 8), "/dev/random"),
    ((1, 9), "/dev/urandom"),
    ((1, 11), "/dev/kmsg"),
    ((5, 0), "/dev/tty"),
    ((10, 200), "/dev/net/tun"),
    ((10, 229), "/dev/fuse"),
    ((10, 237), "/dev/loop-control"),
];

/// Paths of such devices that the guest's runtime creates by default.
const ALWAYS_THERE: [&str; 6] =
    ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty"];

/// Removes from a container's spec the devices that its runtime cannot create. Returns what the guest must provide
/// instead, and how it appears in the container.
pub fn convert(
    container: &ContainerId,
    linux: &mut Linux,
) -> Result<(Vec<Needed>, Vec<BlockDevice>), PodError> {
    let rules = linux.resources().as_ref().and_then(|resources| resources.devices().clone());
    let rules = rules.unwrap_or_default();
    let (mut guest_devices, mut needed, mut seen) = (Vec::new(), Vec::new(), Vec::new());
    for device in linux.devices().clone().unwrap_or_default() {
        let (path, number) = (device.path().clone(), (device.major(), device.minor()));
        if rules.iter().any(allows_all) && is_the_hosts_own(&device) {
            // A privileged container gets all devices of its guest.
            continue;
        }
        match device.typ() {
            LinuxDeviceType::B => {
                let read_only = !rules.iter().any(|rule| allows_writing(rule, number));
                let host = node(number).map_err(|error| {
                    let why =
                        format!("the host has no node for block device {}:{}: {error}", number.0, number.1);
                    unsupported(container, &format!("device {}", path.display()), &why)
                })?;
                let volume = Needed::new(Content::Device { path: host, read_only });
                seen.push(BlockDevice {
                    serial: volume.id.to_string(),
                    path: path.to_string_lossy().into_owned(),
                    owner: Some(owner(&device)).into(),
                    read_only,
                    ..Default::default()
                });
                needed.push(volume);
            }
            LinuxDeviceType::C | LinuxDeviceType::U if of_every_kernel(number).is_some() => {
                if !ALWAYS_THERE.iter().any(|there| path == Path::new(there)) {
                    guest_devices.push(device);
                }
            }
            kind => {
                let what = format!("device {} ({kind:?} {}:{})", path.display(), number.0, number.1);
                return Err(unsupported(container, &what, "it is a device of the host"));
            }
        }
    }
    linux.set_devices(Some(guest_devices));
    Ok((needed, seen))
}

fn owner(device: &LinuxDevice) -> Owner {
    Owner {
        mode: device.file_mode().unwrap_or(0o660) & 0o7777,
        uid: device.uid().unwrap_or(0),
        gid: device.gid().unwrap_or(0),
        ..Default::default()
    }
}

/// Returns whether a rule means the same in a guest as on the host: it allows all devices (privileged), or names a
/// device that every kernel has. The guest adds the default devices and the container's own disks.
pub fn holds_in_a_guest(rule: &LinuxDeviceCgroup) -> bool {
    let number = rule.major().zip(rule.minor());
    let is_of_every_kernel = number.and_then(of_every_kernel).is_some();
    allows_all(rule) || rule.typ() == Some(LinuxDeviceType::C) && is_of_every_kernel
}

/// Returns the guest's path of a character device that every kernel has.
fn of_every_kernel(number: (i64, i64)) -> Option<&'static Path> {
    let found = IN_EVERY_KERNEL.iter().find(|(known, _)| *known == number);
    found.map(|(_, path)| Path::new(*path))
}

/// Returns the guest's path of such a device if it is the source of a mount. Compares only the path, which is the same
/// on every host, and does not access the host's file.
pub fn mounted(source: &Path) -> Option<&'static Path> {
    IN_EVERY_KERNEL.iter().map(|(_, path)| Path::new(*path)).find(|path| *path == source)
}

/// Returns whether a rule allows all devices.
fn allows_all(rule: &LinuxDeviceCgroup) -> bool {
    rule.allow() && rule.typ().is_none_or(|typ| typ == LinuxDeviceType::A) && rule.major().is_none()
}

fn allows_writing(rule: &LinuxDeviceCgroup, (major, minor): (i64, i64)) -> bool {
    let applies = rule.typ().is_none_or(|typ| matches!(typ, LinuxDeviceType::A | LinuxDeviceType::B))
        && rule.major().is_none_or(|number| number == major || number < 0)
        && rule.minor().is_none_or(|number| number == minor || number < 0);
    rule.allow() && applies && rule.access().as_deref().is_none_or(|access| access.contains('w'))
}

/// Returns whether a device has its host path in the container, so that it was not requested by name. True only below
/// /dev: elsewhere, a container's path may be a hung volume on the host.
fn is_the_hosts_own(device: &LinuxDevice) -> bool {
    let plain = device.path().components().all(|part| part != Component::ParentDir);
    plain
        && device.path().starts_with("/dev")
        && fs::metadata(device.path()).is_ok_and(|meta| number_of(&meta) == (device.major(), device.minor()))
}

fn number_of(meta: &fs::Metadata) -> (i64, i64) {
    (major(meta.rdev()).into(), minor(meta.rdev()).into())
}

/// Returns the path of the host's node for a block device.
fn node((major, minor): (i64, i64)) -> io::Result<PathBuf> {
    let events = fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/uevent"))?;
    let name = events.lines().find_map(|line| line.strip_prefix("DEVNAME="));
    let path = Path::new("/dev").join(name.unwrap_or_default());
    let meta = fs::metadata(&path)?;
    if meta.file_type().is_block_device() && number_of(&meta) == (major, minor) {
        Ok(path)
    } else {
        Err(io::Error::other(format!("{path:?} is another one")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn convert_json(
        devices: serde_json::Value,
        rules: serde_json::Value,
    ) -> Result<(Linux, Vec<Needed>, Vec<BlockDevice>), PodError> {
        let json = serde_json::json!({"devices": devices, "resources": {"devices": rules}});
        let mut linux: Linux = serde_json::from_value(json).unwrap();
        let (needed, seen) = convert(&"c".parse().unwrap(), &mut linux)?;
        Ok((linux, needed, seen))
    }

    #[test]
    fn devices_of_every_kernel_stay_and_the_hosts_others_are_refused_by_name() {
        let (linux, needed, _) = convert_json(
            serde_json::json!([
                {"path": "/dev/null", "type": "c", "major": 1, "minor": 3},
                {"path": "/dev/nothing", "type": "c", "major": 1, "minor": 3},
                {"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229},
                {"path": "/dev/net/tun", "type": "c", "major": 10, "minor": 200},
            ]),
            serde_json::json!([]),
        )
        .unwrap();
        let paths: Vec<_> = linux.devices().iter().flatten().map(|device| device.path().clone()).collect();
        assert_eq!(paths, ["/dev/nothing", "/dev/fuse", "/dev/net/tun"].map(Path::new));
        assert!(needed.is_empty());
        for (json, says) in [
            (
                serde_json::json!([{"path": "/dev/kvm", "type": "c", "major": 10, "minor": 232}]),
                "/dev/kvm (C 10:232)",
            ),
            (
                serde_json::json!([{"path": "/dev/x", "type": "b", "major": 4000, "minor": 1}]),
                "block device 4000:1",
            ),
        ] {
            let error = convert_json(json, serde_json::json!([])).unwrap_err().to_string();
            assert!(error.contains(says) && error.contains("container c"), "{error}");
        }
    }

    #[test]
    fn a_device_of_every_kernel_that_is_mounted_is_the_guests() {
        assert_eq!(mounted(Path::new("/dev/zero")), Some(Path::new("/dev/zero")));
        for other in ["/dev", "/dev/nothing", "/dev/../dev/zero", "/proc/version"] {
            assert_eq!(mounted(Path::new(other)), None, "{other}");
        }
    }

    #[test]
    fn a_privileged_container_gets_none_of_the_hosts_own() {
        let all = serde_json::json!([{"allow": true, "access": "rwm"}]);
        let own = fs::metadata("/dev/full").unwrap();
        let (major, minor) = number_of(&own);
        let devices = serde_json::json!([{"path": "/dev/full", "type": "c", "major": major, "minor": minor}]);
        let (linux, needed, seen) = convert_json(devices, all).unwrap();
        assert!(linux.devices().iter().flatten().next().is_none() && needed.is_empty() && seen.is_empty());
    }

    #[test]
    fn rules_of_the_hosts_numbers_stay_on_the_host() {
        let rules: Vec<LinuxDeviceCgroup> = serde_json::from_value(serde_json::json!([
            {"allow": false, "access": "rwm"},
            {"allow": true, "type": "c", "major": 10, "minor": 229, "access": "rw"},
            {"allow": true, "type": "c", "major": 226, "minor": 0, "access": "rw"},
            {"allow": true, "type": "b", "major": 1, "minor": 3, "access": "rw"},
            {"allow": true, "access": "rwm"},
        ]))
        .unwrap();
        let results: Vec<_> = rules.iter().map(holds_in_a_guest).collect();
        assert_eq!(results, [false, true, false, false, true]);
    }

    #[test]
    fn writing_takes_a_rule_that_allows_it() {
        let rule = |json: serde_json::Value| serde_json::from_value::<LinuxDeviceCgroup>(json).unwrap();
        let block_rule = |access: &str, minor: i64| {
            rule(
                serde_json::json!({"allow": true, "type": "b", "major": 7, "minor": minor, "access": access}),
            )
        };
        assert!(allows_writing(&block_rule("rwm", 1), (7, 1)));
        assert!(!allows_writing(&block_rule("r", 1), (7, 1)));
        assert!(!allows_writing(&block_rule("rwm", 2), (7, 1)));
        assert!(allows_writing(&rule(serde_json::json!({"allow": true, "access": "rwm"})), (7, 1)));
        assert!(!allows_writing(&rule(serde_json::json!({"allow": false, "access": "rwm"})), (7, 1)));
    }
}
