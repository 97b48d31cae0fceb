//! Memory of pods: `cargo bench --bench memory`.
//!
//! Criterion times the ledger itself. The sweep uses the code of `sandboxer-cli mem-report` and leaves its result as
//! files.

#![allow(clippy::unwrap_used, reason = "a bench that cannot go on stops where it stands")]

mod stack;

use std::collections::BTreeSet;
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use sandboxer_probe::{
    document::html,
    figures::Palette,
    idle::Windows,
    ledger,
    memory::Sweep,
    present, process, pss,
    results::Results,
    store::{self, Store},
};
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

/// Measures the cost of taking a ledger.
fn observer(c: &mut Criterion) {
    let mut group = c.benchmark_group("ledger");
    group.sample_size(20).measurement_time(Duration::from_secs(3));
    let me = std::process::id() as i32;
    group.bench_function("PSS of one process", |b| b.iter(|| pss::total(me).unwrap()));
    group.bench_function("all processes of the host", |b| b.iter(|| process::table().unwrap()));
    group.finish();
}

/// Measures a sweep over pod counts.
fn sweep(c: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let stack = match stack::Stack::find(&runtime) {
        Ok(stack) => stack,
        Err(why) => return println!("memory of pods: not measured: {why}"),
    };
    let mut group = c.benchmark_group("ledger");
    group.sample_size(10);
    group.bench_function("of no pods", |b| {
        b.to_async(&runtime)
            .iter(|| ledger::take(&stack.bench.runtime, |_| true, const { &BTreeSet::new() }));
    });
    group.finish();

    let counts = std::env::var("SANDBOXER_BENCH_SWEEP").unwrap_or_else(|_| "1,5,10".into());
    let sweep = Sweep {
        runtimes: stack.handlers.clone(),
        counts: counts.split(',').filter_map(|count| count.parse().ok()).collect(),
        repeat: 1,
        recipe: stack.recipe(),
        vm: None,
        idle: Windows::default(),
    };
    let dir = stack::result_dir("memory");
    let mut store = Store::create(&dir).unwrap();
    let never = CancellationToken::new();
    runtime.block_on(stack.bench.memory(&sweep, Some(&mut store), &never, &mut |_| ())).unwrap();
    let results = Results::load(std::slice::from_ref(&dir)).unwrap();
    let palette = Palette::new(&results.startups, &[]);
    store::write_plots(&dir, &results.startups, &[], &palette).unwrap();
    store.write("report.html", html::render(&present::page(&results, &palette)).as_bytes()).unwrap();
    println!("ledger: {}", dir.join("ledger.csv").display());
    println!("report: {}", dir.join("report.html").display());
}

criterion_group!(benches, observer, sweep);
criterion_main!(benches);
