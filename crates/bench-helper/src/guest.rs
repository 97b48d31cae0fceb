//! Runs one command in a VM, as the unit `bench.service`: reads the command from a disk, and sends its output and exit
//! code over a port.
//!
//! | on the host | in the guest |
//! |---|---|
//! | a disk with the serial number `command` | the command, one line of JSON |
//! | a disk with the serial number `data` | its ext4 is mounted on `/data` |
//! | a disk with the serial number `bench` | `/dev/bench` |
//! | a virtio-serial port with the name `bench` | frames: see [`Frame`] |

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::mount::{MountFlags, mount};
use serde::Deserialize;

/// Maximum size of a command, bytes.
const MAX_COMMAND: u64 = 64 << 10;
/// Maximum size of the output in a frame, bytes.
const MAX_FRAME: usize = 16 << 10;
/// Timeout of output after the command's end: a process that it started may still hold the pipe's end.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(5);
/// Exit code if the command cannot be run.
const CANNOT_RUN: i32 = 125;

/// Run the command on the disk `command` and send its output over the port `bench` (in a VM)
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Where sysfs is mounted
    #[arg(long, default_value = "/sys", hide = true)]
    sysfs: PathBuf,
    /// Where devices are
    #[arg(long, default_value = "/dev", hide = true)]
    devices: PathBuf,
}

#[derive(Debug, Deserialize, PartialEq)]
struct Task {
    command: Vec<String>,
}

/// A message to the host: its kind, the length of its content (4 bytes, big endian), and the content.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Frame<'a> {
    /// The unit runs; without content.
    Begun,
    /// Output of the command on stdout.
    Stdout(&'a [u8]),
    /// Output of the command on stderr.
    Stderr(&'a [u8]),
    /// Exit code of the command, 4 bytes, big endian. This is the last frame.
    Exit(i32),
}

impl Frame<'_> {
    fn send(self, to: &mut impl Write) -> std::io::Result<()> {
        let code;
        let (kind, content): (u8, &[u8]) = match self {
            Frame::Begun => (b'b', &[]),
            Frame::Stdout(bytes) => (b'o', bytes),
            Frame::Stderr(bytes) => (b'e', bytes),
            Frame::Exit(number) => {
                code = number.to_be_bytes();
                (b'x', &code)
            }
        };
        let length = u32::try_from(content.len()).unwrap_or(u32::MAX).to_be_bytes();
        to.write_all(&[&[kind][..], &length, content].concat())?;
        to.flush()
    }
}

/// Runs the command. Errors before the port is open are in the journal.
pub fn run(args: &Args) -> Result<()> {
    let port = port(&args.sysfs).context("the VM has no port 'bench'")?;
    let path = args.devices.join(port);
    let mut port = OpenOptions::new()
        .write(true)
        .open(&path)
        .with_context(|| format!("cannot open {}", path.display()))?;
    Frame::Begun.send(&mut port).context("cannot write to the port")?;
    let code = match task(args).and_then(|task| execute(&task, &mut port)) {
        Ok(code) => code,
        Err(error) => {
            Frame::Stderr(format!("bench-helper: {error:#}\n").as_bytes()).send(&mut port)?;
            CANNOT_RUN
        }
    };
    Frame::Exit(code).send(&mut port).context("cannot write to the port")
}

/// Reads the command and makes the other disks available.
fn task(args: &Args) -> Result<Task> {
    let device_of = |serial: &str| disk(&args.sysfs, serial).map(|name| args.devices.join(name));
    let path = device_of("command").context("the VM has no disk 'command'")?;
    let task = read_task(&path)?;
    if let Some(data) = device_of("data") {
        mount(&data, "/data", "ext4", MountFlags::empty(), None)
            .with_context(|| format!("cannot mount {} on /data", data.display()))?;
    }
    if let Some(bench) = device_of("bench") {
        let link = args.devices.join("bench");
        std::os::unix::fs::symlink(&bench, &link)
            .with_context(|| format!("cannot create {}", link.display()))?;
    }
    Ok(task)
}

fn read_task(path: &Path) -> Result<Task> {
    let mut text = Vec::new();
    File::open(path)
        .and_then(|file| file.take(MAX_COMMAND).read_to_end(&mut text))
        .with_context(|| format!("cannot read {}", path.display()))?;
    let line = text.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let task: Task = serde_json::from_slice(line).context("the disk has no command")?;
    ensure!(!task.command.is_empty(), "the command has no program");
    Ok(task)
}

/// Runs the command and sends its output. Returns its exit code, or 128 plus the number of the signal.
fn execute(task: &Task, port: &mut impl Write) -> Result<i32> {
    let mut command = Command::new(&task.command[0]);
    command.args(&task.command[1..]).env_clear().env("PATH", crate::native::PATH).env("HOME", "/root");
    command.current_dir("/").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("cannot run {}", task.command[0]))?;
    let (to, from) = mpsc::sync_channel::<Message>(16);
    let ends = (child.stdout.take(), child.stderr.take());
    if let (Some(stdout), Some(stderr)) = ends {
        forward(stdout, to.clone(), Message::Stdout);
        forward(stderr, to.clone(), Message::Stderr);
    }
    std::thread::spawn(move || {
        // The send only fails if the receiver is gone; then nobody needs the command's end.
        let _ = to.send(Message::Ended(child.wait()));
    });
    let mut exit_code = None;
    loop {
        // All senders are gone after the last output.
        let message = match exit_code {
            None => from.recv().ok(),
            Some(_) => from.recv_timeout(OUTPUT_TIMEOUT).ok(),
        };
        match message {
            Some(Message::Stdout(bytes)) => Frame::Stdout(&bytes).send(port)?,
            Some(Message::Stderr(bytes)) => Frame::Stderr(&bytes).send(port)?,
            Some(Message::Ended(status)) => {
                exit_code = Some(code(status.context("cannot wait for the command")?));
            }
            None => return exit_code.context("the command's end is unknown"),
        }
    }
}

enum Message {
    Stdout(Vec<u8>),
    Stderr(Vec<u8>),
    Ended(std::io::Result<ExitStatus>),
}

fn forward(
    mut from: impl Read + Send + 'static,
    to: mpsc::SyncSender<Message>,
    message: fn(Vec<u8>) -> Message,
) {
    std::thread::spawn(move || {
        let mut buffer = vec![0; MAX_FRAME];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            if to.send(message(buffer[..count].to_vec())).is_err() {
                break;
            }
        }
    });
}

fn code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default())
}

/// Returns the device name of the port `bench`.
fn port(sysfs: &Path) -> Option<String> {
    named(&sysfs.join("class/virtio-ports"), "name", "bench")
}

/// Returns the device name of the disk with this serial number.
fn disk(sysfs: &Path, serial: &str) -> Option<String> {
    named(&sysfs.join("block"), "serial", serial)
}

/// Returns the entry of `directory` in which `file` contains `text`.
fn named(directory: &Path, file: &str, text: &str) -> Option<String> {
    let mut entries = fs::read_dir(directory).ok()?.flatten();
    let entry = entries
        .find(|entry| fs::read_to_string(entry.path().join(file)).is_ok_and(|is| is.trim() == text))?;
    entry.file_name().into_string().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a VM's devices as files: a port and these disks.
    fn vm(disks: &[(&str, &str)]) -> (tempfile::TempDir, Args) {
        let dir = tempfile::tempdir().unwrap();
        let (sysfs, devices) = (dir.path().join("sys"), dir.path().join("dev"));
        let write = |path: PathBuf, text: &str| {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write(sysfs.join("class/virtio-ports/vport0p1/name"), "bench\n");
        write(devices.join("vport0p1"), "");
        for (index, (serial, text)) in disks.iter().enumerate() {
            write(sysfs.join(format!("block/vd{index}/serial")), serial);
            write(devices.join(format!("vd{index}")), text);
        }
        (dir, Args { sysfs, devices })
    }

    /// Returns what the port received: the frames' kinds, and their contents concatenated.
    fn sent(args: &Args) -> (String, String) {
        let bytes = fs::read(args.devices.join("vport0p1")).unwrap();
        let (mut kinds, mut text, mut rest) = (String::new(), String::new(), &bytes[..]);
        while let [kind, a, b, c, d, after @ ..] = rest {
            let (content, next) = after.split_at(u32::from_be_bytes([*a, *b, *c, *d]) as usize);
            kinds.push(*kind as char);
            match kind {
                b'x' => text.push_str(&format!("[{}]", i32::from_be_bytes(content.try_into().unwrap()))),
                _ => text.push_str(std::str::from_utf8(content).unwrap()),
            }
            rest = next;
        }
        assert!(rest.is_empty());
        (kinds, text)
    }

    #[test]
    fn output_and_exit_code_are_sent() {
        let (_dir, args) =
            vm(&[("root", ""), ("command", "{\"command\":[\"sh\",\"-c\",\"echo out; exit 3\"]}\n\0\0")]);
        run(&args).unwrap();
        assert_eq!(sent(&args), ("box".into(), "out\n[3]".into()));
    }

    #[test]
    fn a_signal_is_128_and_its_number() {
        let (_dir, args) = vm(&[("command", "{\"command\":[\"sh\",\"-c\",\"kill -9 $$\"]}\n")]);
        run(&args).unwrap();
        assert_eq!(sent(&args).1, "[137]");
    }

    #[test]
    fn what_is_missing_is_sent_as_output() {
        for (disks, why) in [
            (&[][..], "no disk 'command'"),
            (&[("command", "\0\0")], "no command"),
            (&[("command", "{\"command\":[]}\n")], "no program"),
            (&[("command", "{\"command\":[\"no-such-program\"]}\n")], "no-such-program"),
        ] {
            let (_dir, args) = vm(disks);
            run(&args).unwrap();
            let (kinds, text) = sent(&args);
            assert_eq!(kinds, "bex");
            assert!(text.contains(why) && text.ends_with("[125]"), "{text}");
        }
        let empty = tempfile::tempdir().unwrap();
        let args = Args { sysfs: empty.path().into(), devices: empty.path().into() };
        assert!(run(&args).unwrap_err().to_string().contains("port"));
    }

    #[test]
    fn a_disk_for_the_tool_has_a_fixed_name() {
        let (_dir, args) = vm(&[("command", "{\"command\":[\"true\"]}\n"), ("bench", "content")]);
        run(&args).unwrap();
        assert_eq!(fs::read_to_string(args.devices.join("bench")).unwrap(), "content");
    }
}
