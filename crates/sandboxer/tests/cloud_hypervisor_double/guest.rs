//! The guest of a double: answers on its vsock as `test_guest/init.sh` does on its port, one line per
//! line, and prints to the console.

use std::{
    io::{self, BufRead, BufReader, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use super::vm::Vm;

/// The connections of the guest.
static CONNECTIONS: AtomicUsize = AtomicUsize::new(0);

/// Returns the number of connections of the guest.
pub fn connections() -> usize {
    CONNECTIONS.load(Ordering::SeqCst)
}

/// Runs the guest, with its vsock at `socket`. It assumes `connections` that do not exist any more: a guest that was
/// frozen with open connections and runs elsewhere. As with the real VMM, such a guest does not answer.
pub fn start(socket: &Path, vm: Arc<Vm>, connections: u64) -> io::Result<()> {
    let listener = UnixListener::bind(socket)?;
    println!("guest boots");
    let host = format!("{}_1024", socket.display());
    thread::spawn(move || {
        // Now it listens; the host may be away.
        drop(UnixStream::connect(host));
        for stream in listener.incoming() {
            let (stream, vm) = (stream.unwrap(), vm.clone());
            thread::spawn(move || {
                CONNECTIONS.fetch_add(1, Ordering::SeqCst);
                if connections == 0 {
                    converse(&stream, &vm);
                } else {
                    let _ = io::copy(&mut &stream, &mut io::sink());
                }
                CONNECTIONS.fetch_sub(1, Ordering::SeqCst);
            });
        }
    });
    Ok(())
}

fn converse(mut stream: &UnixStream, vm: &Vm) -> Option<()> {
    let mut lines = BufReader::new(stream.try_clone().ok()?).lines().map_while(Result::ok);
    if lines.next()? != "CONNECT 1024" {
        return None;
    }
    stream.write_all(b"OK 1073741824\n").ok()?;
    for line in lines {
        let (command, argument) = line.split_once(' ').unwrap_or((&line, ""));
        let answer = match command {
            "hello" => "hello host".to_owned(),
            "await" => vm.wait_for_disks(|disks| {
                let disk = disks.values().find(|disk| disk.serial == argument)?;
                let read_only = u8::from(disk.read_only);
                Some(format!("disk {argument} ro={read_only} starts with {}", disk.first_line))
            }),
            "await-gone" => vm.wait_for_disks(|disks| {
                let gone = disks.values().all(|disk| disk.serial != argument);
                gone.then(|| format!("gone {argument}"))
            }),
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
        };
        writeln!(stream, "{answer}").ok()?;
    }
    Some(())
}
