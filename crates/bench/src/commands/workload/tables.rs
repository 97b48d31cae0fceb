//! A result of workloads as a table for a terminal.

use sandboxer_command::tables::table;
use sandboxer_probe::workload::efficiency;
use sandboxer_probe::workload::report::Report;
use sandboxer_probe::workload::summary::shown;

/// Returns one line per metric, variant and runtime, then remarks.
pub fn report(report: &Report) -> String {
    let over = format!("over {}", report.reference);
    let heading = ["probe", "metric", "runtime", "n", "failed", "min", "p50", "max", "mean", "sd", &over];
    let mut rows = table(&heading, 3);
    for of in &report.series {
        let ratio = report.over_reference(of);
        rows.add_row(vec![
            format!("{} {}", of.probe, of.case).trim_end().to_owned(),
            of.metric.name.clone(),
            of.runtime.clone(),
            of.n.to_string(),
            of.failures.to_string(),
            shown(of.min),
            shown(of.p50),
            shown(of.max),
            shown(of.mean),
            shown(of.sd),
            ratio.map_or_else(|| "–".into(), |comparison| comparison.ratio.short()),
        ]);
    }
    let mut text = rows.trim_fmt();
    text.push_str(&format!(
        "\n{} profile, {} rounds, {} threads; ratios are of medians with their 95 % interval",
        report.profile, report.repeat, report.threads
    ));
    text.push_str(&costs(report));
    for note in &report.notes {
        text.push_str(&format!("\nnote: {note}"));
    }
    for (what, why) in &report.not_measured {
        text.push_str(&format!("\nnot measured: {what}: {why}"));
    }
    text
}

/// Returns a second table: CPU time by role, and the work done per CPU time.
fn costs(report: &Report) -> String {
    if report.costs.is_empty() {
        return String::new();
    }
    let mut rows = table(&["probe", "runtime", "n", "CPU s of", "pod CPU s", "per CPU s", "W", "per W"], 4);
    for cost in &report.costs {
        rows.add_row(vec![
            format!("{} {}", cost.probe, cost.case).trim_end().to_owned(),
            cost.runtime.clone(),
            cost.n.to_string(),
            efficiency::shown(&cost.parts),
            shown(Some(cost.pod_cpu_s)),
            shown(cost.per_cpu_s),
            shown(cost.watts),
            shown(cost.per_watt),
        ]);
    }
    format!(
        "\n\n{}\nmedians; per CPU s: the main figure, if a rate, per second of the pod's CPU time",
        rows.trim_fmt()
    )
}
