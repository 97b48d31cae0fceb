//! The raw rows, one per measured container, failures included.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::cpu::RoleUse;
use super::facts::Facts;
use super::host::HostUse;
use crate::sample::Outcome;

/// Figures by the name of their metric.
pub type Figures = BTreeMap<String, f64>;

/// One run of one variant of a probe on one runtime.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Name of the series.
    pub runtime: String,
    /// Name of the probe.
    pub probe: String,
    /// Name of the variant; empty if the probe has none.
    pub case: String,
    /// Number of the round, from 0; warm-up rounds are numbered separately.
    pub round: u32,
    /// Whether this is a warm-up, which never counts.
    pub warm_up: bool,
    /// Begin of the run, s since the measurement began; shows alternation and drift.
    pub begun_s: f64,
    /// Time from the begin until the pods were removed, s.
    pub took_s: f64,
    /// Outcome of the run.
    pub outcome: Outcome,
    /// Call or step that failed; empty if none did.
    pub failed_at: String,
    /// Reason of the failure, in one line.
    pub error: String,
    /// Commands of the tool and of the server.
    pub commands: Commands,
    /// Number of threads, if the tool takes one.
    pub threads: Option<u32>,
    /// The probe's figures; empty for a failure.
    pub figures: Figures,
    /// Resources of the container under test.
    pub facts: Option<Facts>,
    /// The host during the run.
    pub host: HostUse,
    /// CPU time by role; absent for a run whose tool did not end.
    #[serde(default)]
    pub cpu: Option<RoleUse>,
    /// Power of the host.
    #[serde(default)]
    pub power: Power,
}

impl Run {
    /// Returns a figure, if the run counts.
    pub fn figure(&self, metric: &str) -> Option<f64> {
        let counts = self.outcome == Outcome::Ok && !self.warm_up;
        self.figures.get(metric).copied().filter(|_| counts)
    }

    /// Returns whether the run is a counted failure.
    pub fn failed(&self) -> bool {
        self.outcome == Outcome::Failed && !self.warm_up
    }
}

/// The commands of one run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Commands {
    /// Command line of the tool.
    pub tool: Vec<String>,
    /// Command line of the server; empty if there is none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub server: Vec<String>,
}

/// Power of a run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Power {
    /// Mean power, W; `None` if it was not measured.
    pub watts: Option<f64>,
    /// Name of the meter; without a figure the reason, which begins with "not measured".
    pub source: String,
}

/// Returns the handler of a series.
pub fn handler(series: &str) -> &str {
    series.split_once('#').map_or(series, |(handler, _)| handler)
}
