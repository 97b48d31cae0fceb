//! How fast pods start: `cargo bench --bench startup`.
//!
//! Measures the daemon's work per pod without a VM. If there is a stack, then also measures whole starts by the code of
//! `sandboxer-cli startup`, whose distributions are kept as files.

#![allow(clippy::unwrap_used, reason = "a bench that cannot go on stops where it stands")]

#[path = "../crates/sandboxer/tests/fake_agent/mod.rs"]
#[allow(dead_code, reason = "the tests of the daemon use all of it")]
mod fake_agent;
mod stack;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use criterion::{
    BatchSize, BenchmarkGroup, Criterion, criterion_group, criterion_main, measurement::WallTime,
};
use fake_agent::FakeAgent;
use sandboxer::{
    daemon,
    front::Front,
    pod::{
        self, DaemonState, PodHandle,
        admission::{Admission, Work},
        container::{NewContainer, spec},
        journal::{Journal, PodRecord, RECORD_VERSION},
        spec::PodSpec,
        stage_times::StageTimes,
        stages,
    },
    state::PodStatus,
};
use sandboxer_config::Config;
use sandboxer_host::rootfs::Mount;
use sandboxer_probe::{
    document::{html, markdown},
    figures::Palette,
    manifest::Manifest,
    present,
    report::Report,
    results::Results,
    sample::{Mode, Outcome, Sample},
    startup::Plan,
    store::{self, Loaded, Store},
    timeline,
};
use sandboxer_protocol::{link::LinkKey, stage::Stage};
use sandboxer_vmm_fake::FakeVmm;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

fn node(dir: &Path) -> Arc<DaemonState> {
    let config = Config { run_dir: dir.join("run"), state_dir: dir.join("state"), ..Config::default() };
    let agent = FakeAgent::default();
    daemon::node(config, Arc::new(FakeVmm::new(move |guest| agent.serve(guest))), Front::none()).unwrap()
}

fn new_pod(node: &Arc<DaemonState>, id: &str) -> PodHandle {
    let (of, spec) = (node.clone(), PodSpec::plain(id.parse().unwrap(), 1, 128));
    let spawn = || pod::spawn(of, spec.clone(), LinkKey::random(), PodStatus::created(1), Default::default());
    node.registry.insert(&spec.id.clone(), spawn).unwrap()
}

/// Measures the daemon's work per pod, without a VM.
fn daemon(c: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mut group = c.benchmark_group("daemon");
    group.sample_size(20).measurement_time(Duration::from_secs(3));

    let times = StageTimes::default();
    // An upper bound: a pod with one container has each stage at most once.
    group.bench_function("histograms, all stages of a pod", |b| {
        b.iter(|| Stage::ALL.map(|stage| times.record(stage, stages::Outcome::Ok, 700_000_000)));
    });

    let admission = Admission::new(4, 4);
    group.bench_function("admission", |b| {
        b.to_async(&runtime).iter(async || drop(admission.enter(Work::Vm).await));
    });

    journal_write(&mut group, &runtime, dir.path());
    let of_daemon = node(dir.path());
    containers(&mut group, &runtime, dir.path(), &of_daemon);
    pods_without_vms(&mut group, &runtime, &of_daemon);
    group.finish();
}

type Group<'a> = BenchmarkGroup<'a, WallTime>;

fn journal_write(group: &mut Group<'_>, runtime: &Runtime, dir: &Path) {
    fs::create_dir_all(dir.join("journal")).unwrap();
    let journal = Journal::open(&dir.join("journal")).unwrap();
    let record = PodRecord {
        version: RECORD_VERSION,
        readable_from: None,
        spec: PodSpec::plain("journalled".parse().unwrap(), 1, 128),
        status: PodStatus::created(1),
        link_key: LinkKey::random(),
        vm: None,
        containers: Vec::new(),
        volumes: Vec::new(),
        restored: None,
        placement: None,
        shares: None,
    };
    let of_pod = journal.pod(&record.spec.id);
    let mut number = 0;
    group.bench_function("journal write", |b| {
        b.iter(|| {
            number += 1;
            runtime.block_on(of_pod.write(number, record.clone())).unwrap();
        });
    });
}

/// Measures the work before the creation of a container's disks.
fn containers(group: &mut Group<'_>, runtime: &Runtime, dir: &Path, of_daemon: &Arc<DaemonState>) {
    let bundle = dir.join("bundle");
    fs::create_dir_all(&bundle).unwrap();
    let oci = serde_json::json!({
        "ociVersion": "1.1.0",
        "root": { "path": "rootfs" },
        "process": { "user": { "uid": 0, "gid": 0 }, "args": ["sh"], "cwd": "/", "env": ["PATH=/bin"] },
        "mounts": [{ "destination": "/proc", "type": "proc", "source": "proc" }],
        "linux": { "namespaces": [{ "type": "pid" }, { "type": "mount" }, { "type": "ipc" }] }
    });
    fs::write(bundle.join("config.json"), oci.to_string()).unwrap();
    let pod = PodSpec::plain("p".parse().unwrap(), 1, 128);
    let new = NewContainer {
        id: "c".parse().unwrap(),
        bundle,
        mounts: Vec::new(),
        root: None,
        stdio: Default::default(),
        beside: Vec::new(),
    };
    let helpers = &of_daemon.volumes.helpers;
    group.bench_function("spec conversion", |b| {
        b.iter(|| runtime.block_on(spec::read(&pod, &new, helpers, true)).unwrap());
    });

    let lower = dir.join("lower");
    let upper = dir.join("upper");
    fs::create_dir_all(&lower).unwrap();
    fs::create_dir_all(&upper).unwrap();
    fs::create_dir_all(dir.join("work")).unwrap();
    fs::write(lower.join("file"), vec![7; 1 << 20]).unwrap();
    let overlay = Mount {
        fstype: "overlay".into(),
        source: "overlay".into(),
        options: vec![
            format!("lowerdir={}", lower.display()),
            format!("upperdir={}", upper.display()),
            format!("workdir={}", dir.join("work").display()),
        ],
    };
    let prepare =
        || runtime.block_on(of_daemon.rootfs.prepare(&pod.id, &new.id, std::slice::from_ref(&overlay)));
    match prepare() {
        Ok(_) => drop(group.bench_function("rootfs cache hit", |b| b.iter(|| prepare().unwrap()))),
        Err(error) => println!("rootfs cache hit: not measured: {}", sandboxer_base::chain(&error)),
    }
}

fn pods_without_vms(group: &mut Group<'_>, runtime: &Runtime, of_daemon: &Arc<DaemonState>) {
    let running = runtime.block_on(async {
        let pod = new_pod(of_daemon, "running");
        pod.start().await.unwrap();
        pod
    });
    // The double of the agent rejects the call, which is a response like any other.
    group.bench_function("agent round trip", |b| b.to_async(runtime).iter(|| running.stats(None)));

    let mut count = 0;
    group.bench_function("pod started and removed, no VM", |b| {
        b.iter_batched(
            || {
                count += 1;
                let _inside = runtime.enter();
                new_pod(of_daemon, &format!("p{count}"))
            },
            |pod| {
                runtime.block_on(async {
                    pod.start().await.unwrap();
                    pod.remove().await.unwrap();
                });
            },
            BatchSize::PerIteration,
        );
    });
    runtime.block_on(async { running.remove().await.unwrap() });
}

/// Measures a report page on ten thousand starts: two runtimes, serial and in groups, one with stages.
fn page(c: &mut Criterion) {
    let sample = |number: u32| Sample {
        runtime: if number.is_multiple_of(2) { "a" } else { "b" }.into(),
        mode: if number < 5_000 { Mode::Serial } else { Mode::Parallel },
        round: number / 100,
        index: if number < 5_000 { 0 } else { number / 2 % 50 },
        warm_up: false,
        released_ms: f64::from(number) * 10.0,
        pod_ms: Some(80.0),
        created_ms: Some(90.0),
        started_ms: Some(120.0),
        // Spread over 100 ms, all different.
        first_byte_ms: Some(100.0 + f64::from(number * 7919 % 10_000) / 100.0),
        first_ping_ms: None,
        outcome: if number % 100 == 99 { Outcome::Failed } else { Outcome::Ok },
        failed_at: String::new(),
        error: String::new(),
        stages: Stage::ALL
            .into_iter()
            .filter(|_| number.is_multiple_of(2))
            .map(|stage| (stage, 9.0))
            .collect(),
        kvm_exits: None,
    };
    let samples: Vec<Sample> = (0..10_000).map(sample).collect();
    let runtimes = ["a".to_owned(), "b".to_owned()];
    let mut group = c.benchmark_group("report");
    group.sample_size(10);
    // From the rows: percentiles, bootstrapped intervals, plots and tables.
    group.bench_function("page of 10,000 starts", |b| {
        b.iter_batched(
            || samples.clone(),
            |samples| {
                let mut report = Report::new(Manifest::default());
                report.add_startup(&runtimes, &samples, &[]);
                html::render(&present::page(
                    &Results {
                        startups: vec![Loaded { name: "bench".into(), report, samples }],
                        ..Results::default()
                    },
                    &Palette::default(),
                ))
                .len()
            },
            BatchSize::PerIteration,
        );
    });
    group.finish();
}

/// Measures whole starts through containerd.
fn pods(c: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let stack = match stack::Stack::find(&runtime) {
        Ok(stack) => stack,
        Err(why) => return println!("starts of pods: not measured: {why}"),
    };
    let mut group = c.benchmark_group("pod");
    group.sample_size(10).measurement_time(Duration::from_secs(10));
    let never = CancellationToken::new();
    for handler in &stack.handlers {
        let recipe = stack.recipe();
        let mut count = 0;
        group.bench_function(format!("release to first byte, {handler}"), |b| {
            b.iter_custom(|starts| {
                let mut sum = Duration::ZERO;
                for _ in 0..starts {
                    count += 1;
                    let (name, bench) = (format!("{}-{count}", recipe.run), &stack.bench);
                    sum += runtime.block_on(async {
                        let start =
                            timeline::start(&bench.runtime, &bench.watch, &recipe, handler, &name, &never)
                                .await;
                        let id = start.pod_id.as_deref();
                        timeline::remove(&bench.runtime, &bench.watch, &recipe, &name, id).await.unwrap();
                        start.end.unwrap();
                        start.stamps.first_byte.unwrap()
                    });
                }
                sum
            });
        });
    }
    group.finish();

    let plan = Plan {
        runtimes: stack.handlers.clone(),
        serial: count_from("SANDBOXER_BENCH_SERIAL", 20),
        group: count_from("SANDBOXER_BENCH_PARALLEL", 20),
        rounds: 1,
        sustained: 0,
        warm_up: 1,
        pause: Duration::from_secs(1),
        recipe: stack.recipe(),
        bare_boot: None,
        vm: None,
        baseline: None,
    };
    let dir = stack::result_dir("startup");
    let mut store = Store::create(&dir).unwrap();
    runtime.block_on(stack.bench.startup(&plan, Some(&mut store), &never, &mut |_| ())).unwrap();
    let results = Results::load(std::slice::from_ref(&dir)).unwrap();
    let palette = Palette::new(&results.startups, &[]);
    store::write_plots(&dir, &results.startups, &[], &palette).unwrap();
    store.write("report.html", html::render(&present::page(&results, &palette)).as_bytes()).unwrap();
    for series in &results.startups[0].report.series {
        let name = store::file_name(&series.runtime);
        println!("distribution: {}", dir.join(format!("cdf-{name}-{}.txt", series.mode)).display());
    }
    println!(
        "report: {}\n\n{}",
        dir.join("report.html").display(),
        markdown::render(&present::tables(&results))
    );
}

/// Returns the value of an environment variable, or `default`.
fn count_from(variable: &str, default: u32) -> u32 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

criterion_group!(benches, daemon, page, pods);
criterion_main!(benches);
