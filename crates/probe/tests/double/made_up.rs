//! Made-up results for the tests of all crates that show or judge results.

use std::path::Path;

use sandboxer_probe::clock::Clock;
use sandboxer_probe::manifest::Manifest;
use sandboxer_probe::report::Report as Starts;
use sandboxer_probe::sample::{Mode, Outcome, Sample};
use sandboxer_probe::store::Store;
use sandboxer_probe::workload::definition::{self, Profile};
use sandboxer_probe::workload::report::Report;
use sandboxer_probe::workload::run::Run;
use sandboxer_probe::workload::store::Loaded;
use sandboxer_protocol::stage::Stage;
use serde_json::json;

/// Returns a result of three probes: native with 100 of everything, runc with 50, five runs each.
pub fn result(profile: Profile) -> Loaded {
    let names = ["cpu", "http", "latency"];
    let probes: Vec<_> =
        definition::all().into_iter().filter(|probe| names.contains(&&*probe.name)).collect();
    let runtimes = ["native", "runc"].map(str::to_owned);
    let mut runs = Vec::new();
    for probe in &probes {
        for case in probe.cases(profile) {
            for (runtime, value) in [("native", 100.0), ("runc", 50.0)] {
                runs.extend((0..5).map(|round| Run {
                    runtime: runtime.into(),
                    probe: probe.name.clone(),
                    case: case.name.clone(),
                    round,
                    warm_up: false,
                    begun_s: 0.0,
                    took_s: 1.0,
                    outcome: Outcome::Ok,
                    failed_at: String::new(),
                    error: String::new(),
                    commands: Default::default(),
                    threads: None,
                    figures: probe.metrics.iter().map(|metric| (metric.name.clone(), value)).collect(),
                    facts: None,
                    host: Default::default(),
                    cpu: None,
                    power: Default::default(),
                }));
            }
        }
    }
    let empty = Report::new(probes, profile, &runtimes, Manifest::default());
    let mut report = Report { repeat: 5, client_runtime: "runc".into(), ..empty };
    report.evaluate(&runtimes, &runs);
    Loaded { name: "w".into(), report, runs }
}

/// Writes a run in virtual time: five starts of a handler, with this time for container_create, and five of runc.
pub fn virtual_run(dir: &Path, handler: &str, create_ms: f64) {
    let start = |runtime: &str, ms: f64, stages: &[(Stage, f64)], round: u32| Sample {
        runtime: runtime.into(),
        mode: Mode::Serial,
        round,
        index: 0,
        warm_up: false,
        released_ms: 0.0,
        pod_ms: None,
        created_ms: None,
        started_ms: None,
        first_byte_ms: Some(ms),
        outcome: Outcome::Ok,
        failed_at: String::new(),
        error: String::new(),
        stages: stages.iter().copied().collect(),
        kvm_exits: None,
        first_ping_ms: None,
    };
    let stages = [(Stage::AgentReady, 6.0), (Stage::ContainerCreate, create_ms)];
    let samples: Vec<Sample> = (0..5)
        .flat_map(|round| {
            [start(handler, 126.0 + create_ms, &stages, round), start("runc", 270.0, &[], round)]
        })
        .collect();
    let mut report = Starts { clock: Clock::Virtual, ..Starts::new(Manifest::default()) };
    report.manifest.vmm.insert("vmm".into(), json!("qemu"));
    report.add_startup(&[handler.to_owned(), "runc".to_owned()], &samples, &[]);
    let mut store = Store::create(dir).unwrap();
    store.clock = report.clock;
    samples.iter().for_each(|sample| store.sample(sample).unwrap());
    store.report(&report, &samples).unwrap();
}
