//! Results of workloads.

use super::{conditions, heading, listed};
use crate::clock::Clock;
use crate::document::{Document, Part, Table, or_none};
use crate::figures::{Figure, Palette};
use crate::workload::definition::{Probe, Profile};
use crate::workload::efficiency;
use crate::workload::figures::figures;
use crate::workload::published;
use crate::workload::report::Report;
use crate::workload::store::Loaded;
use crate::workload::summary::{Series, shown};

/// Returns everything about a result, with a part for each probe.
pub fn section(result: &Loaded, palette: &Palette) -> Vec<Part> {
    let report = &result.report;
    let emulated = result.runtimes().iter().any(|runtime| report.manifest.is_emulated(runtime));
    let badges = [
        (report.partial, "partial"),
        (report.profile == Profile::Quick, "quick"),
        (report.clock == Clock::Virtual, "virtual time"),
        (emulated, "emulated guests"),
    ];
    let mut parts = heading(&result.name, badges.into(), &report.manifest);
    parts.push(about(report));
    for probe in &report.probes {
        parts.push(Part::heading(format!("{}: {}", probe.name, probe.what)));
        parts.push(Part::Text(format!("{}. Study: {}.", probe.tool, probe.study)));
        let (latency, main): (Vec<Figure>, Vec<Figure>) =
            figures(result, probe, palette).into_iter().partition(|figure| figure.name.ends_with("-latency"));
        parts.push(Part::Plots(main));
        if !latency.is_empty() {
            let plots = vec![Part::Plots(latency)];
            parts.push(Part::Fold { title: "Latency by percentile".into(), open: false, parts: plots });
        }
        let probe = std::slice::from_ref(probe);
        parts.push(Part::Table(table(result, probe)));
        parts.extend(costs(report, probe));
        parts.extend(studies(report, probe));
    }
    parts.extend(remarks(report));
    parts.extend(conditions(&report.manifest));
    parts
}

/// Returns a result in as few tables as possible.
pub fn short(result: &Loaded) -> Vec<Part> {
    let report = &result.report;
    let badges = [(report.partial, "partial")];
    let mut parts = heading(&result.name, badges.into(), &report.manifest);
    parts.extend([about(report), Part::Table(table(result, &report.probes))]);
    parts.extend(costs(report, &report.probes));
    if report.is_like_studies() {
        parts.extend(studies(report, &report.probes));
    }
    parts.extend(remarks(report));
    parts
}

/// Returns a result as soon as it is measured.
pub fn result(result: &Loaded) -> Document {
    let report = &result.report;
    let mut parts = vec![Part::Table(table(result, &report.probes)), about(report)];
    parts.extend(costs(report, &report.probes));
    parts.extend(remarks(report));
    Document { title: String::new(), parts }
}

fn about(report: &Report) -> Part {
    Part::Text(format!(
        "Workloads: profile {}, {} rounds, {} threads. Ratios are of medians, over {}, with a 95 % bootstrap interval. n counts \
         failures; figures do not include them.",
        report.profile, report.repeat, report.threads, report.reference
    ))
}

fn table(result: &Loaded, probes: &[Probe]) -> Table {
    let over = format!("over {}", result.report.reference);
    let names = [
        "probe",
        "metric",
        "better",
        "runtime",
        "n",
        "failed",
        "p50",
        "95 % interval",
        "min",
        "max",
        "mean",
        "sd",
        &over,
    ];
    let mut table = Table::new(4, names).with_details(&["min", "max", "mean", "sd"]);
    let of_probes = |series: &&Series| probes.iter().any(|probe| probe.name == series.probe);
    for series in result.report.series.iter().filter(of_probes) {
        let interval = or_none(result.interval(series), |(low, high)| {
            format!("{}–{}", shown(Some(low)), shown(Some(high)))
        });
        let ratio = or_none(result.report.over_reference(series), |over| over.ratio.short());
        table.row([
            named(&series.probe, &series.case),
            series.metric.name.clone(),
            series.metric.better.as_str().into(),
            series.runtime.clone(),
            series.n.to_string(),
            series.failures.to_string(),
            shown(series.p50),
            interval,
            shown(series.min),
            shown(series.max),
            shown(series.mean),
            shown(series.sd),
            ratio,
        ]);
    }
    table
}

fn named(probe: &str, case: &str) -> String {
    format!("{probe} {case}").trim_end().to_owned()
}

/// Returns CPU time by role, and the work done per CPU time; nothing without either.
fn costs(report: &Report, probes: &[Probe]) -> Option<Part> {
    let names = ["probe", "runtime", "CPU s by role (medians)", "n", "pod CPU s", "per CPU s", "W", "per W"];
    let mut table = Table::new(3, names);
    for cost in report.costs.iter().filter(|cost| probes.iter().any(|probe| probe.name == cost.probe)) {
        table.row([
            named(&cost.probe, &cost.case),
            cost.runtime.clone(),
            efficiency::shown(&cost.parts),
            cost.n.to_string(),
            shown(Some(cost.pod_cpu_s)),
            shown(cost.per_cpu_s),
            shown(cost.watts),
            shown(cost.per_watt),
        ]);
    }
    let parts = vec![Part::Table(table.clone())];
    let title = "CPU time by role, and work per CPU time".into();
    (!table.is_empty()).then_some(Part::Fold { title, open: false, parts })
}

/// Returns the published means of probes' metrics, if they ran with the study's parameters.
fn studies(report: &Report, probes: &[Probe]) -> Vec<Part> {
    let metrics = probes.iter().flat_map(|probe| probe.metrics.iter().map(move |metric| (probe, metric)));
    let like: Vec<_> =
        metrics.flat_map(|(probe, metric)| published::like(&probe.name, &metric.name)).collect();
    if like.is_empty() {
        return Vec::new();
    }
    let study = published::thesis();
    let why = match (report.profile, report.clock) {
        (Profile::Paper, Clock::Wall) => None,
        (Profile::Paper, Clock::Virtual) => Some("this run's times are virtual"),
        (Profile::Quick, _) => Some("this run was shorter"),
    };
    if let Some(why) = why {
        let text = format!("{} has figures of this probe. They are not shown: {why}.", study.study);
        return vec![Part::Text(text)];
    }
    let mut table = Table::new(5, ["system", "what", "variants", "mean", "note"]).with_prose();
    for (feature, cases) in &like {
        for (system, mean) in feature.means() {
            table.row([
                system.to_owned(),
                feature.what.clone(),
                cases.join(", "),
                format!("{} {}", shown(Some(mean)), feature.unit),
                feature.note.clone(),
            ]);
        }
    }
    let text = format!(
        "Published with the same parameters: {}, means of {} runs, of a sweep over all its variants; {}. For orientation only.",
        study.study, study.n, study.hardware
    );
    vec![Part::Text(text), Part::Table(table)]
}

fn remarks(report: &Report) -> Vec<Part> {
    let notes = report.partial_reason.iter().chain(&report.notes).cloned();
    let absent = report.not_measured.iter().map(|(what, why)| format!("not measured: {what}: {why}"));
    listed("Notes", notes.chain(absent).collect())
}
