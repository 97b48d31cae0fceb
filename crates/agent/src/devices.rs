//! The guest's devices, all of which a privileged container gets.

use std::{
    fs, io,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
    path::Path,
};

use libcontainer::oci_spec::runtime::{LinuxDevice, LinuxDeviceBuilder, LinuxDeviceCgroup, LinuxDeviceType};

/// Devices that the runtime creates in every container, and the guest's console.
const NOT_LISTED: [&str; 8] = ["null", "zero", "full", "random", "urandom", "tty", "ptmx", "console"];
/// Directories of `/dev` with other file systems mounted.
const MOUNTS: [&str; 3] = ["pts", "shm", "mqueue"];
/// Depth of the directories in `/dev`.
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
    let mut found = Vec::new();
    list(Path::new("/dev"), DEPTH, &mut found)?;
    Ok(found)
}

fn list(dir: &Path, depth: u32, found: &mut Vec<LinuxDevice>) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let (path, name) = entry.map(|entry| (entry.path(), entry.file_name()))?;
        let meta = match fs::symlink_metadata(&path) {
            // Unplugged after the directory was read.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            meta => meta?,
        };
        let is_one_of = |names: &[&str]| names.iter().any(|other| name == *other);
        let kind = meta.file_type();
        if kind.is_dir() && depth > 0 && !is_one_of(&MOUNTS) {
            list(&path, depth - 1, found)?;
        } else if (kind.is_char_device() || kind.is_block_device()) && !is_one_of(&NOT_LISTED) {
            let number = meta.rdev();
            let device = LinuxDeviceBuilder::default()
                .path(path)
                .typ(if kind.is_char_device() { LinuxDeviceType::C } else { LinuxDeviceType::B })
                .major(i64::from(libc::major(number)))
                .minor(i64::from(libc::minor(number)))
                .file_mode(meta.mode() & 0o7777)
                .uid(meta.uid())
                .gid(meta.gid())
                .build();
            found.push(device.map_err(io::Error::other)?);
        }
    }
    Ok(())
}
