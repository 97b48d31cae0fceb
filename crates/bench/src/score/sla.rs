//! The highest rate of transactions that keeps within a bound of latency, on a ladder of rates.

use sandboxer_probe::results::Results;
use sandboxer_probe::sample::Outcome;
use sandboxer_probe::summary::median;
use sandboxer_probe::workload::run::Run;
use sandboxer_probe::workload::store::Loaded;
use serde::Serialize;

use super::sheet::Sla;

/// Score of one runtime.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Score {
    /// Name of the result.
    pub result: String,
    /// Name of the runtime.
    pub runtime: String,
    /// The highest rate for each bound, per s; `None` if the lowest rate exceeds the bound or was not measured.
    pub rates: Vec<Option<f64>>,
    /// Whether each bound's rate is the ladder's highest: the true one may be higher.
    pub at_top: Vec<bool>,
    /// Geometric mean of the rates; `None` if a bound has none.
    pub score: Option<f64>,
    /// Score divided by the baseline's.
    pub over_baseline: Option<f64>,
}

/// Measured figures at one rate of the ladder.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Rung {
    rate: f64,
    latency_ms: f64,
    done: f64,
}

/// Scores every runtime of every result.
pub fn score(sla: &Sla, results: &Results) -> Vec<Score> {
    results.workloads.iter().flat_map(|result| of_result(sla, result)).collect()
}

fn of_result(sla: &Sla, result: &Loaded) -> Vec<Score> {
    let mut runtimes: Vec<&String> = result.report.series.iter().map(|series| &series.runtime).collect();
    runtimes.dedup();
    let mut scores: Vec<Score> = Vec::new();
    for runtime in runtimes {
        if scores.iter().all(|score| score.runtime != *runtime) {
            let ladder = ladder(sla, result, runtime);
            scores.push(scored(sla, &result.name, runtime, &ladder));
        }
    }
    let baseline = scores.iter().find(|score| score.runtime == sla.baseline).and_then(|score| score.score);
    for score in &mut scores {
        score.over_baseline = score.score.zip(baseline).map(|(score, baseline)| score / baseline);
    }
    scores
}

/// Returns the rungs in ascending order, up to the first without figures: a failure ends the ladder.
fn ladder(sla: &Sla, result: &Loaded, runtime: &str) -> Vec<Rung> {
    let probe = result.report.probes.iter().find(|probe| probe.name == sla.probe);
    let cases = probe.into_iter().flat_map(|probe| probe.cases(result.report.profile));
    let mut rates: Vec<(f64, &str)> =
        cases.filter_map(|case| Some((case.values.get(&sla.rate)?.parse().ok()?, &*case.name))).collect();
    rates.sort_by(|a, b| a.0.total_cmp(&b.0));
    // A single failed run leaves the rung without a figure: it may have failed because the rate was too high.
    let measured = |case: &str, metric: &str| {
        let is_counted = |run: &&Run| {
            let counts = !run.warm_up && run.outcome != Outcome::Interrupted;
            counts && run.probe == sla.probe && run.case == case && run.runtime == runtime
        };
        let values: Option<Vec<f64>> =
            result.runs.iter().filter(is_counted).map(|run| run.figure(metric)).collect();
        median(&values?)
    };
    rates
        .into_iter()
        .map_while(|(rate, case)| {
            let latency_ms = measured(case, &sla.latency)? / 1e3;
            Some(Rung { rate, latency_ms, done: measured(case, &sla.done)? })
        })
        .collect()
}

fn scored(sla: &Sla, result: &str, runtime: &str, ladder: &[Rung]) -> Score {
    let keeps = |rung: &&Rung, bound: f64| {
        rung.latency_ms <= bound && rung.done >= rung.rate * sla.done_percent / 100.0
    };
    let rungs_within = |bound: &f64| ladder.iter().take_while(|rung| keeps(rung, *bound)).count();
    let counts: Vec<usize> = sla.bounds_ms.iter().map(rungs_within).collect();
    let rates: Vec<Option<f64>> =
        counts.iter().map(|count| count.checked_sub(1).map(|at| ladder[at].rate)).collect();
    let all: Option<Vec<f64>> = rates.iter().copied().collect();
    let score = all.map(|rates| (rates.iter().map(|rate| rate.ln()).sum::<f64>() / rates.len() as f64).exp());
    Score {
        result: result.to_owned(),
        runtime: runtime.to_owned(),
        at_top: counts.iter().map(|count| !ladder.is_empty() && *count == ladder.len()).collect(),
        rates,
        score,
        over_baseline: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::made_up;
    use crate::score::sheet::Sheet;
    use sandboxer_probe::workload::definition::{self, Profile};

    fn sla() -> Sla {
        match Sheet::built_in("sla") {
            Some(Sheet::Sla(sla)) => sla,
            other => panic!("{other:?}"),
        }
    }

    fn rung(rate: f64, latency_ms: f64, done: f64) -> Rung {
        Rung { rate, latency_ms, done }
    }

    #[test]
    fn the_highest_rate_below_each_bound_counts() {
        let ladder = [rung(100.0, 1.0, 100.0), rung(200.0, 20.0, 200.0), rung(400.0, 60.0, 398.0)];
        let score = scored(&sla(), "a", "runc", &ladder);
        assert_eq!(score.rates, [100.0, 200.0, 200.0, 400.0, 400.0].map(Some));
        assert_eq!(score.at_top, [false, false, false, true, true]);
        let mean = (100.0f64 * 200.0 * 200.0 * 400.0 * 400.0).powf(0.2);
        assert!((score.score.unwrap() - mean).abs() < 1e-9);
    }

    #[test]
    fn a_rung_with_a_failed_run_is_not_held_by_the_others() {
        let mut result = made_up::result(Profile::Quick);
        result.report.probes =
            definition::all().into_iter().filter(|probe| probe.name == sla().probe).collect();
        let cases: Vec<_> = result.report.probes[0].cases(result.report.profile).cloned().collect();
        let run = result.runs[0].clone();
        result.runs = cases
            .iter()
            .flat_map(|case| (0..3).map(move |round| (case, round)))
            .map(|(case, round)| {
                let rate: f64 = case.values[&sla().rate].parse().unwrap();
                let figures = [(sla().latency, 500.0), (sla().done, rate)].into();
                Run {
                    probe: sla().probe,
                    case: case.name.clone(),
                    runtime: "runc".into(),
                    round,
                    figures,
                    ..run.clone()
                }
            })
            .collect();
        assert_eq!(ladder(&sla(), &result, "runc").len(), cases.len());
        // Two of the three runs at the second rate fail: they exceed their time, and have no latency.
        let second = ladder(&sla(), &result, "runc")[1].rate;
        for run in result.runs.iter_mut().filter(|run| run.figures[&sla().done] == second).take(2) {
            (run.outcome, run.figures) = (Outcome::Failed, Default::default());
        }
        assert_eq!(ladder(&sla(), &result, "runc").len(), 1);
    }

    #[test]
    fn work_that_is_not_done_and_gaps_in_the_ladder_end_it() {
        let ladder = [rung(100.0, 1.0, 100.0), rung(200.0, 1.0, 120.0), rung(400.0, 1.0, 400.0)];
        assert_eq!(scored(&sla(), "a", "runc", &ladder).rates, [Some(100.0); 5]);
        let none = scored(&sla(), "a", "runc", &[]);
        assert_eq!((none.score, none.at_top), (None, vec![false; 5]));
    }
}
