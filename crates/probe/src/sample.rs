//! The raw rows, one per pod, failures included.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

use sandboxer_protocol::stage::Stage;
use serde::{Deserialize, Serialize};

use crate::clock::Clock;

/// How pods were started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Pods are started one after the other, each removed before the next.
    Serial,
    /// Pods of a group are started at once.
    Parallel,
    /// Pods of one runtime are started one after the other without a pause, to measure the sustained rate.
    Sustained,
}

impl Mode {
    /// Every mode, in the order of reports.
    pub const ALL: [Mode; 3] = [Mode::Serial, Mode::Parallel, Mode::Sustained];
}

impl std::fmt::Display for Mode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Mode::Serial => "serial",
            Mode::Parallel => "parallel",
            Mode::Sustained => "sustained",
        })
    }
}

/// Whether a pod's container ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// The container's first byte was detected.
    Ok,
    /// The start failed.
    Failed,
    /// The measurement was interrupted before the start finished; not counted.
    Interrupted,
}

/// One start of a pod with one container. Times are ms since the start request, on the monotonic clock.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Runtime handler.
    pub runtime: String,
    /// How the pod was started.
    pub mode: Mode,
    /// Number of the serial start or of the group, from 0.
    pub round: u32,
    /// Place of the pod within its group; 0 for serial starts.
    pub index: u32,
    /// Whether the start is a warm-up, which never counts.
    pub warm_up: bool,
    /// Time of the start request, ms since the run began; shows alternation and drift.
    pub released_ms: f64,
    /// Time at which RunPodSandbox returned.
    pub pod_ms: Option<f64>,
    /// Time at which CreateContainer returned.
    pub created_ms: Option<f64>,
    /// Time at which StartContainer returned. The first byte may come before or after it.
    pub started_ms: Option<f64>,
    /// Time of the container's first byte: the measured time.
    pub first_byte_ms: Option<f64>,
    /// Time of the first answered ping; only for the series `vm`.
    pub first_ping_ms: Option<f64>,
    /// Outcome of the start.
    pub outcome: Outcome,
    /// Call that failed; empty if none did.
    pub failed_at: String,
    /// Reason of the failure, in one line.
    pub error: String,
    /// Durations of the daemon's own stages, ms, if there is a trace.
    pub stages: BTreeMap<Stage, f64>,
    /// VM exits of the pod, from KVM's statistics: from the start request until after the first byte, in a group until
    /// all of its pods have started.
    pub kvm_exits: Option<u64>,
}

impl Sample {
    /// Returns a start of this runtime for which only the measured time is known.
    pub fn new(runtime: &str, mode: Mode, first_byte_ms: f64) -> Self {
        Self {
            runtime: runtime.to_owned(),
            mode,
            round: 0,
            index: 0,
            warm_up: false,
            released_ms: 0.0,
            pod_ms: None,
            created_ms: None,
            started_ms: None,
            first_byte_ms: Some(first_byte_ms),
            first_ping_ms: None,
            outcome: Outcome::Ok,
            failed_at: String::new(),
            error: String::new(),
            stages: BTreeMap::new(),
            kvm_exits: None,
        }
    }

    /// Returns the measured time, if the pod counts.
    pub fn time(&self) -> Option<f64> {
        self.first_byte_ms.filter(|_| self.outcome == Outcome::Ok && !self.warm_up)
    }

    /// Returns whether the start is a counted failure.
    pub fn failed(&self) -> bool {
        self.outcome == Outcome::Failed && !self.warm_up
    }
}

/// Why a file of samples cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum SamplesError {
    /// The file cannot be read as samples.
    #[error("cannot read samples from {path}")]
    Read {
        /// Path of the file.
        path: String,
        /// The parser's error, with the line.
        source: csv::Error,
    },
    /// A value in a row is invalid.
    #[error("{path}: row {row}: {reason}")]
    Value {
        /// Path of the file.
        path: String,
        /// Number of the row, from 1, without the header.
        row: usize,
        /// What is wrong with the row.
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

/// Columns after the stages' columns.
const LAST_COLUMNS: [&str; 3] = ["kvm_exits", "clock", "first_ping_ms"];

/// Writes samples as CSV, each whole row at once, so that a run that dies or fills the disk keeps earlier rows.
pub struct SampleWriter {
    file: File,
    clock: Clock,
    /// Size of the complete rows, bytes.
    whole_rows_bytes: u64,
}

impl SampleWriter {
    /// Writes the header to an empty file that is open for appending.
    pub fn new(file: File, clock: Clock) -> io::Result<Self> {
        let mut writer = Self { file, clock, whole_rows_bytes: 0 };
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
        self.row(row.into_iter().chain(stages).chain([
            exits,
            self.clock.to_string(),
            ms(sample.first_ping_ms),
        ]))
    }

    fn row(&mut self, fields: impl Iterator<Item = String>) -> io::Result<()> {
        let mut row = csv::Writer::from_writer(Vec::new());
        row.write_record(fields.map(String::into_bytes))?;
        let row = row.into_inner().map_err(csv::IntoInnerError::into_error)?;
        let written = self.file.write_all(&row);
        match written {
            Ok(()) => self.whole_rows_bytes += row.len() as u64,
            // A full disk leaves a partial row, which would be unreadable.
            Err(_) => drop(self.file.set_len(self.whole_rows_bytes)),
        }
        written
    }
}

/// Formats a time with microsecond resolution.
fn ms(time: Option<f64>) -> String {
    time.map(|time| format!("{time:.3}")).unwrap_or_default()
}

/// Contents of a file of samples.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Rows {
    /// Clock of all times; files of older probes name none and used the wall clock.
    pub clock: Clock,
    /// The samples, in file order.
    pub samples: Vec<Sample>,
}

/// Reads what [`SampleWriter`] wrote. Finds columns by name; missing stages are unknown.
pub fn read_samples(from: impl Read, path: &Path) -> Result<Rows, SamplesError> {
    let name = path.display().to_string();
    let read = |source| SamplesError::Read { path: name.clone(), source };
    let mut rows = csv::Reader::from_reader(from);
    let heading = rows.headers().map_err(read)?.clone();
    let (mut samples, mut clock) = (Vec::new(), None);
    for (index, row) in rows.records().enumerate() {
        let row = row.map_err(read)?;
        let bad = |reason: String| SamplesError::Value { path: name.clone(), row: index + 1, reason };
        let row = Row { heading: &heading, row: &row };
        let of_row = row.clock().map_err(bad)?;
        if *clock.get_or_insert(of_row) != of_row {
            return Err(bad("its time is from another clock than the rows before it".into()));
        }
        samples.push(row.sample().map_err(bad)?);
    }
    Ok(Rows { clock: clock.unwrap_or_default(), samples })
}

/// A row of samples.csv. Errors state what is wrong with it.
struct Row<'a> {
    heading: &'a csv::StringRecord,
    row: &'a csv::StringRecord,
}

impl Row<'_> {
    /// Returns the text of a column; `None` if there is no such column.
    fn optional(&self, field: &str) -> Option<&str> {
        self.row.get(self.heading.iter().position(|heading| heading == field)?)
    }

    fn text(&self, field: &str) -> Result<&str, String> {
        self.optional(field).ok_or_else(|| format!("column '{field}' is missing"))
    }

    /// Returns a time, ms; `None` if the column is empty.
    fn number(&self, field: &str) -> Result<Option<f64>, String> {
        match self.text(field)? {
            "" => Ok(None),
            digits => digits
                .parse()
                .ok()
                .filter(|value: &f64| value.is_finite() && *value >= 0.0)
                .map(Some)
                .ok_or_else(|| format!("'{digits}' in column '{field}' is not a time in ms")),
        }
    }

    fn whole(&self, field: &str) -> Result<u32, String> {
        self.text(field)?.parse().map_err(|_| format!("no whole number in column '{field}'"))
    }

    fn clock(&self) -> Result<Clock, String> {
        self.optional("clock").map_or_else(|| Ok(Clock::default()), str::parse)
    }

    fn stages(&self) -> Result<BTreeMap<Stage, f64>, String> {
        let mut stages = BTreeMap::new();
        for stage in Stage::ALL {
            let field = format!("{stage}_ms");
            if self.optional(&field).is_some()
                && let Some(time) = self.number(&field)?
            {
                stages.insert(stage, time);
            }
        }
        Ok(stages)
    }

    /// Returns the time of the first answered ping, ms; `None` in earlier results, which lack the column.
    fn first_ping(&self) -> Result<Option<f64>, String> {
        self.optional("first_ping_ms").map_or(Ok(None), |_| self.number("first_ping_ms"))
    }

    fn kvm_exits(&self) -> Result<Option<u64>, String> {
        let digits = self.optional("kvm_exits").filter(|digits| !digits.is_empty());
        let parse = |digits: &str| {
            digits.parse().map_err(|_| format!("no whole number in column 'kvm_exits': '{digits}'"))
        };
        digits.map(parse).transpose()
    }

    fn sample(&self) -> Result<Sample, String> {
        Ok(Sample {
            runtime: self.text("runtime")?.to_owned(),
            mode: match self.text("mode")? {
                "serial" => Mode::Serial,
                "parallel" => Mode::Parallel,
                "sustained" => Mode::Sustained,
                other => return Err(format!("no such mode '{other}'")),
            },
            round: self.whole("round")?,
            index: self.whole("index")?,
            warm_up: self.text("warm_up")? == "true",
            released_ms: self.number("released_ms")?.unwrap_or_default(),
            pod_ms: self.number("pod_ms")?,
            created_ms: self.number("created_ms")?,
            started_ms: self.number("started_ms")?,
            first_byte_ms: self.number("first_byte_ms")?,
            first_ping_ms: self.first_ping()?,
            outcome: match self.text("outcome")? {
                "ok" => Outcome::Ok,
                "failed" => Outcome::Failed,
                "interrupted" => Outcome::Interrupted,
                other => return Err(format!("no such outcome '{other}'")),
            },
            failed_at: self.text("failed_at")?.to_owned(),
            error: self.text("error")?.to_owned(),
            stages: self.stages()?,
            kvm_exits: self.kvm_exits()?,
        })
    }
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
            first_ping_ms: Some(140.5),
            outcome: Outcome::Ok,
            failed_at: String::new(),
            error: String::new(),
            stages: [(Stage::Boot, 700.5)].into(),
            kvm_exits: Some(4321),
        };
        let failed = Sample {
            outcome: Outcome::Failed,
            first_byte_ms: None,
            first_ping_ms: None,
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
