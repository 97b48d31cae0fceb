//! `report.json`: the result of a run. Its schema is `schema/report.schema.json`.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use self::comparison::pairs;
use crate::clock::Clock;
use crate::manifest::Manifest;
use crate::memory::Point;
use crate::overhead::Overhead;
use crate::rate::Rate;
use crate::ratio::Ratio;
use crate::sample::{Mode, Sample};
use crate::startup::{Batch, FULL_SERIAL};
use crate::summary::Summary;
use crate::vm::VM;

mod comparison;
mod memory;
mod series;

pub use self::comparison::Comparison;
pub use self::memory::{Marginal, Memory};
pub use self::series::{Series, times, times_by_group};

/// Version of the schema. Readers reject newer versions.
pub const SCHEMA: u32 = 1;
/// JSON Schema of the report.
pub const SCHEMA_TEXT: &str = include_str!("../schema/report.schema.json");
/// Key of the first answered ping in [`Series::steps`].
pub const FIRST_PING: &str = "first_ping";
/// Reference handler of ratios, if it was measured.
pub const REFERENCE: &str = "runc";

/// Why there are no ratios to a baseline.
#[derive(Debug, thiserror::Error)]
pub enum BaselineError {
    /// The result has no starts of the baseline.
    #[error("{result} has no starts of the baseline '{baseline}'; it has {known}")]
    Unknown {
        /// Name of the result.
        result: String,
        /// Name of the baseline's handler.
        baseline: String,
        /// The measured handlers.
        known: String,
    },
}

/// Result of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`] of the probe that wrote it.
    pub schema: u32,
    /// Clock of the times; older results name none and used the wall clock.
    #[serde(default)]
    pub clock: Clock,
    /// Whether the run ended early.
    pub partial: bool,
    /// The reason for an early end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partial_reason: Option<String>,
    /// Whether the run has fewer starts than a full run.
    pub quick: bool,
    /// Handler to which ratios were requested, besides [`REFERENCE`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub baseline: Option<String>,
    /// Conditions of the run.
    pub manifest: Manifest,
    /// Start-up, one series per runtime and mode.
    pub series: Vec<Series>,
    /// Start-up, ratios between runtimes.
    pub ratios: Vec<Comparison>,
    /// Times of the same VM booted alone, after each serial round of the same run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bare_boot: Option<Bare>,
    /// Memory, one entry per runtime and pod count: means over the repetitions.
    pub memory: Vec<Memory>,
    /// Growth of memory per pod, by runtime.
    pub marginal_kib_per_pod: BTreeMap<String, Marginal>,
    /// Cost of the probe itself; absent figures were not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overhead: Option<Overhead>,
    /// Notes on the run.
    pub notes: Vec<String>,
    /// Figures that are missing, with the reason.
    pub not_measured: BTreeMap<String, String>,
}

/// Times of a VM booted alone, from its VMM's start to the agent's ready message: no daemon, no container.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Bare {
    /// Boot times.
    #[serde(flatten)]
    pub summary: Summary,
    /// Handler of the VM.
    pub like: String,
    /// Median of that handler's serial starts divided by the median of these boots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub over: Option<Ratio>,
}

impl Report {
    /// Returns an empty report.
    pub fn new(manifest: Manifest) -> Self {
        Self {
            schema: SCHEMA,
            clock: Clock::default(),
            partial: false,
            partial_reason: None,
            quick: false,
            baseline: None,
            manifest,
            series: Vec::new(),
            ratios: Vec::new(),
            bare_boot: None,
            memory: Vec::new(),
            marginal_kib_per_pod: BTreeMap::new(),
            overhead: None,
            notes: Vec::new(),
            not_measured: BTreeMap::new(),
        }
    }

    /// Adds the results of start-up samples. Compares the first runtime with each of the others, and each of those with
    /// [`REFERENCE`] and with [`Report::baseline`].
    pub fn add_startup(&mut self, runtimes: &[String], samples: &[Sample], batches: &[Batch]) {
        for mode in Mode::ALL {
            for runtime in runtimes {
                let series = Series::new(runtime, mode, samples, batches);
                if series.summary.n > 0 {
                    self.series.push(series);
                }
            }
        }
        self.compare(runtimes, samples);
        let serial = self.series.iter().filter(|series| series.mode == Mode::Serial);
        self.quick = serial.map(|series| series.summary.n).min().is_some_and(|n| n < FULL_SERIAL as usize);
        self.notes.extend(reasons(samples));
        self.explain_pings();
        for series in &self.series {
            if series.stages.is_empty() {
                let why = match series.summary.p50_ms {
                    Some(_) => "this runtime has no trace with stages",
                    None => "no start succeeded",
                };
                self.not_measured
                    .insert(format!("series.{}.{}.stages", series.runtime, series.mode), why.into());
            }
            if series.kvm_exits.is_none() {
                self.not_measured.insert(series.exits_name(), "no row has KVM exits".into());
            }
        }
    }

    /// Adds the ratios of these runtimes.
    fn compare(&mut self, runtimes: &[String], samples: &[Sample]) {
        let pairs = pairs(runtimes, self.baseline.as_deref());
        for mode in [Mode::Serial, Mode::Parallel] {
            self.ratios.extend(
                pairs.iter().filter_map(|(a, b)| Comparison::of_pods((a, b), mode, &self.series, samples)),
            );
        }
        let of_groups = pairs.iter().filter_map(|(a, b)| Comparison::of_whole_groups((a, b), &self.series));
        self.ratios.extend(of_groups);
    }

    /// Adds ratios of every runtime to `baseline`, if both are of one run. `name` is the result's name.
    pub fn set_baseline(
        &mut self,
        name: &str,
        baseline: &str,
        samples: &[Sample],
    ) -> Result<(), BaselineError> {
        let mut runtimes: Vec<String> = Vec::new();
        for series in &self.series {
            if !runtimes.contains(&series.runtime) {
                runtimes.push(series.runtime.clone());
            }
        }
        if !runtimes.iter().any(|runtime| runtime == baseline) {
            return Err(BaselineError::Unknown {
                result: name.to_owned(),
                baseline: baseline.to_owned(),
                known: runtimes.join(", "),
            });
        }
        self.baseline = Some(baseline.to_owned());
        let known: BTreeSet<(String, String)> =
            self.ratios.iter().map(|ratio| (ratio.a.clone(), ratio.b.clone())).collect();
        for a in &runtimes {
            let pair = (a.as_str(), baseline);
            if a == baseline || known.contains(&(a.clone(), baseline.to_owned())) {
                continue;
            }
            if !self.manifest.measured_together(a, baseline) {
                self.not_measured.insert(
                    format!("ratios.{a}.{baseline}"),
                    "the two were not measured in one run: a ratio would mix two".into(),
                );
                continue;
            }
            for mode in [Mode::Serial, Mode::Parallel] {
                self.ratios.extend(Comparison::of_pods(pair, mode, &self.series, samples));
            }
            self.ratios.extend(Comparison::of_whole_groups(pair, &self.series));
        }
        Ok(())
    }

    /// Returns the ratios worth more than their rows in a table: those with an interval, or with failures.
    pub fn notable_ratios(&self) -> impl Iterator<Item = &Comparison> {
        let is_notable =
            |comparison: &&Comparison| comparison.ratio.interval.is_some() || comparison.failures != [0, 0];
        self.ratios.iter().filter(is_notable)
    }

    /// Returns the handlers to which a table's rows have a ratio: [`REFERENCE`], if it was measured, and the baseline.
    pub fn bases(&self) -> Vec<&str> {
        let measured = self.series.iter().any(|series| series.runtime == REFERENCE);
        let reference = (measured || self.baseline.is_none()).then_some(REFERENCE);
        let baseline = self.baseline.as_deref().filter(|name| *name != REFERENCE);
        reference.into_iter().chain(baseline).collect()
    }

    /// Adds when VMs of the series `vm` answered their first ping, or that none did.
    fn explain_pings(&mut self) {
        let Some(of_vm) = self.series.iter().find(|series| series.runtime == VM) else { return };
        match of_vm.first_ping(self.clock) {
            Some(note) => self.notes.push(note),
            None => {
                let why = "no VM with a first byte answered a ping in time";
                self.not_measured.insert(format!("series.{VM}.{FIRST_PING}"), why.into());
            }
        }
    }

    /// Adds the sustained rates of handlers.
    pub fn add_rates(&mut self, rates: &BTreeMap<String, Rate>) {
        for series in self.series.iter_mut().filter(|series| series.mode == Mode::Sustained) {
            series.rate = rates.get(&series.runtime).copied();
        }
    }

    /// Adds the reasons for which the exits of these handlers' guests are unknown.
    pub fn explain_exits(&mut self, why: &BTreeMap<String, String>) {
        for series in self.series.iter().filter(|series| series.kvm_exits.is_none()) {
            if let Some(why) = why.get(&series.runtime) {
                self.not_measured.insert(series.exits_name(), why.clone());
            }
        }
    }

    /// Returns the ratio of `runtime` to `base` in this mode of the same run, over whole groups or over pods.
    pub fn over(&self, runtime: &str, base: &str, mode: Mode, groups: bool) -> Option<&Ratio> {
        let wanted = (runtime, base, mode, groups);
        let found = |ratio: &&Comparison| (&*ratio.a, &*ratio.b, ratio.mode, ratio.groups) == wanted;
        self.ratios.iter().find(found).map(|found| &found.ratio)
    }

    /// Returns the ratio of `runtime` to [`REFERENCE`], like [`Report::over`].
    pub fn over_reference(&self, runtime: &str, mode: Mode, groups: bool) -> Option<&Ratio> {
        self.over(runtime, REFERENCE, mode, groups)
    }

    /// Returns the figures that were not measured, by reason.
    pub fn absent(&self) -> BTreeMap<&str, Vec<&str>> {
        let mut absent: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (what, why) in &self.not_measured {
            absent.entry(why).or_default().push(what);
        }
        absent
    }

    /// Adds the results of bare boots of this handler's VM.
    pub fn add_bare_boots(&mut self, like: &str, samples: &[Sample], boots: &[f64], failures: &[String]) {
        if boots.is_empty() && failures.is_empty() {
            return;
        }
        self.notes.extend(failures.iter().map(|why| format!("a bare boot failed: {why}")));
        self.bare_boot = Some(Bare {
            summary: Summary::new(boots, failures.len()),
            like: like.to_owned(),
            over: Ratio::estimate(&times(samples, like, Mode::Serial), boots),
        });
    }

    /// Adds the results of a sweep's points.
    pub fn add_memory(&mut self, points: &[Point]) {
        // In the requested order: the first is compared with each of the others.
        let mut runtimes: Vec<&String> = Vec::new();
        for point in points {
            if !runtimes.contains(&&point.runtime) {
                runtimes.push(&point.runtime);
            }
        }
        for runtime in runtimes {
            let points: Vec<&Point> = points.iter().filter(|point| point.runtime == *runtime).collect();
            let mut groups: BTreeMap<usize, Vec<&Point>> = BTreeMap::new();
            for &point in &points {
                groups.entry(point.ledger.pods).or_default().push(point);
            }
            self.memory.extend(groups.into_values().map(|group| Memory::from_points(&group)));
            match Marginal::fit(&points) {
                Some(marginal) => drop(self.marginal_kib_per_pod.insert(runtime.clone(), marginal)),
                None => drop(self.not_measured.insert(
                    format!("marginal_kib_per_pod.{runtime}"),
                    "growth needs two different pod counts".into(),
                )),
            }
            if points.iter().all(|point| point.idle_cpu_millicores.is_empty()) {
                self.not_measured.insert(
                    format!("memory.{runtime}.idle_cpu_millicores"),
                    "the sweep ended before its largest count, or idle pods were not to be measured".into(),
                );
            }
            for point in points {
                for missing in &point.ledger.missing {
                    self.not_measured
                        .insert(format!("memory.{runtime}.{}", point.ledger.pods), missing.clone());
                }
            }
        }
    }
}

/// Returns the reasons of failures, the most frequent first; merges reasons that differ only in ids and numbers.
fn reasons(samples: &[Sample]) -> Vec<String> {
    const SHOWN: usize = 5;
    let mut counts: BTreeMap<(String, String), (usize, &str)> = BTreeMap::new();
    for sample in samples.iter().filter(|sample| sample.failed()) {
        let word = |word: &str| {
            if word.contains(|c: char| c.is_ascii_digit()) { "…".into() } else { word.to_owned() }
        };
        let alike = sample.error.split(' ').map(word).collect::<Vec<_>>().join(" ");
        counts.entry((sample.runtime.clone(), alike)).or_insert((0, &sample.error)).0 += 1;
    }
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_by_key(|(_, (count, _))| std::cmp::Reverse(*count));
    counts
        .into_iter()
        .take(SHOWN)
        .map(|((runtime, _), (count, error))| {
            format!("{count} failed on {runtime}: {}", error.chars().take(400).collect::<String>())
        })
        .collect()
}

/// Why a text is not a report.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// The text is not JSON, or not of this schema.
    #[error("not a report of this probe")]
    Shape(#[from] serde_json::Error),
    /// The report has a newer schema.
    #[error("the report has schema {found}, this probe reads up to {SCHEMA}: use a newer probe")]
    Newer {
        /// Version of the report's schema.
        found: u64,
    },
}

/// Reads a report; checks the schema version first.
pub fn parse(text: &str) -> Result<Report, ReportError> {
    let value: Value = serde_json::from_str(text)?;
    match value.get("schema").and_then(Value::as_u64) {
        Some(found) if found > u64::from(SCHEMA) => Err(ReportError::Newer { found }),
        _ => {
            let mut report: Report = serde_json::from_value(value)?;
            report.ratios.iter_mut().for_each(Comparison::without_interval_of_few_groups);
            Ok(report)
        }
    }
}

/// Returns indented JSON.
pub fn render(report: &Report) -> String {
    let value = serde_json::to_value(report).unwrap_or_else(|error| json!({ "error": error.to_string() }));
    format!("{value:#}\n")
}
