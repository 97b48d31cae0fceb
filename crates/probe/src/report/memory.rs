//! Memory figures of a report.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::attribution::Role;
use crate::memory::{Point, regression};
use crate::summary::{median, sorted};

/// Memory of one runtime with this many pods: means over the repetitions, KiB.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Memory {
    /// Runtime handler.
    pub runtime: String,
    /// Number of pods.
    pub pods: u32,
    /// Number of repetitions behind the means.
    pub repetitions: u32,
    /// PSS of the resident process and the shims, KiB.
    pub management_pss_kib: f64,
    /// PSS of all roles, KiB.
    pub total_pss_kib: f64,
    /// Memory freed with the pods, KiB: all roles, but only the growth of the resident process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub goes_away_kib: Option<f64>,
    /// Fall of `MemAvailable` since there was no pod, KiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub available_fall_kib: Option<f64>,
    /// CPU time of the idle pods, millicores: median of the windows. Only at a sweep's largest count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_cpu_millicores: Option<f64>,
    /// CPU time in each window, millicores. Earlier results have none: they used one window of 5 s, in clock ticks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub idle_cpu_windows: Vec<f64>,
    /// PSS of each role, KiB.
    pub by_role: BTreeMap<Role, f64>,
    /// PSS of the CRI runtime itself, KiB. No sum includes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cri_pss_kib: Option<f64>,
}

/// Growth of memory per pod, by least squares over all points, KiB.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Marginal {
    /// Growth of the sum of all roles.
    pub total: f64,
    /// Growth of all roles except the containers' own processes: a pod's overhead.
    pub overhead: f64,
    /// Growth of the resident process and the shims.
    pub management: f64,
    /// Growth of the resident process.
    pub daemon: f64,
    /// Growth of the fall of `MemAvailable`.
    pub available: f64,
    /// Part of the variance of the total that the line explains.
    pub r2: f64,
}

impl Memory {
    /// Returns the memory of one pod's VMM without its guest's memory, KiB; `None` without a VMM.
    pub fn each_vmm_kib(&self) -> Option<f64> {
        Some(self.by_role.get(&Role::Vmm)? / f64::from(self.pods.max(1)))
    }

    /// Returns [`Memory::idle_cpu_millicores`] per pod.
    pub fn idle_cpu_per_pod(&self) -> Option<f64> {
        Some(self.idle_cpu_millicores? / f64::from(self.pods.max(1)))
    }

    /// Returns the idle CPU time per pod with its range, as text: "0.80 (0.78 to 0.83 in 3 windows)".
    pub fn shown_idle_cpu(&self) -> Option<String> {
        let each = self.idle_cpu_per_pod()?;
        let windows = sorted(&self.idle_cpu_windows);
        let per_pod = |millicores: f64| millicores / f64::from(self.pods.max(1));
        Some(match windows[..] {
            [] => format!("≈ {each:.1} (one window of 5 s, in clock ticks)"),
            [_] => format!("{each:.2} (one window)"),
            [least, .., most] => {
                format!(
                    "{each:.2} ({:.2} to {:.2} in {} windows)",
                    per_pod(least),
                    per_pod(most),
                    windows.len()
                )
            }
        })
    }

    pub(super) fn from_points(group: &[&Point]) -> Self {
        let count = group.len() as f64;
        let mean = |f: &dyn Fn(&Point) -> f64| group.iter().map(|point| f(point)).sum::<f64>() / count;
        // Only if all repetitions have the value: a mean over some of them is not comparable.
        let known = |f: &dyn Fn(&Point) -> Option<f64>| {
            let known: Vec<f64> = group.iter().filter_map(|point| f(point)).collect();
            (known.len() == group.len()).then(|| known.iter().sum::<f64>() / count)
        };
        let windows: Vec<f64> =
            group.iter().flat_map(|point| point.idle_cpu_millicores.iter().copied()).collect();
        Self {
            runtime: group[0].runtime.clone(),
            pods: group[0].ledger.pods as u32,
            repetitions: group.len() as u32,
            management_pss_kib: mean(&|point| point.ledger.management_kib() as f64),
            total_pss_kib: mean(&|point| point.ledger.total_kib() as f64),
            goes_away_kib: known(&|point| point.goes_away_kib().map(|kib| kib as f64)),
            available_fall_kib: known(&|point| point.available_fall_kib.map(|kib| kib as f64)),
            idle_cpu_millicores: median(&windows),
            idle_cpu_windows: windows,
            by_role: Role::ALL
                .into_iter()
                .map(|role| (role, mean(&|point| point.ledger.role(role) as f64)))
                .filter(|(_, kib)| *kib > 0.0)
                .collect(),
            cri_pss_kib: known(&|point| point.ledger.cri_kib.map(|kib| kib as f64)),
        }
    }
}

impl Marginal {
    pub(super) fn fit(points: &[&Point]) -> Option<Self> {
        let line = |f: &dyn Fn(&Point) -> f64| {
            regression(&points.iter().map(|point| (point.ledger.pods as f64, f(point))).collect::<Vec<_>>())
        };
        let total = line(&|point| point.ledger.total_kib() as f64)?;
        Some(Self {
            total: total.slope,
            overhead: line(&|p| (p.ledger.total_kib() - p.ledger.role(Role::Workload)) as f64)?.slope,
            management: line(&|point| point.ledger.management_kib() as f64)?.slope,
            daemon: line(&|point| point.ledger.role(Role::Daemon) as f64)?.slope,
            available: line(&|point| point.available_fall_kib.unwrap_or_default() as f64)?.slope,
            r2: total.r2,
        })
    }
}
