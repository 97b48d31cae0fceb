//! What a careful reader would object to, said by the report itself: what was seen, and what to do about it.

use crate::clock::Clock;
use crate::manifest::shown;
use crate::report::{Report, Series, times};
use crate::sample::{Mode, Sample};
use crate::startup::FULL_SERIAL;
use crate::summary::median;

/// A warning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// What was seen.
    pub seen: String,
    /// What it means, or what to do about it.
    pub advice: &'static str,
}

/// Load per CPU before the run above which it was not alone on the machine.
const BUSY: f64 = 0.3;
/// Change of the median between halves of a series that is drift, as a part.
const DRIFT: f64 = 0.1;
/// Spread of a series, as sd over mean, above which its percentiles move from run to run.
const WIDE: f64 = 0.25;
/// Part by which the sum of PSS and the fall of `MemAvailable` may differ.
const UNEXPLAINED: f64 = 0.15;
/// Release spread, as a part of the median, above which a group was not released at once.
const SPREAD: f64 = 0.05;
/// The probe's own share of a start that it may have, ms.
const OWN_SHARE: f64 = 1.0;

/// Returns all that apply.
pub fn warnings(report: &Report, samples: &[Sample]) -> Vec<Warning> {
    let mut found = Vec::new();
    let mut warn = |seen: String, advice: &'static str| found.push(Warning { seen, advice });
    if let Some(why) = &report.partial_reason {
        warn(
            format!("The run ended early: {why}."),
            "Its figures stand on fewer samples than were asked for.",
        );
    }
    // In virtual time nothing that others do has a part.
    let wall = report.clock == Clock::Wall;
    if !wall {
        warn(
            "Times are virtual: one instruction of an emulated host is one nanosecond.".into(),
            "A model, not hardware: no cache misses, and a VM exit costs only its instructions. Ratios of one run are the \
             claim; milliseconds are not. See docs/measuring.md.",
        );
    }
    if let Some(load) = report.manifest.load_per_cpu().filter(|load| wall && *load > BUSY) {
        warn(
            format!("The machine was busy before the run: load {load:.2} per CPU."),
            "Times are longer and wider than on an idle machine; ratios suffer less, since runtimes alternate.",
        );
    }
    if report.manifest.vmm.get("accelerator").is_some_and(|name| name == "tcg") {
        warn(
            "Guests ran emulated (TCG), without KVM.".into(),
            "Boot and all guest code take about ten times longer than on KVM: compare these figures with nothing \
             that was taken on KVM.",
        );
    }
    if wall && report.manifest.host.get("virtual_machine").is_some_and(|flag| flag == true) {
        warn(
            "The host is itself a virtual machine.".into(),
            "Its neighbours are part of the measurement; repeat it at another time before believing small differences.",
        );
    }
    sides(report, &mut warn);
    for series in &report.series {
        one(series, samples, &mut warn);
    }
    if let Some(share) =
        report.overhead.as_ref().and_then(|overhead| overhead.per_pod_ms).filter(|ms| *ms > OWN_SHARE)
    {
        warn(
            format!("The probe's own share may be {share:.2} ms per pod."),
            "An upper bound: most of it is the runtime answering empty calls. Differences below it mean nothing.",
        );
    }
    memory(report, &mut warn);
    // Those with the same advice stand together, so that it can be given once.
    let order: Vec<&str> = found.iter().map(|warning| warning.advice).collect();
    found.sort_by_key(|warning| order.iter().position(|advice| *advice == warning.advice));
    found
}

type Warn<'a> = &'a mut dyn FnMut(String, &'static str);

/// Warns of differences between runtimes that are shown side by side.
fn sides(report: &Report, warn: Warn<'_>) {
    let mut snapshotters: Vec<String> =
        report.manifest.runtimes.values().filter_map(|facts| facts.get("snapshotter")).map(shown).collect();
    snapshotters.sort();
    snapshotters.dedup();
    if snapshotters.len() > 1 {
        warn(
            format!("The runtimes use different snapshotters: {}.", snapshotters.join(", ")),
            "Part of a difference may be theirs; give both the same one.",
        );
    }
    let mut sandboxers: Vec<String> =
        report.manifest.runtimes.values().filter_map(|facts| facts.get("sandboxer")).map(shown).collect();
    sandboxers.sort();
    sandboxers.dedup();
    if sandboxers.len() > 1 {
        warn(
            "One runtime starts virtual machines, the other processes on the host's kernel.".into(),
            "They give different isolation, vCPUs and memory: the figures say what each costs, not which is better.",
        );
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
            "They are in no percentile. A runtime that fails under load is not fast: look at samples.csv for why.",
        );
    }
    if series.mode == Mode::Serial && summary.n < FULL_SERIAL as usize {
        warn(
            format!("{name}: {} starts.", summary.n),
            "A quick run: p99 needs at least 100 starts, and is steady from some 500 on.",
        );
    }
    if let (Some(mean), Some(sd)) = (summary.mean_ms, summary.sd_ms)
        && series.mode == Mode::Serial
        && sd > WIDE * mean
    {
        warn(
            format!("{name}: wide spread, sd {sd:.0} ms at a mean of {mean:.0} ms."),
            "Something else ran at times. Percentiles of such a series move from run to run.",
        );
    }
    let all = times(samples, &series.runtime, series.mode);
    let (early, late) = all.split_at(all.len() / 2);
    if let (Mode::Serial, true, Some(a), Some(b)) =
        (series.mode, all.len() >= 20, median(early), median(late))
        && (b / a - 1.0).abs() > DRIFT
    {
        warn(
            format!("{name}: the second half is {:+.0} % against the first.", (b / a - 1.0) * 100.0),
            "The machine or the runtime drifted: something fills up, warms up or leaks.",
        );
    }
    let spread = series.release_spread_ms.iter().copied().fold(0.0, f64::max);
    if let Some(p50) = summary.p50_ms.filter(|p50| spread > SPREAD * p50) {
        warn(
            format!("{name}: pods of a group were released over {spread:.1} ms at a median of {p50:.0} ms."),
            "They were not quite at once; the probe had too little CPU.",
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
                "What is missing is the kernel's (page tables, network, slabs) or somebody else's on the machine.",
            );
        }
        if row.by_role.contains_key(&crate::attribution::Role::Unattributed) {
            warn(
                format!(
                    "{} with {} pods: processes below the runtime belong to no pod.",
                    row.runtime, row.pods
                ),
                "They are in the total under 'unattributed'; ledger.csv names them.",
            );
        }
    }
}
