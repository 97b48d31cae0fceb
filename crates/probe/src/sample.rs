//! The raw rows that every figure stands on: one per pod, failures included.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

use sandboxer_protocol::stage::Stage;
use serde::{Deserialize, Serialize};

use crate::clock::Clock;

/// How pods were released.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// One after the other, each removed before the next.
    Serial,
    /// A group at once, by one barrier.
    Parallel,
}

impl std::fmt::Display for Mode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Mode::Serial => "serial",
            Mode::Parallel => "parallel",
        })
    }
}

/// Whether a pod's container ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// Its first byte was seen.
    Ok,
    /// It did not come that far; counted as a failure, never as a time.
    Failed,
    /// The measurement was ended before the pod was there; counted as nothing.
    Interrupted,
}

/// One start of a pod with one container. Times are ms since the pod's release, on the monotonic clock.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Runtime handler.
    pub runtime: String,
    /// How it was released.
    pub mode: Mode,
    /// Round, from 0: the how-manieth serial start, or the how-manieth group.
    pub round: u32,
    /// Place within its group; 0 for serial starts.
    pub index: u32,
    /// Before counting began, to warm caches: never counted.
    pub warm_up: bool,
    /// The release, ms since the run began; tells alternation and drift.
    pub released_ms: f64,
    /// RunPodSandbox answered.
    pub pod_ms: Option<f64>,
    /// CreateContainer answered.
    pub created_ms: Option<f64>,
    /// StartContainer answered. The first byte may come before or after it.
    pub started_ms: Option<f64>,
    /// The container's process has demonstrably run: the time that counts.
    pub first_byte_ms: Option<f64>,
    /// Whether it came that far.
    pub outcome: Outcome,
    /// Call that failed; empty when none did.
    pub failed_at: String,
    /// Why, in one line.
    pub error: String,
    /// Durations of the daemon's own stages, ms, where it has a trace.
    pub stages: BTreeMap<Stage, f64>,
    /// How often the pod's guest left to the host, by KVM's statistics: from the release until after the first byte, of a
    /// group until all of it was there.
    pub kvm_exits: Option<u64>,
}

impl Sample {
    /// Returns the time that counts, for pods that count.
    pub fn time(&self) -> Option<f64> {
        self.first_byte_ms.filter(|_| self.outcome == Outcome::Ok && !self.warm_up)
    }

    /// Returns whether the failure counts.
    pub fn failed(&self) -> bool {
        self.outcome == Outcome::Failed && !self.warm_up
    }
}

/// What is wrong with a file of samples.
#[derive(Debug, thiserror::Error)]
pub enum SamplesError {
    /// Not readable as samples.
    #[error("cannot read samples from {path}")]
    Read {
        /// The file.
        path: String,
        /// Line and reason.
        source: csv::Error,
    },
    /// A value that no probe writes.
    #[error("{path}: row {row}: {reason}")]
    Value {
        /// The file.
        path: String,
        /// From 1, without the heading.
        row: usize,
        /// What is wrong.
        reason: String,
    },
}

const COLUMNS: [&str; 13] = [
    "runtime",
    "mode",
    "round",
    "index",
    "warm_up",
    "released_ms",
    "pod_ms",
    "created_ms",
    "started_ms",
    "first_byte_ms",
    "outcome",
    "failed_at",
    "error",
];

/// After the stages.
const LAST_COLUMNS: [&str; 2] = ["kvm_exits", "clock"];

/// Writes samples as CSV, each row at once and whole: a run that dies, or fills the disk, keeps those before.
pub struct SampleWriter {
    file: File,
    clock: Clock,
    /// Bytes of whole rows.
    kept: u64,
}

impl SampleWriter {
    /// Writes the heading to an empty file that is open for appending.
    pub fn new(file: File, clock: Clock) -> io::Result<Self> {
        let mut writer = Self { file, clock, kept: 0 };
        let stages = Stage::ALL.iter().map(|stage| format!("{stage}_ms"));
        let more = LAST_COLUMNS.iter().map(|&name| name.to_owned());
        writer.row(COLUMNS.iter().map(|&name| name.to_owned()).chain(stages).chain(more))?;
        Ok(writer)
    }

    /// Writes a row.
    pub fn write(&mut self, sample: &Sample) -> io::Result<()> {
        let outcome = match sample.outcome {
            Outcome::Ok => "ok",
            Outcome::Failed => "failed",
            Outcome::Interrupted => "interrupted",
        };
        let row = [
            sample.runtime.clone(),
            sample.mode.to_string(),
            sample.round.to_string(),
            sample.index.to_string(),
            sample.warm_up.to_string(),
            ms(Some(sample.released_ms)),
            ms(sample.pod_ms),
            ms(sample.created_ms),
            ms(sample.started_ms),
            ms(sample.first_byte_ms),
            outcome.to_owned(),
            sample.failed_at.clone(),
            sample.error.clone(),
        ];
        let stages = Stage::ALL.iter().map(|stage| ms(sample.stages.get(stage).copied()));
        let exits = sample.kvm_exits.map(|count| count.to_string()).unwrap_or_default();
        self.row(row.into_iter().chain(stages).chain([exits, self.clock.to_string()]))
    }

    fn row(&mut self, fields: impl Iterator<Item = String>) -> io::Result<()> {
        let mut row = csv::Writer::from_writer(Vec::new());
        row.write_record(fields.map(String::into_bytes))?;
        let row = row.into_inner().map_err(csv::IntoInnerError::into_error)?;
        let written = self.file.write_all(&row);
        match written {
            Ok(()) => self.kept += row.len() as u64,
            // A disk that fills takes a part of a row, which nobody could read.
            Err(_) => drop(self.file.set_len(self.kept)),
        }
        written
    }
}

/// Microseconds are the last digit that means anything.
fn ms(time: Option<f64>) -> String {
    time.map(|time| format!("{time:.3}")).unwrap_or_default()
}

/// What a file of samples holds.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Rows {
    /// Of all its times; files of older probes don't say it, and are the wall's.
    pub clock: Clock,
    /// In the order of the file.
    pub samples: Vec<Sample>,
}

/// Reads what [`SampleWriter`] wrote. Columns are found by name; a stage that has none is not known.
pub fn read_samples(from: impl Read, path: &Path) -> Result<Rows, SamplesError> {
    let name = path.display().to_string();
    let read = |source| SamplesError::Read { path: name.clone(), source };
    let mut rows = csv::Reader::from_reader(from);
    let heading = rows.headers().map_err(read)?.clone();
    let column = |name: &str| heading.iter().position(|heading| heading == name);
    let (mut samples, mut clock) = (Vec::new(), None);
    for (index, row) in rows.records().enumerate() {
        let row = row.map_err(read)?;
        let bad = |reason: String| SamplesError::Value { path: name.clone(), row: index + 1, reason };
        let text = |field: &str| {
            column(field)
                .and_then(|at| row.get(at))
                .ok_or_else(|| bad(format!("there is no column '{field}'")))
        };
        let number = |field: &str| -> Result<Option<f64>, SamplesError> {
            match text(field)? {
                "" => Ok(None),
                digits => digits
                    .parse()
                    .ok()
                    .filter(|value: &f64| value.is_finite() && *value >= 0.0)
                    .map(Some)
                    .ok_or_else(|| bad(format!("'{digits}' in column '{field}' is no time in ms"))),
            }
        };
        let whole = |field: &str| -> Result<u32, SamplesError> {
            text(field)?.parse().map_err(|_| bad(format!("no whole number in column '{field}'")))
        };
        let mut stages = BTreeMap::new();
        for stage in Stage::ALL {
            let field = format!("{stage}_ms");
            if column(&field).is_some()
                && let Some(time) = number(&field)?
            {
                stages.insert(stage, time);
            }
        }
        let kvm_exits = match column("kvm_exits").and_then(|at| row.get(at)) {
            None | Some("") => None,
            Some(digits) => Some(
                digits
                    .parse()
                    .map_err(|_| bad(format!("no whole number in column 'kvm_exits': '{digits}'")))?,
            ),
        };
        let of_row = match column("clock").and_then(|at| row.get(at)) {
            None => Clock::default(),
            Some(name) => name.parse().map_err(bad)?,
        };
        if *clock.get_or_insert(of_row) != of_row {
            return Err(bad("its time is of another clock than those before it".into()));
        }
        samples.push(Sample {
            runtime: text("runtime")?.to_owned(),
            mode: match text("mode")? {
                "serial" => Mode::Serial,
                "parallel" => Mode::Parallel,
                other => return Err(bad(format!("no such mode '{other}'"))),
            },
            round: whole("round")?,
            index: whole("index")?,
            warm_up: text("warm_up")? == "true",
            released_ms: number("released_ms")?.unwrap_or_default(),
            pod_ms: number("pod_ms")?,
            created_ms: number("created_ms")?,
            started_ms: number("started_ms")?,
            first_byte_ms: number("first_byte_ms")?,
            outcome: match text("outcome")? {
                "ok" => Outcome::Ok,
                "failed" => Outcome::Failed,
                "interrupted" => Outcome::Interrupted,
                other => return Err(bad(format!("no such outcome '{other}'"))),
            },
            failed_at: text("failed_at")?.to_owned(),
            error: text("error")?.to_owned(),
            stages,
            kvm_exits,
        });
    }
    Ok(Rows { clock: clock.unwrap_or_default(), samples })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_back_as_they_went_out() {
        let ok = Sample {
            runtime: "runc".into(),
            mode: Mode::Parallel,
            round: 2,
            index: 49,
            warm_up: false,
            released_ms: 12.5,
            pod_ms: Some(80.0),
            created_ms: Some(90.25),
            started_ms: Some(130.0),
            first_byte_ms: Some(129.875),
            outcome: Outcome::Ok,
            failed_at: String::new(),
            error: String::new(),
            stages: [(Stage::Boot, 700.5)].into(),
            kvm_exits: Some(4321),
        };
        let failed = Sample {
            outcome: Outcome::Failed,
            first_byte_ms: None,
            failed_at: "StartContainer".into(),
            error: "it said \"no\",\nand, again, no".into(),
            stages: BTreeMap::new(),
            kvm_exits: None,
            ..ok.clone()
        };
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut writer = SampleWriter::new(file.reopen().unwrap(), Clock::Virtual).unwrap();
        writer.write(&ok).unwrap();
        writer.write(&failed).unwrap();
        let read = read_samples(file.reopen().unwrap(), Path::new("samples.csv")).unwrap();
        assert_eq!(read, Rows { clock: Clock::Virtual, samples: vec![ok, failed] });
    }

    const HEADING: &str = "runtime,mode,round,index,warm_up,released_ms,pod_ms,created_ms,started_ms,first_byte_ms,\
                           outcome,failed_at,error";

    #[test]
    fn rows_that_say_nothing_of_a_clock_are_the_walls_and_two_clocks_never_stand_in_one_file() {
        let row = "runc,serial,0,0,false,0,1,2,3,4,ok,,";
        let read = |text: String| read_samples(text.as_bytes(), Path::new("s.csv"));
        let old = read(format!("{HEADING}\n{row}\n")).unwrap();
        assert_eq!((old.clock, old.samples[0].kvm_exits), (Clock::Wall, None));
        let mixed = format!("{HEADING},clock\n{row},virtual\n{row},wall\n");
        let error = read(mixed).unwrap_err().to_string();
        assert!(error.contains("row 2") && error.contains("another clock"), "{error}");
    }

    #[test]
    fn a_damaged_row_is_named() {
        let text = "runtime,mode,round,index,warm_up,released_ms,pod_ms,created_ms,started_ms,first_byte_ms,\
                    outcome,failed_at,error\nrunc,serial,0,0,false,0,1,2,soon,4,ok,,\n";
        let error = read_samples(text.as_bytes(), Path::new("s.csv")).unwrap_err().to_string();
        assert!(error.contains("s.csv: row 1") && error.contains("soon"), "{error}");
    }
}
