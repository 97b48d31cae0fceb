//! A volume whose server stops answering: a FUSE file system with one file, served here according to Linux'
//! `include/uapi/linux/fuse.h`. Needs root.
//!
//! The server answers all processes, such as containerd, until it must stop answering some. A process whose request has
//! been read but not answered cannot abort it, even if it is killed.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail their test")]

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    os::{
        fd::{AsFd, AsRawFd},
        unix::fs::OpenOptionsExt,
    },
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
};

use nix::{
    errno::Errno,
    libc,
    mount::{MntFlags, MsFlags, mount, umount2},
    poll::{PollFd, PollFlags, PollTimeout, poll},
};

/// Thread names of processes that a silent server does not answer: the daemon's helpers, and those of its tests.
const LEFT_WAITING: [&str; 2] = ["sandboxer-path", "helper"];

const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const STATFS: u32 = 17;
const RELEASE: u32 = 18;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const OPENDIR: u32 = 27;
const READDIR: u32 = 28;
const RELEASEDIR: u32 = 29;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;
/// Header of a request.
const IN_HEADER: usize = 40;
/// The inode of the one file.
const FILE: u64 = 2;
/// The content of the file.
const CONTENT: &[u8] = b"content";

/// A mounted volume; it is unmounted when this is dropped, and waiting processes get an error.
pub struct HungVolume {
    path: PathBuf,
    shared: Arc<Shared>,
    server: Option<thread::JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    silent: AtomicBool,
    ended: AtomicBool,
    left_waiting: AtomicUsize,
}

impl HungVolume {
    /// Mounts it at `path`, an existing directory. It answers.
    pub fn mount(path: &Path) -> io::Result<Self> {
        let device =
            File::options().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/fuse")?;
        let options =
            format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other", device.as_fd().as_raw_fd());
        mount(Some("hung"), path, Some("fuse"), MsFlags::empty(), Some(options.as_str()))?;
        let shared = Arc::<Shared>::default();
        let of_server = shared.clone();
        let server =
            thread::Builder::new().name("volume".to_owned()).spawn(move || serve(device, &of_server))?;
        Ok(Self { path: path.to_owned(), shared, server: Some(server) })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Sets whether it answers the daemon's helpers from now on.
    pub fn set_silent(&self, silent: bool) {
        self.shared.silent.store(silent, Ordering::SeqCst);
    }

    /// Returns the number of requests that it has not answered.
    pub fn left_waiting(&self) -> usize {
        self.shared.left_waiting.load(Ordering::SeqCst)
    }
}

impl Drop for HungVolume {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::SeqCst);
        // The server closes its file, and all waiting processes get an error.
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
        let _ = umount2(&self.path, MntFlags::MNT_DETACH);
    }
}

fn serve(mut device: File, shared: &Shared) {
    let mut request = vec![0; 1 << 20];
    while !shared.ended.load(Ordering::SeqCst) {
        let mut waiting = [PollFd::new(device.as_fd(), PollFlags::POLLIN)];
        let _ = poll(&mut waiting, PollTimeout::from(20_u8));
        let length = match device.read(&mut request) {
            Ok(length) => length,
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR | libc::ENOENT)) => {
                continue;
            }
            // It is unmounted.
            Err(_) => return,
        };
        let u32_at = |at: usize| u32::from_le_bytes(request[at..at + 4].try_into().unwrap());
        let u64_at = |at: usize| u64::from_le_bytes(request[at..at + 8].try_into().unwrap());
        let (operation, unique, node, thread) = (u32_at(4), u64_at(8), u64_at(16), u32_at(32));
        if [FORGET, BATCH_FORGET, INTERRUPT].contains(&operation) {
            continue;
        }
        if shared.silent.load(Ordering::SeqCst) && is_left_waiting(thread) {
            shared.left_waiting.fetch_add(1, Ordering::SeqCst);
            continue;
        }
        let answer = answer(operation, node, &request[IN_HEADER..length]);
        let (error, body) = match answer {
            Ok(body) => (0, body),
            Err(errno) => (-(errno as i32), Vec::new()),
        };
        let mut message = Vec::with_capacity(16 + body.len());
        message.extend(u32::try_from(16 + body.len()).unwrap().to_le_bytes());
        message.extend(error.to_le_bytes());
        message.extend(unique.to_le_bytes());
        message.extend(body);
        // The requesting process may be gone.
        let _ = device.write_all(&message);
    }
}

fn is_left_waiting(thread: u32) -> bool {
    let name = fs::read_to_string(format!("/proc/{thread}/comm")).unwrap_or_default();
    LEFT_WAITING.contains(&name.trim_end())
}

fn answer(operation: u32, node: u64, body: &[u8]) -> Result<Vec<u8>, Errno> {
    match operation {
        INIT => {
            let mut out = vec![0; 64];
            let words = [(0, 7), (4, 31), (8, 65_536), (20, 65_536), (24, 1)];
            words
                .into_iter()
                .for_each(|(at, word): (usize, u32)| out[at..at + 4].copy_from_slice(&word.to_le_bytes()));
            Ok(out)
        }
        // Nothing is cached: each look-up sends a request.
        LOOKUP if body.starts_with(b"file\0") => {
            Ok([&FILE.to_le_bytes()[..], &[0; 32], &attributes(FILE)].concat())
        }
        LOOKUP => Err(Errno::ENOENT),
        GETATTR => Ok([&[0; 16][..], &attributes(node)].concat()),
        OPEN | OPENDIR => Ok(vec![0; 16]),
        READ => Ok(CONTENT.to_vec()),
        READDIR | FLUSH | RELEASE | RELEASEDIR => Ok(Vec::new()),
        STATFS => Ok(vec![0; 80]),
        _ => Err(Errno::ENOSYS),
    }
}

/// `struct fuse_attr`.
fn attributes(node: u64) -> Vec<u8> {
    let (mode, size) = match node {
        FILE => (libc::S_IFREG | 0o644, CONTENT.len() as u64),
        _ => (libc::S_IFDIR | 0o755, 0),
    };
    let mut out = Vec::new();
    for long in [node, size, 0, 0, 0, 0] {
        out.extend(long.to_le_bytes());
    }
    for word in [0, 0, 0, mode, 1, 0, 0, 0, 4096, 0_u32] {
        out.extend(word.to_le_bytes());
    }
    out
}
