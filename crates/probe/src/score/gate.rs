//! A gate: every metric within a tolerance of the baseline's, start-up included.

use serde::Serialize;

use super::figures::Results;
use super::sheet::Gate;
use crate::ratio::Ratio;
use crate::report::times;
use crate::store::Loaded as Startup;
use crate::workload::definition::Better;
use crate::workload::store::Loaded as Workload;
use crate::workload::summary;

/// Verdict on one metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The interval is within the tolerance.
    Pass,
    /// All of the interval is better than the tolerance.
    Better,
    /// All of the interval is worse than the tolerance.
    Fail,
    /// The interval crosses the tolerance: more rounds decide.
    Undecided,
    /// A side has too few values.
    NotMeasured,
    /// The guests were emulated: the figure says nothing about the runtime.
    Emulated,
}

/// A judged metric.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Judged {
    /// The result.
    pub result: String,
    /// Probe and case, or the mode of start-up.
    pub what: String,
    /// The metric.
    pub metric: String,
    /// The runtime.
    pub runtime: String,
    /// Ratio to the baseline's median, with its interval.
    pub ratio: Option<Ratio>,
    /// The verdict.
    pub verdict: Verdict,
}

impl Verdict {
    /// Returns the verdict on a ratio.
    pub fn of(ratio: &Ratio, better: Better, tolerance_percent: f64) -> Self {
        let (low, high) = (1.0 - tolerance_percent / 100.0, 1.0 + tolerance_percent / 100.0);
        let (above, below) = match better {
            Better::Higher => (Verdict::Better, Verdict::Fail),
            Better::Lower => (Verdict::Fail, Verdict::Better),
        };
        match ratio {
            ratio if ratio.ci_low >= low && ratio.ci_high <= high => Verdict::Pass,
            ratio if ratio.ci_low > high => above,
            ratio if ratio.ci_high < low => below,
            _ => Verdict::Undecided,
        }
    }

    /// Returns whether a gate lets it through.
    pub fn passes(self) -> bool {
        matches!(self, Verdict::Pass | Verdict::Better)
    }

    /// Returns its name.
    pub const fn as_str(self) -> &'static str {
        match self {
            Verdict::Pass => "pass",
            Verdict::Better => "better",
            Verdict::Fail => "FAIL",
            Verdict::Undecided => "undecided",
            Verdict::NotMeasured => "not measured",
            Verdict::Emulated => "not judged: emulated",
        }
    }
}

/// Judges every metric of every runtime except the baseline.
pub fn judge(gate: &Gate, results: &Results) -> Vec<Judged> {
    let of_workloads = results.workloads.iter().flat_map(|of| of_workload(gate, of));
    let of_startups = results.startups.iter().flat_map(|of| of_startup(gate, of));
    of_workloads.chain(of_startups).collect()
}

fn of_workload(gate: &Gate, of: &Workload) -> Vec<Judged> {
    let compared = summary::comparisons(&of.report.series, &gate.baseline, &of.runs);
    let others = of.report.series.iter().filter(|series| series.runtime != gate.baseline);
    others
        .map(|series| {
            let ratio = compared.iter().find(|found| found.is_of(series)).map(|found| found.ratio);
            let verdict = match ratio {
                _ if of.report.manifest.is_emulated(&series.runtime) => Verdict::Emulated,
                None => Verdict::NotMeasured,
                Some(ratio) => Verdict::of(&ratio, series.metric.better, gate.tolerance_percent),
            };
            Judged {
                result: of.name.clone(),
                what: format!("{} {}", series.probe, series.case).trim_end().to_owned(),
                metric: series.metric.name.clone(),
                runtime: series.runtime.clone(),
                ratio,
                verdict,
            }
        })
        .collect()
}

fn of_startup(gate: &Gate, of: &Startup) -> Vec<Judged> {
    let others = of.report.series.iter().filter(|series| series.runtime != gate.baseline);
    others
        .map(|series| {
            let values = |runtime: &str| times(&of.samples, runtime, series.mode);
            let ratio = Ratio::of_few(&values(&series.runtime), &values(&gate.baseline));
            let verdict = match ratio {
                _ if of.report.manifest.is_emulated(&series.runtime) => Verdict::Emulated,
                None => Verdict::NotMeasured,
                Some(ratio) => Verdict::of(&ratio, Better::Lower, gate.tolerance_percent),
            };
            Judged {
                result: of.name.clone(),
                what: format!("start-up {}", series.mode),
                metric: "first_byte_ms".into(),
                runtime: series.runtime.clone(),
                ratio,
                verdict,
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(low: f64, high: f64, better: Better) -> Verdict {
        Verdict::of(&Ratio { p50: (low + high) / 2.0, ci_low: low, ci_high: high }, better, 5.0)
    }

    #[test]
    fn an_interval_within_passes_one_outside_fails_and_one_across_is_undecided() {
        for better in [Better::Higher, Better::Lower] {
            assert_eq!(of(0.96, 1.04, better), Verdict::Pass);
            assert_eq!(of(0.94, 1.04, better), Verdict::Undecided);
            assert_eq!(of(0.90, 1.10, better), Verdict::Undecided);
        }
        assert_eq!(of(1.4, 2.0, Better::Lower), Verdict::Fail);
        assert_eq!(of(1.4, 2.0, Better::Higher), Verdict::Better);
        assert_eq!(of(0.5, 0.8, Better::Higher), Verdict::Fail);
        assert_eq!(of(0.5, 0.8, Better::Lower), Verdict::Better);
    }

    #[test]
    fn only_what_is_shown_passes() {
        let passing = [Verdict::Pass, Verdict::Better];
        let others = [Verdict::Fail, Verdict::Undecided, Verdict::NotMeasured, Verdict::Emulated];
        assert!(passing.iter().all(|verdict| verdict.passes()));
        assert!(!others.iter().any(|verdict| verdict.passes()));
    }
}
