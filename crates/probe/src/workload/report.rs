//! `workload.json`: the result of a measurement. Its schema is `schema/workload.schema.json`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::definition::{Probe, Profile};
use super::efficiency::{self, Cost};
use super::facts::Facts;
use super::run::{Run, handler};
use super::summary::{self, Comparison, Series};
use crate::clock::Clock;
use crate::manifest::Manifest;

/// Version of the schema. Readers reject newer versions.
pub const SCHEMA: u32 = 1;
/// JSON Schema of the result.
pub const SCHEMA_TEXT: &str = include_str!("../../schema/workload.schema.json");
/// Reference runtimes of ratios, if measured; otherwise the plan's first runtime.
const REFERENCES: [&str; 2] = ["native", "runc"];
/// Key of the power in [`Report::not_measured`].
pub const POWER: &str = "power";
/// Relative change of the processors' frequency above which a note is added.
const CLOCK_MOVES: f64 = 0.05;

/// Result of a measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`] of the probe that wrote it.
    pub schema: u32,
    /// Clock of the times.
    pub clock: Clock,
    /// Whether the measurement ended early.
    pub partial: bool,
    /// The reason for an early end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partial_reason: Option<String>,
    /// Profile of the parameters.
    pub profile: Profile,
    /// Number of counted rounds.
    pub repeat: u32,
    /// Number of warm-up rounds, which no figure includes.
    pub warm_up: u32,
    /// Number of threads of tools that take one: the smallest number of effective CPUs of all runtimes.
    pub threads: u32,
    /// Handler of the clients' pods.
    pub client_runtime: String,
    /// Conditions of the measurement.
    pub manifest: Manifest,
    /// Definitions of the probes.
    pub probes: Vec<Probe>,
    /// Resources of a container of each runtime, read from inside.
    pub sides: BTreeMap<String, Facts>,
    /// Name of the reference runtime.
    pub reference: String,
    /// Each metric of each variant on each runtime.
    pub series: Vec<Series>,
    /// Ratios to the reference.
    pub comparisons: Vec<Comparison>,
    /// CPU time by role, and work per CPU time and per W, of each variant on each runtime.
    #[serde(default)]
    pub costs: Vec<Cost>,
    /// Notes on the measurement.
    pub notes: Vec<String>,
    /// Figures that are missing, with the reason.
    pub not_measured: BTreeMap<String, String>,
}

impl Report {
    /// Returns a result without figures.
    pub fn new(probes: Vec<Probe>, profile: Profile, runtimes: &[String], manifest: Manifest) -> Self {
        Self {
            schema: SCHEMA,
            clock: Clock::default(),
            partial: false,
            partial_reason: None,
            profile,
            repeat: 0,
            warm_up: 0,
            threads: 1,
            client_runtime: String::new(),
            manifest,
            probes,
            sides: BTreeMap::new(),
            reference: reference(runtimes),
            series: Vec::new(),
            comparisons: Vec::new(),
            costs: Vec::new(),
            notes: Vec::new(),
            not_measured: BTreeMap::new(),
        }
    }

    /// Replaces all figures with those of `runs`, and adds notes on them.
    pub fn evaluate(&mut self, runtimes: &[String], runs: &[Run]) {
        self.series = summary::series(&self.probes, self.profile, runtimes, runs);
        self.comparisons = summary::comparisons(&self.series, &self.reference, runs);
        self.costs = efficiency::costs(&self.probes, self.profile, runtimes, runs);
        self.not_measured.retain(|name, _| name == POWER);
        self.not_measured.extend(not_measured(&self.series, runs));
        self.explain(runs);
    }

    /// Returns whether the figures are comparable with published ones: with the studies' parameters, in real time.
    pub fn is_like_studies(&self) -> bool {
        self.profile == Profile::Paper && self.clock == Clock::Wall
    }

    /// Returns the number of counted runs that failed.
    pub fn failures(&self, runs: &[Run]) -> usize {
        runs.iter().filter(|run| run.failed()).count()
    }

    /// Returns the comparison of a series with the reference.
    pub fn over_reference(&self, series: &Series) -> Option<&Comparison> {
        self.comparisons.iter().find(|comparison| comparison.is_of(series))
    }

    /// Returns, for each further series of the reference's handler, the number of its comparisons that show no
    /// difference and the number of all its comparisons. Of 100 comparisons, about 5 differ by chance.
    pub fn no_difference(&self) -> BTreeMap<String, (usize, usize)> {
        let mut counts: BTreeMap<String, (usize, usize)> = BTreeMap::new();
        let same =
            self.comparisons.iter().filter(|comparison| handler(&comparison.a) == handler(&comparison.b));
        for comparison in same {
            let (none, all) = counts.entry(comparison.a.clone()).or_default();
            *none += usize::from(comparison.ratio.shows_no_difference());
            *all += 1;
        }
        counts
    }

    fn explain(&mut self, runs: &[Run]) {
        if self.profile == Profile::Quick {
            self.notes
                .push("quick: shorter than the studies' own runs; do not compare with their figures".into());
        }
        if self.clock == Clock::Virtual {
            self.notes.push(
                "times are virtual: one instruction of an emulated host is one nanosecond, whatever memory it waits for, and waiting \
                 for a disk or a timer costs nothing. Use the ratios"
                    .into(),
            );
        }
        for (other, (none, all)) in self.no_difference() {
            self.notes.push(format!(
                "{other}: {none} of {all} metrics show no difference to {}, the same handler",
                self.reference
            ));
        }
        if self.warm_up > 0 {
            self.notes.push(format!("{} warm-up rounds are not included", self.warm_up));
        }
        if self.manifest.vmm.get("accelerator").is_some_and(|name| name == "tcg") {
            self.notes.push(
                "guests ran emulated, without KVM: figures of runtimes with VMs prove that the probe works, and nothing \
                 of the runtime"
                    .into(),
            );
        }
        for series in self.series.iter().filter(|series| series.two_levels) {
            let name = format!("{} {}", series.probe, series.case);
            self.notes.push(format!(
                "{} {}, {}: values are at two levels, as with two processor frequencies: the mean has no meaning",
                series.runtime,
                name.trim_end(),
                series.metric.name
            ));
        }
        if let Some((low, high)) = clocks(runs).filter(|(low, high)| high / low - 1.0 > CLOCK_MOVES) {
            self.notes.push(format!("the processors' frequency was between {low:.0} and {high:.0} MHz"));
        }
    }
}

fn reference(runtimes: &[String]) -> String {
    let known = REFERENCES.iter().find(|known| runtimes.iter().any(|runtime| runtime == *known));
    known.map(|known| (*known).to_owned()).or_else(|| runtimes.first().cloned()).unwrap_or_default()
}

/// Returns the lowest and highest frequency of all runs, MHz.
fn clocks(runs: &[Run]) -> Option<(f64, f64)> {
    let all = || runs.iter().flat_map(|run| run.host.mhz_before.into_iter().chain(run.host.mhz_after));
    let low = all().min_by(f64::total_cmp)?;
    Some((low, all().max_by(f64::total_cmp)?)).filter(|(low, _)| *low > 0.0)
}

/// Returns the series without a figure, by "probe.case.runtime.metric", with the first failure's reason.
fn not_measured(series: &[Series], runs: &[Run]) -> BTreeMap<String, String> {
    let empty = series.iter().filter(|series| series.p50.is_none());
    empty
        .map(|series| {
            let mine = |run: &&Run| {
                run.probe == series.probe && run.case == series.case && run.runtime == series.runtime
            };
            let why = match runs.iter().filter(mine).find(|run| run.failed()) {
                Some(run) => format!("{}: {}", run.failed_at, run.error),
                None => "none of its runs finished".into(),
            };
            let name = [&series.probe, &series.case, &series.runtime, &series.metric.name];
            let parts = name.into_iter().filter(|part| !part.is_empty()).map(String::as_str);
            (parts.collect::<Vec<_>>().join("."), why)
        })
        .collect()
}

/// Why a text is not a result.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// The text is not JSON, or not of this schema.
    #[error("not a result of workloads")]
    Shape(#[from] serde_json::Error),
    /// The result has a newer schema.
    #[error("the result has schema {found}, this probe reads up to {SCHEMA}: use a newer probe")]
    Newer {
        /// Version of the result's schema.
        found: u64,
    },
}

/// Reads a result; checks the schema version first.
pub fn parse(text: &str) -> Result<Report, ReportError> {
    let value: Value = serde_json::from_str(text)?;
    match value.get("schema").and_then(Value::as_u64) {
        Some(found) if found > u64::from(SCHEMA) => Err(ReportError::Newer { found }),
        _ => Ok(serde_json::from_value(value)?),
    }
}

/// Returns a result as text, indented.
pub fn render(report: &Report) -> Result<String, serde_json::Error> {
    Ok(serde_json::to_string_pretty(report)? + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_are_shown_over_native_or_runc_or_the_first() {
        let reference_of =
            |names: &[&str]| reference(&names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>());
        assert_eq!(reference_of(&["sandboxer", "runc", "native"]), "native");
        assert_eq!(reference_of(&["sandboxer", "runc"]), "runc");
        assert_eq!(reference_of(&["sandboxer", "gvisor"]), "sandboxer");
    }

    #[test]
    fn a_result_of_a_newer_probe_is_refused_by_its_number() {
        let error = parse("{\"schema\": 9}").unwrap_err();
        assert!(error.to_string().contains("schema 9"), "{error}");
        assert!(matches!(parse("[]"), Err(ReportError::Shape(_))));
    }
}
