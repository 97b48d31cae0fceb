//! Start-up times.

use crate::clock::Clock;
use crate::document::{Part, Table, ms, or_none};
use crate::ratio::Ratio;
use crate::report::{REFERENCE, Report, Series};
use crate::sample::Mode;
use crate::summary::Summary;

/// Returns one table of all starts, and notes on them; nothing without starts.
pub fn parts(clock: Clock, reports: &[&Report]) -> Vec<Part> {
    let table = table(reports);
    if table.is_empty() {
        return Vec::new();
    }
    let notes = reports.iter().flat_map(|report| notes(report)).collect();
    vec![Part::heading(format!("Start-up, {}", clock.ms())), Part::Table(table), Part::List(notes)]
}

fn table(reports: &[&Report]) -> Table {
    let mut bases: Vec<&str> = reports.iter().flat_map(|report| report.bases()).collect();
    bases.sort_by_key(|base| (*base != REFERENCE, *base));
    bases.dedup();
    let figures = ["runtime", "mode", "n", "failed", "min", "p50", "p90", "p95", "p99", "max", "mean", "sd"];
    let over = bases.iter().map(|base| format!("over {base}"));
    let names = figures.map(str::to_owned).into_iter().chain(over).chain(["KVM exits a pod".to_owned()]);
    let mut table = Table::new(2, names).with_details(&["min", "p95", "mean", "sd"]);
    for report in reports {
        for series in &report.series {
            let over = |mode: Mode, groups: bool| {
                let ratio =
                    |base: &&str| or_none(report.over(&series.runtime, base, mode, groups), Ratio::short);
                bases.iter().map(ratio).collect::<Vec<_>>()
            };
            let exits = vec![series.shown_exits()];
            let row =
                [named(&series.runtime, series.how(), &series.summary), over(series.mode, false), exits];
            table.row(row.concat());
            if let Some(whole) = series.whole_groups() {
                let name = named(&series.runtime, format!("whole groups of {}", series.group), &whole);
                table.row([name, over(Mode::Parallel, true)].concat());
            }
        }
        if let Some(bare) = &report.bare_boot {
            table.row(named("bare boot", "the same VM alone".into(), &bare.summary));
        }
    }
    table
}

fn named(runtime: &str, how: String, summary: &Summary) -> Vec<String> {
    let counts = [summary.n, summary.failures].map(|count| count.to_string());
    let figures = summary.figures().map(|(_, time)| ms(time));
    [runtime.to_owned(), how].into_iter().chain(counts).chain(figures).collect()
}

/// Returns the ratios of starts, and the probe's own cost per start.
fn notes(report: &Report) -> Vec<String> {
    let mut notes: Vec<String> = report.notable_ratios().map(ToString::to_string).collect();
    if let Some((bare, over)) = report.bare_boot.as_ref().and_then(|bare| Some((bare, bare.over?))) {
        notes.push(format!("{} over a bare boot of its VM: medians {over}", bare.like));
    }
    let rates = report.series.iter().filter_map(|series| Some((&series.runtime, series.rate?)));
    notes.extend(rates.map(|(runtime, rate)| format!("{runtime} without pauses: {rate}")));
    for series in report.series.iter().filter(|series| !series.release_spread_ms.is_empty()) {
        let spread = series.release_spread_ms.iter().copied().fold(0.0, f64::max);
        notes.push(format!(
            "{}: the pods of a group were started within {spread:.2} ms at most",
            series.runtime
        ));
    }
    if let Some(overhead) = &report.overhead {
        notes.push(format!(
            "the probe itself takes at most {} ms per pod (an empty call {} ms, detecting a first byte {} ms)",
            ms(overhead.per_pod_ms),
            ms(overhead.empty_call_ms),
            ms(overhead.mark_ms)
        ));
    }
    notes
}

/// Returns a table of each series' stages.
pub fn stages(report: &Report) -> Vec<Part> {
    let traced = report.series.iter().filter(|series| !series.stages.is_empty());
    let one = |series: &Series| {
        let mut table = Table::new(1, ["stage", "n", "p50", "p90", "p99", "max"]);
        let rest = series.unexplained.iter().map(|summary| ("unexplained".to_owned(), summary));
        let stages = series.stages.iter().map(|(stage, summary)| (stage.to_string(), summary));
        for (name, summary) in stages.chain(rest) {
            let figures = [summary.p50_ms, summary.p90_ms, summary.p99_ms, summary.max_ms].map(ms);
            table.row([name, summary.n.to_string()].into_iter().chain(figures));
        }
        let title = format!("Stages of {} {}, {}", series.runtime, series.mode, report.clock.ms());
        [Part::heading(title), Part::Table(table)]
    };
    traced.flat_map(one).collect()
}
