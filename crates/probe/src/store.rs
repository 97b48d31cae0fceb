//! A result on disk: a directory with `report.json`, the raw rows, and the plots.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use crate::attribution::Role;
use crate::clock::Clock;
use crate::figures::{Palette, figures};
use crate::ledger::Ledger;
use crate::manifest::Manifest;
use crate::memory::Point;
use crate::plot::{png, standalone};
use crate::report::{self, Report, ReportError};
use crate::sample::{Mode, Rows, Sample, SampleWriter, SamplesError, read_samples};
use crate::startup::batches_of;
use crate::summarise::{self, TextError};
use crate::summary::cdf;
use crate::workload::figures::figures as workload_figures;
use crate::workload::store::Loaded as Workload;

/// Why a result cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The directory already contains a result.
    #[error("{0} already contains a result: use another directory")]
    Taken(PathBuf),
    /// A file cannot be read or written.
    #[error("cannot {action} {path}")]
    Io {
        /// The attempted step.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The raw rows are invalid.
    #[error(transparent)]
    Samples(#[from] SamplesError),
    /// The report is invalid.
    #[error("cannot use {path}")]
    Report {
        /// Path of the file.
        path: PathBuf,
        /// What is wrong with it.
        source: ReportError,
    },
    /// A text file has no usable times.
    #[error("cannot use {path}")]
    Text {
        /// Path of the file.
        path: PathBuf,
        /// What is wrong with it.
        source: TextError,
    },
    /// The path is not a directory with a result in it.
    #[error("{0} contains no result: it has neither report.json nor samples.csv")]
    None(PathBuf),
    /// The lines of ledgers are invalid.
    #[error("cannot use {path}: {reason}")]
    Ledger {
        /// Path of the file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

fn io<'a>(action: &'static str, path: &'a Path) -> impl FnOnce(std::io::Error) -> StoreError + 'a {
    move |source| StoreError::Io { action, path: path.to_owned(), source }
}

/// A result that is being written.
pub struct Store {
    dir: PathBuf,
    samples: Option<SampleWriter>,
    /// Clock of the times. Each row has it, so that even a killed run has it.
    pub clock: Clock,
}

impl Store {
    /// Creates the directory. Rejects one that already contains a result, so that no samples are lost.
    pub fn create(dir: &Path) -> Result<Self, StoreError> {
        fs::create_dir_all(dir).map_err(io("create", dir))?;
        for name in ["report.json", "samples.csv", "ledger.csv"] {
            if dir.join(name).exists() {
                return Err(StoreError::Taken(dir.to_owned()));
            }
        }
        Ok(Self { dir: dir.to_owned(), samples: None, clock: Clock::default() })
    }

    /// Returns the directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Writes a sample at once.
    pub fn sample(&mut self, sample: &Sample) -> Result<(), StoreError> {
        let path = self.dir.join("samples.csv");
        let samples = match &mut self.samples {
            Some(samples) => samples,
            none => {
                let file = OpenOptions::new().append(true).create(true).open(&path);
                let writer = file.and_then(|file| SampleWriter::new(file, self.clock));
                none.insert(writer.map_err(io("write", &path))?)
            }
        };
        samples.write(sample).map_err(io("write", &path))
    }

    /// Writes the lines of all ledgers.
    pub fn ledgers(&self, points: &[Point]) -> Result<(), StoreError> {
        let mut rows = csv::Writer::from_writer(Vec::new());
        let path = self.dir.join("ledger.csv");
        let wrote = ledger_rows(&mut rows, points).map_err(|error| io("write", &path)(error.into()))?;
        let bytes = rows.into_inner().map_err(|error| io("write", &path)(error.into_error()))?;
        if wrote { write_whole(&path, &bytes) } else { Ok(()) }
    }

    /// Writes the report, and each series' distribution in two columns for gnuplot.
    pub fn report(&self, report: &Report, samples: &[Sample]) -> Result<(), StoreError> {
        for series in &report.series {
            let times = report::times(samples, &series.runtime, series.mode);
            let head = format!(
                "# {} {}, {} times: {}, fraction of starts at or below\n",
                series.runtime,
                series.mode,
                times.len(),
                report.clock.ms()
            );
            let lines = cdf(&times).into_iter().map(|(time, part)| format!("{time:.3} {part:.6}\n"));
            let text: String = std::iter::once(head).chain(lines).collect();
            self.write(&format!("cdf-{}-{}.txt", file_name(&series.runtime), series.mode), text.as_bytes())?;
        }
        self.write("report.json", report::render(report).as_bytes())
    }

    /// Writes a file of the result atomically.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
        write_whole(&self.dir.join(name), bytes)
    }
}

/// Writes a file atomically: a full disk leaves the old one.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), StoreError> {
    let mut part = path.as_os_str().to_owned();
    part.push(".part");
    let part = PathBuf::from(part);
    let written = File::create(&part).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&part, path)
    });
    written.map_err(|source| {
        let _ = fs::remove_file(&part);
        StoreError::Io { action: "write", path: path.to_owned(), source }
    })
}

/// Returns a handler's name, escaped for use in a file name.
pub fn file_name(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' }).collect()
}

fn ledger_rows(rows: &mut csv::Writer<Vec<u8>>, points: &[Point]) -> Result<bool, csv::Error> {
    rows.write_record(["runtime", "repetition", "pods", "pid", "name", "pod", "role", "pss_kib", "tie"])?;
    for point in points {
        for entry in &point.ledger.entries {
            for (role, kib) in &entry.pss_kib {
                rows.write_record([
                    &point.runtime,
                    &point.repetition.to_string(),
                    &point.ledger.pods.to_string(),
                    &entry.pid.to_string(),
                    &entry.name,
                    entry.found.pod.as_deref().unwrap_or_default(),
                    role.as_str(),
                    &kib.to_string(),
                    &entry.found.tie,
                ])?;
            }
        }
    }
    Ok(!points.is_empty())
}

/// A result read from disk.
#[derive(Debug, Clone)]
pub struct Loaded {
    /// Name of the result's directory.
    pub name: String,
    /// The result's report.
    pub report: Report,
    /// The raw rows; empty if there are none.
    pub samples: Vec<Sample>,
}

/// Writes the plots of results as `plots/<name>.svg` and `.png` below `dir`; returns their paths.
pub fn write_plots(
    dir: &Path,
    results: &[Loaded],
    workloads: &[Workload],
    palette: &Palette,
) -> Result<Vec<PathBuf>, StoreError> {
    let plots = dir.join("plots");
    fs::create_dir_all(&plots).map_err(io("create", &plots))?;
    let of_workload = |workload: &Workload| {
        workload
            .report
            .probes
            .iter()
            .flat_map(|probe| workload_figures(workload, probe, palette))
            .collect::<Vec<_>>()
    };
    let starts = results.iter().map(|result| (&result.name, figures(result, palette)));
    let all = starts
        .chain(workloads.iter().map(|result| (&result.name, of_workload(result))))
        .flat_map(|(name, figures)| figures.into_iter().map(move |figure| (name, figure)));
    let mut paths = Vec::new();
    for (result, figure) in all {
        let name = format!("{}-{}", file_name(result), figure.name);
        let picture = png(&figure.scene).unwrap_or_default();
        for (end, bytes) in [("svg", standalone(&figure.scene).into_bytes()), ("png", picture)] {
            let path = plots.join(format!("{name}.{end}"));
            write_whole(&path, &bytes)?;
            paths.push(path);
        }
    }
    Ok(paths)
}

/// Loads a result: a directory that a [`Store`] wrote, or a text file of times, which becomes a serial series of a
/// runtime named after the file.
pub fn load(path: &Path) -> Result<Loaded, StoreError> {
    if path.is_file() { load_text(path) } else { load_dir(path) }
}

fn load_text(path: &Path) -> Result<Loaded, StoreError> {
    let text = fs::read_to_string(path).map_err(io("read", path))?;
    let times =
        summarise::parse(&text).map_err(|source| StoreError::Text { path: path.to_owned(), source })?;
    let name = path.file_stem().map_or_else(|| "times".into(), |name| name.to_string_lossy().into_owned());
    let samples = times.samples(&name);
    let mut report = Report::new(Manifest::default());
    report.add_startup(std::slice::from_ref(&name), &samples, &[]);
    report.notes.push(format!("imported from {}, read as {}", path.display(), times.read_as));
    let unknown = "imported from a text file: it contains only times";
    report.not_measured.insert("manifest".into(), unknown.into());
    Ok(Loaded { name, report, samples })
}

fn load_dir(dir: &Path) -> Result<Loaded, StoreError> {
    let path = dir.join("samples.csv");
    let (Rows { clock, samples }, torn) = whole_rows(&path)?;
    let path = dir.join("report.json");
    let mut report = match fs::read_to_string(&path) {
        Ok(text) => report::parse(&text).map_err(|source| StoreError::Report { path, source })?,
        Err(error) if error.kind() == ErrorKind::NotFound && samples.is_empty() => of_ledgers_alone(dir)?,
        Err(error) if error.kind() == ErrorKind::NotFound => of_rows_alone(clock, &samples),
        Err(error) => return Err(io("read", &path)(error)),
    };
    pair_groups(&mut report, &samples);
    if torn {
        report.notes.push("the last row of samples.csv was not complete, and is left out".into());
    }
    let name =
        dir.file_name().map_or_else(|| dir.display().to_string(), |name| name.to_string_lossy().into_owned());
    Ok(Loaded { name, report, samples })
}

/// Reads `samples.csv`, and whether its last row is incomplete because the program or the host ended during the write.
fn whole_rows(path: &Path) -> Result<(Rows, bool), StoreError> {
    let mut bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok((Rows::default(), false)),
        Err(error) => return Err(io("read", path)(error)),
    };
    let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    let torn = whole < bytes.len();
    bytes.truncate(whole);
    Ok((read_samples(&bytes[..], path)?, torn))
}

/// Pairs the times of groups with their spreads: earlier versions omitted the times of groups in which a pod failed.
fn pair_groups(report: &mut Report, samples: &[Sample]) {
    let batches = batches_of(samples);
    let unpaired = |series: &&mut report::Series| {
        series.mode == Mode::Parallel && series.batch_ms.len() != series.release_spread_ms.len()
    };
    for series in report.series.iter_mut().filter(unpaired) {
        let mine = batches.iter().filter(|batch| batch.runtime == series.runtime);
        (series.batch_ms, series.release_spread_ms) =
            mine.map(|batch| (batch.wall_ms, batch.release_spread_ms)).unzip();
    }
}

/// Returns a report from the ledgers of a sweep that was killed or filled the disk. All other facts are unknown.
fn of_ledgers_alone(dir: &Path) -> Result<Report, StoreError> {
    let path = dir.join("ledger.csv");
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Err(StoreError::None(dir.to_owned())),
        Err(error) => return Err(io("read", &path)(error)),
    };
    let points = ledger_points(&text).map_err(|reason| StoreError::Ledger { path: path.clone(), reason })?;
    let mut report = Report::new(Manifest::default());
    report.add_memory(&points);
    report.marginal_kib_per_pod.clear();
    let unknown = "report.json, which has it, does not exist";
    for what in ["manifest", "marginal_kib_per_pod", "memory.goes_away_kib", "memory.available_fall_kib"] {
        report.not_measured.insert(what.into(), unknown.into());
    }
    report.partial = true;
    report.partial_reason =
        Some("it has ledgers but no report.json: it was killed, or the disk was full".into());
    Ok(report)
}

/// Reads the lines of ledgers, as [`ledger_rows`] writes them.
fn ledger_points(text: &str) -> Result<Vec<Point>, String> {
    let mut rows = csv::Reader::from_reader(text.as_bytes());
    let mut points: Vec<Point> = Vec::new();
    for (index, row) in rows.records().enumerate() {
        let row = row.map_err(|error| error.to_string())?;
        let bad = |what: &str| format!("row {}: no {what}", index + 1);
        let number = |at: usize, what: &str| -> Result<u64, String> {
            row.get(at).and_then(|text| text.parse().ok()).ok_or_else(|| bad(what))
        };
        let runtime = row.get(0).ok_or_else(|| bad("runtime"))?;
        let (repetition, pods) = (number(1, "repetition")? as u32, number(2, "number of pods")? as usize);
        let role: Role = row
            .get(6)
            .and_then(|name| Role::ALL.into_iter().find(|role| role.as_str() == name))
            .ok_or_else(|| bad("known role"))?;
        let kib = number(7, "size in KiB")?;
        let same = |point: &Point| {
            (&*point.runtime, point.repetition, point.ledger.pods) == (runtime, repetition, pods)
        };
        let at = points.iter().position(same).unwrap_or_else(|| {
            points.push(Point {
                runtime: runtime.to_owned(),
                repetition,
                ledger: Ledger { pods, ..Ledger::default() },
                idle_daemon_kib: None,
                available_fall_kib: None,
                idle_cpu_millicores: Vec::new(),
            });
            points.len() - 1
        });
        *points[at].ledger.by_role.entry(role).or_default() += kib;
    }
    Ok(points)
}

/// Returns a report from the rows of a run that was killed or filled the disk.
fn of_rows_alone(clock: Clock, samples: &[Sample]) -> Report {
    let mut runtimes: Vec<String> = Vec::new();
    for sample in samples {
        if !runtimes.contains(&sample.runtime) {
            runtimes.push(sample.runtime.clone());
        }
    }
    let mut report = Report { clock, ..Report::new(Manifest::default()) };
    report.add_startup(&runtimes, samples, &batches_of(samples));
    report.partial = true;
    report.partial_reason =
        Some("it has rows but no report.json: it was killed, or the disk was full".into());
    report
        .not_measured
        .insert("manifest".into(), "report.json, which has the conditions, does not exist".into());
    report
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::Outcome;

    #[test]
    fn a_result_comes_back_and_is_never_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::create(dir.path()).unwrap();
        let report = Report::new(Manifest::default());
        store.report(&report, &[]).unwrap();
        assert_eq!(load(dir.path()).unwrap().report, report);
        assert!(matches!(Store::create(dir.path()), Err(StoreError::Taken(_))));
    }

    fn group(round: u32, failed: bool) -> [Sample; 2] {
        [0, 1].map(|index| Sample {
            round,
            index,
            released_ms: 100.0 + f64::from(index * round),
            outcome: if failed && index == 1 { Outcome::Failed } else { Outcome::Ok },
            ..Sample::new("own", Mode::Parallel, 50.0 * f64::from(round + 1))
        })
    }

    #[test]
    fn a_run_that_was_killed_while_it_wrote_a_row_keeps_the_rows_before_it() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Store::create(dir.path()).unwrap();
        group(0, false).iter().chain(&group(1, true)).for_each(|sample| store.sample(sample).unwrap());
        let path = dir.path().join("samples.csv");
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, &text[..text.len() - 20]).unwrap();
        let loaded = load(dir.path()).unwrap();
        assert_eq!(loaded.samples.len(), 3);
        assert!(loaded.report.partial && loaded.report.notes.iter().any(|note| note.contains("last row")));
        assert_eq!(loaded.report.series[0].batch_ms, [Some(50.0), Some(100.0)]);
    }

    #[test]
    fn a_sweep_that_was_killed_keeps_the_points_before_it() {
        let dir = tempfile::tempdir().unwrap();
        let recorded = include_str!("../../../docs/results/kata/memory-image/ledger.csv");
        fs::write(dir.path().join("ledger.csv"), recorded).unwrap();
        let report = load(dir.path()).unwrap().report;
        let whole: Report =
            report::parse(include_str!("../../../docs/results/kata/memory-image/report.json")).unwrap();
        let sums = |report: &Report| -> Vec<(String, u32, u64)> {
            report
                .memory
                .iter()
                .map(|row| (row.runtime.clone(), row.pods, row.total_pss_kib as u64))
                .collect()
        };
        assert_eq!(sums(&report), sums(&whole));
        assert!(report.partial && report.marginal_kib_per_pod.is_empty());
        fs::write(dir.path().join("ledger.csv"), recorded.replace(",vmm,", ",vvm,")).unwrap();
        let why = load(dir.path()).unwrap_err().to_string();
        assert!(why.contains("ledger.csv: row 2: no known role"), "{why}");
    }

    #[test]
    fn every_recorded_result_of_kata_loads() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results/kata");
        let results = fs::read_dir(dir).unwrap().flatten().filter(|entry| entry.path().is_dir());
        let loaded: Vec<Loaded> = results.map(|entry| load(&entry.path()).unwrap()).collect();
        assert_eq!(loaded.len(), 6);
        for mut result in loaded.into_iter().filter(|result| !result.report.series.is_empty()) {
            let kata = result.report.series.iter().find(|series| series.runtime.starts_with("kata")).unwrap();
            let (base, mode) = (kata.runtime.clone(), kata.mode);
            result.report.set_baseline(&result.name, &base, &result.samples).unwrap();
            let boot = result.report.over("sandboxer-boot", &base, mode, false).unwrap();
            assert!(boot.p50 < 0.25, "{}: {boot}", result.name);
            // Two groups show no difference.
            assert_eq!(boot.times_faster().is_some(), mode == Mode::Serial, "{}", result.name);
        }
    }

    #[test]
    fn results_of_earlier_versions_load_and_their_intervals_over_pods_of_groups_are_gone() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Store::create(dir.path()).unwrap();
        let samples: Vec<Sample> = group(0, true).into_iter().chain(group(1, false)).collect();
        samples.iter().for_each(|sample| store.sample(sample).unwrap());
        let mut report = Report::new(Manifest::default());
        report.add_startup(&["own".to_owned()], &samples, &batches_of(&samples));
        let mut old = serde_json::to_value(&report).unwrap();
        // The second group's time was paired with the first group's spread.
        old["series"][0]["batch_ms"] = serde_json::json!([100.0]);
        let ratio = |mode: &str| {
            serde_json::json!({
                "mode": mode, "a": "own", "b": "runc", "p50": 0.9, "ci_low": 0.8, "ci_high": 0.95
            })
        };
        old["ratios"] = serde_json::json!([ratio("parallel"), ratio("serial")]);
        fs::write(dir.path().join("report.json"), old.to_string()).unwrap();
        let loaded = load(dir.path()).unwrap().report;
        assert_eq!(loaded.series[0].batch_ms, [None, Some(101.0)]);
        assert_eq!(loaded.series[0].release_spread_ms, [0.0, 1.0]);
        assert_eq!(loaded.ratios[0].ratio.interval, None);
        assert!(loaded.ratios[1].ratio.times_faster().is_some());
    }

    #[test]
    fn a_report_from_a_newer_probe_is_refused_by_its_number() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("report.json"), r#"{"schema": 7, "what": "ever"}"#).unwrap();
        let error = load(dir.path()).unwrap_err();
        let why = std::error::Error::source(&error).unwrap().to_string();
        assert!(why.contains("schema 7") && why.contains("up to 1"), "{why}");
    }

    #[test]
    fn a_file_that_cannot_be_written_is_named_and_leaves_no_part() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("report.json")).unwrap();
        let error = write_whole(&dir.path().join("report.json"), b"x").unwrap_err();
        assert!(error.to_string().contains("report.json"), "{error}");
        assert!(!dir.path().join("report.json.part").exists());
    }
}
