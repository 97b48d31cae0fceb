//! A disk that fills while workloads are measured.

use std::path::Path;
use std::time::Duration;

use sandboxer_bench::workload::measure::measure;
use sandboxer_bench::workload::output::example;
use sandboxer_bench::workload::plan::Plan;
use sandboxer_bench::workload::power::Meter;
use sandboxer_probe::measure::{Bench, recipe};
use sandboxer_probe::options::Network;
use sandboxer_probe::workload::definition::{self, Format, Profile};
use sandboxer_probe::workload::store::Store;
use tokio_util::sync::CancellationToken;

use crate::double::{Behaviour, Double, Ended, IMAGE};
use crate::small_disk::{DISK, on_small_disk};

#[test]
fn a_disk_that_fills_ends_workloads_and_keeps_their_rows() {
    on_small_disk("full_disk::child");
}

/// Prints facts, and what sysbench prints.
fn works(command: &[String]) -> Ended {
    let facts = "{\"bench_facts\":{\"cpus\":1,\"quota_cpus\":null,\"memory_limit\":536870912,\"memory_total\":536870912,\
                 \"kernel\":null}}\n"
        .to_owned();
    match command.iter().any(|word| word == "facts") {
        true => Some((0, facts, String::new())),
        false => Some((0, example(Format::SysbenchCpu).to_owned(), facts)),
    }
}

/// The child's part, called by name; without the variable it has nothing to do.
#[tokio::test]
async fn child() {
    let Some(dir) = std::env::var_os(DISK) else { return };
    let dir = Path::new(&dir);
    let double = Double::serve([("a", Behaviour { tool: Some(works), ..Behaviour::default() })]);
    let bench = Bench::open(&double.endpoint(), None).unwrap();
    let mut store = Store::create(dir).unwrap();
    let mut probe = definition::all().into_iter().find(|probe| probe.name == "cpu").unwrap();
    probe.quick.takes = 0.001;
    probe.cases.truncate(1);
    let plan = Plan {
        runtimes: vec!["a".into()],
        native: None,
        vm: None,
        client_runtime: "a".into(),
        probes: vec![probe],
        profile: Profile::Quick,
        repeat: 100,
        warm_up: 0,
        cpus: 1,
        memory: 512 << 20,
        volumes: std::env::temp_dir(),
        recipe: recipe(IMAGE, Network::Pod, Duration::from_secs(30)),
        trusted: Vec::new(),
        build_image: "none".into(),
        meter: Meter::None("a double has none".into()),
    };
    let never = CancellationToken::new();
    let (report, runs) = measure(&bench, &plan, Some(&mut store), &never, &mut |_| ()).await.unwrap();
    let why = report.partial_reason.unwrap();
    assert!(why.contains("No space left") && why.contains("cannot write the whole result"), "{why}");
    // The figures are still there to be printed, and no pod is left.
    assert!((1..100).contains(&runs.len()), "{} runs", runs.len());
    assert!(report.series.iter().all(|series| series.n == runs.len() && series.failures == 0));
    assert!(double.truth(|truth| truth.pods.is_empty()));
    println!("rows kept: {}", runs.len());
}
