//! A result of workloads as a table for a terminal.

use sandboxer_probe::workload::report::Report;

use crate::commands::tables::table;

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
            number(of.min),
            number(of.p50),
            number(of.max),
            number(of.mean),
            number(of.sd),
            ratio.map_or_else(|| "–".into(), |comparison| comparison.ratio.short()),
        ]);
    }
    let mut text = rows.trim_fmt();
    text.push_str(&format!(
        "\n{} profile, {} rounds, {} threads; ratios are of medians with their 95 % interval",
        report.profile, report.repeat, report.threads
    ));
    for note in &report.notes {
        text.push_str(&format!("\nnote: {note}"));
    }
    for (what, why) in &report.not_measured {
        text.push_str(&format!("\nnot measured: {what}: {why}"));
    }
    text
}

/// Returns a value with four digits, to keep columns narrow; "–" without a value.
fn number(value: Option<f64>) -> String {
    match value {
        None => "–".into(),
        Some(0.0) => "0".into(),
        Some(value) if value.abs() < 10.0 => format!("{value:.3}"),
        Some(value) if value.abs() < 1000.0 => format!("{value:.1}"),
        Some(value) => format!("{value:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_none_is_no_zero() {
        let shown = [None, Some(0.0), Some(0.0334), Some(99.96), Some(123_456.7)].map(number);
        assert_eq!(shown, ["–", "0", "0.033", "100.0", "123457"]);
    }
}
