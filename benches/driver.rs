//! Cost of Cloud Hypervisor's driver in a pod's start: `cargo bench --bench driver`.
//!
//! Measures the time from the VMM's spawn to the response to `vm.boot`, with the tests' double, which runs nothing;
//! then the same with a minimal client. The difference is the driver's cost.

#![allow(clippy::unwrap_used, reason = "a bench that cannot go on stops where it stands")]

#[path = "../crates/sandboxer/tests/cloud_hypervisor_double/mod.rs"]
#[allow(dead_code, reason = "the tests use all of it")]
mod double;
#[path = "../crates/sandboxer/tests/double_guest/mod.rs"]
mod double_guest;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput};
use double::behaviour::Behaviour;
use sandboxer_config::{Config, VmConfig};
use sandboxer_protocol::{boot::BootParams, link::LinkKey};
use sandboxer_vmm::{VmSpec, Vmm, cloud_hypervisor::CloudHypervisor};
use tempfile::TempDir;
use tokio::runtime::Runtime;

/// Number of starts of each kind, one after the other.
const STARTS: usize = 100;

fn main() -> ExitCode {
    if let Some(ended) = double::run_if_asked() {
        return ended;
    }
    let mut criterion = Criterion::default().configure_from_args();
    starts(&mut criterion);
    criterion.final_summary();
    ExitCode::SUCCESS
}

/// A double of the VMM, and a driver for it.
struct Host {
    runtime: Runtime,
    dir: TempDir,
    vmm: CloudHypervisor,
}

impl Host {
    fn new() -> Self {
        let (runtime, dir) = (Runtime::new().unwrap(), tempfile::tempdir().unwrap());
        let program = double::install(dir.path(), &Behaviour::for_version("v53.0"));
        let config = VmConfig { cloud_hypervisor: program, ..Config::default().vm };
        let vmm = runtime.block_on(CloudHypervisor::new(&config, "a bench".into())).unwrap();
        Self { runtime, dir, vmm }
    }

    /// Returns a VM with its own directory.
    fn spec(&self) -> VmSpec {
        let run_dir = self.dir.path().join("run");
        let _ = fs::remove_dir_all(&run_dir);
        fs::create_dir(&run_dir).unwrap();
        VmSpec {
            cgroup: None,
            pod: "bench".parse().unwrap(),
            run_dir,
            vcpus: 1,
            memory_mib: 128,
            huge_pages: false,
            growth_mib: 0,
            growth_vcpus: 0,
            nics: 0,
            taps: Vec::new(),
            named_taps: None,
            kernel: "/dev/null".into(),
            initramfs: "/dev/null".into(),
            boot: BootParams { link_key: LinkKey::random(), log: None, template: false },
            memory_file: None,
            disks: Vec::new(),
            background: false,
            console_log_bytes: 64 << 10,
        }
    }

    /// Returns the duration of a start by the driver.
    fn by_driver(&self) -> Duration {
        let spec = self.spec();
        self.runtime.block_on(async {
            let began = Instant::now();
            let vm = self.vmm.boot(&spec).await.unwrap();
            let took = began.elapsed();
            vm.kill().await.unwrap();
            took
        })
    }

    /// Returns the duration of a start by a client that watches, keeps, bounds and times nothing.
    fn by_least(&self) -> Duration {
        let spec = self.spec();
        let description = serde_json::to_string(&self.vmm.description(&spec)).unwrap();
        let began = Instant::now();
        let socket = spec.run_dir.join("control.sock");
        let listener = OwnedFd::from(UnixListener::bind(&socket).unwrap());
        let (_events, told) = std::io::pipe().unwrap();
        let mut process = Command::new(self.dir.path().join("cloud-hypervisor"))
            .args(["--api-socket", "fd=0", "--event-monitor", "fd=1", "--seccomp", "true"])
            .current_dir(&spec.run_dir)
            .stdin(listener)
            .stdout(told)
            .spawn()
            .unwrap();
        put(&socket, "vm.create", &description);
        put(&socket, "vm.boot", "");
        let took = began.elapsed();
        process.kill().unwrap();
        process.wait().unwrap();
        took
    }
}

fn put(socket: &Path, call: &str, body: &str) {
    let mut stream = UnixStream::connect(socket).unwrap();
    let length = body.len();
    write!(stream, "PUT /api/v1/{call} HTTP/1.1\r\nContent-Length: {length}\r\n\r\n{body}").unwrap();
    let mut status = String::new();
    BufReader::new(stream).read_line(&mut status).unwrap();
    assert!(status.starts_with("HTTP/1.1 204"), "{call}: {status}");
}

fn starts(criterion: &mut Criterion) {
    let host = Host::new();
    let mut group = criterion.benchmark_group("cloud hypervisor, spawn to vm.boot answered");
    group.sample_size(20).measurement_time(Duration::from_secs(5)).throughput(Throughput::Elements(1));
    group.bench_function("driver", |b| b.iter_custom(|n| (0..n).map(|_| host.by_driver()).sum()));
    group.bench_function("least client", |b| b.iter_custom(|n| (0..n).map(|_| host.by_least()).sum()));
    group.finish();

    // The two alternate, so that other work of the host affects both.
    let (mut driver, mut least): (Vec<_>, Vec<_>) =
        (0..STARTS).map(|_| (host.by_driver(), host.by_least())).unzip();
    driver.sort();
    least.sort();
    let (driver, least) = (driver[STARTS / 2], least[STARTS / 2]);
    let own = driver.as_secs_f64() - least.as_secs_f64();
    println!(
        "driver overhead: {:.2} ms of {driver:.2?} (medians of {STARTS}); at most 5 ms are due",
        own * 1e3
    );
}
