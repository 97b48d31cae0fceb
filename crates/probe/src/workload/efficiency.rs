//! CPU time of each variant on each runtime by role, and the work done per second of CPU time and per W.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::cpu::{Part, Time};
use super::definition::{Better, Probe, Profile};
use super::run::Run;
use crate::sample::Outcome;
use crate::summary::median;

/// One variant on one runtime: medians over the counted runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// Name of the probe.
    pub probe: String,
    /// Name of the variant; empty if there is none.
    pub case: String,
    /// Name of the series.
    pub runtime: String,
    /// Number of runs with CPU time.
    pub n: usize,
    /// CPU time by role, s. A role counts 0 in a run without it.
    pub parts: BTreeMap<Part, Time>,
    /// CPU time of everything that worked for the pod under test, s.
    pub pod_cpu_s: f64,
    /// Main figure per second of `pod_cpu_s`, if it is a rate: for "events/s", events.
    pub per_cpu_s: Option<f64>,
    /// Power of the host, W; `None` without a meter.
    pub watts: Option<f64>,
    /// Main figure per W, if it is a rate: for "events/s", events per J.
    pub per_watt: Option<f64>,
}

/// Returns the costs of every variant on every runtime with at least one run that has CPU time.
pub fn costs(probes: &[Probe], profile: Profile, runtimes: &[String], runs: &[Run]) -> Vec<Cost> {
    let mut all = Vec::new();
    for probe in probes {
        for case in probe.cases(profile) {
            for runtime in runtimes {
                let is_counted = |run: &&Run| {
                    run.outcome == Outcome::Ok
                        && !run.warm_up
                        && run.probe == probe.name
                        && run.case == case.name
                        && run.runtime == *runtime
                };
                let case_runs: Vec<&Run> = runs.iter().filter(is_counted).collect();
                all.extend(cost(probe, &case.name, runtime, &case_runs));
            }
        }
    }
    all
}

fn cost(probe: &Probe, case: &str, runtime: &str, runs: &[&Run]) -> Option<Cost> {
    let used: Vec<_> = runs.iter().filter_map(|run| run.cpu.as_ref()).collect();
    let medians = |part: &Part| {
        let median_of = |time: fn(&Time) -> f64| {
            let values: Vec<f64> =
                used.iter().map(|cpu| cpu.parts.get(part).map(time).unwrap_or_default()).collect();
            median(&values).unwrap_or_default()
        };
        Time {
            user_s: median_of(|time| time.user_s),
            system_s: median_of(|time| time.system_s),
            guest_s: median_of(|time| time.guest_s),
        }
    };
    let parts = Part::ALL.iter().map(|part| (*part, medians(part))).filter(|(_, time)| time.total_s() > 0.0);
    let pod: Vec<f64> = used.iter().map(|cpu| cpu.pods_s()).collect();
    let main = probe.metrics.first().filter(|metric| metric.better == Better::Higher && metric.is_rate());
    let rate = |run: &Run| run.figure(&main?.name);
    let per_cpu: Vec<f64> = runs.iter().filter_map(|run| run.cpu.as_ref()?.per_cpu_s(rate(run)?)).collect();
    let watts: Vec<f64> = runs.iter().filter_map(|run| run.power.watts).collect();
    let per_watt: Vec<f64> = runs
        .iter()
        .filter_map(|run| Some(rate(run)? / run.power.watts.filter(|watts| *watts > 0.0)?))
        .collect();
    Some(Cost {
        probe: probe.name.clone(),
        case: case.to_owned(),
        runtime: runtime.to_owned(),
        n: used.len(),
        parts: parts.collect(),
        pod_cpu_s: median(&pod)?,
        per_cpu_s: median(&per_cpu),
        watts: median(&watts),
        per_watt: median(&per_watt),
    })
}

/// Returns the CPU seconds by role as text, such as "vmm 1.20, rest 0.31"; omits roles below 5 ms.
pub fn shown(parts: &BTreeMap<Part, Time>) -> String {
    let large = parts.iter().filter(|(_, time)| time.total_s() >= 0.005);
    let one = |(part, time): (&Part, &Time)| format!("{} {:.2}", part.as_str(), time.total_s());
    large.map(one).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::cpu::RoleUse;
    use crate::workload::made_up::result;

    #[test]
    fn a_rate_is_per_cpu_second_and_per_watt_and_a_time_is_not() {
        let mut result = result(Profile::Quick);
        for run in &mut result.runs {
            let time = Time { user_s: 1.5, system_s: 0.5, guest_s: 0.0 };
            let parts = [(Part::Workload, time), (Part::Rest, time)].into();
            run.cpu = Some(RoleUse { window_s: 4.2, tool_s: Some(4.0), parts });
            run.power.watts = Some(25.0);
        }
        let runtimes = ["native".to_owned(), "runc".to_owned()];
        let costs = costs(&result.report.probes, Profile::Quick, &runtimes, &result.runs);
        let cost = |probe: &str, runtime: &str| {
            costs.iter().find(|cost| cost.probe == probe && cost.runtime == runtime).unwrap()
        };
        let cpu = cost("cpu", "native");
        // 100 per s for 4 s with 2 s of CPU time.
        assert_eq!((cpu.n, cpu.pod_cpu_s, cpu.per_cpu_s), (5, 2.0, Some(200.0)));
        assert_eq!((cpu.watts, cpu.per_watt), (Some(25.0), Some(4.0)));
        assert_eq!(cost("cpu", "runc").per_cpu_s, Some(100.0));
        assert_eq!(cost("latency", "runc").per_cpu_s, None);
        assert_eq!(shown(&cpu.parts), "workload 2.00, rest 2.00");
    }

    #[test]
    fn runs_without_cpu_time_have_no_costs() {
        let result = result(Profile::Quick);
        assert!(costs(&result.report.probes, Profile::Quick, &["runc".to_owned()], &result.runs).is_empty());
    }
}
