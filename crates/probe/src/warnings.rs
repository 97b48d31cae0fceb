//! Warnings about a report: observations, with advice.

use crate::clock::Clock;
use crate::manifest::{Facts, shown};
use crate::ratio::MIN_GROUPS;
use crate::report::{Report, Series, times};
use crate::sample::{Mode, Sample};
use crate::startup::FULL_SERIAL;
use crate::summary::median;

/// A warning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// What was observed.
    pub seen: String,
    /// What the observation means, or what to do about it.
    pub advice: &'static str,
}

/// Load per CPU before the run above which the host counts as busy.
const BUSY: f64 = 0.3;
/// Relative change of the median between halves of a series that counts as drift.
const DRIFT: f64 = 0.1;
/// Spread of a series (sd over mean) above which its percentiles vary from run to run.
const WIDE: f64 = 0.25;
/// Accepted relative difference between the sum of PSS and the fall of `MemAvailable`.
const UNEXPLAINED: f64 = 0.15;
/// Release spread, relative to the median, above which a group did not start at once.
const SPREAD: f64 = 0.05;
/// Relative difference of two guests' memory that is ignored.
const SAME_MEMORY: f64 = 0.1;
/// Accepted time of the probe itself per start, ms.
const OWN_SHARE: f64 = 1.0;

/// Returns all warnings that apply.
pub fn warnings(report: &Report, samples: &[Sample]) -> Vec<Warning> {
    let mut found = Vec::new();
    let mut warn = |seen: String, advice: &'static str| found.push(Warning { seen, advice });
    if let Some(why) = &report.partial_reason {
        warn(format!("The run ended early: {why}."), "Its figures have fewer samples than requested.");
    }
    // Other load on the host does not affect virtual time.
    let wall = report.clock == Clock::Wall;
    if !wall {
        warn(
            "Times are virtual: one instruction of an emulated host is one nanosecond, and a sleep counts in full.".into(),
            "This is a model, not hardware: no cache misses, and a VM exit costs only its instructions. Use the ratios of \
             one run, not the milliseconds. See docs/measuring.md.",
        );
    }
    if let Some(load) = report.manifest.load_per_cpu().filter(|load| wall && *load > BUSY) {
        warn(
            format!("The host was busy before the run: load {load:.2} per CPU."),
            "Times are longer and vary more than on an idle host. Ratios are less affected: runtimes alternate.",
        );
    }
    if report.manifest.vmm.get("accelerator").is_some_and(|name| name == "tcg") {
        warn(
            "Guests ran emulated (TCG), without KVM.".into(),
            "Boot and all guest code take about ten times longer than on KVM: do not compare these figures with any \
             that were measured on KVM.",
        );
    }
    if wall && report.manifest.host.get("virtual_machine").is_some_and(|flag| flag == true) {
        warn(
            "The host is a VM.".into(),
            "Other VMs on its host affect the measurement; repeat it at another time before you rely on small differences.",
        );
    }
    sides(report, &mut warn);
    guests(report, &mut warn);
    for series in &report.series {
        one(series, samples, &mut warn);
    }
    if let Some(share) =
        report.overhead.as_ref().and_then(|overhead| overhead.per_pod_ms).filter(|ms| *ms > OWN_SHARE)
    {
        warn(
            format!("The probe itself may take {share:.2} ms per pod."),
            "This is an upper bound: most of it is the runtime's time for empty calls. Ignore smaller differences.",
        );
    }
    memory(report, &mut warn);
    // Makes warnings with the same advice adjacent, so that the advice is shown once.
    let order: Vec<&str> = found.iter().map(|warning| warning.advice).collect();
    found.sort_by_key(|warning| order.iter().position(|advice| *advice == warning.advice));
    found
}

type Warn<'a> = &'a mut dyn FnMut(String, &'static str);

/// Warns of differences between the compared runtimes.
fn sides(report: &Report, warn: Warn<'_>) {
    let mut snapshotters: Vec<String> =
        report.manifest.runtimes.values().filter_map(|facts| facts.get("snapshotter")).map(shown).collect();
    snapshotters.sort();
    snapshotters.dedup();
    if snapshotters.len() > 1 {
        warn(
            format!("The runtimes use different snapshotters: {}.", snapshotters.join(", ")),
            "They may cause part of a difference; configure the same one for both.",
        );
    }
    let mut sandboxers: Vec<String> =
        report.manifest.runtimes.values().filter_map(|facts| facts.get("sandboxer")).map(shown).collect();
    sandboxers.sort();
    sandboxers.dedup();
    if sandboxers.len() > 1 {
        warn(
            "One runtime starts VMs, the other processes on the host kernel.".into(),
            "They differ in isolation, vCPUs and memory: the figures show the cost of each, not which is better.",
        );
    }
}

/// Warns of differences between the VMs of two handlers: a comparison of unequal VMs must say how they differ.
fn guests(report: &Report, warn: Warn<'_>) {
    let fact =
        |facts: &Facts, name: &str| facts.get("container_sees").and_then(|sees| sees.get(name)).map(shown);
    let guests: Vec<(&String, &Facts)> =
        report.manifest.runtimes.iter().filter(|(_, facts)| facts.contains_key("vmm_program")).collect();
    for name in ["kernel", "processors", "memory_mib"] {
        let values: Vec<(&String, String)> =
            guests.iter().filter_map(|(handler, facts)| Some((*handler, fact(facts, name)?))).collect();
        let mib = |text: &str| text.parse::<f64>().ok();
        let alike = |a: &str, b: &str| match (name, mib(a), mib(b)) {
            // Kernels leave amounts of the same memory that differ by some MiB.
            ("memory_mib", Some(a), Some(b)) => (a / b - 1.0).abs() < SAME_MEMORY,
            _ => a == b,
        };
        let Some((_, first)) = values.first() else { continue };
        if values.iter().any(|(_, other)| !alike(first, other)) {
            let all: Vec<String> =
                values.iter().map(|(handler, value)| format!("{handler}: {value}")).collect();
            warn(
                format!(
                    "The guests differ in {}: {}.",
                    name.replace("memory_mib", "memory, MiB"),
                    all.join("; ")
                ),
                "They are not the same machine: make the two sides equal, or keep it in mind with every ratio.",
            );
        }
    }
}

fn one(series: &Series, samples: &[Sample], warn: Warn<'_>) {
    let name = format!("{} {}", series.runtime, series.mode);
    let summary = &series.summary;
    if summary.failures > 0 {
        let at: Vec<String> =
            series.failed_at.iter().map(|(call, count)| format!("{count} at {call}")).collect();
        warn(
            format!("{name}: {} of {} starts failed ({}).", summary.failures, summary.n, at.join(", ")),
            "Percentiles do not include them. A runtime that fails under load is not fast: see samples.csv for the errors.",
        );
    }
    if series.mode == Mode::Serial && summary.n < FULL_SERIAL as usize {
        warn(
            format!("{name}: {} starts.", summary.n),
            "This is a quick run: p99 needs at least 100 starts, and is stable from about 500.",
        );
    }
    if let (Some(mean), Some(sd)) = (summary.mean_ms, summary.sd_ms)
        && series.mode == Mode::Serial
        && sd > WIDE * mean
    {
        warn(
            format!("{name}: wide spread, sd {sd:.0} ms at a mean of {mean:.0} ms."),
            "Other programs may have run at times. Percentiles of such a series vary from run to run.",
        );
    }
    let all = times(samples, &series.runtime, series.mode);
    let (early, late) = all.split_at(all.len() / 2);
    if let (Mode::Serial, true, Some(a), Some(b)) =
        (series.mode, all.len() >= 20, median(early), median(late))
        && (b / a - 1.0).abs() > DRIFT
    {
        warn(
            format!("{name}: the second half differs from the first by {:+.0} %.", (b / a - 1.0) * 100.0),
            "The host or the runtime drifted: something fills up, warms up or leaks.",
        );
    }
    if series.mode == Mode::Parallel && (1..MIN_GROUPS).contains(&series.walls().count()) {
        warn(
            format!("{name}: {} groups.", series.walls().count()),
            "Pods of one group are one sample: below three groups there is no interval, and no verdict.",
        );
    }
    let spread = series.release_spread_ms.iter().copied().fold(0.0, f64::max);
    if let Some(p50) = summary.p50_ms.filter(|p50| spread > SPREAD * p50) {
        warn(
            format!(
                "{name}: the pods of a group were started within {spread:.1} ms, at a median of {p50:.0} ms."
            ),
            "They did not start at the same time: the probe had too little CPU time.",
        );
    }
}

fn memory(report: &Report, warn: Warn<'_>) {
    for row in &report.memory {
        if let Some((fell, explained)) = row.available_fall_kib.zip(row.goes_away_kib)
            && row.pods >= 10
            && (fell / explained - 1.0).abs() > UNEXPLAINED
        {
            warn(
                format!(
                    "{} with {} pods: MemAvailable fell by {:.0} MB, PSS explains {:.0} MB.",
                    row.runtime,
                    row.pods,
                    fell / 1024.0,
                    explained / 1024.0
                ),
                "The rest belongs to the kernel (page tables, network, slabs) or to other programs on the host.",
            );
        }
        if row.by_role.contains_key(&crate::attribution::Role::Unattributed) {
            warn(
                format!(
                    "{} with {} pods: some processes below the runtime belong to no pod.",
                    row.runtime, row.pods
                ),
                "The total includes them as 'unattributed'; ledger.csv lists them.",
            );
        }
    }
}
