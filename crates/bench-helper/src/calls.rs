//! Cost of a system call, of an allocation and of opening a file.

use std::fs::File;
use std::hint::black_box;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::result::{Line, Times};

/// Number of calls between two clock readings: a reading costs a fifth of a call.
const BATCH: u32 = 100;
/// Step in which pages are touched, bytes.
const PAGE: usize = 4096;

/// Measure getppid, the shortest call that is not in the vDSO
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Duration, seconds
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
}

/// Measure mapping, touching and unmapping memory
#[derive(Debug, clap::Args)]
pub struct AllocArgs {
    /// Duration, seconds
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Size of one allocation, bytes
    #[arg(long, default_value_t = 65_536, value_parser = clap::value_parser!(u64).range(4096..=1 << 30))]
    size: u64,
}

/// Measure opening and closing a file
#[derive(Debug, clap::Args)]
pub struct OpenArgs {
    /// Duration, seconds
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// The file
    #[arg(long, default_value = "/usr/bin/bench-helper")]
    file: PathBuf,
}

/// Measures system calls. Percentiles are of batches of 100 calls.
pub fn syscalls(args: &Args) -> Result<()> {
    per_call("syscalls", args.seconds, BATCH, || {
        black_box(rustix::process::getppid());
        Ok(())
    })
}

/// Measures allocations: maps memory, writes once to each page, and unmaps it.
pub fn alloc(args: &AllocArgs) -> Result<()> {
    let size = usize::try_from(args.size)?;
    per_call("alloc", args.seconds, 1, || allocate(size))
}

/// Measures opening a file, with a path lookup each time.
pub fn open(args: &OpenArgs) -> Result<()> {
    per_call("open", args.seconds, 1, || {
        File::open(&args.file).map(drop).with_context(|| format!("cannot open {}", args.file.display()))
    })
}

fn allocate(size: usize) -> Result<()> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the kernel chooses a range where nothing is mapped.
    let start = unsafe { mmap_anonymous(std::ptr::null_mut(), size, access, MapFlags::PRIVATE) }
        .context("cannot map memory")?;
    for offset in (0..size).step_by(PAGE) {
        // SAFETY: within the mapping of `size` bytes, which is writable and not shared.
        unsafe { start.cast::<u8>().add(offset).write_volatile(1) };
    }
    // SAFETY: all of the mapping, to which no reference exists.
    unsafe { munmap(start, size) }.context("cannot unmap memory")
}

fn per_call(
    what: &'static str,
    seconds: f64,
    batch: u32,
    mut call: impl FnMut() -> Result<()>,
) -> Result<()> {
    let limit = Duration::try_from_secs_f64(seconds).context("--seconds takes seconds from 0 up")?;
    let (begun, mut times, mut calls) = (Instant::now(), Times::new()?, 0u64);
    let mut last = begun;
    while last.duration_since(begun) < limit {
        for _ in 0..batch {
            call()?;
        }
        calls += u64::from(batch);
        let now = Instant::now();
        times.add(now.duration_since(last) / batch);
        last = now;
    }
    let mean = last.duration_since(begun).as_nanos() as f64 / calls.max(1) as f64;
    Line::new(what)
        .figure("calls", calls as f64)
        .figure("mean_ns", mean)
        .figure("p50_ns", times.percentile(50.0))
        .figure("p99_ns", times.percentile(99.0))
        .print()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_given_back() {
        let resident = || {
            let text = std::fs::read_to_string("/proc/self/statm").unwrap();
            text.split(' ').nth(1).unwrap().parse::<usize>().unwrap()
        };
        let before = resident();
        (0..100).for_each(|_| allocate(1 << 20).unwrap());
        assert!(resident() < before + 100 * 256 / 4, "100 MiB were kept");
    }

    #[test]
    fn a_file_that_is_not_there_is_named() {
        let args = OpenArgs { seconds: 1.0, file: "/no/such/file".into() };
        assert!(open(&args).unwrap_err().to_string().contains("/no/such/file"));
    }
}
