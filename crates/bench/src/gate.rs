//! A gate against regressions: compares a result with recorded results of earlier versions.
//!
//! A recording is one row per handler in a CSV file in the repository. Only reproducible figures are compared: the
//! ratio to [`REFERENCE`] of the same run, and the medians of the stages.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use sandboxer_probe::clock::Clock;
use sandboxer_probe::manifest::shown;
use sandboxer_probe::report::{REFERENCE, Report};
use sandboxer_probe::sample::Mode;
use sandboxer_protocol::stage::Stage;
use serde::Serialize;

/// Growth of a stage that is ignored, ms: medians of a few starts differ by as much.
pub const FLOOR_MS: f64 = 0.5;
/// Growth of a stage that is ignored, as a fraction of the allowed growth of the whole start: a timer of containerd or
/// of the kernel may fall into a stage.
const OF_WHOLE: f64 = 0.5;
/// Name of the time outside all stages: containerd, CNI and the first byte's path to the log.
const UNEXPLAINED: &str = "unexplained";
/// Columns before the stages' columns.
const COLUMNS: [&str; 8] = ["at", "commit", "clock", "vmm", "runtime", "n", "p50_ms", "over_runc"];

/// One handler of one recorded run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Recorded {
    /// Time of recording, RFC 3339; a node in virtual time has no real date.
    pub at: String,
    /// Commit of the measured version.
    pub commit: String,
    /// Clock of the times.
    pub clock: Clock,
    /// Name of the VMM.
    pub vmm: String,
    /// Runtime handler.
    pub runtime: String,
    /// Number of serial starts.
    pub n: usize,
    /// Median start-up time, ms.
    pub p50_ms: f64,
    /// Ratio of the median to the median of [`REFERENCE`] in the same run.
    pub over_runc: f64,
    /// Medians of the stages and of the unexplained rest, ms.
    pub stages: BTreeMap<String, f64>,
}

/// Why a result cannot be recorded or compared.
#[derive(Debug, thiserror::Error)]
pub enum GateError {
    /// There is no figure to compare.
    #[error("{0}")]
    Result(String),
    /// The file of recordings is invalid.
    #[error("cannot read recordings from {path}: {reason}")]
    History {
        /// Path of the file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A file cannot be read or written.
    #[error("cannot {action} {path}")]
    Io {
        /// The attempted step.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// Growth of one figure.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Growth {
    /// Name of a stage, or of the ratio to the reference.
    pub what: String,
    /// Recorded value.
    pub before: f64,
    /// Value now.
    pub now: f64,
}

impl Growth {
    /// Returns the growth in per cent; infinite if the earlier value is 0.
    pub fn percent(&self) -> f64 {
        if self.before > 0.0 { (self.now / self.before - 1.0) * 100.0 } else { f64::INFINITY }
    }
}

/// Result for one handler.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verdict {
    /// Runtime handler.
    pub runtime: String,
    /// Commit of the compared version; `None` if this handler has no recording with this VMM and clock.
    pub commit: Option<String>,
    /// Ratio to the reference, recorded and now.
    pub over_runc: Option<Growth>,
    /// Whether the ratio grew by more than allowed.
    pub slower: bool,
    /// Stages that grew by more than allowed; if only the ratio did, the stage that grew most.
    pub grown: Vec<Growth>,
}

impl Verdict {
    /// Returns whether the handler passes the gate.
    pub fn passes(&self) -> bool {
        !self.slower && self.grown.is_empty()
    }
}

/// Returns a result's rows to record: one per handler except the reference.
pub fn recording(report: &Report, commit: &str) -> Result<Vec<Recorded>, GateError> {
    let refused = |why: String| Err(GateError::Result(why));
    if report.partial {
        let why = report.partial_reason.as_deref().unwrap_or("unknown reason");
        return refused(format!("the run is partial ({why}): only complete runs can be compared"));
    }
    let at = jiff::Timestamp::now().strftime("%FT%TZ").to_string();
    let mut rows = Vec::new();
    for series in &report.series {
        if series.mode != Mode::Serial || series.runtime == REFERENCE {
            continue;
        }
        let name = &series.runtime;
        if series.summary.failures > 0 {
            return refused(format!(
                "{} of {} starts of {name} failed",
                series.summary.failures, series.summary.n
            ));
        }
        let (Some(p50_ms), Some(ratio)) =
            (series.summary.p50_ms, report.over_reference(name, Mode::Serial, false))
        else {
            return refused(format!(
                "the result has no ratio of {name} to {REFERENCE}: measure both in one run"
            ));
        };
        let stages = series.stages.iter().map(|(stage, summary)| (stage.to_string(), summary.p50_ms));
        let rest = series.unexplained.as_ref().map(|rest| (UNEXPLAINED.to_owned(), rest.p50_ms));
        rows.push(Recorded {
            at: at.clone(),
            commit: commit.to_owned(),
            clock: report.clock,
            vmm: report.manifest.vmm.get("vmm").map(shown).unwrap_or_default(),
            runtime: name.clone(),
            n: series.summary.n,
            p50_ms,
            over_runc: ratio.p50,
            stages: stages.chain(rest).filter_map(|(name, ms)| Some((name, ms?))).collect(),
        });
    }
    if rows.is_empty() {
        return refused("the result has no serial starts of any handler".into());
    }
    Ok(rows)
}

/// Compares rows with the latest recorded ones of the same handler, VMM and clock. Growth of up to `allowed` per cent
/// passes.
pub fn judge(now: &[Recorded], history: &[Recorded], allowed: f64) -> Vec<Verdict> {
    now.iter()
        .map(|row| {
            let key = |row: &Recorded| (row.clock, row.vmm.clone(), row.runtime.clone());
            match history.iter().rev().find(|before| key(before) == key(row)) {
                Some(before) => verdict(before, row, allowed),
                None => Verdict {
                    runtime: row.runtime.clone(),
                    commit: None,
                    over_runc: None,
                    slower: false,
                    grown: Vec::new(),
                },
            }
        })
        .collect()
}

fn verdict(before: &Recorded, now: &Recorded, allowed: f64) -> Verdict {
    let ratio = Growth { what: "ratio".into(), before: before.over_runc, now: now.over_runc };
    let median = Growth { what: "p50".into(), before: before.p50_ms, now: now.p50_ms };
    // Virtual times are the same on all hosts: if ours did not grow, the reference became faster.
    let ours = now.clock != Clock::Virtual || median.percent() > allowed;
    let slower = ratio.percent() > allowed && ours;
    let mut stages: Vec<Growth> = now
        .stages
        .iter()
        .map(|(stage, &now)| {
            let before = before.stages.get(stage).copied().unwrap_or_default();
            Growth { what: stage.clone(), before, now }
        })
        .collect();
    stages.sort_by(|a, b| (b.now - b.before).total_cmp(&(a.now - a.before)));
    let floor = FLOOR_MS.max(before.p50_ms * allowed / 100.0 * OF_WHOLE);
    let beyond = |stage: &&Growth| stage.percent() > allowed && stage.now - stage.before > floor;
    let mut grown: Vec<Growth> = stages.iter().filter(beyond).cloned().collect();
    if slower && grown.is_empty() {
        grown.extend(stages.into_iter().next());
    }
    Verdict {
        runtime: now.runtime.clone(),
        commit: Some(before.commit.clone()),
        over_runc: Some(ratio),
        slower,
        grown,
    }
}

fn stage_columns() -> Vec<String> {
    Stage::ALL.iter().map(Stage::to_string).chain([UNEXPLAINED.to_owned()]).collect()
}

/// Reads recordings; returns none if the file does not exist. Finds columns by name.
pub fn read(path: &Path) -> Result<Vec<Recorded>, GateError> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(GateError::Io { action: "read", path: path.to_owned(), source }),
    };
    parse(&text).map_err(|reason| GateError::History { path: path.to_owned(), reason })
}

fn parse(text: &str) -> Result<Vec<Recorded>, String> {
    let mut rows = csv::Reader::from_reader(text.as_bytes());
    let heading = rows.headers().map_err(|error| error.to_string())?.clone();
    let mut recorded = Vec::new();
    for (index, row) in rows.records().enumerate() {
        let row = row.map_err(|error| error.to_string())?;
        let cell = |name: &str| heading.iter().position(|column| column == name).and_then(|at| row.get(at));
        let text = |name: &str| {
            cell(name).map(str::to_owned).ok_or_else(|| format!("row {}: no column '{name}'", index + 1))
        };
        let number = |name: &str| -> Result<f64, String> {
            let digits = text(name)?;
            let value = digits.parse().ok().filter(|value: &f64| value.is_finite() && *value >= 0.0);
            value.ok_or_else(|| format!("row {}: '{digits}' in column '{name}' is not a number", index + 1))
        };
        let mut stages = BTreeMap::new();
        for stage in stage_columns() {
            let column = format!("{stage}_ms");
            if cell(&column).is_some_and(|digits| !digits.is_empty()) {
                stages.insert(stage, number(&column)?);
            }
        }
        recorded.push(Recorded {
            at: text("at")?,
            commit: text("commit")?,
            clock: text("clock")?.parse().map_err(|why: String| format!("row {}: {why}", index + 1))?,
            vmm: text("vmm")?,
            runtime: text("runtime")?,
            n: number("n")? as usize,
            p50_ms: number("p50_ms")?,
            over_runc: number("over_runc")?,
            stages,
        });
    }
    Ok(recorded)
}

/// Appends recordings to the file. A new file begins with a header.
pub fn append(path: &Path, rows: &[Recorded]) -> Result<(), GateError> {
    let io = |action| move |source| GateError::Io { action, path: path.to_owned(), source };
    let begun = fs::metadata(path).is_ok_and(|file| file.len() > 0);
    let text = render(rows, !begun).map_err(io("format rows for"))?;
    let mut file = OpenOptions::new().append(true).create(true).open(path).map_err(io("open"))?;
    file.write_all(&text).map_err(io("write"))
}

fn render(rows: &[Recorded], heading: bool) -> io::Result<Vec<u8>> {
    let mut text = csv::Writer::from_writer(Vec::new());
    if heading {
        let stages = stage_columns().into_iter().map(|stage| format!("{stage}_ms"));
        text.write_record(COLUMNS.iter().map(|&name| name.to_owned()).chain(stages))?;
    }
    for row in rows {
        let cells = [
            row.at.clone(),
            row.commit.clone(),
            row.clock.to_string(),
            row.vmm.clone(),
            row.runtime.clone(),
            row.n.to_string(),
            format!("{:.3}", row.p50_ms),
            format!("{:.4}", row.over_runc),
        ];
        let stages = stage_columns()
            .into_iter()
            .map(|stage| row.stages.get(&stage).map(|ms| format!("{ms:.3}")).unwrap_or_default());
        text.write_record(cells.into_iter().chain(stages))?;
    }
    text.into_inner().map_err(csv::IntoInnerError::into_error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(commit: &str, over_runc: f64, stages: &[(&str, f64)]) -> Recorded {
        Recorded {
            at: "2026-11-22T16:00:00Z".into(),
            commit: commit.into(),
            clock: Clock::Virtual,
            vmm: "qemu".into(),
            runtime: "sandboxer".into(),
            n: 5,
            p50_ms: over_runc * 270.0,
            over_runc,
            stages: stages.iter().map(|(name, ms)| ((*name).to_owned(), *ms)).collect(),
        }
    }

    const BEFORE: [(&str, f64); 4] =
        [("agent_ready", 5.8), ("container_create", 14.6), ("claim", 0.2), (UNEXPLAINED, 100.0)];

    fn only(now: Recorded, history: &[Recorded]) -> Verdict {
        judge(&[now], history, 5.0).remove(0)
    }

    #[test]
    fn a_stage_that_grew_by_much_of_what_the_whole_may_fails_by_name() {
        let history = [row("a", 0.9, &BEFORE), row("b", 0.52, &BEFORE)];
        let mut stages = BEFORE;
        stages[1].1 += 3.6;
        let verdict = only(row("c", 0.525, &stages), &history);
        assert!(!verdict.passes() && !verdict.slower, "{verdict:?}");
        assert_eq!(verdict.commit.as_deref(), Some("b"));
        let names: Vec<&str> = verdict.grown.iter().map(|growth| &*growth.what).collect();
        assert_eq!(names, ["container_create"]);
        assert!((verdict.grown[0].percent() - 24.66).abs() < 0.01, "{verdict:?}");
    }

    #[test]
    fn growth_within_what_is_allowed_passes_and_so_does_what_medians_differ_by_anyway() {
        let mut stages = BEFORE;
        stages[1].1 *= 1.04;
        // Twice as long, yet too small a change to matter.
        stages[2].1 *= 2.0;
        // A large part of the stage, and a small part of the whole start.
        stages[0].1 += 3.4;
        let verdict = only(row("c", 0.52 * 1.049, &stages), &[row("b", 0.52, &BEFORE)]);
        assert!(verdict.passes(), "{verdict:?}");
    }

    #[test]
    fn a_ratio_that_grew_names_the_stage_that_grew_most_even_if_none_is_beyond() {
        let mut stages = BEFORE;
        stages[0].1 *= 1.02;
        stages[3].1 *= 1.045;
        let verdict = only(row("c", 0.52 * 1.06, &stages), &[row("b", 0.52, &BEFORE)]);
        assert!(!verdict.passes() && verdict.slower);
        assert_eq!(verdict.grown[0].what, UNEXPLAINED, "{verdict:?}");
    }

    #[test]
    fn a_reference_that_became_shorter_makes_nothing_slower_in_virtual_time() {
        let before = row("b", 0.52, &BEFORE);
        let now = |clock| Recorded { clock, p50_ms: before.p50_ms, ..row("c", 0.56, &BEFORE) };
        assert!(only(now(Clock::Virtual), std::slice::from_ref(&before)).passes());
        let wall = Recorded { clock: Clock::Wall, ..before.clone() };
        assert!(!only(now(Clock::Wall), &[wall]).passes());
    }

    #[test]
    fn a_stage_that_was_not_there_before_counts_from_nothing() {
        let stages = [&BEFORE[..], &[("queue", 4.0)]].concat();
        let verdict = only(row("c", 0.52, &stages), &[row("b", 0.52, &BEFORE)]);
        assert_eq!(verdict.grown[0].what, "queue");
    }

    #[test]
    fn another_vmm_or_clock_is_not_compared_with() {
        let other = [
            Recorded { vmm: "cloud-hypervisor".into(), ..row("b", 0.1, &[]) },
            Recorded { clock: Clock::Wall, ..row("b", 0.1, &[]) },
        ];
        let verdict = only(row("c", 0.52, &BEFORE), &other);
        assert_eq!((verdict.passes(), verdict.commit), (true, None));
    }

    #[test]
    fn recordings_come_back_as_they_went_out_and_a_second_has_no_second_heading() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("history.csv");
        assert_eq!(read(&path).unwrap(), []);
        let rows = [row("a", 0.5, &BEFORE), row("b", 0.51, &BEFORE[..1])];
        append(&path, &rows[..1]).unwrap();
        append(&path, &rows[1..]).unwrap();
        assert_eq!(read(&path).unwrap(), rows);
        fs::write(&path, "at,commit,clock,vmm,runtime,n,p50_ms,over_runc\nx,y,wall,qemu,a,5,soon,1\n")
            .unwrap();
        let why = read(&path).unwrap_err().to_string();
        assert!(why.contains("row 1") && why.contains("soon"), "{why}");
    }
}
