//! The raw rows: one per measured container, with failures.

use serde::{Deserialize, Serialize};

use super::cpu::RoleUse;
use super::facts::Facts;
use super::host::HostUse;
use super::output::Figures;
use super::plan::Commands;
use super::power::Power;
use crate::sample::Outcome;

/// One run of one variant of a probe on one runtime.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Handler.
    pub runtime: String,
    /// Probe.
    pub probe: String,
    /// Its variant; empty where it has none.
    pub case: String,
    /// From 0; warm-up rounds count by themselves.
    pub round: u32,
    /// Warm-up: never counted.
    pub warm_up: bool,
    /// Its begin, s since the measurement began; shows alternation and drift.
    pub begun_s: f64,
    /// From the begin until the pods were removed, s.
    pub took_s: f64,
    /// Result.
    pub outcome: Outcome,
    /// Call or step that failed; empty when none did.
    pub failed_at: String,
    /// Why, in one line.
    pub error: String,
    /// The commands.
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

    /// Returns whether it is a counted failure.
    pub fn failed(&self) -> bool {
        self.outcome == Outcome::Failed && !self.warm_up
    }
}
