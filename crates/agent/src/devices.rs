//! The devices of the guest, all of which a privileged container gets.

use std::{
    fs, io,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
    path::{Path, PathBuf},
};

use libcontainer::oci_spec::runtime::{LinuxDevice, LinuxDeviceBuilder, LinuxDeviceCgroup, LinuxDeviceType};

/// Devices that the runtime creates in every container, and the guest's console.
const NOT_LISTED: [&str; 8] = ["null", "zero", "full", "random", "urandom", "tty", "ptmx", "console"];
/// Directories of `/dev` on which other file systems are mounted.
const MOUNTS: [&str; 3] = ["pts", "shm", "mqueue"];
/// The loop devices. The kernel creates one when it is first opened, but a container's /dev does not change later.
const LOOPS: std::ops::Range<i64> = 0..8;
/// The major number of loop devices.
const LOOP: i64 = 7;
/// The most levels of directories in `/dev`.
const DEPTH: u32 = 3;

/// Returns whether `rules` allow a container every device.
pub fn allow_all(rules: &[LinuxDeviceCgroup]) -> bool {
    let all = |rule: &LinuxDeviceCgroup| {
        rule.allow() && rule.typ().is_none_or(|typ| typ == LinuxDeviceType::A) && rule.major().is_none()
    };
    rules.iter().any(all)
}

/// Returns every device of the guest.
pub fn all() -> io::Result<Vec<LinuxDevice>> {
    let mut devices = Vec::new();
    list(Path::new("/dev"), DEPTH, &mut devices)?;
    for minor in LOOPS {
        let path = Path::new("/dev").join(format!("loop{minor}"));
        if !devices.iter().any(|device| *device.path() == path) {
            devices.push(node(path, LinuxDeviceType::B, (LOOP, minor), (0o660, 0, 0))?);
        }
    }
    Ok(devices)
}

fn node(
    path: PathBuf,
    kind: LinuxDeviceType,
    (major, minor): (i64, i64),
    (mode, uid, gid): (u32, u32, u32),
) -> io::Result<LinuxDevice> {
    let device = LinuxDeviceBuilder::default().path(path).typ(kind).major(major).minor(minor);
    device.file_mode(mode).uid(uid).gid(gid).build().map_err(io::Error::other)
}

fn list(dir: &Path, depth: u32, devices: &mut Vec<LinuxDevice>) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let (path, name) = entry.map(|entry| (entry.path(), entry.file_name()))?;
        let meta = match fs::symlink_metadata(&path) {
            // The device was unplugged after the directory was read.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            meta => meta?,
        };
        let is_one_of = |names: &[&str]| names.iter().any(|other| name == *other);
        let kind = meta.file_type();
        if kind.is_dir() && depth > 0 && !is_one_of(&MOUNTS) {
            list(&path, depth - 1, devices)?;
        } else if (kind.is_char_device() || kind.is_block_device()) && !is_one_of(&NOT_LISTED) {
            let kind = if kind.is_char_device() { LinuxDeviceType::C } else { LinuxDeviceType::B };
            let number = (libc::major(meta.rdev()).into(), libc::minor(meta.rdev()).into());
            devices.push(node(path, kind, number, (meta.mode() & 0o7777, meta.uid(), meta.gid()))?);
        }
    }
    Ok(())
}
