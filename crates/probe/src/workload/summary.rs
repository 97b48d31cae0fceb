//! Summaries of a variant's runs, and ratios of two runtimes with intervals.

use serde::{Deserialize, Serialize};

use super::definition::{Better, Metric, Probe, Profile};
use super::run::Run;
use crate::ratio::Ratio;
use crate::summary::{median, sorted};

/// Minimum number of values on each side for an interval: three values each of two equal runtimes are separated in one
/// of ten cases, four in one of 35.
pub const COMPARED_OF: usize = 4;
/// Minimum number of values to detect two levels, and minimum number at each level.
const LEVELS_OF: usize = 6;
const LEVEL_OF: usize = 2;
/// Minimum gap between two levels, relative to the upper one.
const LEVELS_APART: f64 = 0.15;
/// Maximum width of each level, relative to the gap.
const LEVEL_WIDTH: f64 = 0.5;

/// One metric of one variant on one runtime.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// Name of the probe.
    pub probe: String,
    /// Name of the variant; empty if there is none.
    pub case: String,
    /// Name of the series.
    pub runtime: String,
    /// Metric, unit and direction.
    #[serde(flatten)]
    pub metric: Metric,
    /// Number of counted runs, failures included.
    pub n: usize,
    /// Number of runs without a figure. The figures below are from the other `n - failures`.
    pub failures: usize,
    /// Smallest value.
    pub min: Option<f64>,
    /// Median value, by nearest rank.
    pub p50: Option<f64>,
    /// Largest value.
    pub max: Option<f64>,
    /// Arithmetic mean of the values.
    pub mean: Option<f64>,
    /// Standard deviation of the sample.
    pub sd: Option<f64>,
    /// Whether the values are at two levels, for example of two processor frequencies: the mean then has no meaning.
    pub two_levels: bool,
}

/// Comparison of two runtimes in one metric of one variant.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// Name of the probe.
    pub probe: String,
    /// Name of the variant; empty if there is none.
    pub case: String,
    /// Name of the metric.
    pub metric: String,
    /// Whether higher or lower values are better.
    pub better: Better,
    /// Handler in the numerator.
    pub a: String,
    /// Handler in the denominator.
    pub b: String,
    /// Number of values of a and of b.
    pub n: (usize, usize),
    /// Ratio of the medians.
    #[serde(flatten)]
    pub ratio: Ratio,
}

impl Comparison {
    /// Returns whether this is the ratio of `series`.
    pub fn is_of(&self, series: &Series) -> bool {
        self.probe == series.probe
            && self.case == series.case
            && self.metric == series.metric.name
            && self.a == series.runtime
    }
}

impl Series {
    fn new(probe: &Probe, case: &str, runtime: &str, metric: &Metric, runs: &[&Run]) -> Self {
        let values: Vec<f64> = runs.iter().filter_map(|run| run.figure(&metric.name)).collect();
        let failures = runs.iter().filter(|run| run.failed()).count();
        let ordered = sorted(&values);
        let count = values.len() as f64;
        let mean = (!values.is_empty()).then(|| values.iter().sum::<f64>() / count);
        let sd = mean.filter(|_| values.len() > 1).map(|mean| {
            (values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1.0)).sqrt()
        });
        Self {
            probe: probe.name.clone(),
            case: case.to_owned(),
            runtime: runtime.to_owned(),
            metric: metric.clone(),
            n: values.len() + failures,
            failures,
            min: ordered.first().copied(),
            p50: median(&values),
            max: ordered.last().copied(),
            mean,
            sd,
            two_levels: two_levels(&ordered),
        }
    }
}

/// Returns whether ascending values are at two levels: a wide gap with a narrow range on each side.
pub fn two_levels(ordered: &[f64]) -> bool {
    if ordered.len() < LEVELS_OF {
        return false;
    }
    let gaps = ordered.windows(2).map(|pair| pair[1] - pair[0]).enumerate();
    let Some((at, gap)) = gaps.max_by(|a, b| a.1.total_cmp(&b.1)) else { return false };
    let (low, high) = ordered.split_at(at + 1);
    let narrow =
        |level: &[f64]| level.len() >= LEVEL_OF && level[level.len() - 1] - level[0] <= LEVEL_WIDTH * gap;
    gap >= LEVELS_APART * high[high.len() - 1] && narrow(low) && narrow(high)
}

/// Returns every metric of every variant on every runtime, even if all runs failed.
pub fn series(probes: &[Probe], profile: Profile, runtimes: &[String], runs: &[Run]) -> Vec<Series> {
    let mut all = Vec::new();
    for probe in probes {
        for case in probe.cases(profile) {
            for metric in &probe.metrics {
                for runtime in runtimes {
                    let case_runs: Vec<&Run> = runs_of(runs, &probe.name, &case.name, runtime).collect();
                    all.push(Series::new(probe, &case.name, runtime, metric, &case_runs));
                }
            }
        }
    }
    all
}

/// Returns the ratio of every runtime to `reference`, if both have at least four values.
pub fn comparisons(series: &[Series], reference: &str, runs: &[Run]) -> Vec<Comparison> {
    let values = |series: &Series, runtime: &str| -> Vec<f64> {
        runs_of(runs, &series.probe, &series.case, runtime)
            .filter_map(|run| run.figure(&series.metric.name))
            .collect()
    };
    let others = series.iter().filter(|series| series.runtime != reference);
    others
        .filter_map(|series| {
            let (a, b) = (values(series, &series.runtime), values(series, reference));
            let ratio = (a.len().min(b.len()) >= COMPARED_OF).then(|| Ratio::of_few(&a, &b)).flatten()?;
            Some(Comparison {
                probe: series.probe.clone(),
                case: series.case.clone(),
                metric: series.metric.name.clone(),
                better: series.metric.better,
                a: series.runtime.clone(),
                b: reference.to_owned(),
                n: (a.len(), b.len()),
                ratio,
            })
        })
        .collect()
}

/// Returns the values of a series' counted runs.
pub fn values(runs: &[Run], series: &Series) -> Vec<f64> {
    runs_of(runs, &series.probe, &series.case, &series.runtime)
        .filter_map(|run| run.figure(&series.metric.name))
        .collect()
}

/// Formats a value with four digits; "–" without a value.
pub fn shown(value: Option<f64>) -> String {
    match value {
        None => "–".into(),
        Some(0.0) => "0".into(),
        Some(value) if value.abs() < 10.0 => format!("{value:.3}"),
        Some(value) if value.abs() < 1000.0 => format!("{value:.1}"),
        Some(value) => format!("{value:.0}"),
    }
}

fn runs_of<'a>(
    runs: &'a [Run],
    probe: &'a str,
    case: &'a str,
    runtime: &'a str,
) -> impl Iterator<Item = &'a Run> {
    runs.iter()
        .filter(move |run| !run.warm_up && run.probe == probe && run.case == case && run.runtime == runtime)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_clocks_of_a_processor_are_seen() {
        // The levels of a study whose processor ran at 1.6 and 2.4 GHz.
        assert!(two_levels(&[334.0, 335.0, 336.0, 500.0, 501.0, 502.0, 503.0]));
        assert!(!two_levels(&[334.0, 335.0, 336.0, 500.0]));
        assert!(!two_levels(&[498.0, 499.0, 500.0, 501.0, 502.0, 503.0]));
    }

    #[test]
    fn one_outlier_and_a_wide_spread_are_no_levels() {
        assert!(!two_levels(&[500.0, 500.0, 501.0, 502.0, 503.0, 900.0]));
        assert!(!two_levels(&[100.0, 150.0, 200.0, 260.0, 310.0, 370.0]));
    }

    #[test]
    fn numbers_are_short_and_none_is_no_zero() {
        let numbers = [None, Some(0.0), Some(0.0334), Some(99.96), Some(123_456.7)].map(shown);
        assert_eq!(numbers, ["–", "0", "0.033", "100.0", "123457"]);
    }
}
