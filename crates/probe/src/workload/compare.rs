//! Compares two results of workloads.

use serde::Serialize;

use super::definition::{Better, Parameters, Profile};
use super::report::Report;
use super::store::Loaded;
use super::summary::{self, COMPARED_OF, Series};
use crate::compare::{CompareError, Difference, SAME_HOST, SAME_POD, SAME_VMM, facts};
use crate::ratio::Ratio;

/// Comparison of two results.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// Names of the two results.
    #[serde(rename = "of")]
    pub names: [String; 2],
    /// Differences that make the two results incomparable.
    pub not_comparable: Vec<Difference>,
    /// Other differences, which limit what every ratio shows.
    pub differences: Vec<Difference>,
    /// Metrics that both results have, the second over the first.
    pub rows: Vec<Row>,
}

/// A metric of a variant on a runtime.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// Name of the probe.
    pub probe: String,
    /// Name of the variant.
    pub case: String,
    /// Runtime handler.
    pub runtime: String,
    /// Name of the metric.
    pub metric: String,
    /// Whether higher or lower values are better.
    pub better: Better,
    /// Median of each result; `None` without values.
    pub p50: [Option<f64>; 2],
    /// Ratio of the medians; `None` with fewer than four values on a side.
    pub ratio: Option<Ratio>,
}

/// Compares two results. They did not alternate, so a difference may come from the host.
pub fn compare(a: &Loaded, b: &Loaded) -> Result<Comparison, CompareError> {
    let clocks = [a.report.clock, b.report.clock];
    if clocks[0] != clocks[1] {
        return Err(CompareError::Clocks { a: a.name.clone(), b: b.name.clone(), clocks });
    }
    let other = |series: &Series| {
        let same = |other: &&Series| {
            (&other.probe, &other.case, &other.runtime, &other.metric.name)
                == (&series.probe, &series.case, &series.runtime, &series.metric.name)
        };
        b.report.series.iter().find(same)
    };
    let row = |series: &Series| {
        let other = other(series)?;
        let values = [(a, series), (b, other)].map(|(result, series)| summary::values(&result.runs, series));
        let enough = values.iter().all(|values| values.len() >= COMPARED_OF);
        Some(Row {
            probe: series.probe.clone(),
            case: series.case.clone(),
            runtime: series.runtime.clone(),
            metric: series.metric.name.clone(),
            better: series.metric.better,
            p50: [series.p50, other.p50],
            ratio: enough.then(|| Ratio::of_few(&values[1], &values[0])).flatten(),
        })
    };
    let rows: Vec<Row> = a.report.series.iter().filter_map(row).collect();
    if rows.is_empty() {
        return Err(CompareError::NothingInCommon { a: a.name.clone(), b: b.name.clone() });
    }
    let (of_a, of_b) = (&a.report.manifest, &b.report.manifest);
    let mut not_comparable = facts("pod", &SAME_POD, &of_a.pod, &of_b.pod);
    not_comparable.extend(facts("plan", &["cpus", "memory_bytes"], &of_a.plan, &of_b.plan));
    not_comparable.extend(profiles([a.report.profile, b.report.profile]));
    not_comparable.extend(probes([&a.report, &b.report]));
    let mut differences = facts("host", &SAME_HOST, &of_a.host, &of_b.host);
    differences.extend(facts("VMM", &SAME_VMM, &of_a.vmm, &of_b.vmm));
    differences.extend(facts("plan", &["volumes", "client_runtime"], &of_a.plan, &of_b.plan));
    Ok(Comparison { names: [a.name.clone(), b.name.clone()], not_comparable, differences, rows })
}

fn profiles(profiles: [Profile; 2]) -> Option<Difference> {
    (profiles[0] != profiles[1])
        .then(|| Difference { what: "profile".into(), values: profiles.map(|profile| profile.to_string()) })
}

/// Returns the probes whose definitions differ between the results, such as changed parameters of `quick`.
fn probes([a, b]: [&Report; 2]) -> impl Iterator<Item = Difference> {
    let both = a.probes.iter().filter_map(|one| {
        let other = b.probes.iter().find(|other| other.name == one.name)?;
        (one != other).then_some([one, other])
    });
    both.map(|both| {
        let parameters = both.map(|probe| shown(probe.parameters(a.profile)));
        let (what, values) = if parameters[0] == parameters[1] {
            ("command, metrics or variants", both.map(|probe| probe.command.join(" ")))
        } else {
            ("parameters", parameters)
        };
        Difference { what: format!("{} of probe {}", what, both[0].name), values }
    })
}

/// Returns parameters as text.
fn shown(parameters: &Parameters) -> String {
    serde_json::to_string(parameters).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::made_up::result;

    #[test]
    fn the_same_result_has_ratios_of_one() {
        let a = result(Profile::Quick);
        let comparison = compare(&a, &a).unwrap();
        assert!(comparison.not_comparable.is_empty() && comparison.differences.is_empty());
        assert_eq!(comparison.rows.len(), a.report.series.len());
        assert!(comparison.rows.iter().all(|row| row.ratio.is_some_and(|ratio| ratio.p50 == 1.0)));
    }

    #[test]
    fn two_hosts_and_two_profiles_are_told() {
        let (a, mut b) = (result(Profile::Quick), result(Profile::Paper));
        b.report.manifest.host.insert("cpu".into(), "another".into());
        let comparison = compare(&a, &b).unwrap();
        assert_eq!(comparison.not_comparable[0].values, ["quick", "paper"]);
        assert!(
            comparison.differences.iter().any(|difference| difference.what.contains("cpu")),
            "{comparison:?}"
        );
    }

    #[test]
    fn changed_parameters_of_a_profile_are_told() {
        let (a, mut b) = (result(Profile::Quick), result(Profile::Quick));
        b.report.probes[0].quick.takes += 1.0;
        b.report.probes[1].command.push("--more".into());
        let incomparable: Vec<String> =
            compare(&a, &b).unwrap().not_comparable.into_iter().map(|difference| difference.what).collect();
        assert_eq!(incomparable, ["parameters of probe cpu", "command, metrics or variants of probe http"]);
    }

    #[test]
    fn virtual_times_are_not_compared_with_real_ones() {
        let (a, mut b) = (result(Profile::Quick), result(Profile::Quick));
        b.report.clock = crate::clock::Clock::Virtual;
        assert!(matches!(compare(&a, &b), Err(CompareError::Clocks { .. })));
    }

    #[test]
    fn results_without_a_common_metric_are_refused() {
        let (a, mut b) = (result(Profile::Quick), result(Profile::Quick));
        b.report.series.iter_mut().for_each(|series| series.runtime.push('x'));
        assert!(compare(&a, &b).unwrap_err().to_string().contains("nothing to compare"));
    }
}
