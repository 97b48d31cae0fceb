//! Results of workloads as tables.

use std::fmt::Write;

use super::cell;
use crate::workload::efficiency;
use crate::workload::published;
use crate::workload::store::Loaded as Workload;
use crate::workload::summary::shown;

/// Returns one table per result of workloads, beside published figures with the same parameters.
pub fn workloads(results: &[Workload]) -> String {
    let mut out = String::new();
    for result in results {
        let report = &result.report;
        let _ = writeln!(
            out,
            "\n{}: {} profile, {} rounds, {} threads{}.\n",
            cell(&result.name),
            report.profile,
            report.repeat,
            report.threads,
            if report.partial { ", **partial**" } else { "" }
        );
        let over = cell(&report.reference);
        let _ = writeln!(
            out,
            "| probe | metric | runtime | n | failed | p50 | 95 % interval | over {over} |\n|---|---|---|--:|--:|--:|--:|--:|"
        );
        for of in &report.series {
            let interval = result.interval(of);
            let interval = interval
                .map_or_else(|| "–".into(), |(a, b)| format!("{}–{}", shown(Some(a)), shown(Some(b))));
            let ratio = report.over_reference(of).map_or_else(|| "–".into(), |over| over.ratio.short());
            let probe = format!("{} {}", of.probe, of.case);
            let arrow = of.metric.better.as_str();
            let _ = writeln!(
                out,
                "| {} | {} ({arrow} is better) | {} | {} | {} | {} | {interval} | {ratio} |",
                cell(probe.trim_end()),
                cell(&of.metric.name),
                cell(&of.runtime),
                of.n,
                of.failures,
                shown(of.p50)
            );
        }
        if report.is_like_studies() {
            studies(&mut out, result);
        }
        costs(&mut out, result);
        out.push('\n');
        for note in report.partial_reason.iter().chain(&report.notes) {
            let _ = writeln!(out, "- {}", cell(note));
        }
        for (what, why) in &report.not_measured {
            let _ = writeln!(out, "- not measured: {}: {}", cell(what), cell(why));
        }
    }
    out
}

/// Adds CPU time by role, and the work done per CPU time.
fn costs(out: &mut String, result: &Workload) {
    if result.report.costs.is_empty() {
        return;
    }
    out.push_str(
        "\n| CPU time, medians | runtime | n | pod CPU s | per CPU s | W | per W | CPU s by role |\n|---|---|--:|--:|--:|--:|--:|---|\n",
    );
    for cost in &result.report.costs {
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {} | {} | {} | {} |",
            cell(format!("{} {}", cost.probe, cost.case).trim_end()),
            cell(&cost.runtime),
            cost.n,
            shown(Some(cost.pod_cpu_s)),
            shown(cost.per_cpu_s),
            shown(cost.watts),
            shown(cost.per_watt),
            efficiency::shown(&cost.parts)
        );
    }
}

/// Adds rows of published means with the same parameters.
fn studies(out: &mut String, result: &Workload) {
    let study = published::thesis();
    for probe in &result.report.probes {
        for metric in &probe.metrics {
            for (feature, cases) in published::like(&probe.name, &metric.name) {
                let what = match &cases[..] {
                    [only] => format!("{} {only}", probe.name),
                    all => format!("{}, mean of {} variants", probe.name, all.len()),
                };
                for (system, mean) in feature.means() {
                    let (what, name, system) = (cell(what.trim_end()), cell(&metric.name), cell(system));
                    let _ = writeln!(
                        out,
                        "| *{what}* | *{name}* | *{system}; published mean, other hardware* | {} | – | {} | – | – |",
                        study.n,
                        shown(Some(mean))
                    );
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::definition::Profile;
    use crate::workload::made_up::result;

    #[test]
    fn workloads_have_rows_and_published_ones_only_with_the_same_parameters() {
        let quick = workloads(&[result(Profile::Quick)]);
        assert!(
            quick.contains("| cpu one-thread | events\\_per\\_s (higher is better) | runc | 5 | 0 |"),
            "{quick}"
        );
        assert!(quick.contains("0.50 (0.50–0.50)") && !quick.contains("published"), "{quick}");
        let paper = workloads(&[result(Profile::Paper)]);
        assert!(paper.contains("Docker; published mean, other hardware* | 10 | – | 419.9 |"), "{paper}");
        let cells = |line: &str| line.replace("\\|", "").matches('|').count();
        let rows: Vec<&str> = paper.lines().filter(|line| line.starts_with('|')).collect();
        assert!(rows.len() > 8 && rows.iter().all(|line| cells(line) == 9), "{paper}");
    }
}
