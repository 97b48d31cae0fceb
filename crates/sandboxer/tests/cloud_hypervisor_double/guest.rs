//! The guest of a double.

use std::{io, path::Path, sync::Arc};

use super::vm::Vm;
use crate::double_guest::{self, ask_for_files, converse};

/// Runs the guest, with its vsock at `socket`. If it was saved with open connections, they are gone: the real VMM tells it so.
pub fn start(socket: &Path, vm: Arc<Vm>) -> io::Result<()> {
    let path = socket.to_owned();
    let answer = move |command: &str, argument: &str| {
        Some(match command {
            "await" => vm.wait_for_disks(|disks| {
                let disk = disks.values().find(|disk| disk.serial == argument)?;
                let read_only = u8::from(disk.read_only);
                Some(format!("disk {argument} ro={read_only} starts with {}", disk.first_line))
            }),
            "await-gone" => vm.wait_for_disks(|disks| {
                let is_gone = disks.values().all(|disk| disk.serial != argument);
                is_gone.then(|| format!("gone {argument}"))
            }),
            "ask-for-files" => ask_for_files(&path).ok()?,
            "remember" => {
                vm.remember(argument);
                "noted".to_owned()
            }
            "recall" => vm.recall(),
            "memory" => vm.memory_mib().to_string(),
            "vcpus" => vm.vcpus().to_string(),
            "power-off" => {
                println!("guest says goodbye");
                vm.power_off();
                return None;
            }
            "panic" => {
                println!("Kernel panic - not syncing");
                vm.reset();
                return None;
            }
            other => panic!("unknown command {other}"),
        })
    };
    double_guest::start(socket, move |stream| {
        converse(stream, &answer);
    })
}
