//! Start-up times of one runtime in one mode.

use std::collections::BTreeMap;

use sandboxer_protocol::stage::Stage;
use serde::{Deserialize, Serialize};

use super::FIRST_PING;
use crate::clock::Clock;
use crate::exits::ExitsPerPod;
use crate::rate::Rate;
use crate::sample::{Mode, Sample};
use crate::startup::Batch;
use crate::summary::Summary;

/// Start-up of one runtime in one mode.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// Runtime handler.
    pub runtime: String,
    /// How the pods were started.
    pub mode: Mode,
    /// Number of pods started at once.
    pub group: u32,
    /// Times from the start request to the first byte.
    #[serde(flatten)]
    pub summary: Summary,
    /// Times of the CRI calls' responses since the start request: `pod`, `created`, `started`. For VMs of the series
    /// `vm`: time of the first answered ping, `first_ping`.
    pub steps: BTreeMap<String, Summary>,
    /// Wall time of each group, ms; `None` if one of its pods failed.
    pub batch_ms: Vec<Option<f64>>,
    /// Time between the first and the last start request of each group, ms.
    pub release_spread_ms: Vec<f64>,
    /// Pods per minute and CPU time per pod; only for [`Mode::Sustained`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<Rate>,
    /// Durations of the daemon's stages.
    pub stages: BTreeMap<Stage, Summary>,
    /// Time outside all stages; only with stages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unexplained: Option<Summary>,
    /// VM exits per pod; only if KVM's statistics could be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kvm_exits: Option<ExitsPerPod>,
    /// Number of failures by the call that failed.
    pub failed_at: BTreeMap<String, usize>,
}

/// Returns the counted times of one runtime in one mode.
pub fn times(samples: &[Sample], runtime: &str, mode: Mode) -> Vec<f64> {
    samples.iter().filter(|s| s.runtime == runtime && s.mode == mode).filter_map(Sample::time).collect()
}

/// Returns the counted times of one runtime's pods, by group.
pub fn times_by_group(samples: &[Sample], runtime: &str) -> Vec<Vec<f64>> {
    let mut groups: BTreeMap<u32, Vec<f64>> = BTreeMap::new();
    for sample in samples.iter().filter(|s| s.runtime == runtime && s.mode == Mode::Parallel) {
        if let Some(time) = sample.time() {
            groups.entry(sample.round).or_default().push(time);
        }
    }
    groups.into_values().collect()
}

impl Series {
    pub(super) fn new(runtime: &str, mode: Mode, samples: &[Sample], batches: &[Batch]) -> Self {
        let mine = |s: &&Sample| s.runtime == runtime && s.mode == mode && !s.warm_up;
        let failed: Vec<&Sample> = samples.iter().filter(mine).filter(|s| s.failed()).collect();
        let good: Vec<&Sample> = samples.iter().filter(mine).filter(|s| s.time().is_some()).collect();
        let summary_of = |f: &dyn Fn(&Sample) -> Option<f64>| {
            Summary::new(&good.iter().filter_map(|s| f(s)).collect::<Vec<_>>(), 0)
        };
        let mut failed_at = BTreeMap::new();
        for sample in &failed {
            *failed_at.entry(sample.failed_at.clone()).or_default() += 1;
        }
        let pinged = good.iter().any(|s| s.first_ping_ms.is_some());
        let traced = good.iter().any(|s| !s.stages.is_empty());
        let batches: Vec<&Batch> =
            batches.iter().filter(|batch| mode == Mode::Parallel && batch.runtime == runtime).collect();
        Self {
            runtime: runtime.to_owned(),
            mode,
            group: match mode {
                Mode::Parallel => samples.iter().filter(mine).map(|s| s.index + 1).max().unwrap_or(1),
                Mode::Serial | Mode::Sustained => 1,
            },
            summary: Summary::new(&good.iter().filter_map(|s| s.time()).collect::<Vec<_>>(), failed.len()),
            steps: [
                ("pod".to_owned(), summary_of(&|s| s.pod_ms)),
                ("created".to_owned(), summary_of(&|s| s.created_ms)),
                ("started".to_owned(), summary_of(&|s| s.started_ms)),
            ]
            .into_iter()
            .chain(pinged.then(|| (FIRST_PING.to_owned(), summary_of(&|s| s.first_ping_ms))))
            .collect(),
            batch_ms: batches.iter().map(|batch| batch.wall_ms).collect(),
            release_spread_ms: batches.iter().map(|batch| batch.release_spread_ms).collect(),
            rate: None,
            stages: Stage::ALL
                .into_iter()
                .map(|stage| (stage, summary_of(&|s| s.stages.get(&stage).copied())))
                .filter(|(_, summary)| summary.n > 0)
                .collect(),
            unexplained: traced.then(|| {
                summary_of(&|s| {
                    Some(s.time()? - s.stages.values().sum::<f64>()).filter(|_| !s.stages.is_empty())
                })
            }),
            kvm_exits: ExitsPerPod::from_counts(good.iter().filter_map(|s| s.kvm_exits).collect()),
            failed_at,
        }
    }

    /// Returns a sentence on when the series' VMs answered their first ping.
    pub fn first_ping(&self, clock: Clock) -> Option<String> {
        let pings = self.steps.get(FIRST_PING)?;
        let (min, p50, max) = (pings.min_ms?, pings.p50_ms?, pings.max_ms?);
        Some(format!(
            "{}: the first ping was answered after {p50:.0} {} (median of {}; {min:.0} to {max:.0})",
            self.runtime,
            clock.ms(),
            pings.n
        ))
    }

    /// Returns the times of groups without a failure, ms.
    pub fn walls(&self) -> impl Iterator<Item = f64> {
        self.batch_ms.iter().copied().flatten()
    }

    /// Returns the summary of whole groups; `None` without groups.
    pub fn whole_groups(&self) -> Option<Summary> {
        let walls: Vec<f64> = self.walls().collect();
        let failed = self.batch_ms.len() - walls.len();
        (!self.batch_ms.is_empty()).then(|| Summary::new(&walls, failed))
    }

    /// Returns how the pods were started, for tables: "serial", "parallel × 50".
    pub fn how(&self) -> String {
        if self.group > 1 { format!("{} × {}", self.mode, self.group) } else { self.mode.to_string() }
    }

    /// Returns the key of the series' exits in `not_measured`.
    pub fn exits_name(&self) -> String {
        format!("series.{}.{}.kvm_exits", self.runtime, self.mode)
    }

    /// Returns the median of the pods' exits, as text.
    pub fn shown_exits(&self) -> String {
        self.kvm_exits.map_or_else(|| "not measured".into(), |exits| exits.p50.to_string())
    }
}
