//! Start-up measured on a double whose delays are known.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail their test")]

mod double;

use std::time::Duration;

use double::{Behaviour, Double, IMAGE};
use sandboxer_probe::{
    attribution::Role,
    ledger::Ledger,
    measure::{self, Bench, MeasureError},
    memory::Point,
    options::Network,
    report::{Report, SCHEMA_TEXT, render},
    sample::{Mode, Outcome, Sample},
    startup::{Plan, PlanError},
    store::{self, Store},
    summary::median,
};
use tokio_util::sync::CancellationToken;

fn plan(runtimes: &[&str], serial: u32) -> Plan {
    Plan {
        pause: Duration::ZERO,
        baseline: None,
        sustained: 0,
        runtimes: runtimes.iter().map(|&name| name.to_owned()).collect(),
        serial,
        group: 0,
        rounds: 0,
        warm_up: 0,
        recipe: measure::recipe(IMAGE, Network::Pod, Duration::from_secs(30)),
        bare_boot: None,
        vm: None,
    }
}

async fn run(double: &Double, plan: &Plan) -> (Report, Vec<Sample>) {
    let bench = Bench::open(&double.endpoint(), None).unwrap();
    bench.startup(plan, None, &CancellationToken::new(), &mut |_| ()).await.unwrap()
}

fn quick() -> Behaviour {
    Behaviour { call_ms: (1, 3), first_byte_ms: (1, 3), ..Behaviour::default() }
}

fn assert_valid(report: &Report) {
    let schema = serde_json::from_str(SCHEMA_TEXT).unwrap();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let value = serde_json::from_str(&render(report)).unwrap();
    let faults: Vec<String> =
        validator.iter_errors(&value).map(|fault| format!("{}: {fault}", fault.instance_path())).collect();
    assert!(faults.is_empty(), "{faults:#?}");
}

#[tokio::test]
async fn times_are_those_that_were_drawn() {
    let slow = Behaviour { call_ms: (5, 40), first_byte_ms: (0, 60), ..Behaviour::default() };
    let double = Double::serve([("drawn", slow)]);
    let plan = plan(&["drawn"], 40);
    let (report, samples) = run(&double, &plan).await;
    let excess: Vec<f64> = samples
        .iter()
        .enumerate()
        .map(|(index, sample)| {
            let name = format!("{}-{}", plan.recipe.run, index + 1);
            sample.time().unwrap() - double.truth(|truth| truth.drawn_ms[&name])
        })
        .collect();
    assert_eq!(excess.len(), 40);
    // A timer never ends early; the rest is scheduling and three calls.
    assert!(excess.iter().all(|excess| *excess > -1.0), "measured less than was drawn: {excess:?}");
    assert!(median(&excess).unwrap() < 40.0, "measured far more than was drawn: {excess:?}");
    // The first line may come before StartContainer is answered, and then that is its time.
    assert!(samples.iter().any(|sample| sample.first_byte_ms < sample.started_ms));
    assert_valid(&report);
}

#[tokio::test]
async fn failures_stay_and_are_no_times() {
    let double = Double::serve([("fails", Behaviour { fails_each: 4, ..quick() })]);
    let (report, samples) = run(&double, &plan(&["fails"], 20)).await;
    let series = &report.series[0];
    assert_eq!((series.summary.n, series.summary.failures), (20, 5));
    assert_eq!(double.truth(|truth| truth.failed), 5);
    assert_eq!(series.failed_at["StartContainer"], 5);
    let failed: Vec<&Sample> = samples.iter().filter(|sample| sample.outcome == Outcome::Failed).collect();
    assert!(failed.iter().all(|sample| sample.time().is_none() && sample.error.contains("told to fail")));
    assert!(report.notes.iter().any(|note| note.starts_with("5 failed on fails:")), "{:?}", report.notes);
    assert!(double.truth(|truth| truth.pods.is_empty()), "pods of failed starts are left");
    assert_valid(&report);
}

#[tokio::test]
async fn a_pod_that_never_starts_is_a_failure_and_is_removed() {
    let double = Double::serve([("never", Behaviour { never: true, ..quick() })]);
    let mut plan = plan(&["never"], 2);
    plan.recipe.timeout = Duration::from_millis(150);
    let (report, samples) = run(&double, &plan).await;
    assert_eq!(report.series[0].summary.failures, 2);
    assert_eq!(report.series[0].summary.p50_ms, None);
    assert_eq!(samples[0].failed_at, "RunPodSandbox");
    // Its id never came back: it is found by its labels.
    assert!(double.truth(|truth| truth.pods.is_empty()));
    assert_valid(&report);
}

#[tokio::test]
async fn runtimes_alternate_and_warm_ups_are_in_no_figure() {
    let double = Double::serve([("a", quick()), ("b", quick())]);
    let plan = Plan { warm_up: 1, ..plan(&["a", "b"], 3) };
    let (report, samples) = run(&double, &plan).await;
    assert_eq!(double.truth(|truth| truth.runs.join("")), "abababab");
    assert_eq!(samples.len(), 8);
    assert!(report.series.iter().all(|series| series.summary.n == 3));
    assert_eq!((report.ratios[0].a.as_str(), report.ratios[0].b.as_str()), ("a", "b"));
    assert!(report.quick);
    assert_valid(&report);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_is_released_at_once() {
    // Nobody is answered before all twenty have asked: if one waited for another, none would start.
    let double = Double::serve([("all", Behaviour { together: 20, ..quick() })]);
    let plan = Plan { group: 20, rounds: 2, ..plan(&["all"], 0) };
    let (report, samples) = run(&double, &plan).await;
    let series = &report.series[0];
    assert_eq!(
        (series.mode, series.group, series.summary.n, series.summary.failures),
        (Mode::Parallel, 20, 40, 0)
    );
    assert_eq!((series.batch_ms.len(), series.release_spread_ms.len()), (2, 2));
    let longest = samples.iter().filter(|s| s.round == 0).filter_map(Sample::time).fold(0.0, f64::max);
    assert!(series.batch_ms[0].unwrap() >= longest, "a group ends with its last pod");
    assert_valid(&report);
}

#[tokio::test]
async fn an_interrupted_run_keeps_its_samples_and_removes_its_pods() {
    let double = Double::serve([("a", quick())]);
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::open(&double.endpoint(), None).unwrap();
    let mut store = Store::create(dir.path()).unwrap();
    let cancel = CancellationToken::new();
    let mut seen = 0;
    let mut third = |_: &Sample| {
        seen += 1;
        if seen == 3 {
            cancel.cancel();
        }
    };
    let plan = plan(&["a"], 1000);
    let (report, _) = bench.startup(&plan, Some(&mut store), &cancel, &mut third).await.unwrap();
    assert!(report.partial);
    assert_valid(&report);
    assert!(double.truth(|truth| truth.pods.is_empty()));
    let read = store::load(dir.path()).unwrap();
    assert!(read.report.partial && read.report.series[0].summary.n == 3);
    assert_eq!(read.samples.len(), 3);
    assert!(dir.path().join("cdf-a-serial.txt").exists());
}

#[tokio::test]
async fn a_runtime_that_dies_half_way_ends_the_run() {
    let mut double = Double::serve([("a", quick())]);
    let bench = Bench::open(&double.endpoint(), None).unwrap();
    let mut seen = 0;
    let mut die = |_: &Sample| {
        seen += 1;
        if seen == 5 {
            double.die();
        }
    };
    let plan = plan(&["a"], 1000);
    let (report, samples) = bench.startup(&plan, None, &CancellationToken::new(), &mut die).await.unwrap();
    assert!(report.partial_reason.as_deref().unwrap().contains("is gone"), "{:?}", report.partial_reason);
    assert!(samples.len() < 1000 && report.series[0].summary.n >= 5);
    assert_valid(&report);
}

#[tokio::test]
async fn output_on_stderr_is_not_a_start() {
    let double = Double::serve([("loud", Behaviour { on_stderr: true, ..quick() })]);
    let (report, samples) = run(&double, &plan(&["loud"], 2)).await;
    assert_eq!(report.series[0].summary.failures, 2);
    assert!(samples[0].error.contains("not on stdout"), "{}", samples[0].error);
}

#[tokio::test]
async fn what_is_not_there_is_named_before_anything_starts() {
    let double = Double::serve([("a", quick())]);
    let bench = Bench::open(&double.endpoint(), None).unwrap();
    let ask = async |plan: &Plan| {
        bench.startup(plan, None, &CancellationToken::new(), &mut |_| ()).await.unwrap_err()
    };
    let error = ask(&plan(&["kata"], 1)).await;
    assert!(matches!(error, MeasureError::Plan(PlanError::NoHandler { .. })), "{error}");
    assert!(error.to_string().contains("'kata'; it has a"), "{error}");
    let mut no_image = plan(&["a"], 1);
    no_image.recipe.image = "not/there:1".into();
    let error = ask(&no_image).await;
    assert!(error.to_string().contains("not/there:1"), "{error}");
    assert!(double.truth(|truth| truth.runs.is_empty()));
    let nobody = Bench::open("unix:///nowhere/cri.sock", None).unwrap();
    let result = nobody.startup(&plan(&["a"], 1), None, &CancellationToken::new(), &mut |_| ()).await;
    let error = result.unwrap_err().to_string();
    assert!(error.contains("/nowhere/cri.sock") && error.contains("is containerd running"), "{error}");
}

#[test]
fn reports_of_memory_are_of_the_schema_too() {
    let point = |pods: usize, swept: bool| Point {
        runtime: "a".into(),
        repetition: 0,
        ledger: Ledger {
            pods,
            by_role: [(Role::Shim, 5_000 * pods as u64), (Role::GuestMemory, 7)].into(),
            cri_kib: Some(9),
            missing: vec!["vmm: not permitted".into()],
            ..Ledger::default()
        },
        idle_daemon_kib: swept.then_some(0),
        available_fall_kib: swept.then_some(-3),
        idle_cpu_millicores: if swept { vec![0.4, 0.3, 0.5] } else { vec![] },
    };
    for swept in [true, false] {
        let mut report = Report::new(Default::default());
        report.add_memory(&[point(1, swept), point(5, swept)]);
        assert_eq!(report.memory.len(), 2);
        assert_eq!(report.not_measured.contains_key("memory.a.idle_cpu_millicores"), !swept);
        let idle = report.memory.iter().find_map(|row| row.shown_idle_cpu());
        assert_eq!(idle.as_deref(), swept.then_some("0.40 (0.30 to 0.50 in 3 windows)"));
        assert_valid(&report);
    }
}

#[test]
fn the_schema_refuses_what_is_no_report() {
    let schema = serde_json::from_str(SCHEMA_TEXT).unwrap();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let good: serde_json::Value = serde_json::from_str(&render(&Report::new(Default::default()))).unwrap();
    assert!(validator.is_valid(&good) || good["manifest"]["at"] == "", "{good}");
    for (pointer, value) in [
        ("/schema", serde_json::json!(2)),
        ("/series", serde_json::json!([{ "runtime": "a" }])),
        ("/notes", serde_json::json!("text")),
    ] {
        let mut bad = good.clone();
        *bad.pointer_mut(pointer).unwrap() = value;
        assert!(!validator.is_valid(&bad), "{pointer}");
    }
}

#[test]
fn the_schema_knows_every_stage() {
    let schema: serde_json::Value = serde_json::from_str(SCHEMA_TEXT).unwrap();
    let stages = schema.pointer("/$defs/series/properties/stages/propertyNames/enum").unwrap();
    let known: Vec<_> = stages.as_array().unwrap().iter().filter_map(|name| name.as_str()).collect();
    assert_eq!(known, sandboxer_protocol::stage::Stage::ALL.map(sandboxer_protocol::stage::Stage::as_str));
}
