//! Finds a block device by the serial that the host set.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::{
    failure::{Failure, Kind, internal},
    uevent,
};

/// How long a disk may take to appear. Under emulation 60 ms are usual; more is the host's fault.
const DEADLINE: Duration = Duration::from_secs(10);

/// Size of the read-ahead around a page fault in a mapped file, KiB: one or two requests for a shell.
/// Measured under emulation: from the container's start to its first byte of output 30 ms, 48 ms with the
/// kernel's 128 KiB (n=12 each).
const READ_AHEAD_KIB: &str = "1024";

/// Header of a vital product data page, bytes.
const VPD_HEADER: usize = 4;

/// Waits for the disk with `serial`; returns its device node.
pub async fn find(serial: &str) -> Result<PathBuf, Failure> {
    let found = uevent::wait_for(Some(DEADLINE), || scan(Path::new("/sys/block"), serial))
        .await
        .map_err(internal(format!("cannot listen for disk {serial:?}")))?;
    let name = found.ok_or_else(|| {
        let message = format!(
            "disk with serial {serial:?} did not appear within {} s; the guest has {}",
            DEADLINE.as_secs(),
            present(Path::new("/sys/block"))
        );
        Failure::new(Kind::DeadlineExceeded, message)
    })?;
    // On failure reads are slower, nothing else.
    let _ = fs::write(Path::new("/sys/block").join(&name).join("queue/read_ahead_kb"), READ_AHEAD_KIB);
    Ok(Path::new("/dev").join(name))
}

fn scan(sys_block: &Path, serial: &str) -> Option<String> {
    disks(sys_block).into_iter().find(|name| serial_of(&sys_block.join(name)).as_deref() == Some(serial))
}

fn present(sys_block: &Path) -> String {
    let disks = disks(sys_block);
    if disks.is_empty() {
        return "no disk".to_owned();
    }
    let described = disks.iter().map(|name| match serial_of(&sys_block.join(name)) {
        Some(serial) => format!("{name} ({serial:?})"),
        None => format!("{name} (no serial)"),
    });
    described.collect::<Vec<_>>().join(", ")
}

/// Returns the names of the real disks. Loop and RAM disks have no serial and only cost reads.
fn disks(sys_block: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(sys_block) else {
        return Vec::new();
    };
    let mut names: Vec<String> =
        entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.retain(|name| !name.starts_with("loop") && !name.starts_with("ram"));
    names.sort();
    names
}

/// Reads a disk's serial: virtio-blk has it as text, SCSI in page 0x80 of the vital product data.
fn serial_of(disk: &Path) -> Option<String> {
    let text = |bytes: &[u8]| {
        let text = std::str::from_utf8(bytes).ok()?.trim_matches(['\0', '\n', ' ']);
        (!text.is_empty()).then(|| text.to_owned())
    };
    for name in ["serial", "device/serial"] {
        if let Some(serial) = fs::read(disk.join(name)).ok().and_then(|bytes| text(&bytes)) {
            return Some(serial);
        }
    }
    text(fs::read(disk.join("device/vpd_pg80")).ok()?.get(VPD_HEADER..)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block_dir() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for name in ["vda", "sda/device", "sdb/device", "loop0"] {
            fs::create_dir_all(dir.path().join(name)).unwrap();
        }
        fs::write(dir.path().join("vda/serial"), "root-1").unwrap();
        fs::write(dir.path().join("sda/device/vpd_pg80"), b"\0\x80\0\x0611d-2 ").unwrap();
        dir
    }

    #[test]
    fn disks_are_told_apart_by_serial_on_both_buses() {
        let dir = block_dir();
        assert_eq!(scan(dir.path(), "root-1").as_deref(), Some("vda"));
        assert_eq!(scan(dir.path(), "11d-2").as_deref(), Some("sda"));
        assert_eq!(scan(dir.path(), "root"), None, "part of a serial is another serial");
        assert_eq!(scan(dir.path(), ""), None);
    }

    #[test]
    fn the_error_lists_what_is_there() {
        let dir = block_dir();
        assert_eq!(present(dir.path()), r#"sda ("11d-2"), sdb (no serial), vda ("root-1")"#);
    }
}
