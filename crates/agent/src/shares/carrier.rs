//! The carrier: a process that forwards requests from the kernel to the host, and responses back. Each of its threads
//! handles one request at a time.
//!
//! Each thread runs a blocking loop: it reads a request, writes it to the host, reads the response, and writes that to
//! the kernel.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    ops::Range,
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, OpenOptionsExt},
    },
    path::Path,
    sync::Arc,
    thread,
};

use nix::{
    errno::Errno,
    sys::{
        signal::{SigSet, SigmaskHow, sigprocmask},
        socket::{AddressFamily, SockFlag, SockType, VsockAddr, connect, socket},
    },
    unistd::{ForkResult, Pid, fork},
};
use sandboxer_protocol::share::{
    ANSWER_HEAD, Head, MAX_MESSAGE, SLOTS, VSOCK_PORT,
    disk::{self, ANSWER, DONE, FIRST, LATER, MESSAGE, SECTOR, SLOT, STATE},
    opcode, u32_at,
};

use crate::worker::close_all_but;

/// The size of a thread's stack, bytes.
const STACK: usize = 128 << 10;
/// The size of a page, bytes: the kernel reads and writes a disk in whole pages.
const PAGE: usize = 4096;
/// The host's vsock CID.
const HOST: u32 = 2;

/// The transport of requests.
pub enum Transport {
    /// A disk with a region for each slot.
    Disk(File),
    /// A stream for each slot, and the key that each begins with.
    Streams(Vec<File>, Vec<u8>),
}

impl Transport {
    /// Opens the disk at `path`.
    pub fn disk(path: &Path) -> io::Result<Self> {
        // Responses must not be cached.
        let flags = libc::O_DIRECT | libc::O_EXCL | libc::O_CLOEXEC;
        File::options().read(true).write(true).custom_flags(flags).open(path).map(Self::Disk)
    }

    /// Connects `count` streams; each will begin with `key`.
    pub fn streams(count: usize, key: Vec<u8>) -> io::Result<Self> {
        let stream = |_| {
            let stream = socket(AddressFamily::Vsock, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
            connect(stream.as_raw_fd(), &VsockAddr::new(HOST, VSOCK_PORT))?;
            Ok(File::from(stream))
        };
        Ok(Self::Streams((0..count).map(stream).collect::<io::Result<_>>()?, key))
    }
}

/// Starts the carrier, which ends when `device` has no more requests.
pub fn start(device: File, transport: Transport) -> io::Result<Pid> {
    #[expect(clippy::disallowed_methods, reason = "the agent has one thread, so a fork copies all of it")]
    // SAFETY: no other thread exists that could hold a lock or be in the middle of a change.
    match unsafe { fork() }? {
        ForkResult::Child => {
            carry(device, transport);
            // SAFETY: ends this process without the agent's destructors and exit handlers, which must run in
            // the agent only.
            unsafe { libc::_exit(0) }
        }
        ForkResult::Parent { child } => {
            // When the guest is out of memory, the kernel must kill containers, not the process that they depend on.
            fs::write(format!("/proc/{child}/oom_score_adj"), "-1000")?;
            Ok(child)
        }
    }
}

/// Runs the carrier until its device is closed.
fn carry(device: File, transport: Transport) {
    let _ = sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), None);
    let mut fds = vec![device.as_raw_fd()];
    match &transport {
        Transport::Disk(disk) => fds.push(disk.as_raw_fd()),
        Transport::Streams(streams, _) => fds.extend(streams.iter().map(AsRawFd::as_raw_fd)),
    }
    close_all_but(fds);
    let slots: Vec<Slot> = match transport {
        Transport::Disk(disk) => {
            let disk = Arc::new(disk);
            (0..SLOTS)
                .map(|number| Slot::Disk { disk: Arc::clone(&disk), at: (number * SLOT) as u64 })
                .collect()
        }
        Transport::Streams(streams, key) => {
            let begun = |mut stream: File| {
                // A broken stream fails its requests as well.
                let _ = stream.write_all(&key);
                Slot::Stream(stream)
            };
            streams.into_iter().map(begun).collect()
        }
    };
    let device = Arc::new(device);
    let mut threads = Vec::new();
    for mut slot in slots {
        let device = Arc::clone(&device);
        let thread = thread::Builder::new().stack_size(STACK).spawn(move || slot.carry(&device));
        // With fewer threads, shares are slower; without any, requests fail as if the host had closed the connection.
        threads.extend(thread);
    }
    for thread in threads {
        let _ = thread.join();
    }
}

/// A slot, which carries one request at a time.
enum Slot {
    Disk { disk: Arc<File>, at: u64 },
    Stream(File),
}

impl Slot {
    /// Carries requests until the device is closed.
    fn carry(&mut self, device: &File) {
        // Pages stay unused until they are needed: most messages are short.
        let mut pages = vec![0; MAX_MESSAGE + 2 * PAGE];
        let aligned = pages.as_ptr().align_offset(PAGE).min(PAGE);
        let buffer = &mut pages[aligned..aligned + MAX_MESSAGE + PAGE];
        loop {
            let length = match nix::unistd::read(device, &mut buffer[..MAX_MESSAGE]) {
                Ok(length) => length,
                // The request was aborted before it was read.
                Err(Errno::ENOENT | Errno::EINTR | Errno::EAGAIN) => continue,
                Err(_) => return,
            };
            let Some(head) = Head::parse(&buffer[..length]) else { continue };
            // Requests cannot be interrupted, and none is slow here.
            if head.opcode == opcode::INTERRUPT {
                continue;
            }
            let failed;
            let answer = match self.ask(head, buffer, length) {
                Ok(answer) if head.is_answered_by(&buffer[answer.clone()]) => &buffer[answer],
                _ => {
                    failed = head.failed(libc::EIO);
                    &failed[..]
                }
            };
            if !answer.is_empty() {
                // The process that waits for the response may have been killed in the meantime.
                let _ = nix::unistd::write(device, answer);
            }
        }
    }

    /// Sends the request at the beginning of `buffer` to the host; returns the range of the response in it.
    fn ask(&mut self, head: Head, buffer: &mut [u8], length: usize) -> io::Result<Range<usize>> {
        match self {
            Self::Disk { disk, at } => ask_disk(disk, *at, buffer, length),
            Self::Stream(stream) => {
                stream.write_all(&buffer[..length])?;
                if !head.is_answered() {
                    return Ok(0..0);
                }
                stream.read_exact(&mut buffer[..ANSWER_HEAD])?;
                let length = answer_length(buffer)?;
                let rest = buffer.get_mut(ANSWER_HEAD..length).ok_or(io::ErrorKind::InvalidData)?;
                stream.read_exact(rest)?;
                Ok(0..length)
            }
        }
    }
}

fn ask_disk(file: &File, at: u64, buffer: &mut [u8], length: usize) -> io::Result<Range<usize>> {
    let to_read = disk::to_read(&buffer[..length]);
    file.write_all_at(&buffer[..length.next_multiple_of(SECTOR)], at)?;
    loop {
        file.read_exact_at(&mut buffer[FIRST..FIRST + to_read], at + (ANSWER + FIRST) as u64)?;
        match u32_at(buffer, STATE) {
            Some(DONE) => break,
            Some(LATER) => {}
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
    }
    let answer = MESSAGE..MESSAGE + answer_length(&buffer[MESSAGE..])?;
    if answer.end > FIRST + to_read {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(answer)
}

/// Returns the length of the response that starts with these bytes.
fn answer_length(beginning: &[u8]) -> io::Result<usize> {
    let length = u32_at(beginning, 0).and_then(|length| usize::try_from(length).ok());
    length.filter(|&length| length <= MAX_MESSAGE).ok_or_else(|| io::ErrorKind::InvalidData.into())
}
