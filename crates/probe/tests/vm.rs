//! The series `vm`, with a VMM double: a script that sends frames as the guest's helper does.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail their test")]

#[allow(dead_code, reason = "other tests use all of it")]
mod double;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use double::{Behaviour, Double, Ended, IMAGE, Tool};
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
use sandboxer_probe::workload::definition::{self, Profile};
use sandboxer_probe::workload::measure::WorkloadError;
use sandboxer_probe::workload::output::Format;
use sandboxer_probe::workload::plan::Plan;
use sandboxer_probe::workload::power::Meter;
use sandboxer_probe::workload::report::Report;
use sandboxer_probe::workload::run::Run;
use tokio_util::sync::CancellationToken;

const LIMIT: Duration = Duration::from_secs(20);
const FACTS: &str = "{\"bench_facts\":{\"cpus\":1,\"quota_cpus\":null,\"memory_limit\":null,\"memory_total\":500000000,\
                     \"kernel\":\"6.1\"}}\n";

/// Shell functions that send frames: `frame KIND FILE`, and `code LAST_BYTE`.
const FRAMES: &str = r#"
length() { printf '\\%03o' $(($1 >> 24 & 255)) $(($1 >> 16 & 255)) $(($1 >> 8 & 255)) $(($1 & 255)); }
frame() { printf "%s$(length $(wc -c <"$2"))" "$1" >&0; cat "$2" >&0; }
begun() { printf 'b\000\000\000\000' >&0; }
code() { printf "x\000\000\000\004\000\000\000\\$1" >&0; }
"#;

/// An image and a VMM whose behaviour is `script`, with control groups that are directories. The script has its directory in `$at`.
struct Made {
    dir: tempfile::TempDir,
    vm: Vm,
}

fn vmm(script: &str) -> Made {
    let dir = tempfile::tempdir().unwrap();
    for name in ["disk.raw", "vmlinuz", "initrd"] {
        std::fs::write(dir.path().join(name), "").unwrap();
    }
    std::fs::write(dir.path().join("facts"), FACTS).unwrap();
    std::fs::write(dir.path().join("example"), Format::SysbenchCpu.example()).unwrap();
    let groups = dir.path().join("groups");
    std::fs::create_dir(&groups).unwrap();
    std::fs::write(groups.join("cgroup.controllers"), "cpu memory").unwrap();
    let program = dir.path().join("qemu");
    let text = format!(
        "#!/bin/sh\nat={}\necho $$ >$at/pid\nprintf '%s\\n' \"$*\" >>$at/lines\n{FRAMES}{script}",
        dir.path().display()
    );
    std::fs::write(&program, text).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let accelerator = Accelerator { kvm: false, reason: "a double".into() };
    let vm =
        Vm { program, groups, ..Vm::of(&dir.path().join("disk.raw"), accelerator, Some("127.0.0.1".into())) };
    Made { dir, vm }
}

/// Prints facts, and the output of sysbench if the command is it.
const WORKS: &str = "begun
disk=$(printf '%s\\n' \"$*\" | sed 's/.*file=\\([^ ]*command\\).*/\\1/')
case $(head -n 1 $disk) in
*facts*) frame o $at/facts ;;
*) frame e $at/facts; frame o $at/example ;;
esac
code 000
exec sleep 60
";

impl Made {
    fn pid(&self) -> i32 {
        std::fs::read_to_string(self.dir.path().join("pid")).unwrap().trim().parse().unwrap()
    }

    fn lines(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("lines")).unwrap()
    }
}

fn alive(pid: i32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

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
    assert_eq!(running.printed().stdout, Format::SysbenchCpu.example());
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
    let vm = Vm { program: at.join("qemu"), ..Vm::of(&at.join("disk.raw"), accelerator, None) };
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
    let of = |name: &str| samples.iter().filter(|sample| sample.runtime == name).count();
    // Five of each one after the other, and a group of containers alone.
    assert_eq!((of("runc"), of(VM)), (7, 5));
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
        let of: Vec<_> = points.iter().filter(|point| point.runtime == name).collect();
        assert_eq!(of.iter().map(|point| point.ledger.pods).collect::<Vec<_>>(), [1, 2]);
        assert!(of[1].ledger.role(role) > of[0].ledger.role(role) && of[0].ledger.role(role) > 0, "{of:?}");
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
    let plan = startup_plan(&[VM], Some(made.vm.clone()), 1);
    let refused = bench.startup(&plan, None, &never, &mut |_| ()).await.unwrap_err().to_string();
    assert!(refused.contains("vmlinuz is not a file"), "{refused}");
    let refused = run(&double, &workload("cpu", &[VM], Some(made.vm), 1)).await.unwrap_err();
    assert!(matches!(refused, WorkloadError::Plan(PlanError::Vm(VmError::Missing { .. }))), "{refused}");
}

fn container(command: &[String]) -> Ended {
    let facts = FACTS.to_owned();
    Some(match command.iter().any(|word| word == "facts") {
        true => (0, facts, String::new()),
        false => (0, Format::SysbenchCpu.example().to_owned(), facts),
    })
}

fn tool(tool: Tool) -> Behaviour {
    Behaviour { tool: Some(tool), ..Behaviour::default() }
}

/// Returns the first variant of a probe, which takes no time here.
fn workload(probe: &str, runtimes: &[&str], vm: Option<Vm>, repeat: u32) -> Plan {
    let mut probe = definition::all().into_iter().find(|known| known.name == probe).unwrap();
    probe.quick.takes = 0.001;
    probe.cases.truncate(1);
    Plan {
        runtimes: runtimes.iter().map(|&name| name.to_owned()).collect(),
        native: None,
        vm,
        client_runtime: "client".into(),
        probes: vec![probe],
        profile: Profile::Quick,
        repeat,
        warm_up: 0,
        cpus: 1,
        memory: 512 << 20,
        volumes: std::env::temp_dir(),
        recipe: measure::recipe(IMAGE, Network::Pod, Duration::from_secs(3)),
        trusted: Vec::new(),
        build_image: "double/build:1".into(),
        meter: Meter::None("a double has none".into()),
    }
}

async fn run(double: &Double, plan: &Plan) -> Result<(Report, Vec<Run>), WorkloadError> {
    let bench = Bench::open(&double.endpoint(), None).unwrap();
    sandboxer_probe::workload::measure::measure(&bench, plan, None, &CancellationToken::new(), &mut |_| ())
        .await
}

#[tokio::test]
async fn a_workload_in_vms_has_the_figures_of_its_output() {
    let made = vmm(WORKS);
    let double = Double::serve([("runc", tool(container))]);
    let plan = workload("cpu", &["runc", VM], Some(made.vm.clone()), 4);
    let (report, runs) = run(&double, &plan).await.unwrap();
    // The runtime was asked for the other series alone: one look inside, and the rounds.
    assert_eq!(double.truth(|truth| truth.runs.clone()), ["runc"; 5]);
    let of_vm: Vec<&Run> = runs.iter().filter(|run| run.runtime == VM).collect();
    assert_eq!(of_vm.len(), 4);
    assert!(
        of_vm.iter().all(|run| run.figures["events_per_s"] == 841.02 && run.facts.is_some()),
        "{of_vm:?}"
    );
    assert!(
        made.lines().lines().all(|line| line.contains("-machine q35") && line.contains("-smp 1 -m 512M"))
    );
    assert_eq!(report.reference, "runc");
    assert!(report.manifest.is_emulated(VM));
    assert!(!alive(made.pid()));
}

#[tokio::test]
async fn what_the_series_has_not_is_a_named_failure() {
    let made = vmm(WORKS);
    let double = Double::serve([("runc", tool(container))]);
    for (probe, case, at, why) in [
        ("pipeline", None, "image", "bench-build is not available in series vm"),
        ("fileio", Some("share"), "volume", "a share is not available in series vm"),
    ] {
        let mut plan = workload(probe, &[VM], Some(made.vm.clone()), 1);
        if let Some(case) = case {
            let all = definition::all().into_iter().find(|known| known.name == probe).unwrap();
            plan.probes[0].cases =
                all.cases.into_iter().filter(|of| of.name.contains(case)).take(1).collect();
        }
        plan.memory = 4 << 30;
        let (report, runs) = run(&double, &plan).await.unwrap();
        assert!(runs.iter().all(|run| run.failed_at == at && run.error.contains(why)), "{runs:?}");
        assert!(!report.not_measured.is_empty());
    }
}

#[tokio::test]
async fn an_interrupted_measurement_leaves_no_vmm() {
    let made =
        vmm("begun\ncase $(wc -l <$at/lines) in 1) frame o $at/facts; code 000 ;; esac\nexec sleep 60\n");
    let double = Double::serve([("runc", tool(container))]);
    let bench = Bench::open(&double.endpoint(), None).unwrap();
    let plan = workload("cpu", &[VM], Some(made.vm.clone()), 1);
    let cancel = CancellationToken::new();
    let ends = async {
        // The second VM runs the tool, which never ends.
        while made.dir.path().join("lines").metadata().is_err() || made.lines().lines().count() < 2 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        cancel.cancel();
    };
    let mut progress = |_: &Run| ();
    let measured = sandboxer_probe::workload::measure::measure(&bench, &plan, None, &cancel, &mut progress);
    let ((report, _), ()) = tokio::join!(async { measured.await.unwrap() }, ends);
    assert_eq!(report.partial_reason.as_deref(), Some("interrupted"));
    assert!(!alive(made.pid()));
}
