//! The page's section on a result of workloads, with a part for each probe.

use std::fmt::Write;

use super::{badge, conditions, plots, table, taken};
use crate::clock::Clock;
use crate::figures::{Figure, Palette};
use crate::plot::escape;
use crate::workload::definition::{Probe, Profile};
use crate::workload::efficiency;
use crate::workload::figures::figures;
use crate::workload::published;
use crate::workload::report::Report;
use crate::workload::store::Loaded;
use crate::workload::summary::{Series, shown};

/// Adds the section of `result`.
pub fn section(out: &mut String, result: &Loaded, palette: &Palette) {
    let report = &result.report;
    let emulated = result.runtimes().iter().any(|runtime| report.manifest.is_emulated(runtime));
    let _ = write!(
        out,
        "<h2>{}{}{}{}{}</h2>",
        escape(&result.name),
        badge(report.partial, "partial"),
        badge(report.profile == Profile::Quick, "quick"),
        badge(report.clock == Clock::Virtual, "virtual time"),
        badge(emulated, "emulated guests")
    );
    taken(out, &report.manifest);
    let _ = write!(
        out,
        "<p class=\"muted\">Workloads: profile {}, {} rounds, {} threads. Ratios are of medians, over {}, with a 95 % bootstrap \
         interval. n counts failures; figures do not include them.</p>",
        report.profile,
        report.repeat,
        report.threads,
        escape(&report.reference)
    );
    report.probes.iter().for_each(|probe| part(out, result, probe, palette));
    remarks(out, report);
    conditions(out, &report.manifest);
}

fn part(out: &mut String, result: &Loaded, probe: &Probe, palette: &Palette) {
    let _ = write!(
        out,
        "<h3>{}: {}</h3><p class=\"muted\">{}. Study: {}.</p>",
        escape(&probe.name),
        escape(&probe.what),
        escape(&probe.tool),
        escape(&probe.study)
    );
    let (latency, main): (Vec<Figure>, Vec<Figure>) =
        figures(result, probe, palette).into_iter().partition(|figure| figure.name.ends_with("-latency"));
    plots(out, main.iter());
    if !latency.is_empty() {
        out.push_str("<details><summary>Latency by percentile</summary>");
        plots(out, latency.iter());
        out.push_str("</details>");
    }
    let heading = [
        "variant",
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
        "ratio",
    ];
    let of_probe = result.report.series.iter().filter(|of| of.probe == probe.name);
    let rows: Vec<Vec<String>> = of_probe.map(|of| row(result, of)).collect();
    table(out, &heading, &rows, 4, "");
    costs(out, &result.report, probe);
    studies(out, &result.report, probe);
}

/// Adds CPU time by role, and the work done per CPU time.
fn costs(out: &mut String, report: &Report, probe: &Probe) {
    let of_probe = report.costs.iter().filter(|cost| cost.probe == probe.name);
    let rows: Vec<Vec<String>> = of_probe
        .map(|cost| {
            vec![
                if cost.case.is_empty() { "–".into() } else { cost.case.clone() },
                cost.runtime.clone(),
                cost.n.to_string(),
                shown(Some(cost.pod_cpu_s)),
                shown(cost.per_cpu_s),
                shown(cost.watts),
                shown(cost.per_watt),
                efficiency::shown(&cost.parts),
            ]
        })
        .collect();
    if rows.is_empty() {
        return;
    }
    out.push_str("<details><summary>CPU time by role, and work per CPU time</summary>");
    let heading =
        ["variant", "runtime", "n", "pod CPU s", "per CPU s", "W", "per W", "CPU s by role (medians)"];
    table(out, &heading, &rows, 2, "");
    out.push_str("</details>");
}

fn row(result: &Loaded, of: &Series) -> Vec<String> {
    let interval = result
        .interval(of)
        .map_or_else(|| "–".into(), |(low, high)| format!("{}–{}", shown(Some(low)), shown(Some(high))));
    let ratio = result.report.over_reference(of).map_or_else(|| "–".into(), |over| over.ratio.short());
    vec![
        if of.case.is_empty() { "–".into() } else { of.case.clone() },
        of.metric.name.clone(),
        of.metric.better.as_str().into(),
        of.runtime.clone(),
        of.n.to_string(),
        of.failures.to_string(),
        shown(of.p50),
        interval,
        shown(of.min),
        shown(of.max),
        shown(of.mean),
        shown(of.sd),
        ratio,
    ]
}

/// Adds the published means of a probe's metrics, if it ran with the study's parameters.
fn studies(out: &mut String, report: &Report, probe: &Probe) {
    let like = probe.metrics.iter().flat_map(|metric| published::like(&probe.name, &metric.name));
    let found: Vec<(published::Published, Vec<String>)> = like.collect();
    if found.is_empty() {
        return;
    }
    let study = published::thesis();
    let why = match (report.profile, report.clock) {
        (Profile::Paper, Clock::Wall) => None,
        (Profile::Paper, Clock::Virtual) => Some("this run's times are virtual"),
        (Profile::Quick, _) => Some("this run was shorter"),
    };
    if let Some(why) = why {
        let study = escape(&study.study);
        let _ = write!(
            out,
            "<p class=\"muted\">{study} has figures of this probe. They are not shown: {why}.</p>"
        );
        return;
    }
    let mut rows = Vec::new();
    for (feature, cases) in &found {
        for (system, mean) in feature.means() {
            rows.push(vec![
                system.to_owned(),
                feature.what.clone(),
                cases.join(", "),
                format!("{} {}", shown(Some(mean)), feature.unit),
                feature.note.clone(),
            ]);
        }
    }
    let _ = write!(
        out,
        "<p class=\"muted\">Published with the same parameters: {}, means of {} runs, of a sweep over all its variants; {}. For \
         orientation only.</p>",
        escape(&study.study),
        study.n,
        escape(&study.hardware)
    );
    table(out, &["system", "what", "variants", "mean", "note"], &rows, 5, "wrap");
}

fn remarks(out: &mut String, report: &Report) {
    if report.notes.is_empty() && report.not_measured.is_empty() && !report.partial {
        return;
    }
    out.push_str("<h3>Notes</h3><ul>");
    for note in report.partial_reason.iter().chain(&report.notes) {
        let _ = write!(out, "<li>{}</li>", escape(note));
    }
    for (what, why) in &report.not_measured {
        let _ = write!(out, "<li>not measured: {}: {}</li>", escape(what), escape(why));
    }
    out.push_str("</ul>");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::made_up::result;

    fn of(profile: Profile) -> String {
        crate::html::page(&[], &[result(profile)])
    }

    #[test]
    fn a_probe_has_its_bars_its_latency_and_its_table() {
        let page = of(Profile::Quick);
        for text in ["<h3>cpu: ", ">Latency by percentile<", "latency</text>", ">runc</text>"] {
            assert!(page.contains(text), "no {text}");
        }
        assert!(page.contains("one-thread") && page.contains(">quick</span>"));
        assert!(page.contains("0.50 (0.50–0.50)"), "no ratio");
    }

    #[test]
    fn published_figures_stand_only_beside_the_same_parameters() {
        let (quick, paper) = (of(Profile::Quick), of(Profile::Paper));
        assert!(!quick.contains("419.9") && quick.contains("this run was shorter"));
        assert!(
            paper.contains("Docker, published")
                && paper.contains("419.9")
                && paper.contains("other hardware")
        );
    }

    #[test]
    fn virtual_time_is_said_and_no_published_figure_stands_beside_it() {
        let mut run = result(Profile::Paper);
        run.report.clock = Clock::Virtual;
        run.report.evaluate(&run.runtimes(), &run.runs);
        let page = crate::html::page(&[], &[run]);
        assert!(page.contains(">virtual time</span>") && page.contains("times are virtual: one instruction"));
        assert!(!page.contains("419.9") && page.contains("this run's times are virtual"));
    }

    #[test]
    fn what_was_not_measured_is_named_and_names_are_never_markup() {
        let mut result = result(Profile::Quick);
        result.report.not_measured.insert("cpu.x".into(), "tool: <script>".into());
        let page = crate::html::page(&[], &[result]);
        assert!(page.contains("not measured: cpu.x: tool: &lt;script&gt;"), "{page}");
    }
}
