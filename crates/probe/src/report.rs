//! `report.json`: the result of a run; its schema is `schema/report.schema.json`.

use std::collections::BTreeMap;

use sandboxer_protocol::stage::Stage;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::clock::Clock;
use crate::exits::ExitsPerPod;
use crate::manifest::Manifest;
use crate::memory::Point;
use crate::overhead::Overhead;
use crate::ratio::Ratio;
use crate::sample::{Mode, Sample};
use crate::startup::{Batch, FULL_SERIAL};
use crate::summary::Summary;
use crate::vm::VM;

mod memory;

pub use self::memory::{Marginal, Memory};

/// Version of the schema. Readers reject newer versions.
pub const SCHEMA: u32 = 1;
/// The JSON Schema.
pub const SCHEMA_TEXT: &str = include_str!("../schema/report.schema.json");
/// Key of the first answered ping in [`Series::steps`].
pub const FIRST_PING: &str = "first_ping";
/// Reference handler of ratios, if it was measured.
pub const REFERENCE: &str = "runc";

/// A result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`] of the probe that wrote it.
    pub schema: u32,
    /// Clock of its times; older results without it used the wall clock.
    #[serde(default)]
    pub clock: Clock,
    /// It ended early.
    pub partial: bool,
    /// Why, if so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partial_reason: Option<String>,
    /// It has fewer starts than a full run.
    pub quick: bool,
    /// Conditions.
    pub manifest: Manifest,
    /// Start-up, one per runtime and mode.
    pub series: Vec<Series>,
    /// Start-up, runtimes compared.
    pub ratios: Vec<Comparison>,
    /// The same VM booted alone, after each serial round of the same run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bare_boot: Option<Bare>,
    /// Memory, one per runtime and pod count: means over the repetitions.
    pub memory: Vec<Memory>,
    /// Growth of memory per pod, by runtime.
    pub marginal_kib_per_pod: BTreeMap<String, Marginal>,
    /// Cost of the probe itself; absent figures were not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overhead: Option<Overhead>,
    /// Notes on this run.
    pub notes: Vec<String>,
    /// Figures that are missing, and why.
    pub not_measured: BTreeMap<String, String>,
}

/// Start-up of one runtime in one mode.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// Handler.
    pub runtime: String,
    /// Serial or parallel.
    pub mode: Mode,
    /// Pods at once.
    pub group: u32,
    /// From the start request to the first byte.
    #[serde(flatten)]
    pub summary: Summary,
    /// Answers of the CRI calls, since the start request: `pod`, `created`, `started`; of VMs of the series `vm` that of the
    /// first ping, `first_ping`.
    pub steps: BTreeMap<String, Summary>,
    /// Wall time of each complete group, ms.
    pub batch_ms: Vec<f64>,
    /// Between the first and the last start request of each group, ms.
    pub release_spread_ms: Vec<f64>,
    /// The daemon's stages.
    pub stages: BTreeMap<Stage, Summary>,
    /// Time outside all stages; only with stages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unexplained: Option<Summary>,
    /// VM exits per pod; only if KVM's statistics could be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kvm_exits: Option<ExitsPerPod>,
    /// Failures by call.
    pub failed_at: BTreeMap<String, usize>,
}

/// Two runtimes in the same mode of the same run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// Serial or parallel.
    pub mode: Mode,
    /// Handler in the numerator.
    pub a: String,
    /// Handler in the denominator.
    pub b: String,
    /// Compares times of whole groups instead of pods.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub groups: bool,
    /// Ratio of the medians.
    #[serde(flatten)]
    pub ratio: Ratio,
}

/// Formats as "sandboxer over runc, whole groups: medians 0.90 × (95 % CI 0.88 to 0.92)".
impl std::fmt::Display for Comparison {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let what = if self.groups { "whole groups".to_owned() } else { self.mode.to_string() };
        write!(f, "{} over {}, {what}: medians {}", self.a, self.b, self.ratio)
    }
}

/// A VM booted alone, from its VMM's start to the agent's ready message: no daemon, no container.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Bare {
    /// The times.
    #[serde(flatten)]
    pub summary: Summary,
    /// Handler of the VM.
    pub like: String,
    /// Median of that handler's serial starts over the median of these.
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

    /// Adds the results of start-up samples. The first runtime is compared with each of the others, and each with
    /// [`REFERENCE`].
    pub fn add_startup(&mut self, runtimes: &[String], samples: &[Sample], batches: &[Batch]) {
        for mode in [Mode::Serial, Mode::Parallel] {
            for runtime in runtimes {
                let series = Series::of(runtime, mode, samples, batches);
                if series.summary.n > 0 {
                    self.series.push(series);
                }
            }
            self.ratios.extend(pairs(runtimes).filter_map(|(a, b)| {
                let ratio = Ratio::of(&times(samples, a, mode), &times(samples, b, mode))?;
                Some(Comparison { mode, a: a.clone(), b: b.clone(), groups: false, ratio })
            }));
        }
        let of_groups: Vec<Comparison> = pairs(runtimes)
            .filter_map(|(a, b)| {
                let ratio = Ratio::of(&self.batches(a), &self.batches(b))?;
                Some(Comparison { mode: Mode::Parallel, a: a.clone(), b: b.clone(), groups: true, ratio })
            })
            .collect();
        self.ratios.extend(of_groups);
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

    /// Adds why the exits of these handlers' guests are unknown.
    pub fn explain_exits(&mut self, why: &BTreeMap<String, String>) {
        for series in self.series.iter().filter(|series| series.kvm_exits.is_none()) {
            if let Some(why) = why.get(&series.runtime) {
                self.not_measured.insert(series.exits_name(), why.clone());
            }
        }
    }

    /// Returns the ratio of this runtime to [`REFERENCE`] in this mode of the same run; of whole groups or of pods.
    pub fn over_reference(&self, runtime: &str, mode: Mode, groups: bool) -> Option<&Ratio> {
        let wanted = (runtime, REFERENCE, mode, groups);
        let found = |ratio: &&Comparison| (&*ratio.a, &*ratio.b, ratio.mode, ratio.groups) == wanted;
        self.ratios.iter().find(found).map(|found| &found.ratio)
    }

    /// Returns the times of this runtime's whole groups.
    fn batches(&self, runtime: &str) -> Vec<f64> {
        let of = self.series.iter().filter(|series| series.runtime == runtime);
        of.flat_map(|series| series.batch_ms.iter().copied()).collect()
    }

    /// Returns what was not measured, by reason.
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
        // In the requested order: the others are compared with the first.
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
            if points.iter().all(|point| point.idle_cpu_millicores.is_none()) {
                self.not_measured.insert(
                    format!("memory.{runtime}.idle_cpu_millicores"),
                    "the sweep ended before its largest count".into(),
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

/// Returns the compared pairs: the first with each of the others, and others with [`REFERENCE`].
fn pairs(runtimes: &[String]) -> impl Iterator<Item = (&String, &String)> {
    let (first, others) = runtimes.split_at(runtimes.len().min(1));
    let with_first = first.iter().flat_map(move |first| others.iter().map(move |other| (first, other)));
    let reference = runtimes.iter().find(|name| *name == REFERENCE);
    let with_reference = others.iter().filter_map(move |other| {
        reference.filter(|reference| *reference != other).map(|reference| (other, reference))
    });
    with_first.chain(with_reference)
}

/// Returns the reasons of failures, the most frequent first; merges those that differ only in ids and numbers.
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
            group: samples.iter().filter(mine).map(|s| s.index + 1).max().unwrap_or(1),
            summary: Summary::of(&good.iter().filter_map(|s| s.time()).collect::<Vec<_>>(), failed.len()),
            steps: [
                ("pod".to_owned(), of(&|s| s.pod_ms)),
                ("created".to_owned(), of(&|s| s.created_ms)),
                ("started".to_owned(), of(&|s| s.started_ms)),
            ]
            .into_iter()
            .chain(pinged.then(|| (FIRST_PING.to_owned(), of(&|s| s.first_ping_ms))))
            .collect(),
            batch_ms: batches.iter().filter_map(|batch| batch.wall_ms).collect(),
            release_spread_ms: batches.iter().map(|batch| batch.release_spread_ms).collect(),
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
    /// Returns when its VMs answered their first ping, as a sentence.
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

    /// Returns the key of its exits in `not_measured`.
    pub fn exits_name(&self) -> String {
        format!("series.{}.{}.kvm_exits", self.runtime, self.mode)
    }

    /// Returns the median of its pods' exits, as text.
    pub fn shown_exits(&self) -> String {
        self.kvm_exits.map_or_else(|| "not measured".into(), |exits| exits.p50.to_string())
    }
}

/// Why a text is not a report.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// Not JSON, or not of this schema.
    #[error("not a report of this probe")]
    Shape(#[from] serde_json::Error),
    /// A newer schema.
    #[error("the report has schema {found}, this probe reads up to {SCHEMA}: use a newer probe")]
    Newer {
        /// Its version.
        found: u64,
    },
}

/// Reads a report; checks the schema version first.
pub fn parse(text: &str) -> Result<Report, ReportError> {
    let value: Value = serde_json::from_str(text)?;
    match value.get("schema").and_then(Value::as_u64) {
        Some(found) if found > u64::from(SCHEMA) => Err(ReportError::Newer { found }),
        _ => Ok(serde_json::from_value(value)?),
    }
}

/// Returns indented JSON.
pub fn render(report: &Report) -> String {
    let value = serde_json::to_value(report).unwrap_or_else(|error| json!({ "error": error.to_string() }));
    format!("{value:#}\n")
}
