//! A program that moves a stream is killed repeatedly; the stream arrives complete, and only once.
//!
//! Run with an argument, this is that program. Its stdin is the FIFO, its stdout the memfd: the test holds both, as
//! the front does.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails where it stands")]

use std::{
    fs::File,
    io::{self, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::FileExt,
    },
    process::{Command, ExitCode, Stdio},
    thread,
    time::{Duration, Instant},
};

use libtest_mimic::{Arguments, Failed, Trial};
use sandboxer::pod::container::spool::{Inlet, Outlet};

/// Bytes of the stream.
const LENGTH: u64 = 4 << 20;
/// How often the program is killed at most: it may finish earlier.
const KILLS: u32 = 200;

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some("deliver") => run(deliver),
        Some("take") => run(take),
        _ => {
            let trials = [("output", output as fn() -> Result<(), Failed>), ("input", input)];
            let trials = trials.map(|(name, test)| {
                Trial::test(format!("a_killed_program_moves_each_byte_of_{name}_once"), test)
            });
            libtest_mimic::run(&Arguments::from_args(), trials.into()).exit_code()
        }
    }
}

/// Returns the stream's byte at an offset: no period is a power of two, so none fits a page or a chunk.
fn byte(offset: u64) -> u8 {
    (offset % 251) as u8 ^ (offset / 251 % 241) as u8
}

fn bytes(offset: u64, count: u64) -> Vec<u8> {
    (offset..offset + count).map(byte).collect()
}

// ── the program ─────────────────────────────────────────────────────────────────────────────────────

fn run<F: Future<Output = io::Result<()>>>(program: fn(OwnedFd, OwnedFd) -> F) -> ExitCode {
    let fifo = io::stdin().as_fd().try_clone_to_owned().unwrap();
    let spool = io::stdout().as_fd().try_clone_to_owned().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { program(fifo, spool).await }).unwrap();
    ExitCode::SUCCESS
}

async fn deliver(fifo: OwnedFd, spool: OwnedFd) -> io::Result<()> {
    let mut outlet = Outlet::inherited(fifo, spool)?;
    loop {
        let at = outlet.delivered()?;
        let count = (1 + at % 70_001).min(LENGTH - at);
        if count == 0 {
            return Ok(());
        }
        outlet.deliver(at, &bytes(at, count)).await?;
    }
}

/// Writes to a file in place of the guest, which accepts bytes at offsets, also repeated ones.
async fn take(fifo: OwnedFd, spool: OwnedFd) -> io::Result<()> {
    let guest = File::from(io::stderr().as_fd().try_clone_to_owned()?);
    let mut inlet = Inlet::inherited(fifo, spool)?;
    let mut offset = guest.metadata()?.len();
    while offset < LENGTH {
        let chunk = inlet.read(offset, 50_000)?;
        if chunk.is_empty() {
            inlet.take(50_000).await?;
            continue;
        }
        guest.write_all_at(&chunk, offset)?;
        offset += chunk.len() as u64;
        inlet.passed(offset)?;
    }
    Ok(())
}

// ── the tests ───────────────────────────────────────────────────────────────────────────────────────

/// Runs and kills the program repeatedly, until it finishes.
fn until_through(
    role: &str,
    fifo: &OwnedFd,
    spool: &OwnedFd,
    stderr: impl Fn() -> Stdio,
) -> Result<u32, Failed> {
    let mut killed = 0;
    for round in 0.. {
        let mut program = Command::new(std::env::current_exe()?)
            .arg(role)
            .stdin(fifo.try_clone()?)
            .stdout(spool.try_clone()?)
            .stderr(stderr())
            .spawn()?;
        if killed < KILLS {
            let end = Instant::now() + Duration::from_micros(500 + u64::from(round % 37_u32) * 400);
            while Instant::now() < end && program.try_wait()?.is_none() {
                thread::yield_now();
            }
            program.kill()?;
        }
        match program.wait()? {
            status if status.success() => break,
            status if status.code().is_some() => return Err(format!("{role}: {status}").into()),
            _ => killed += 1,
        }
    }
    if killed == 0 { Err("it was never killed".into()) } else { Ok(killed) }
}

fn memfd() -> OwnedFd {
    rustix::fs::memfd_create("spool", rustix::fs::MemfdFlags::CLOEXEC).unwrap()
}

fn nonblocking(fd: &OwnedFd) {
    let flags = rustix::fs::fcntl_getfl(fd).unwrap();
    rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK).unwrap();
}

fn output() -> Result<(), Failed> {
    let (mut read, write) = io::pipe()?;
    let (write, spool) = (OwnedFd::from(write), memfd());
    nonblocking(&write);
    let reader = thread::spawn(move || {
        let mut all = Vec::new();
        read.read_to_end(&mut all).map(|_| all)
    });
    let killed = until_through("deliver", &write, &spool, Stdio::inherit)?;
    drop(write);
    let all = reader.join().unwrap()?;
    same(&all, killed)?;
    let left = rustix::fs::fstat(&spool)?.st_blocks * 512;
    if left > 128 << 10 { Err(format!("{left} bytes are still kept").into()) } else { Ok(()) }
}

fn input() -> Result<(), Failed> {
    let (read, mut write) = io::pipe()?;
    let (read, spool) = (OwnedFd::from(read), memfd());
    nonblocking(&read);
    let writer = thread::spawn(move || write.write_all(&bytes(0, LENGTH)).map(|()| write));
    let guest = tempfile::NamedTempFile::new()?;
    let killed = until_through("take", &read, &spool, || guest.reopen().unwrap().into())?;
    drop(writer.join().unwrap()?);
    same(&std::fs::read(guest.path())?, killed)
}

fn same(all: &[u8], killed: u32) -> Result<(), Failed> {
    if let Some(at) = (0..).zip(all).position(|(offset, found)| *found != byte(offset)) {
        return Err(format!("killed {killed} times: byte {at} of {} is wrong", all.len()).into());
    }
    if all.len() as u64 != LENGTH {
        return Err(format!("killed {killed} times: {} bytes of {LENGTH}", all.len()).into());
    }
    Ok(())
}
