//! A result on disk: a directory with `report.json`, the raw rows, and the plots.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use crate::clock::Clock;
use crate::figures::{Palette, figures};
use crate::manifest::Manifest;
use crate::memory::Point;
use crate::plot::{png, standalone};
use crate::report::{self, Report, ReportError};
use crate::sample::{Rows, Sample, SampleWriter, SamplesError, read_samples};
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
    /// An I/O error.
    #[error("cannot {action} {path}")]
    Io {
        /// What was attempted.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The raw rows are invalid.
    #[error(transparent)]
    Samples(#[from] SamplesError),
    /// The report is invalid.
    #[error("cannot use {path}")]
    Report {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: ReportError,
    },
    /// A text file without times.
    #[error("cannot use {path}")]
    Text {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: TextError,
    },
    /// Not a directory with a result in it.
    #[error("{0} contains no result: it has neither report.json nor samples.csv")]
    None(PathBuf),
}

fn io<'a>(action: &'static str, path: &'a Path) -> impl FnOnce(std::io::Error) -> StoreError + 'a {
    move |source| StoreError::Io { action, path: path.to_owned(), source }
}

/// A result that is being written.
pub struct Store {
    dir: PathBuf,
    samples: Option<SampleWriter>,
    /// Clock of its times; written in each row, so that a killed run has it, too.
    pub clock: Clock,
}

impl Store {
    /// Creates the directory. Rejects one that contains a result, so that no samples are lost.
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

    /// Writes the raw lines of all ledgers.
    pub fn ledgers(&self, points: &[Point]) -> Result<(), StoreError> {
        let mut rows = csv::Writer::from_writer(Vec::new());
        let path = self.dir.join("ledger.csv");
        let wrote = ledger_rows(&mut rows, points).map_err(|error| io("write", &path)(error.into()))?;
        let bytes = rows.into_inner().map_err(|error| io("write", &path)(error.into_error()))?;
        if wrote { write_whole(&path, &bytes) } else { Ok(()) }
    }

    /// Writes the report, and each series' distribution in the two columns that gnuplot reads.
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

/// Returns a handler's name as part of a file's.
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
    /// Its directory's name.
    pub name: String,
    /// The report.
    pub report: Report,
    /// The raw rows; empty if there are none.
    pub samples: Vec<Sample>,
}

/// Writes the plots of results as `plots/<name>.svg` and `.png` below `dir`; returns their paths.
pub fn write_plots(
    dir: &Path,
    results: &[Loaded],
    workloads: &[Workload],
) -> Result<Vec<PathBuf>, StoreError> {
    let plots = dir.join("plots");
    fs::create_dir_all(&plots).map_err(io("create", &plots))?;
    let palette = Palette::of(results, workloads);
    let of_workload = |of: &Workload| {
        of.report.probes.iter().flat_map(|probe| workload_figures(of, probe, &palette)).collect::<Vec<_>>()
    };
    let starts = results.iter().map(|result| (&result.name, figures(result, &palette)));
    let all = starts
        .chain(workloads.iter().map(|result| (&result.name, of_workload(result))))
        .flat_map(|(name, figures)| figures.into_iter().map(move |figure| (name, figure)));
    let mut paths = Vec::new();
    for (of, figure) in all {
        let name = format!("{}-{}", file_name(of), figure.name);
        let picture = png(&figure.scene).unwrap_or_default();
        for (end, bytes) in [("svg", standalone(&figure.scene).into_bytes()), ("png", picture)] {
            let path = plots.join(format!("{name}.{end}"));
            write_whole(&path, &bytes)?;
            paths.push(path);
        }
    }
    Ok(paths)
}

/// Reads a result: a directory that a [`Store`] wrote, or a text file of times, which becomes a serial series
/// of a runtime that is named like the file.
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
    let Rows { clock, samples } = match File::open(&path) {
        Ok(file) => read_samples(file, &path)?,
        Err(error) if error.kind() == ErrorKind::NotFound => Rows::default(),
        Err(error) => return Err(io("read", &path)(error)),
    };
    let path = dir.join("report.json");
    let report = match fs::read_to_string(&path) {
        Ok(text) => report::parse(&text).map_err(|source| StoreError::Report { path, source })?,
        Err(error) if error.kind() == ErrorKind::NotFound && samples.is_empty() => {
            return Err(StoreError::None(dir.to_owned()));
        }
        Err(error) if error.kind() == ErrorKind::NotFound => of_rows_alone(clock, &samples),
        Err(error) => return Err(io("read", &path)(error)),
    };
    let name =
        dir.file_name().map_or_else(|| dir.display().to_string(), |name| name.to_string_lossy().into_owned());
    Ok(Loaded { name, report, samples })
}

/// Returns the rows of a run that was killed, or that filled the disk.
fn of_rows_alone(clock: Clock, samples: &[Sample]) -> Report {
    let mut runtimes: Vec<String> = Vec::new();
    for sample in samples {
        if !runtimes.contains(&sample.runtime) {
            runtimes.push(sample.runtime.clone());
        }
    }
    let mut report = Report { clock, ..Report::new(Manifest::default()) };
    report.add_startup(&runtimes, samples, &[]);
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

    #[test]
    fn a_result_comes_back_and_is_never_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::create(dir.path()).unwrap();
        let report = Report::new(Manifest::default());
        store.report(&report, &[]).unwrap();
        assert_eq!(load(dir.path()).unwrap().report, report);
        assert!(matches!(Store::create(dir.path()), Err(StoreError::Taken(_))));
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
