//! The guest of a double: answers on its vsock as `test_guest/init.sh` does on its port, one line per line, and prints
//! to the console.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    sync::Arc,
    thread,
};

use sandboxer_protocol::{boot::AGENT_VSOCK_PORT, link::LinkKey, share::VSOCK_PORT};

/// The key of `test_guest/share_server.rs`.
const KEY: LinkKey = LinkKey::from_bytes([9; LinkKey::LEN]);

/// Runs the guest, with its vsock at `socket`. Each connection is served by `serve`, on a thread of its own.
pub fn start(socket: &Path, serve: impl Fn(&UnixStream) + Send + Sync + 'static) -> io::Result<()> {
    let listener = UnixListener::bind(socket)?;
    println!("guest boots");
    let host = port(socket, AGENT_VSOCK_PORT);
    let serve = Arc::new(serve);
    thread::spawn(move || {
        // Now it listens; the host may be away.
        drop(UnixStream::connect(host));
        for stream in listener.incoming() {
            let (stream, serve) = (stream.unwrap(), serve.clone());
            thread::spawn(move || serve(&stream));
        }
    });
    Ok(())
}

/// Serves a connection: `answer` returns the answer to a command and its argument, or `None` to end.
pub fn converse(mut stream: &UnixStream, answer: impl Fn(&str, &str) -> Option<String>) -> Option<()> {
    let mut lines = BufReader::new(stream.try_clone().ok()?).lines().map_while(Result::ok);
    if lines.next()? != "CONNECT 1024" {
        return None;
    }
    stream.write_all(b"OK 1073741824\n").ok()?;
    for line in lines {
        let (command, argument) = line.split_once(' ').unwrap_or((&line, ""));
        let answer = if command == "hello" { "hello host".to_owned() } else { answer(command, argument)? };
        writeln!(stream, "{answer}").ok()?;
    }
    Some(())
}

/// Returns the socket of a port of the guest's host.
fn port(socket: &Path, port: u32) -> PathBuf {
    format!("{}_{port}", socket.display()).into()
}

/// First bytes that a guest's kernel sends (`FUSE_INIT`), and the answer's header after a disk's state.
pub fn ask_for_files(socket: &Path) -> io::Result<String> {
    let mut stream = UnixStream::connect(port(socket, VSOCK_PORT))?;
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
