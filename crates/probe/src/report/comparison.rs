//! Ratios of start-up times between runtimes.

use serde::{Deserialize, Serialize};

use super::REFERENCE;
use super::series::{Series, times, times_by_group};
use crate::ratio::{MIN_GROUPS, Ratio};
use crate::sample::{Mode, Sample};

/// Comparison of two runtimes in the same mode of the same run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// How the pods were started.
    pub mode: Mode,
    /// Handler in the numerator.
    pub a: String,
    /// Handler in the denominator.
    pub b: String,
    /// Whether times of whole groups are compared instead of times of pods.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub groups: bool,
    /// Number of independent samples of a and of b: starts, or groups of [`Mode::Parallel`]. Earlier results have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub samples: Option<[usize; 2]>,
    /// Number of failed starts of a and of b. No median includes them.
    #[serde(default, skip_serializing_if = "none_failed")]
    pub failures: [usize; 2],
    /// Ratio of the medians.
    #[serde(flatten)]
    pub ratio: Ratio,
}

fn none_failed(failures: &[usize; 2]) -> bool {
    failures.iter().all(|count| *count == 0)
}

/// Formats as "sandboxer over runc, whole groups: medians 0.50 × (95 % CI 0.48 to 0.52), 2.00 times faster (1.92 to
/// 2.08)".
impl std::fmt::Display for Comparison {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let what = if self.groups { "whole groups".to_owned() } else { self.mode.to_string() };
        write!(f, "{} over {}, {what}: medians {}", self.a, self.b, self.ratio)?;
        match (self.failures, self.ratio.times_faster()) {
            // The slowest starts may be among the failed ones.
            ([a, b], _) if a + b > 0 => {
                write!(f, "; no verdict, because starts failed: {a} of {}, {b} of {}", self.a, self.b)
            }
            (_, Some(faster)) => write!(f, ", {faster}"),
            (_, None) => Ok(()),
        }
    }
}

/// Returns the compared pairs: the first runtime with each of the others, and those with [`REFERENCE`] and the
/// baseline.
pub(super) fn pairs<'a>(runtimes: &'a [String], baseline: Option<&'a str>) -> Vec<(&'a str, &'a str)> {
    let mut pairs: Vec<(&str, &str)> = Vec::new();
    let mut add = |a: &'a str, b: &'a str| {
        if a != b && !pairs.contains(&(a, b)) {
            pairs.push((a, b));
        }
    };
    if let Some((first, others)) = runtimes.split_first() {
        others.iter().for_each(|other| add(first, other));
    }
    for base in [Some(REFERENCE), baseline].into_iter().flatten() {
        if runtimes.iter().any(|name| name == base) {
            runtimes.iter().for_each(|name| add(name, base));
        }
    }
    pairs
}

impl Comparison {
    /// Returns the ratio of two runtimes' starts in this mode.
    pub(super) fn of_pods(
        (a, b): (&str, &str),
        mode: Mode,
        series: &[Series],
        samples: &[Sample],
    ) -> Option<Self> {
        let (ratio, n) = match mode {
            Mode::Parallel => {
                let [a, b] = [a, b].map(|runtime| times_by_group(samples, runtime));
                (Ratio::of_groups(&a, &b)?, [a.len(), b.len()])
            }
            Mode::Serial | Mode::Sustained => {
                let [a, b] = [a, b].map(|runtime| times(samples, runtime, mode));
                (Ratio::estimate(&a, &b)?, [a.len(), b.len()])
            }
        };
        Some(Self::new((a, b), mode, series, ratio, n))
    }

    /// Returns the ratio of the times of two runtimes' whole groups.
    pub(super) fn of_whole_groups((a, b): (&str, &str), series: &[Series]) -> Option<Self> {
        let walls = |runtime: &str| -> Vec<Vec<f64>> {
            let matching =
                series.iter().filter(|series| series.runtime == runtime && series.mode == Mode::Parallel);
            matching.flat_map(Series::walls).map(|wall| vec![wall]).collect()
        };
        let (of_a, of_b) = (walls(a), walls(b));
        let ratio = Ratio::of_groups(&of_a, &of_b)?;
        let comparison = Self::new((a, b), Mode::Parallel, series, ratio, [of_a.len(), of_b.len()]);
        Some(Self { groups: true, ..comparison })
    }

    fn new((a, b): (&str, &str), mode: Mode, series: &[Series], ratio: Ratio, samples: [usize; 2]) -> Self {
        let failures = |runtime: &str| {
            let matching = series.iter().filter(|series| series.runtime == runtime && series.mode == mode);
            matching.map(|series| series.summary.failures).sum()
        };
        let failures = [a, b].map(failures);
        Self {
            mode,
            a: a.to_owned(),
            b: b.to_owned(),
            groups: false,
            samples: Some(samples),
            failures,
            ratio,
        }
    }

    /// Removes an interval that earlier versions computed over the pods of groups as if they were independent.
    pub(super) fn without_interval_of_few_groups(&mut self) {
        let enough = self.samples.is_some_and(|samples| samples.iter().all(|count| *count >= MIN_GROUPS));
        if self.mode == Mode::Parallel && !enough {
            self.ratio.interval = None;
        }
    }
}
