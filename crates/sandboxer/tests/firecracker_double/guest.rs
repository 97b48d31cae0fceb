//! The guest of a double: answers on its vsock as `test_guest/init.sh` does on its port, one line per line, and prints
//! to the console. It finds disks by the index, as a real guest does.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::{
        fs::FileExt,
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    sync::Arc,
    thread,
};

use sandboxer_protocol::disk_index;

use super::vm::{Drive, Vm};
use crate::test_guest::share_server::KEY;

/// Runs the guest, with its vsock at `socket`.
pub fn start(socket: &Path, vm: Arc<Vm>) -> io::Result<()> {
    let listener = UnixListener::bind(socket)?;
    println!("guest boots");
    let socket = socket.to_owned();
    thread::spawn(move || {
        // Now it listens; the host may be away.
        drop(UnixStream::connect(port(&socket, 1024)));
        for stream in listener.incoming() {
            let (stream, vm, socket) = (stream.unwrap(), vm.clone(), socket.clone());
            thread::spawn(move || converse(&stream, &vm, &socket));
        }
    });
    Ok(())
}

fn port(socket: &Path, port: u32) -> PathBuf {
    format!("{}_{port}", socket.display()).into()
}

fn converse(mut stream: &UnixStream, vm: &Vm, socket: &Path) -> Option<()> {
    let mut lines = BufReader::new(stream.try_clone().ok()?).lines().map_while(Result::ok);
    if lines.next()? != "CONNECT 1024" {
        return None;
    }
    stream.write_all(b"OK 1073741824\n").ok()?;
    for line in lines {
        let (command, argument) = line.split_once(' ').unwrap_or((&line, ""));
        let answer = match command {
            "hello" => "hello host".to_owned(),
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
            "ask-for-files" => ask_for_files(&port(socket, sandboxer_protocol::share::VSOCK_PORT)).ok()?,
            "memory" => vm.memory_mib().to_string(),
            "power-off" => {
                println!("guest says goodbye");
                vm.reset();
                return None;
            }
            other => panic!("unknown command {other}"),
        };
        writeln!(stream, "{answer}").ok()?;
    }
    Some(())
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

/// First bytes that a guest's kernel sends (`FUSE_INIT`), and the answer's header after a disk's state.
fn ask_for_files(shares: &Path) -> io::Result<String> {
    let mut stream = UnixStream::connect(shares)?;
    let mut request = [104, 26, 7, 0].map(u32::to_le_bytes).concat();
    request.extend([0; 24]);
    request.extend([7, 36].map(u32::to_le_bytes).concat());
    request.resize(104, 0);
    stream.write_all(KEY.as_bytes())?;
    stream.write_all(&request)?;
    let mut head = [0; 16];
    stream.read_exact(&mut head)?;
    let bytes = [&[1, 0, 0, 0][..], &head].concat();
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
