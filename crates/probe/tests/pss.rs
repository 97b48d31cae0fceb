//! PSS of processes with known pages: this program starts itself twice, with a number of private
//! pages and a number of shared pages.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail their test")]

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::mm::{MapFlags, ProtFlags};
use sandboxer_probe::pss;

const PRIVATE: usize = 24 << 20;
const SHARED: usize = 20 << 20;
const FILE: &str = "PSS_TEST_FILE";

/// The child's part, called by name in a process of its own; without the variable it has nothing to do.
#[test]
fn child() {
    let Some(path) = std::env::var_os(FILE) else { return };
    let file = File::options().read(true).write(true).open(path).unwrap();
    println!("ready");
    let mut lines = std::io::stdin().lines();
    lines.next().unwrap().unwrap();
    let map = |fd: Option<&File>, length| {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: new mappings at addresses of the kernel's choice; nothing else refers to them.
        let start = unsafe {
            match fd {
                Some(fd) => {
                    rustix::mm::mmap(std::ptr::null_mut(), length, protection, MapFlags::SHARED, fd, 0)
                }
                None => {
                    rustix::mm::mmap_anonymous(std::ptr::null_mut(), length, protection, MapFlags::PRIVATE)
                }
            }
        }
        .unwrap()
        .cast::<u8>();
        for offset in (0..length).step_by(4096) {
            // SAFETY: inside the mapping made above.
            unsafe { start.add(offset).write(1) };
        }
    };
    map(None, PRIVATE);
    map(Some(&file), SHARED);
    println!("mapped");
    // Until the parent lets go.
    let _ = lines.next();
}

struct Process {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
}

impl Process {
    fn start(file: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env(FILE, file)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut process = Self { child, output };
        process.wait_for("ready");
        process
    }

    fn wait_for(&mut self, word: &str) {
        let mut line = String::new();
        while !line.trim_end().ends_with(word) {
            line.clear();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the child ended before '{word}'");
        }
    }

    fn map(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"map\n").unwrap();
        self.wait_for("mapped");
    }

    fn pid(&self) -> i32 {
        self.child.id() as i32
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

fn near(measured: u64, expected: usize) -> bool {
    // A few pages of the allocator, the page tables' and the test harness' own.
    measured.abs_diff(expected as u64 >> 10) < 512
}

#[test]
fn private_pages_count_whole_and_shared_ones_by_half() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("shared");
    File::create(&path).unwrap().set_len(SHARED as u64).unwrap();
    let mut processes = [Process::start(&path), Process::start(&path)];
    let before: Vec<u64> = processes.iter().map(|process| pss::total(process.pid()).unwrap()).collect();

    processes[0].map();
    let alone = pss::total(processes[0].pid()).unwrap() - before[0];
    assert!(near(alone, PRIVATE + SHARED), "alone: {alone} KiB");

    processes[1].map();
    for (process, before) in processes.iter().zip(before) {
        let grown = pss::total(process.pid()).unwrap() - before;
        assert!(near(grown, PRIVATE + SHARED / 2), "of two: {grown} KiB");
        // As a monitor's, both would be a guest's memory, and the rest its own.
        let split = pss::split(process.pid()).unwrap();
        assert!(near(split.guest + split.template, PRIVATE + SHARED / 2), "{split:?}");
        let total = pss::total(process.pid()).unwrap();
        // Between two readings, others begin and end to share the program's pages.
        assert!((split.own + split.guest + split.template).abs_diff(total) < 512, "{split:?} of {total}");
        // The same by a few lines of shell, which know nothing of this crate.
        let shell = format!("awk '/^Pss:/ {{ print $2 }}' /proc/{}/smaps_rollup", process.pid());
        let output = Command::new("sh").args(["-c", &shell]).output().unwrap();
        let independent: u64 = String::from_utf8(output.stdout).unwrap().trim().parse().unwrap();
        assert!(independent.abs_diff(total) < 512, "{independent} by shell, {total} here");
    }
}

/// Without the rights of a debugger the error says which figure it costs.
#[test]
fn what_may_not_be_looked_at_is_said() {
    let mut other = Command::new("sleep").arg("600").spawn().unwrap();
    let pid = if rustix::process::geteuid().is_root() { other.id() as i32 } else { 1 };
    // Root's rights are given up by one thread alone.
    let look = move || {
        if rustix::process::geteuid().is_root() {
            let nobody = rustix::process::Uid::from_raw(65534);
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
        }
        pss::total(pid)
    };
    let looked = std::thread::spawn(look).join().unwrap();
    other.kill().unwrap();
    other.wait().unwrap();
    let error = looked.unwrap_err();
    assert!(matches!(error, pss::PssError::Denied(_)), "{error}");
    assert!(error.to_string().contains("lacks its PSS"), "{error}");
}

#[test]
fn a_process_that_has_ended_is_gone() {
    let mut child = Command::new("true").spawn().unwrap();
    child.wait().unwrap();
    assert!(matches!(pss::total(child.id() as i32), Err(pss::PssError::Gone(_))));
}
