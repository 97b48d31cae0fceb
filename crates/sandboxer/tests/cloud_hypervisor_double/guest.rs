//! The guest of a double.

use std::{
    io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use super::vm::Vm;
use crate::double_guest::{self, ask_for_files, converse};

/// The connections of the guest.
static CONNECTIONS: AtomicUsize = AtomicUsize::new(0);

/// Returns the number of connections of the guest.
pub fn connections() -> usize {
    CONNECTIONS.load(Ordering::SeqCst)
}

/// Runs the guest, with its vsock at `socket`. It assumes `connections` that do not exist any more: a guest that was
/// frozen with open connections and runs elsewhere. As with the real VMM, such a guest does not answer.
pub fn start(socket: &Path, vm: Arc<Vm>, connections: u64) -> io::Result<()> {
    let path = socket.to_owned();
    let answer = move |command: &str, argument: &str| {
        Some(match command {
            "await" => vm.wait_for_disks(|disks| {
                let disk = disks.values().find(|disk| disk.serial == argument)?;
                let read_only = u8::from(disk.read_only);
                Some(format!("disk {argument} ro={read_only} starts with {}", disk.first_line))
            }),
            "await-gone" => vm.wait_for_disks(|disks| {
                let gone = disks.values().all(|disk| disk.serial != argument);
                gone.then(|| format!("gone {argument}"))
            }),
            "ask-for-files" => ask_for_files(&path).ok()?,
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
    double_guest::start(socket, move |mut stream| {
        CONNECTIONS.fetch_add(1, Ordering::SeqCst);
        if connections == 0 {
            converse(stream, &answer);
        } else {
            let _ = io::copy(&mut stream, &mut io::sink());
        }
        CONNECTIONS.fetch_sub(1, Ordering::SeqCst);
    })
}
