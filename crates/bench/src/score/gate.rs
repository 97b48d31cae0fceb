//! A gate: every metric must be within a tolerance of the baseline's, start-up included.

use sandboxer_probe::ratio::Ratio;
use sandboxer_probe::report::{Series, times, times_by_group};
use sandboxer_probe::results::Results;
use sandboxer_probe::sample::Mode;
use sandboxer_probe::store::Loaded as Startup;
use sandboxer_probe::workload::definition::Better;
use sandboxer_probe::workload::store::Loaded as Workload;
use sandboxer_probe::workload::summary;
use serde::Serialize;

use super::sheet::Gate;

/// Verdict on one metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The interval is within the tolerance.
    Pass,
    /// The whole interval is better than the tolerance.
    Better,
    /// The whole interval is worse than the tolerance.
    Fail,
    /// The interval crosses the tolerance: more rounds are needed to decide.
    Undecided,
    /// A side has too few values, or the baseline had failed starts or runs.
    NotMeasured,
    /// A side has fewer than three groups: the pods of one group are one sample.
    TooFewGroups,
    /// The guests were emulated: the figure does not describe the runtime.
    Emulated,
}

/// A judged metric.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Judged {
    /// Name of the result.
    pub result: String,
    /// Probe and case, or the mode of start-up.
    pub what: String,
    /// Name of the metric.
    pub metric: String,
    /// Name of the judged runtime.
    pub runtime: String,
    /// Ratio to the baseline's median, with its interval.
    pub ratio: Option<Ratio>,
    /// Failed starts or runs, of the runtime and of the baseline. No median includes them, although the slowest may be
    /// among them. So a runtime with failures does not pass, and nothing passes if the baseline has failures.
    pub failures: [usize; 2],
    /// Verdict on the metric.
    pub verdict: Verdict,
}

impl Verdict {
    /// Returns the verdict on a ratio.
    pub fn judge(ratio: &Ratio, better: Better, tolerance_percent: f64) -> Self {
        let (low, high) = (1.0 - tolerance_percent / 100.0, 1.0 + tolerance_percent / 100.0);
        let (above, below) = match better {
            Better::Higher => (Verdict::Better, Verdict::Fail),
            Better::Lower => (Verdict::Fail, Verdict::Better),
        };
        match ratio.interval {
            None => Verdict::TooFewGroups,
            Some(ends) if ends.ci_low >= low && ends.ci_high <= high => Verdict::Pass,
            Some(ends) if ends.ci_low > high => above,
            Some(ends) if ends.ci_high < low => below,
            Some(_) => Verdict::Undecided,
        }
    }

    /// Returns the verdict on a runtime with these failures.
    fn on(
        is_emulated: bool,
        [own, of_baseline]: [usize; 2],
        ratio: Option<&Ratio>,
        better: Better,
        tolerance_percent: f64,
    ) -> Self {
        match ratio {
            _ if is_emulated => Verdict::Emulated,
            _ if own > 0 => Verdict::Fail,
            None => Verdict::NotMeasured,
            Some(_) if of_baseline > 0 => Verdict::NotMeasured,
            Some(ratio) => Verdict::judge(ratio, better, tolerance_percent),
        }
    }

    /// Returns whether the gate passes this verdict.
    pub fn passes(self) -> bool {
        matches!(self, Verdict::Pass | Verdict::Better)
    }

    /// Returns the verdict's name.
    pub const fn as_str(self) -> &'static str {
        match self {
            Verdict::Pass => "pass",
            Verdict::Better => "better",
            Verdict::Fail => "FAIL",
            Verdict::Undecided => "undecided",
            Verdict::NotMeasured => "not measured",
            Verdict::TooFewGroups => "too few groups",
            Verdict::Emulated => "not judged: emulated",
        }
    }
}

/// Judges every metric of every runtime except the baseline.
pub fn judge(gate: &Gate, results: &Results) -> Vec<Judged> {
    let of_workloads = results.workloads.iter().flat_map(|result| of_workload(gate, result));
    let of_startups = results.startups.iter().flat_map(|result| of_startup(gate, result));
    of_workloads.chain(of_startups).collect()
}

fn of_workload(gate: &Gate, result: &Workload) -> Vec<Judged> {
    let compared = summary::comparisons(&result.report.series, &gate.baseline, &result.runs);
    let others = result.report.series.iter().filter(|series| series.runtime != gate.baseline);
    others
        .map(|series| {
            let ratio = compared.iter().find(|found| found.is_of(series)).map(|found| found.ratio);
            let same = |other: &&summary::Series| {
                other.runtime == gate.baseline
                    && (&other.probe, &other.case, &other.metric.name)
                        == (&series.probe, &series.case, &series.metric.name)
            };
            let of_baseline = result.report.series.iter().find(same).map_or(0, |other| other.failures);
            let failures = [series.failures, of_baseline];
            let is_emulated = result.report.manifest.is_emulated(&series.runtime);
            let verdict = Verdict::on(
                is_emulated,
                failures,
                ratio.as_ref(),
                series.metric.better,
                gate.tolerance_percent,
            );
            Judged {
                result: result.name.clone(),
                what: format!("{} {}", series.probe, series.case).trim_end().to_owned(),
                metric: series.metric.name.clone(),
                runtime: series.runtime.clone(),
                ratio,
                failures,
                verdict,
            }
        })
        .collect()
}

fn of_startup(gate: &Gate, result: &Startup) -> Vec<Judged> {
    let others = result.report.series.iter().filter(|series| series.runtime != gate.baseline);
    others
        .map(|series| {
            let ratio = match series.mode {
                Mode::Parallel => {
                    let [a, b] =
                        [&series.runtime, &gate.baseline].map(|name| times_by_group(&result.samples, name));
                    Ratio::of_groups(&a, &b)
                }
                Mode::Serial | Mode::Sustained => {
                    let values = |runtime: &str| times(&result.samples, runtime, series.mode);
                    Ratio::of_few(&values(&series.runtime), &values(&gate.baseline))
                }
            };
            let same = |other: &&Series| other.runtime == gate.baseline && other.mode == series.mode;
            let of_baseline =
                result.report.series.iter().find(same).map_or(0, |other| other.summary.failures);
            let failures = [series.summary.failures, of_baseline];
            let is_emulated = result.report.manifest.is_emulated(&series.runtime);
            let verdict =
                Verdict::on(is_emulated, failures, ratio.as_ref(), Better::Lower, gate.tolerance_percent);
            Judged {
                result: result.name.clone(),
                what: format!("start-up {}", series.mode),
                metric: "first_byte_ms".into(),
                runtime: series.runtime.clone(),
                ratio,
                failures,
                verdict,
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::score::sheet::Sheet;
    use sandboxer_probe::ratio::Interval;
    use sandboxer_probe::report::Report;
    use sandboxer_probe::sample::{Outcome, Sample};

    fn verdict(low: f64, high: f64, better: Better) -> Verdict {
        let interval = Some(Interval { ci_low: low, ci_high: high });
        Verdict::judge(&Ratio { p50: (low + high) / 2.0, interval }, better, 5.0)
    }

    /// Returns the verdict on a runtime that is twice as fast as the baseline, in this many groups of ten pods.
    fn judged(mode: Mode, groups: u32, failures: [usize; 2]) -> Judged {
        let start = |runtime: &str, round: u32, index: u32, ms: f64| Sample {
            round,
            index,
            ..Sample::new(runtime, mode, ms + f64::from(round) + f64::from(index) / 10.0)
        };
        let mut samples = Vec::new();
        for (runtime, ms, failed) in [("fast", 100.0, failures[0]), ("slow", 200.0, failures[1])] {
            let all = (0..groups).flat_map(|round| (0..10).map(move |index| (round, index)));
            samples.extend(all.enumerate().map(|(at, (round, index))| Sample {
                outcome: if at < failed { Outcome::Failed } else { Outcome::Ok },
                ..start(runtime, round, index, ms)
            }));
        }
        let mut report = Report::new(Default::default());
        report.add_startup(&["fast", "slow"].map(str::to_owned), &samples, &[]);
        let startups = vec![Startup { name: "r".into(), report, samples }];
        let gate = match Sheet::built_in("gate") {
            Some(Sheet::Gate(gate)) => Gate { baseline: "slow".into(), ..gate },
            other => panic!("{other:?}"),
        };
        judge(&gate, &Results { startups, ..Results::default() }).remove(0)
    }

    #[test]
    fn a_runtime_that_fails_its_slow_starts_does_not_pass() {
        assert_eq!(judged(Mode::Serial, 3, [0, 0]).verdict, Verdict::Better);
        let failed = judged(Mode::Serial, 3, [1, 0]);
        assert_eq!((failed.verdict, failed.failures), (Verdict::Fail, [1, 0]));
        // The baseline's remaining starts may be its fast ones or its slow ones.
        assert!(!judged(Mode::Serial, 3, [0, 1]).verdict.passes());
        assert_eq!(judged(Mode::Serial, 3, [30, 0]).verdict, Verdict::Fail);
    }

    #[test]
    fn pods_of_one_or_two_groups_get_no_verdict() {
        assert_eq!(
            [1, 2].map(|groups| judged(Mode::Parallel, groups, [0, 0]).verdict),
            [Verdict::TooFewGroups; 2]
        );
        assert_eq!(judged(Mode::Parallel, 3, [0, 0]).verdict, Verdict::Better);
    }

    #[test]
    fn an_interval_within_passes_one_outside_fails_and_one_across_is_undecided() {
        for better in [Better::Higher, Better::Lower] {
            assert_eq!(verdict(0.96, 1.04, better), Verdict::Pass);
            assert_eq!(verdict(0.94, 1.04, better), Verdict::Undecided);
            assert_eq!(verdict(0.90, 1.10, better), Verdict::Undecided);
        }
        assert_eq!(verdict(1.4, 2.0, Better::Lower), Verdict::Fail);
        assert_eq!(verdict(1.4, 2.0, Better::Higher), Verdict::Better);
        assert_eq!(verdict(0.5, 0.8, Better::Higher), Verdict::Fail);
        assert_eq!(verdict(0.5, 0.8, Better::Lower), Verdict::Better);
    }

    #[test]
    fn only_what_is_shown_passes() {
        let passing = [Verdict::Pass, Verdict::Better];
        let others = [
            Verdict::Fail,
            Verdict::Undecided,
            Verdict::NotMeasured,
            Verdict::TooFewGroups,
            Verdict::Emulated,
        ];
        assert!(passing.iter().all(|verdict| verdict.passes()));
        assert!(!others.iter().any(|verdict| verdict.passes()));
    }
}
