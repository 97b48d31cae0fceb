//! Finds a block device by the serial that the host set, or by the host's index of disks.

use std::{
    fs::{self, File},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::Duration,
};

use sandboxer_protocol::disk_index::{self, Entry};

use crate::{
    failure::{Failure, Kind, internal},
    uevent,
};

/// How long a disk may take to appear. Under emulation 60 ms are usual; a longer delay is the host's fault.
const DEADLINE: Duration = Duration::from_secs(10);

/// Size of the read-ahead around a page fault in a mapped file, KiB: one or two requests for a shell. Measured under
/// emulation: 30 ms from the container's start to its first byte of output, 48 ms with the kernel's 128 KiB (n=12
/// each).
const READ_AHEAD_KIB: &str = "1024";

/// Header of a vital product data page, bytes.
const VPD_HEADER: usize = 4;

/// Waits for the disk with `serial`; returns its device node.
pub async fn find(serial: &str) -> Result<PathBuf, Failure> {
    let index = Index::of_guest();
    let name = uevent::wait_for(&["block"], Some(DEADLINE), || match &index {
        None => scan(Path::new("/sys/block"), serial),
        Some(index) => index.read().and_then(|entries| in_slot(Path::new("/sys/block"), &entries, serial)),
    })
    .await
    .map_err(internal(format!("cannot listen for disk {serial:?}")))?;
    let name = name.ok_or_else(|| {
        let message = format!(
            "disk with serial {serial:?} did not appear within {} s; the guest has {}",
            DEADLINE.as_secs(),
            present(Path::new("/sys/block"))
        );
        Failure::new(Kind::DeadlineExceeded, message)
    })?;
    // On failure, reads are slower but still work.
    let _ = fs::write(Path::new("/sys/block").join(&name).join("queue/read_ahead_kb"), READ_AHEAD_KIB);
    Ok(Path::new("/dev").join(name))
}

fn scan(sys_block: &Path, serial: &str) -> Option<String> {
    disks(sys_block).into_iter().find(|name| serial_of(&sys_block.join(name)).as_deref() == Some(serial))
}

/// The index of disks that the host provides if its VMM gives them no serials.
struct Index(PathBuf);

impl Index {
    /// Returns the index, if the kernel command line announces one.
    fn of_guest() -> Option<Self> {
        let cmdline = fs::read_to_string("/proc/cmdline").ok()?;
        cmdline.split_ascii_whitespace().any(|word| word == disk_index::WORD).then(|| Self("/dev/vda".into()))
    }

    /// Reads the index from the host: the kernel must not return what it read before.
    fn read(&self) -> Option<Vec<Entry>> {
        let disk = File::options().read(true).custom_flags(libc::O_DIRECT).open(&self.0).ok()?;
        let mut page = Page([0; disk_index::BYTES]);
        disk.read_exact_at(&mut page.0, 0).ok()?;
        disk_index::parse(&page.0)
    }
}

/// Memory that a device can write to directly.
#[repr(align(4096))]
struct Page([u8; disk_index::BYTES]);

/// Returns the disk `serial` of the index, once its slot's device has its size.
fn in_slot(sys_block: &Path, entries: &[Entry], serial: &str) -> Option<String> {
    let entry = entries.iter().find(|entry| entry.serial == serial)?;
    // vda is the index itself.
    let letter = char::from(b'b'.checked_add(u8::try_from(entry.slot).ok()?)?);
    let name = format!("vd{letter}");
    let sectors: u64 = fs::read_to_string(sys_block.join(&name).join("size")).ok()?.trim().parse().ok()?;
    (letter.is_ascii_lowercase() && sectors == entry.sectors).then_some(name)
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

/// Returns the names of the real disks. Loop and RAM disks have no serial and are skipped.
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
    fn a_disk_of_the_index_is_there_once_its_slot_has_its_size() {
        let dir = tempfile::tempdir().unwrap();
        for (name, sectors) in [("vda", 8), ("vdb", 1), ("vdc", 2048)] {
            fs::create_dir(dir.path().join(name)).unwrap();
            fs::write(dir.path().join(name).join("size"), format!("{sectors}\n")).unwrap();
        }
        let entry = |slot, serial: &str| Entry { slot, sectors: 2048, serial: serial.to_owned() };
        let entries = [entry(0, "not-yet"), entry(1, "there"), entry(24, "beyond"), entry(200, "far-beyond")];
        assert_eq!(in_slot(dir.path(), &entries, "there").as_deref(), Some("vdc"));
        for absent in ["not-yet", "beyond", "far-beyond", "unknown", "ther"] {
            assert_eq!(in_slot(dir.path(), &entries, absent), None, "{absent}");
        }
    }

    #[test]
    fn the_error_lists_what_is_there() {
        let dir = block_dir();
        assert_eq!(present(dir.path()), r#"sda ("11d-2"), sdb (no serial), vda ("root-1")"#);
    }
}
