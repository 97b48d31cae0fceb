//! A double of Firecracker: a process that speaks its API and runs nothing.
//!
//! The double is this test program under another name, so a driver starts it as it starts the real one. Which call is
//! possible when, and with which body, is in `vm.rs`; its guest (`guest.rs`) is a few threads.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test helper fails its test")]

mod guest;
mod vm;

use std::{
    env, fs,
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::{
        fs::symlink,
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{Arc, Mutex, mpsc},
    thread,
};

use serde_json::{Value, json};

use self::vm::Vm;

/// Under this name the program is the double.
const NAME: &str = "firecracker";
/// File with its version, beside its program.
const VERSION: &str = "version";
/// Version of a double in a jail, where that file is not.
const USUAL: &str = "1.16.1";

/// Held while a request is answered.
static API: Mutex<()> = Mutex::new(());

/// Installs a double of this version into `dir`. Returns its program.
pub fn install(dir: &Path, version: &str) -> PathBuf {
    let program = dir.join(NAME);
    if !program.exists() {
        symlink(env::current_exe().unwrap(), &program).unwrap();
    }
    fs::write(dir.join(VERSION), version).unwrap();
    program
}

/// Runs the double, if this process was started as one. To be called first in `main`.
pub fn run_if_asked() -> Option<ExitCode> {
    let program = PathBuf::from(env::args_os().next()?);
    if program.file_name()? != NAME {
        return None;
    }
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["--version"] => {
            let version =
                fs::read_to_string(program.parent()?.join(VERSION)).unwrap_or_else(|_| USUAL.into());
            println!("Firecracker v{version}\n");
            Some(ExitCode::SUCCESS)
        }
        ["--enable-pci", "--level", "Warning", "--api-sock", socket] => Some(serve(Path::new(socket))),
        _ => {
            eprintln!("unexpected arguments {arguments:?}");
            Some(ExitCode::from(153))
        }
    }
}

fn serve(socket: &Path) -> ExitCode {
    let (end, ended) = mpsc::channel();
    let vm = Vm::new(end);
    let api = UnixListener::bind(socket).unwrap();
    thread::spawn(move || {
        for connection in api.incoming() {
            let vm = vm.clone();
            thread::spawn(move || while answer_one(connection.as_ref().unwrap(), &vm).is_some() {});
        }
    });
    ended.recv().unwrap()
}

/// Writes to the log, which is its stdout. If nobody can read that, it answers nothing from then on: in a real one, the handler of
/// SIGPIPE waits for the log's lock, which its own thread holds.
fn log(message: &str) {
    while writeln!(io::stdout(), "[fc_api:ERROR] {message}").is_err() {
        thread::park();
    }
}

/// Answers one request; `None` at the end of the connection.
fn answer_one(mut stream: &UnixStream, vm: &Arc<Vm>) -> Option<()> {
    let mut reader = BufReader::with_capacity(1, stream);
    let mut lines = reader.by_ref().lines().map_while(Result::ok).take_while(|line| !line.is_empty());
    let request = lines.next()?;
    let length = lines.filter_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().unwrap())
    });
    let mut body = vec![0; length.last().unwrap_or(0)];
    reader.read_exact(&mut body).ok()?;
    let mut words = request.split(' ');
    let (method, path) = (words.next()?, words.next()?);
    let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
    let one_at_a_time = API.lock().unwrap();
    let (status, answer) = match vm.answer(method, path, &body) {
        Ok(None) => (204, String::new()),
        Ok(Some(answer)) => (200, answer.to_string()),
        Err(fault) => {
            log(&fault);
            (400, json!({ "fault_message": fault }).to_string())
        }
    };
    drop(one_at_a_time);
    let length = if status == 204 { String::new() } else { format!("Content-Length: {}\r\n", answer.len()) };
    let head = format!("HTTP/1.1 {status} \r\nServer: a double\r\nConnection: keep-alive\r\n{length}\r\n");
    stream.write_all(format!("{head}{answer}").as_bytes()).ok()
}
