//! Workloads in the series `vm`, with a double of a VMM.

use std::time::Duration;

use sandboxer_bench::workload::measure::{WorkloadError, measure};
use sandboxer_bench::workload::plan::Plan;
use sandboxer_bench::workload::power::Meter;
use sandboxer_probe::measure::{Bench, recipe};
use sandboxer_probe::options::Network;
use sandboxer_probe::startup::PlanError;
use sandboxer_probe::vm::{VM, Vm, VmError};
use sandboxer_probe::workload::definition::{self, Profile};
use sandboxer_probe::workload::report::Report;
use sandboxer_probe::workload::run::Run;
use tokio_util::sync::CancellationToken;

use crate::double::{Behaviour, Double, Ended, IMAGE, Tool};
use crate::vmm::{EXAMPLE, FACTS, WORKS, alive, vmm};

fn container(command: &[String]) -> Ended {
    let facts = FACTS.to_owned();
    Some(match command.iter().any(|word| word == "facts") {
        true => (0, facts, String::new()),
        false => (0, EXAMPLE.to_owned(), facts),
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
        recipe: recipe(IMAGE, Network::Pod, Duration::from_secs(3)),
        trusted: Vec::new(),
        build_image: "double/build:1".into(),
        meter: Meter::None("a double has none".into()),
    }
}

async fn run(double: &Double, plan: &Plan) -> Result<(Report, Vec<Run>), WorkloadError> {
    let bench = Bench::open(&double.endpoint(), None).unwrap();
    measure(&bench, plan, None, &CancellationToken::new(), &mut |_| ()).await
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
                all.cases.into_iter().filter(|known| known.name.contains(case)).take(1).collect();
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
    let measured = measure(&bench, &plan, None, &cancel, &mut progress);
    let ((report, _), ()) = tokio::join!(async { measured.await.unwrap() }, ends);
    assert_eq!(report.partial_reason.as_deref(), Some("interrupted"));
    assert!(!alive(made.pid()));
}

#[tokio::test]
async fn a_missing_kernel_is_refused_before_anything_starts() {
    let double = Double::serve([("runc", Behaviour::default())]);
    let made = vmm("");
    std::fs::remove_file(made.dir.path().join("vmlinuz")).unwrap();
    let refused = run(&double, &workload("cpu", &[VM], Some(made.vm), 1)).await.unwrap_err();
    assert!(matches!(refused, WorkloadError::Plan(PlanError::Vm(VmError::Missing { .. }))), "{refused}");
}
