//! Measures the promises of Firecracker's specification: `cargo bench --bench firecracker`, with the program's path in
//! `FIRECRACKER` and a usable KVM. `scripts/firecracker-promises.sh` runs it in a node VM, in virtual time.
//!
//! | promised maximum | how it is measured |
//! |---|---|
//! | API socket within 8 ms of CPU time | the process's clock when inotify reports the socket, exec included |
//! | 125 ms from InstanceStart to the guest's init | until the guest's first process has connected to the host |
//! | 5 MiB for the VMM, with 1 vCPU and 128 MiB | resident pages without the guest's memory, one second later |
//!
//! Firecracker runs without a jail and without a daemon, as in the specification's own tests, but with our guest
//! kernel. Besides the specification's VM, the bench measures a VM as the daemon configures it: with drives on PCI, and
//! the daemon's words on the kernel's command line.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a bench that cannot go on stops where it stands"
)]

mod first_process;

use std::{
    env, fs,
    io::{BufRead, BufReader, Read, Write},
    os::{
        fd::AsFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::inotify::{AddWatchFlags, InitFlags, Inotify},
    time::{clock_getcpuclockid, clock_gettime},
    unistd::Pid,
};
use sandboxer_protocol::boot::KERNEL_WORDS;
use sandboxer_vmm::kvm::{self, KvmUnusable};

/// Number of starts of each VM, unless SANDBOXER_BENCH_STARTS is set.
const STARTS: usize = 20;
/// Memory of the specification's VM, MiB.
const MEMORY_MIB: u64 = 128;
/// Words on the kernel's command line in the specification's test of the boot time: no serial port, no absent devices.
const SPECIFIED_WORDS: &str = "reboot=k panic=1 nomodule 8250.nr_uarts=0 i8042.noaux i8042.nomux i8042.nopnp i8042.dumbkbd swiotlb=noforce cryptomgr.notests";
/// Time after which a silent guest counts as not booting.
const LONG: Duration = Duration::from_secs(120);

/// A VM to measure.
struct Kind {
    name: &'static str,
    pci: bool,
    drives: usize,
    words: String,
}

/// Figures of one start.
struct Start {
    /// CPU time of the VMM until its API socket was there.
    socket: Duration,
    /// Time from InstanceStart to the guest's init.
    init: Duration,
    /// VM exits until the guest's init ran; `None` if KVM's statistics cannot be read.
    exits: Option<u64>,
    /// Resident memory of the VMM without its guest's memory, KiB.
    resident: u64,
    /// Proportional set size of the same memory, KiB.
    proportional: u64,
}

fn kinds() -> Vec<Kind> {
    let own = format!("{KERNEL_WORDS} reboot=k");
    let kind = |name, pci, drives, words: &str| Kind { name, pci, drives, words: words.to_owned() };
    vec![
        kind("as specified: one drive, no serial port", false, 1, SPECIFIED_WORDS),
        kind("the same on PCI", true, 1, SPECIFIED_WORDS),
        kind("as the daemon's: 21 drives on PCI", true, 21, &own),
        kind("with 14 drives on PCI", true, 14, &own),
        kind("with 14 on MMIO, where more do not fit", false, 14, &own),
    ]
}

fn main() -> ExitCode {
    let Some(program) = env::var_os("FIRECRACKER").map(PathBuf::from) else {
        println!("not measured: FIRECRACKER names no program");
        return ExitCode::SUCCESS;
    };
    let kernel = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guest/vmlinux");
    if !kernel.exists() || !Path::new("/dev/kvm").exists() {
        println!("not measured: no /dev/kvm, or no guest kernel (`make guest-image`)");
        return ExitCode::SUCCESS;
    }
    match kvm::measure(Path::new("/dev/kvm")) {
        // A slow KVM is sufficient: times are virtual.
        Ok(_) | Err(KvmUnusable::Slow { .. }) => {}
        Err(why) => {
            println!("not measured: {why}");
            return ExitCode::SUCCESS;
        }
    }
    let asked = env::var("SANDBOXER_BENCH_STARTS").ok().and_then(|text| text.parse().ok());
    let starts = asked.filter(|starts| *starts > 0).unwrap_or(STARTS);
    println!(
        "{:42} {:>3}  {:>24}  {:>24}  {:>7}  {:>21}",
        "VM", "n", "API socket, CPU ms", "to init, ms", "exits", "RSS; PSS, MiB"
    );
    for kind in kinds() {
        // The first start warms the caches.
        let mut all: Vec<Start> = (0..=starts).map(|_| start(&program, &kernel, &kind)).collect();
        all.remove(0);
        report(&kind, &all);
    }
    println!("Promised: 8 CPU ms, 125 ms, 5 MiB. Medians, then least and most.");
    ExitCode::SUCCESS
}

fn report(kind: &Kind, all: &[Start]) {
    let spread = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        let [least, most] = [values[0], values[values.len() - 1]];
        format!("{:.2} ({least:.2}–{most:.2})", values[values.len() / 2])
    };
    let of = |value: fn(&Start) -> f64| spread(all.iter().map(value).collect());
    let mut exits: Vec<u64> = all.iter().filter_map(|start| start.exits).collect();
    exits.sort_unstable();
    let exits = exits.get(exits.len() / 2).map_or("–".to_owned(), u64::to_string);
    println!(
        "{:42} {:>3}  {:>24}  {:>24}  {exits:>7}  {:>21}",
        kind.name,
        all.len(),
        of(|start| start.socket.as_secs_f64() * 1e3),
        of(|start| start.init.as_secs_f64() * 1e3),
        format!(
            "{}; {}",
            of(|start| start.resident as f64 / 1024.0),
            of(|start| start.proportional as f64 / 1024.0)
        ),
    );
}

/// A running VMM. Dropping it kills the VMM, however the start went.
struct Vmm(Child);

impl Drop for Vmm {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(program: &Path, kernel: &Path, kind: &Kind) -> Start {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("initramfs"), first_process::initramfs()).unwrap();
    fs::write(at("drive"), [0; 512]).unwrap();
    let announced = UnixListener::bind(at("vsock.sock_1024")).unwrap();
    let events = Inotify::init(InitFlags::IN_CLOEXEC).unwrap();
    events.add_watch(dir.path(), AddWatchFlags::IN_CREATE).unwrap();

    let mut command = Command::new(program);
    command.args(kind.pci.then_some("--enable-pci")).args(["--level", "Warning", "--api-sock"]);
    command.arg(at("api.sock")).stdin(Stdio::null()).stdout(Stdio::null());
    let vmm = Vmm(command.spawn().unwrap());
    let pid = Pid::from_raw(vmm.0.id().try_into().unwrap());
    while !events
        .read_events()
        .unwrap()
        .iter()
        .any(|event| event.name.as_deref() == Some("api.sock".as_ref()))
    {}
    let socket = clock_gettime(clock_getcpuclockid(pid).unwrap()).unwrap().into();

    describe(&at, kernel, kind);
    let began = Instant::now();
    put(&at("api.sock"), "actions", r#"{"action_type":"InstanceStart"}"#);
    let mut waits = [PollFd::new(announced.as_fd(), PollFlags::POLLIN)];
    let limit = PollTimeout::try_from(LONG).unwrap();
    assert_eq!(poll(&mut waits, limit).unwrap(), 1, "the guest of {:?} does not boot", kind.name);
    let init = began.elapsed();
    let exits = exits(vmm.0.id());
    wait(Duration::from_secs(1));
    let (resident, proportional) = memory(vmm.0.id());
    Start { socket, init, exits, resident, proportional }
}

/// Configures the VM over the VMM's API.
fn describe(at: &impl Fn(&str) -> PathBuf, kernel: &Path, kind: &Kind) {
    let api = at("api.sock");
    put(&api, "machine-config", &format!(r#"{{"vcpu_count":1,"mem_size_mib":{MEMORY_MIB}}}"#));
    let (kernel, initramfs, words) = (kernel.display(), at("initramfs"), &kind.words);
    let initramfs = initramfs.display();
    put(
        &api,
        "boot-source",
        &format!(r#"{{"kernel_image_path":"{kernel}","initrd_path":"{initramfs}","boot_args":"{words}"}}"#),
    );
    for drive in 0..kind.drives {
        let body = format!(
            r#"{{"drive_id":"d{drive}","path_on_host":"{}","is_root_device":false,"is_read_only":true}}"#,
            at("drive").display()
        );
        put(&api, &format!("drives/d{drive}"), &body);
    }
    put(&api, "vsock", &format!(r#"{{"guest_cid":3,"uds_path":"{}"}}"#, at("vsock.sock").display()));
    put(&api, "entropy", "{}");
}

/// Makes a call once the VMM listens.
fn put(api: &Path, call: &str, body: &str) {
    let began = Instant::now();
    let mut stream = loop {
        match UnixStream::connect(api) {
            Ok(stream) => break stream,
            Err(error) => assert!(began.elapsed() < LONG, "{}: {error}", api.display()),
        }
        wait(Duration::from_millis(1));
    };
    let length = body.len();
    let head =
        format!("PUT /{call} HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n");
    stream.write_all(format!("{head}{body}").as_bytes()).unwrap();
    let (mut status, mut reader) = (String::new(), BufReader::new(stream));
    reader.read_line(&mut status).unwrap();
    if !status.starts_with("HTTP/1.1 204") {
        let mut rest = [0; 1000];
        let length = reader.read(&mut rest).unwrap_or_default();
        panic!("{call}: {status}{}", String::from_utf8_lossy(&rest[..length]));
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "no event tells that a socket listens, or that a VMM is at rest"
)]
fn wait(time: Duration) {
    std::thread::sleep(time);
}

/// Returns the VM exits of a VMM's guest so far, from KVM's statistics; `None` if they cannot be read.
fn exits(vmm: u32) -> Option<u64> {
    let prefix = format!("{vmm}-");
    let mut all = fs::read_dir("/sys/kernel/debug/kvm").ok()?.flatten();
    let of_vm = all.find(|entry| entry.file_name().to_string_lossy().starts_with(&prefix))?;
    fs::read_to_string(of_vm.path().join("exits")).ok()?.trim().parse().ok()
}

/// Returns the resident memory of a process and its proportional part, KiB, without mappings as large as guest memory.
fn memory(vmm: u32) -> (u64, u64) {
    let maps = fs::read_to_string(format!("/proc/{vmm}/smaps")).unwrap();
    let (mut resident, mut proportional, mut size) = (0, 0, 0);
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        let (Some(name), Some(kib)) = (words.next(), words.next().and_then(|word| word.parse::<u64>().ok()))
        else {
            continue;
        };
        match name {
            "Size:" => size = kib,
            "Rss:" if size < MEMORY_MIB << 10 => resident += kib,
            "Pss:" if size < MEMORY_MIB << 10 => proportional += kib,
            _ => {}
        }
    }
    (resident, proportional)
}
