//! A disk that fills while starts are measured: this program starts itself again where a small tmpfs is mounted.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail their test")]

#[allow(dead_code, reason = "other tests use all of it")]
mod double;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use double::{Behaviour, Double, Ended, IMAGE};
use sandboxer_probe::{
    measure::{self, Bench},
    options::Network,
    sample::Sample,
    startup::Plan,
    store::{self, Store},
    workload::{self, output::Format},
};
use tokio_util::sync::CancellationToken;

const DISK: &str = "FULL_DISK_TEST_DIR";
/// Two pages: room for some fifty rows, and for no report beside them.
const SIZE: &str = "8k";

#[test]
fn a_disk_that_fills_ends_the_run_and_keeps_its_rows() {
    on_small_disk("child");
}

#[test]
fn a_disk_that_fills_ends_workloads_and_keeps_their_rows() {
    on_small_disk("workload_child");
}

/// In user and mount namespaces of its own, so that it needs no root and the tmpfs ends with it.
fn on_small_disk(child: &str) {
    let dir = tempfile::tempdir().unwrap();
    let mount = format!("mount -t tmpfs -o size={SIZE} tmpfs \"${DISK}\" && exec \"$@\"");
    let output = Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "sh", "-c", &mount, "sh"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", child, "--nocapture"])
        .env(DISK, dir.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8(output.stdout).unwrap().contains("rows kept: "));
}

/// The child's part, called by name; without the variable it has nothing to do.
#[tokio::test]
async fn child() {
    let Some(dir) = std::env::var_os(DISK) else { return };
    let dir = Path::new(&dir);
    let double = Double::serve([("a", Behaviour::default())]);
    let bench = Bench::open(&double.endpoint(), None).unwrap();
    let mut store = Store::create(dir).unwrap();
    let plan = Plan {
        pause: Duration::ZERO,
        runtimes: vec!["a".into()],
        serial: 1000,
        group: 0,
        rounds: 0,
        sustained: 0,
        warm_up: 0,
        recipe: measure::recipe(IMAGE, Network::Pod, Duration::from_secs(30)),
        bare_boot: None,
        vm: None,
        baseline: None,
    };
    let never = CancellationToken::new();
    let (report, samples) = bench.startup(&plan, Some(&mut store), &never, &mut |_| ()).await.unwrap();

    // Both files are named, and the figures are still there to be printed.
    let why = report.partial_reason.unwrap();
    assert!(why.contains("samples.csv: No space left"), "{why}");
    assert!(why.contains("cannot write the whole result") && why.contains("cdf-a-serial.txt"), "{why}");
    assert_eq!(report.series[0].summary.n, samples.len());
    assert!(double.truth(|truth| truth.pods.is_empty()));

    // All but the row that found no room can be read again, and no part of anything is left.
    let read = store::load(dir).unwrap();
    let kept: Vec<f64> = read.samples.iter().filter_map(Sample::time).collect();
    assert_eq!(kept.len(), samples.len() - 1);
    assert!(kept.len() > 20, "{} rows", kept.len());
    assert!(read.report.partial && read.report.not_measured.contains_key("manifest"));
    assert!(
        !std::fs::read_dir(dir)
            .unwrap()
            .any(|file| file.unwrap().path().extension() == Some("part".as_ref()))
    );
    println!("rows kept: {}", kept.len());
}

/// Prints facts, and what sysbench prints.
fn works(command: &[String]) -> Ended {
    let facts = "{\"bench_facts\":{\"cpus\":1,\"quota_cpus\":null,\"memory_limit\":536870912,\"memory_total\":536870912,\
                 \"kernel\":null}}\n"
        .to_owned();
    match command.iter().any(|word| word == "facts") {
        true => Some((0, facts, String::new())),
        false => Some((0, Format::SysbenchCpu.example().to_owned(), facts)),
    }
}

/// The other child's part.
#[tokio::test]
async fn workload_child() {
    let Some(dir) = std::env::var_os(DISK) else { return };
    let dir = Path::new(&dir);
    let double = Double::serve([("a", Behaviour { tool: Some(works), ..Behaviour::default() })]);
    let bench = Bench::open(&double.endpoint(), None).unwrap();
    let mut store = workload::store::Store::create(dir).unwrap();
    let mut probe = workload::definition::all().into_iter().find(|probe| probe.name == "cpu").unwrap();
    probe.quick.takes = 0.001;
    probe.cases.truncate(1);
    let plan = workload::plan::Plan {
        runtimes: vec!["a".into()],
        native: None,
        vm: None,
        client_runtime: "a".into(),
        probes: vec![probe],
        profile: workload::definition::Profile::Quick,
        repeat: 100,
        warm_up: 0,
        cpus: 1,
        memory: 512 << 20,
        volumes: std::env::temp_dir(),
        recipe: measure::recipe(IMAGE, Network::Pod, Duration::from_secs(30)),
        trusted: Vec::new(),
        build_image: "none".into(),
        meter: workload::power::Meter::None("a double has none".into()),
    };
    let never = CancellationToken::new();
    let (report, runs) =
        workload::measure::measure(&bench, &plan, Some(&mut store), &never, &mut |_| ()).await.unwrap();
    let why = report.partial_reason.unwrap();
    assert!(why.contains("No space left") && why.contains("cannot write the whole result"), "{why}");
    // The figures are still there to be printed, and no pod is left.
    assert!((1..100).contains(&runs.len()), "{} runs", runs.len());
    assert!(report.series.iter().all(|of| of.n == runs.len() && of.failures == 0));
    assert!(double.truth(|truth| truth.pods.is_empty()));
    println!("rows kept: {}", runs.len());
}
