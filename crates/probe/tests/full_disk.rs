//! A disk that fills while starts are measured.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail their test")]

#[allow(dead_code, reason = "other tests use all of it")]
mod double;
#[path = "double/small_disk.rs"]
mod small_disk;

use std::path::Path;
use std::time::Duration;

use double::{Behaviour, Double, IMAGE};
use sandboxer_probe::{
    measure::{self, Bench},
    options::Network,
    sample::Sample,
    startup::Plan,
    store::{self, Store},
};
use small_disk::{DISK, on_small_disk};
use tokio_util::sync::CancellationToken;

#[test]
fn a_disk_that_fills_ends_the_run_and_keeps_its_rows() {
    on_small_disk("child");
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
    let times: Vec<f64> = read.samples.iter().filter_map(Sample::time).collect();
    assert_eq!(times.len(), samples.len() - 1);
    assert!(times.len() > 20, "{} rows", times.len());
    assert!(read.report.partial && read.report.not_measured.contains_key("manifest"));
    assert!(
        !std::fs::read_dir(dir)
            .unwrap()
            .any(|file| file.unwrap().path().extension() == Some("part".as_ref()))
    );
    println!("rows kept: {}", times.len());
}
