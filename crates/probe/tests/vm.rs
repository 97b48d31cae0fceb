//! The series `vm`, with a double of a VMM.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail their test")]

#[allow(dead_code, reason = "other tests use all of it")]
mod double;
#[allow(dead_code, reason = "other tests use all of it")]
#[path = "double/vmm.rs"]
mod vmm;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use double::{Behaviour, Double, IMAGE};
use sandboxer_probe::attribution::Role;
use sandboxer_probe::idle::Windows;
use sandboxer_probe::measure::{self, Bench, MeasureError};
use sandboxer_probe::memory::Sweep;
use sandboxer_probe::native::NATIVE;
use sandboxer_probe::options::{Network, Resources};
use sandboxer_probe::sample::Sample;
use sandboxer_probe::startup::{self, PlanError};
use sandboxer_probe::vm::process::Task;
use sandboxer_probe::vm::{Accelerator, VM, Vm, VmError};
use tokio_util::sync::CancellationToken;
use vmm::{EXAMPLE, FACTS, LIMIT, alive, vmm};

fn task() -> Task {
    Task {
        name: "task".into(),
        command: vec!["true".into()],
        cpus: 1,
        memory: 512 << 20,
        resources: Some(Resources { cpu_quota: 100_000, cpu_period: 100_000, ..Resources::default() }),
        disks: Vec::new(),
        forward: None,
        ping: false,
    }
}

#[tokio::test]
async fn output_and_exit_code_come_over_the_port_and_the_vmm_is_limited() {
    let made = vmm("begun\nframe e $at/facts\nframe o $at/example\ncode 003\nexec sleep 60\n");
    let running = made.vm.start(&task()).unwrap();
    running.first_byte(LIMIT).await.unwrap();
    let end = Instant::now() + LIMIT;
    while running.ended().unwrap().is_none() && Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(running.ended().unwrap(), Some(3));
    assert_eq!(running.printed().stderr, FACTS);
    assert_eq!(running.printed().stdout, EXAMPLE);
    assert!(running.ran_s().is_some());
    let group = made.dir.path().join("groups/task");
    let text = |file: &str| std::fs::read_to_string(group.join(file)).unwrap();
    assert_eq!(text("cpu.max"), "100000 100000");
    // QEMU has memory of its own.
    assert_eq!(text("memory.max"), (1_u64 << 30).to_string());
    let pid = made.pid();
    assert_eq!(text("cgroup.procs"), pid.to_string());
    assert!(alive(pid));
    drop(running);
    assert!(!alive(pid), "the VMM is left");
}

#[tokio::test]
async fn what_goes_wrong_is_named_and_no_vmm_is_left() {
    for (script, why) in [
        ("echo 'qemu: no such card' >&2\nexit 1\n", "no such card"),
        ("echo 'Kernel panic'\nbegun\nexit 0\n", "Kernel panic"),
        ("printf 'SeaBIOS' >&0\nexec sleep 60\n", "unknown kind 0x53"),
        ("begun\nprintf 'o\\377\\377\\377\\377' >&0\nexec sleep 60\n", "4294967295 bytes"),
        ("begun\ncode 000\nframe o $at/facts\nexec sleep 60\n", "after the last one"),
    ] {
        let made = vmm(script);
        let running = made.vm.start(&task()).unwrap();
        let failed = async {
            loop {
                if let Err(error) = running.ended() {
                    return error;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let error = tokio::time::timeout(LIMIT, failed).await.unwrap().to_string();
        assert!(error.contains(why), "{error}");
        drop(running);
        assert!(!alive(made.pid()), "the VMM is left after: {why}");
    }
}

#[tokio::test]
async fn a_guest_that_hangs_is_a_failure_with_its_last_words() {
    let made = vmm("echo 'Starting disks'\nexec sleep 60\n");
    let running = made.vm.start(&task()).unwrap();
    let error = running.begun(Duration::from_millis(500)).await.unwrap_err();
    assert!(
        matches!(error, VmError::NoUnit { .. }) && error.to_string().ends_with("Starting disks"),
        "{error}"
    );
    drop(running);
    assert!(!alive(made.pid()));
}

#[tokio::test]
async fn a_missing_vmm_is_named() {
    let mut made = vmm("");
    made.vm.program = PathBuf::from("/no/such/qemu");
    let running = made.vm.start(&task()).unwrap();
    let error = running.begun(LIMIT).await.unwrap_err().to_string();
    assert!(error.contains("/no/such/qemu"), "{error}");
}

/// Variable with the directory of the parent's double.
const AT: &str = "SANDBOXER_TEST_VM_AT";

/// The child's part, called by name; without the variable it has nothing to do.
#[tokio::test]
async fn child() {
    let Some(at) = std::env::var_os(AT) else { return };
    let at = Path::new(&at);
    let accelerator = Accelerator { kvm: false, reason: "a double".into() };
    let vm = Vm { program: at.join("qemu"), ..Vm::new(&at.join("disk.raw"), accelerator, None) };
    let running = vm.start(&Task { resources: None, ..task() }).unwrap();
    running.begun(LIMIT).await.unwrap();
    std::fs::write(at.join("ready"), "").unwrap();
    std::future::pending::<()>().await;
}

#[tokio::test]
async fn a_probe_that_is_killed_leaves_no_vmm() {
    let made = vmm("begun\nexec sleep 60\n");
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child"])
        .env(AT, made.dir.path())
        .spawn()
        .unwrap();
    let end = Instant::now() + LIMIT;
    while !made.dir.path().join("ready").exists() && Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let pid = made.pid();
    assert!(alive(pid));
    child.kill().unwrap();
    child.wait().unwrap();
    while alive(pid) && Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(!alive(pid), "the VMM outlives the probe");
}

fn startup_plan(runtimes: &[&str], vm: Option<Vm>, serial: u32) -> startup::Plan {
    startup::Plan {
        runtimes: runtimes.iter().map(|&name| name.to_owned()).collect(),
        serial,
        group: 2,
        rounds: 1,
        sustained: 0,
        warm_up: 1,
        pause: Duration::ZERO,
        recipe: measure::recipe(IMAGE, Network::Pod, LIMIT),
        bare_boot: None,
        vm,
        baseline: None,
    }
}

#[tokio::test]
async fn start_up_of_vms_alternates_with_that_of_containers() {
    let made = vmm("begun\nsleep 0.05\nframe o $at/facts\nexec sleep 60\n");
    let double = Double::serve([("runc", Behaviour::default())]);
    let bench = Bench::open(&double.endpoint(), None).unwrap();
    let plan = startup_plan(&["runc", VM], Some(made.vm.clone()), 4);
    let (report, samples) = bench.startup(&plan, None, &CancellationToken::new(), &mut |_| ()).await.unwrap();
    assert_eq!(samples.len() as u64, plan.pods());
    let count = |name: &str| samples.iter().filter(|sample| sample.runtime == name).count();
    // Five of each one after the other, and a group of containers alone.
    assert_eq!((count("runc"), count(VM)), (7, 5));
    assert!(samples[..10].chunks(2).all(|pair| pair[1].runtime == VM));
    let series = report.series.iter().find(|series| series.runtime == VM).unwrap();
    assert_eq!((series.summary.n, series.summary.failures), (4, 0));
    assert!(series.summary.p50_ms.unwrap() >= 50.0);
    assert!(report.ratios.iter().any(|ratio| [&*ratio.a, &*ratio.b].contains(&VM)));
    assert!(report.manifest.is_emulated(VM) && !report.manifest.is_emulated("runc"));
    // The double has no network card.
    assert!(report.not_measured.contains_key("series.vm.first_ping"));
    assert!(report.notes.iter().any(|note| note.contains("not started in groups")), "{:?}", report.notes);
    assert!(!alive(made.pid()));
}

#[tokio::test]
async fn processes_of_this_host_alternate_with_containers_and_need_no_handler() {
    let double = Double::serve([("runc", Behaviour::default())]);
    let bench = Bench::open(&double.endpoint(), None).unwrap();
    let mut plan = startup_plan(&[NATIVE, "runc"], None, 3);
    let never = CancellationToken::new();
    let (report, samples) = bench.startup(&plan, None, &never, &mut |_| ()).await.unwrap();
    assert_eq!(samples.len() as u64, plan.pods());
    assert!(samples[..8].chunks(2).all(|pair| pair[0].runtime == NATIVE));
    let series = report.series.iter().find(|series| series.runtime == NATIVE).unwrap();
    assert_eq!((series.summary.n, series.summary.failures), (3, 0));
    assert!(report.manifest.runtimes.contains_key(NATIVE));
    plan.recipe.command = vec!["/no/such/program".into()];
    let (_, samples) = bench.startup(&plan, None, &never, &mut |_| ()).await.unwrap();
    let mut failed = samples.iter().filter(|sample| sample.runtime == NATIVE);
    assert!(failed.all(|sample| sample.failed_at == NATIVE && sample.error.contains("No such file")));
}

#[tokio::test]
async fn memory_of_vms_and_processes_is_counted_by_their_numbers() {
    let made = vmm("begun\nframe o $at/facts\nexec sleep 60\n");
    let double = Double::serve([("runc", Behaviour::default())]);
    let bench = Bench::open(&double.endpoint(), None).unwrap();
    let sweep = Sweep {
        runtimes: [VM, NATIVE].map(str::to_owned).into(),
        counts: vec![1, 2],
        repeat: 1,
        recipe: measure::recipe(IMAGE, Network::Pod, LIMIT),
        vm: Some(made.vm.clone()),
        idle: Windows { length: Duration::from_millis(100), ..Windows::default() },
    };
    let never = CancellationToken::new();
    let (report, points) = bench.memory(&sweep, None, &never, &mut |_| ()).await.unwrap();
    assert_eq!(report.partial_reason, None);
    for (name, role) in [(VM, Role::Vmm), (NATIVE, Role::Workload)] {
        let of_runtime: Vec<_> = points.iter().filter(|point| point.runtime == name).collect();
        assert_eq!(of_runtime.iter().map(|point| point.ledger.pods).collect::<Vec<_>>(), [1, 2]);
        assert!(
            of_runtime[1].ledger.role(role) > of_runtime[0].ledger.role(role)
                && of_runtime[0].ledger.role(role) > 0,
            "{of_runtime:?}"
        );
        assert!(report.manifest.runtimes.contains_key(name));
    }
    assert!(double.truth(|truth| truth.runs.is_empty()));
    assert!(!alive(made.pid()));
}

#[tokio::test]
async fn failed_starts_of_vms_are_no_times() {
    let made = vmm("echo 'qemu: broken' >&2\nexit 1\n");
    let double = Double::serve([("runc", Behaviour::default())]);
    let bench = Bench::open(&double.endpoint(), None).unwrap();
    let plan = startup_plan(&["runc", VM], Some(made.vm), 2);
    let (report, samples) = bench.startup(&plan, None, &CancellationToken::new(), &mut |_| ()).await.unwrap();
    let series = report.series.iter().find(|series| series.runtime == VM).unwrap();
    assert_eq!((series.summary.failures, series.summary.p50_ms), (2, None));
    let failed: Vec<&Sample> = samples.iter().filter(|sample| sample.failed()).collect();
    assert!(failed.iter().all(|sample| sample.failed_at == "vm" && sample.error.contains("qemu: broken")));
}

#[tokio::test]
async fn a_missing_image_is_refused_before_anything_starts() {
    let double = Double::serve([("runc", Behaviour::default())]);
    let bench = Bench::open(&double.endpoint(), None).unwrap();
    let never = CancellationToken::new();
    let refused = bench.startup(&startup_plan(&[VM], None, 1), None, &never, &mut |_| ()).await.unwrap_err();
    assert!(matches!(refused, MeasureError::Plan(PlanError::Vm(VmError::NoImage))), "{refused}");
    let made = vmm("");
    std::fs::remove_file(made.dir.path().join("vmlinuz")).unwrap();
    let plan = startup_plan(&[VM], Some(made.vm), 1);
    let refused = bench.startup(&plan, None, &never, &mut |_| ()).await.unwrap_err().to_string();
    assert!(refused.contains("vmlinuz is not a file"), "{refused}");
}
