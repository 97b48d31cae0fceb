//! The figures of results that rules judge.

use sandboxer_probe::report::times;
use sandboxer_probe::results::Results;
use sandboxer_probe::summary::median;

use super::sheet::From;

/// A figure of one system.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Figure {
    /// The mean; for a sweep, the mean of its cases' means.
    pub mean: f64,
    /// The median; for a sweep, the mean of its cases' medians.
    pub median: Option<f64>,
    /// The values, if they are of one case.
    pub values: Vec<f64>,
}

impl Figure {
    /// Returns the figure of a published mean.
    pub fn of_mean(mean: f64) -> Self {
        Self { mean, ..Self::default() }
    }

    /// Returns the figure of cases; `None` if a case has no values.
    pub fn of_cases(cases: &[Vec<f64>]) -> Option<Self> {
        let average = |average_of: &dyn Fn(&[f64]) -> Option<f64>| -> Option<f64> {
            let all = cases.iter().map(|values| average_of(values)).collect::<Option<Vec<f64>>>()?;
            mean(&all)
        };
        let values = if cases.len() == 1 { cases[0].clone() } else { Vec::new() };
        Some(Self { mean: average(&mean)?, median: average(&median), values })
    }
}

fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// Returns a figure of a runtime, from the first result that has it.
pub fn figure(results: &Results, from: &From, runtime: &str) -> Option<Figure> {
    match from {
        From::Workload { probe, cases, metric } => results.workloads.iter().find_map(|result| {
            let values = |case: &String| -> Vec<f64> {
                let mine = result
                    .runs
                    .iter()
                    .filter(|run| run.probe == *probe && run.case == *case && run.runtime == runtime);
                mine.filter_map(|run| run.figure(metric)).collect()
            };
            Figure::of_cases(&cases.iter().map(values).collect::<Vec<_>>())
        }),
        From::Startup { startup } => results
            .startups
            .iter()
            .find_map(|result| Figure::of_cases(&[times(&result.samples, runtime, *startup)])),
    }
}

/// Returns the properties of the results that a reader of a verdict must know.
pub fn remarks(results: &Results) -> Vec<String> {
    let mut remarks: Vec<String> = Vec::new();
    for result in &results.workloads {
        let name = &result.name;
        let more =
            result.report.notes.iter().filter(|note| note.starts_with("quick") || note.contains("emulated"));
        remarks.extend(more.map(|note| format!("{name}: {note}")));
        remarks.extend(result.report.partial_reason.iter().map(|why| format!("{name} is partial: {why}")));
    }
    for result in &results.startups {
        let failed = result.report.series.iter().filter(|series| series.summary.failures > 0);
        remarks.extend(failed.map(|series| {
            let (failures, n) = (series.summary.failures, series.summary.n);
            format!(
                "{}: {failures} of {n} starts of {} failed, and are in no figure",
                result.name, series.runtime
            )
        }));
    }
    remarks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sweep_is_the_mean_of_its_cases_and_needs_all_of_them() {
        let figure = Figure::of_cases(&[vec![1.0, 2.0, 9.0], vec![8.0]]).unwrap();
        assert_eq!((figure.mean, figure.median, figure.values.len()), (6.0, Some(5.0), 0));
        assert_eq!(Figure::of_cases(&[vec![1.0], vec![]]), None);
        assert_eq!(Figure::of_cases(&[vec![3.0, 4.0]]).unwrap().values, [3.0, 4.0]);
    }
}
