//! Compares two results, and lists the differences that make them incomparable.

use std::collections::BTreeSet;

use serde::Serialize;
use serde_json::Value;

use crate::clock::Clock;
use crate::manifest::{Facts, shown};
use crate::ratio::Ratio;
use crate::report::{times, times_by_group};
use crate::sample::Mode;
use crate::store::Loaded;

/// Facts of the pod that must be equal in comparable results.
pub const SAME_POD: [&str; 4] = ["image_digest", "command", "network_asked_for", "annotations"];
/// Facts of the host whose differences are shown.
pub const SAME_HOST: [&str; 8] =
    ["cpu", "cpus", "smt", "numa_nodes", "memory_kib", "kernel", "governor", "virtual_machine"];
/// Facts of the VMM whose differences are shown.
pub const SAME_VMM: [&str; 5] = ["vmm", "vmm_version", "accelerator", "kernel_sha256", "initramfs_sha256"];

/// Comparison of two results.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// Names of the two results.
    #[serde(rename = "of")]
    pub names: [String; 2],
    /// Clock of both results.
    pub clock: Clock,
    /// Differences that make the two results incomparable; empty if they are comparable.
    pub not_comparable: Vec<Difference>,
    /// Other differences, which limit what every ratio shows.
    pub differences: Vec<Difference>,
    /// Start-up, the second result over the first.
    pub startup: Vec<StartUp>,
    /// Memory, the second result over the first.
    pub memory: Vec<Memory>,
}

/// A fact that differs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Difference {
    /// Name of the fact.
    pub what: String,
    /// The fact's value in each result.
    pub values: [String; 2],
}

/// Start-up of one runtime in one mode.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StartUp {
    /// Runtime handler.
    pub runtime: String,
    /// How the pods were started.
    pub mode: Mode,
    /// Median start-up time of each result, ms; `None` without times.
    pub p50_ms: [Option<f64>; 2],
    /// Number of failed starts of each result. No median includes them.
    pub failures: [usize; 2],
    /// Ratio of the medians; `None` unless both sides have times.
    pub ratio: Option<Ratio>,
}

impl StartUp {
    /// Returns the ratio as text, with the factor by which the second result is faster.
    pub fn shown(&self) -> String {
        let Some(ratio) = self.ratio else { return "not measured: one side has no times".into() };
        match (self.failures, ratio.times_faster()) {
            ([a, b], _) if a + b > 0 => format!("{ratio}; no verdict: {a} | {b} starts failed"),
            (_, Some(faster)) => format!("{ratio}, {faster}"),
            (_, None) => ratio.to_string(),
        }
    }
}

/// Memory of one runtime with one number of pods.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Memory {
    /// Runtime handler.
    pub runtime: String,
    /// Number of pods.
    pub pods: u32,
    /// Memory of management in each result, KiB.
    pub management_kib: [f64; 2],
    /// Memory of all roles in each result, KiB.
    pub total_kib: [f64; 2],
}

/// Why two results cannot be compared.
#[derive(Debug, thiserror::Error)]
pub enum CompareError {
    /// The two results have no series in common.
    #[error("{a} and {b} have no runtime, mode and number of pods in common: there is nothing to compare")]
    NothingInCommon {
        /// Name of the first result.
        a: String,
        /// Name of the second result.
        b: String,
    },
    /// The clocks of the two results differ.
    #[error(
        "times of {a} are {} and those of {b} are {}: their ratio has no meaning. Compare runs with the same clock; ratios \
         of one run, such as those to runc, can be read beside each other",
        clocks[0].ms(), clocks[1].ms()
    )]
    Clocks {
        /// Name of the first result.
        a: String,
        /// Name of the second result.
        b: String,
        /// Clock of each result.
        clocks: [Clock; 2],
    },
}

/// Compares two runs. They did not alternate, so a difference may come from the host.
pub fn compare(a: &Loaded, b: &Loaded) -> Result<Comparison, CompareError> {
    let clocks = [a.report.clock, b.report.clock];
    if clocks[0] != clocks[1] && !a.report.series.is_empty() && !b.report.series.is_empty() {
        return Err(CompareError::Clocks { a: a.name.clone(), b: b.name.clone(), clocks });
    }
    let (startup, memory) = (startups(a, b), memories(a, b));
    if startup.is_empty() && memory.is_empty() {
        return Err(CompareError::NothingInCommon { a: a.name.clone(), b: b.name.clone() });
    }
    let (of_a, of_b) = (&a.report.manifest, &b.report.manifest);
    Ok(Comparison {
        names: [a.name.clone(), b.name.clone()],
        clock: clocks[0],
        not_comparable: facts("pod", &SAME_POD, &of_a.pod, &of_b.pod),
        differences: differences(a, b),
        startup,
        memory,
    })
}

/// Compares the start-up times of the runtimes that both results have.
fn startups(a: &Loaded, b: &Loaded) -> Vec<StartUp> {
    a.report
        .series
        .iter()
        .filter_map(|of_a| {
            let of_b = b.report.series.iter().find(|of_b| {
                (&of_b.runtime, of_b.mode, of_b.group) == (&of_a.runtime, of_a.mode, of_a.group)
            })?;
            let ratio = match of_a.mode {
                Mode::Parallel => {
                    let [a, b] = [a, b].map(|result| times_by_group(&result.samples, &of_a.runtime));
                    Ratio::of_groups(&b, &a)
                }
                Mode::Serial | Mode::Sustained => {
                    let [a, b] = [a, b].map(|result| times(&result.samples, &of_a.runtime, of_a.mode));
                    Ratio::estimate(&b, &a)
                }
            };
            Some(StartUp {
                runtime: of_a.runtime.clone(),
                mode: of_a.mode,
                p50_ms: [of_a.summary.p50_ms, of_b.summary.p50_ms],
                failures: [of_a.summary.failures, of_b.summary.failures],
                ratio,
            })
        })
        .collect()
}

/// Compares the memory of the runtimes and numbers of pods that both results have.
fn memories(a: &Loaded, b: &Loaded) -> Vec<Memory> {
    a.report
        .memory
        .iter()
        .filter_map(|of_a| {
            let of_b = b
                .report
                .memory
                .iter()
                .find(|of_b| (&of_b.runtime, of_b.pods) == (&of_a.runtime, of_a.pods))?;
            Some(Memory {
                runtime: of_a.runtime.clone(),
                pods: of_a.pods,
                management_kib: [of_a.management_pss_kib, of_b.management_pss_kib],
                total_kib: [of_a.total_pss_kib, of_b.total_pss_kib],
            })
        })
        .collect()
}

/// Returns the differences that limit what the ratios show.
fn differences(a: &Loaded, b: &Loaded) -> Vec<Difference> {
    let (of_a, of_b) = (&a.report.manifest, &b.report.manifest);
    let mut differences = facts("host", &SAME_HOST, &of_a.host, &of_b.host);
    differences.extend(facts("VMM", &SAME_VMM, &of_a.vmm, &of_b.vmm));
    differences.extend(facts("CRI", &["name", "version"], &of_a.cri, &of_b.cri));
    let runtimes: BTreeSet<&String> = of_a.runtimes.keys().chain(of_b.runtimes.keys()).collect();
    for runtime in runtimes {
        if let (Some(of_a), Some(of_b)) = (of_a.runtimes.get(runtime), of_b.runtimes.get(runtime)) {
            differences.extend(facts(
                runtime,
                &["type", "snapshotter", "options", "vcpus", "memory_mib", "guest_kernel"],
                of_a,
                of_b,
            ));
        }
    }
    for (flag, is_set) in
        [("partial", [a.report.partial, b.report.partial]), ("quick", [a.report.quick, b.report.quick])]
    {
        if is_set.contains(&true) {
            differences.push(Difference { what: flag.into(), values: is_set.map(|flag| flag.to_string()) });
        }
    }
    differences
}

/// Returns the facts of `group` that differ.
pub fn facts(group: &str, names: &[&str], a: &Facts, b: &Facts) -> Vec<Difference> {
    let absent = Value::String("not stated".into());
    names
        .iter()
        .map(|name| (name, a.get(*name).unwrap_or(&absent), b.get(*name).unwrap_or(&absent)))
        .filter(|(_, a, b)| a != b)
        .map(|(name, a, b)| Difference {
            what: format!("{group}: {}", name.replace('_', " ")),
            values: [shown(a), shown(b)],
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;
    use crate::{
        manifest::Manifest,
        report::Report,
        sample::{Outcome, Sample},
    };

    fn result(name: &str, runtime: &str, ms: f64, network: &str, kernel: &str) -> Loaded {
        let mut manifest = Manifest::default();
        manifest.pod.insert("network_asked_for".into(), json!(network));
        manifest.host.insert("kernel".into(), json!(kernel));
        let samples: Vec<Sample> = (0..30)
            .map(|round| Sample {
                runtime: runtime.into(),
                mode: Mode::Serial,
                round,
                index: 0,
                warm_up: false,
                released_ms: 0.0,
                pod_ms: None,
                created_ms: None,
                started_ms: None,
                first_byte_ms: Some(ms + f64::from(round)),
                outcome: Outcome::Ok,
                failed_at: String::new(),
                error: String::new(),
                stages: Default::default(),
                kvm_exits: None,
                first_ping_ms: None,
            })
            .collect();
        let mut report = Report::new(manifest);
        report.add_startup(&[runtime.to_owned()], &samples, &[]);
        Loaded { name: name.into(), report, samples }
    }

    #[test]
    fn what_differs_is_said_beside_the_ratio() {
        let mut a = result("a", "runc", 100.0, "pod", "6.1");
        let mut b = result("b", "runc", 200.0, "host", "6.18");
        let vm =
            |vcpus: u32| BTreeMap::from([("runc".into(), Facts::from([("vcpus".into(), json!(vcpus))]))]);
        a.report.manifest.add_vms(vm(1));
        b.report.manifest.add_vms(vm(2));
        let comparison = compare(&a, &b).unwrap();
        let ratio = comparison.startup[0].ratio.unwrap();
        assert!((ratio.p50 - 214.0 / 114.0).abs() < 1e-9, "{ratio}");
        assert_eq!(comparison.not_comparable[0].values, ["pod".to_owned(), "host".to_owned()]);
        for what in ["host: kernel", "runc: vcpus"] {
            assert!(comparison.differences.iter().any(|difference| difference.what == what), "{what}");
        }
    }

    #[test]
    fn times_of_two_clocks_are_refused_by_name() {
        let a = result("a", "runc", 100.0, "pod", "6.1");
        let mut b = result("b", "runc", 200.0, "pod", "6.1");
        b.report.clock = Clock::Virtual;
        let why = compare(&a, &b).unwrap_err().to_string();
        assert!(why.contains("times of a are ms and those of b are virtual ms"), "{why}");
        assert_eq!(compare(&b, &b).unwrap().clock, Clock::Virtual);
    }

    #[test]
    fn results_without_anything_in_common_are_refused() {
        let a = result("a", "runc", 100.0, "pod", "6.1");
        let b = result("b", "kata", 100.0, "pod", "6.1");
        assert!(compare(&a, &b).unwrap_err().to_string().contains("nothing to compare"));
    }
}
