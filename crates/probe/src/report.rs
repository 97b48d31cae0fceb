//! `report.json`: the result of a run. Its schema is `schema/report.schema.json`.

use std::collections::{BTreeMap, BTreeSet};

use sandboxer_protocol::stage::Stage;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::clock::Clock;
use crate::exits::ExitsPerPod;
use crate::manifest::Manifest;
use crate::memory::Point;
use crate::overhead::Overhead;
use crate::rate::Rate;
use crate::ratio::{MIN_GROUPS, Ratio};
use crate::sample::{Mode, Sample};
use crate::startup::{Batch, FULL_SERIAL};
use crate::summary::Summary;
use crate::vm::VM;

mod memory;

pub use self::memory::{Marginal, Memory};

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

/// Comparison of two runtimes in the same mode of the same run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// How the pods were started.
    pub mode: Mode,
    /// Handler in the numerator.
    pub a: String,
    /// Handler in the denominator.
    pub b: String,
    /// Whether times of whole groups are compared instead of times of pods.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub groups: bool,
    /// Number of independent samples of a and of b: starts, or groups of [`Mode::Parallel`]. Earlier results have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub samples: Option<[usize; 2]>,
    /// Number of failed starts of a and of b. No median includes them.
    #[serde(default, skip_serializing_if = "none_failed")]
    pub failures: [usize; 2],
    /// Ratio of the medians.
    #[serde(flatten)]
    pub ratio: Ratio,
}

fn none_failed(failures: &[usize; 2]) -> bool {
    failures.iter().all(|count| *count == 0)
}

/// Formats as "sandboxer over runc, whole groups: medians 0.50 × (95 % CI 0.48 to 0.52), 2.00 times faster (1.92 to
/// 2.08)".
impl std::fmt::Display for Comparison {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let what = if self.groups { "whole groups".to_owned() } else { self.mode.to_string() };
        write!(f, "{} over {}, {what}: medians {}", self.a, self.b, self.ratio)?;
        match (self.failures, self.ratio.times_faster()) {
            // The slowest starts may be among the failed ones.
            ([a, b], _) if a + b > 0 => {
                write!(f, "; no verdict, because starts failed: {a} of {}, {b} of {}", self.a, self.b)
            }
            (_, Some(faster)) => write!(f, ", {faster}"),
            (_, None) => Ok(()),
        }
    }
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
                let series = Series::of(runtime, mode, samples, batches);
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
    pub fn told_ratios(&self) -> impl Iterator<Item = &Comparison> {
        let says_more = |of: &&Comparison| of.ratio.interval.is_some() || !none_failed(&of.failures);
        self.ratios.iter().filter(says_more)
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
            summary: Summary::of(boots, failures.len()),
            like: like.to_owned(),
            over: Ratio::of(&times(samples, like, Mode::Serial), boots),
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
            self.memory.extend(groups.into_values().map(|group| Memory::of(&group)));
            match Marginal::of(&points) {
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

/// Returns the compared pairs: the first runtime with each of the others, and those with [`REFERENCE`] and the
/// baseline.
fn pairs<'a>(runtimes: &'a [String], baseline: Option<&'a str>) -> Vec<(&'a str, &'a str)> {
    let mut pairs: Vec<(&str, &str)> = Vec::new();
    let mut add = |a: &'a str, b: &'a str| {
        if a != b && !pairs.contains(&(a, b)) {
            pairs.push((a, b));
        }
    };
    if let Some((first, others)) = runtimes.split_first() {
        others.iter().for_each(|other| add(first, other));
    }
    for base in [Some(REFERENCE), baseline].into_iter().flatten() {
        if runtimes.iter().any(|name| name == base) {
            runtimes.iter().for_each(|name| add(name, base));
        }
    }
    pairs
}

impl Comparison {
    /// Returns the ratio of two runtimes' starts in this mode.
    fn of_pods((a, b): (&str, &str), mode: Mode, series: &[Series], samples: &[Sample]) -> Option<Self> {
        let (ratio, n) = match mode {
            Mode::Parallel => {
                let [a, b] = [a, b].map(|runtime| times_by_group(samples, runtime));
                (Ratio::of_groups(&a, &b)?, [a.len(), b.len()])
            }
            Mode::Serial | Mode::Sustained => {
                let [a, b] = [a, b].map(|runtime| times(samples, runtime, mode));
                (Ratio::of(&a, &b)?, [a.len(), b.len()])
            }
        };
        Some(Self::new((a, b), mode, series, ratio, n))
    }

    /// Returns the ratio of the times of two runtimes' whole groups.
    fn of_whole_groups((a, b): (&str, &str), series: &[Series]) -> Option<Self> {
        let walls = |runtime: &str| -> Vec<Vec<f64>> {
            let of =
                series.iter().filter(|series| series.runtime == runtime && series.mode == Mode::Parallel);
            of.flat_map(Series::walls).map(|wall| vec![wall]).collect()
        };
        let (of_a, of_b) = (walls(a), walls(b));
        let ratio = Ratio::of_groups(&of_a, &of_b)?;
        let comparison = Self::new((a, b), Mode::Parallel, series, ratio, [of_a.len(), of_b.len()]);
        Some(Self { groups: true, ..comparison })
    }

    fn new((a, b): (&str, &str), mode: Mode, series: &[Series], ratio: Ratio, samples: [usize; 2]) -> Self {
        let failures = |runtime: &str| {
            let of = series.iter().filter(|series| series.runtime == runtime && series.mode == mode);
            of.map(|series| series.summary.failures).sum()
        };
        let failures = [a, b].map(failures);
        Self {
            mode,
            a: a.to_owned(),
            b: b.to_owned(),
            groups: false,
            samples: Some(samples),
            failures,
            ratio,
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
    fn of(runtime: &str, mode: Mode, samples: &[Sample], batches: &[Batch]) -> Self {
        let mine = |s: &&Sample| s.runtime == runtime && s.mode == mode && !s.warm_up;
        let failed: Vec<&Sample> = samples.iter().filter(mine).filter(|s| s.failed()).collect();
        let good: Vec<&Sample> = samples.iter().filter(mine).filter(|s| s.time().is_some()).collect();
        let of = |f: &dyn Fn(&Sample) -> Option<f64>| {
            Summary::of(&good.iter().filter_map(|s| f(s)).collect::<Vec<_>>(), 0)
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
            summary: Summary::of(&good.iter().filter_map(|s| s.time()).collect::<Vec<_>>(), failed.len()),
            steps: [
                ("pod".to_owned(), of(&|s| s.pod_ms)),
                ("created".to_owned(), of(&|s| s.created_ms)),
                ("started".to_owned(), of(&|s| s.started_ms)),
            ]
            .into_iter()
            .chain(pinged.then(|| (FIRST_PING.to_owned(), of(&|s| s.first_ping_ms))))
            .collect(),
            batch_ms: batches.iter().map(|batch| batch.wall_ms).collect(),
            release_spread_ms: batches.iter().map(|batch| batch.release_spread_ms).collect(),
            rate: None,
            stages: Stage::ALL
                .into_iter()
                .map(|stage| (stage, of(&|s| s.stages.get(&stage).copied())))
                .filter(|(_, summary)| summary.n > 0)
                .collect(),
            unexplained: traced.then(|| {
                of(&|s| Some(s.time()? - s.stages.values().sum::<f64>()).filter(|_| !s.stages.is_empty()))
            }),
            kvm_exits: ExitsPerPod::of(good.iter().filter_map(|s| s.kvm_exits).collect()),
            failed_at,
        }
    }
}

impl Series {
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
        (!self.batch_ms.is_empty()).then(|| Summary::of(&walls, failed))
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

impl Comparison {
    /// Removes an interval that earlier versions computed over the pods of groups as if they were independent.
    fn without_interval_of_few_groups(&mut self) {
        let enough = self.samples.is_some_and(|samples| samples.iter().all(|count| *count >= MIN_GROUPS));
        if self.mode == Mode::Parallel && !enough {
            self.ratio.interval = None;
        }
    }
}

/// Returns indented JSON.
pub fn render(report: &Report) -> String {
    let value = serde_json::to_value(report).unwrap_or_else(|error| json!({ "error": error.to_string() }));
    format!("{value:#}\n")
}
