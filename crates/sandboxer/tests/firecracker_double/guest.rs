//! The guest of a double. It finds disks by the index, as a real guest does.

use std::{io, os::unix::fs::FileExt, path::Path, sync::Arc, thread};

use sandboxer_protocol::disk_index;

use super::vm::{Drive, Vm};
use crate::double_guest::{self, ask_for_files, converse};

/// Runs the guest, with its vsock at `socket`.
pub fn start(socket: &Path, vm: Arc<Vm>) -> io::Result<()> {
    let path = socket.to_owned();
    let answer = move |command: &str, argument: &str| {
        Some(match command {
            "await" => vm.wait_for_drives(|drives| {
                let drive = found(drives, argument)?;
                let mut first = [0; 64];
                let read = drive.file.read_at(&mut first, 0).ok()?;
                let text = String::from_utf8_lossy(&first[..read]).into_owned();
                let (first, read_only) = (text.lines().next()?, u8::from(drive.read_only));
                Some(format!("disk {argument} ro={read_only} starts with {first}"))
            }),
            "await-gone" => loop {
                // Of the index, which changes after the drive.
                if vm.wait_for_drives(|drives| Some(found(drives, argument).is_none())) {
                    break format!("gone {argument}");
                }
                thread::yield_now();
            },
            "ask-for-files" => ask_for_files(&path).ok()?,
            "memory" => vm.memory_mib().to_string(),
            "power-off" => {
                println!("guest says goodbye");
                vm.reset();
                return None;
            }
            other => panic!("unknown command {other}"),
        })
    };
    double_guest::start(socket, move |stream| converse(stream, &answer).unwrap_or_default())
}

/// Returns the drive of a disk: that of its slot, once it has its size.
fn found<'a>(drives: &'a [Drive], serial: &str) -> Option<&'a Drive> {
    let mut index = vec![0; disk_index::BYTES];
    let (first, slots) = drives.split_first()?;
    first.file.read_exact_at(&mut index, 0).ok()?;
    let entry = disk_index::parse(&index)?.into_iter().find(|entry| entry.serial == serial)?;
    let drive = slots.get(entry.slot)?;
    (drive.file.metadata().ok()?.len() / disk_index::SECTOR as u64 == entry.sectors).then_some(drive)
}
