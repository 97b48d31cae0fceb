//! A result on disk: a directory with `workload.json`, the raw rows in `runs.jsonl`, and each tool's output in
//! `outputs`.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use super::report::{self, Report, ReportError};
use super::run::Run;
use super::summary::{self, COMPARED_OF, Series};
use crate::log::Printed;
use crate::ratio::Ratio;
use crate::store::{StoreError, file_name, write_whole};

/// Names in the directory.
const REPORT: &str = "workload.json";
const RUNS: &str = "runs.jsonl";
const OUTPUTS: &str = "outputs";

fn io<'a>(action: &'static str, path: &'a Path) -> impl FnOnce(std::io::Error) -> StoreError + 'a {
    move |source| StoreError::Io { action, path: path.to_owned(), source }
}

/// A result that is being written.
#[derive(Debug)]
pub struct Store {
    dir: PathBuf,
    runs: Option<File>,
    count: u32,
}

impl Store {
    /// Creates the directory. Rejects one that already contains a result, so that no run is lost.
    pub fn create(dir: &Path) -> Result<Self, StoreError> {
        if [REPORT, RUNS].iter().any(|name| dir.join(name).exists()) {
            return Err(StoreError::Taken(dir.to_owned()));
        }
        let outputs = dir.join(OUTPUTS);
        fs::create_dir_all(&outputs).map_err(io("create", &outputs))?;
        Ok(Self { dir: dir.to_owned(), runs: None, count: 0 })
    }

    /// Returns the directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Writes a run and its tool's output at once.
    pub fn run(&mut self, run: &Run, printed: &Printed) -> Result<(), StoreError> {
        self.count += 1;
        let name = [&run.probe, &run.case, &run.runtime].map(|part| file_name(part)).join("-");
        let path = self.dir.join(OUTPUTS).join(format!("{:04}-{name}.txt", self.count));
        let text = format!("{}--- stderr ---\n{}", printed.stdout, printed.stderr);
        fs::write(&path, text).map_err(io("write", &path))?;
        self.row(run)
    }

    /// Writes a run without its tool's output, which another result has.
    pub fn row(&mut self, run: &Run) -> Result<(), StoreError> {
        let path = self.dir.join(RUNS);
        let file = match &mut self.runs {
            Some(file) => file,
            none => none.insert(
                OpenOptions::new().append(true).create(true).open(&path).map_err(io("write", &path))?,
            ),
        };
        let line = serde_json::to_string(run).map_err(std::io::Error::from);
        line.and_then(|line| file.write_all(format!("{line}\n").as_bytes())).map_err(io("write", &path))
    }

    /// Writes the result atomically.
    pub fn report(&self, report: &Report) -> Result<(), StoreError> {
        let path = self.dir.join(REPORT);
        let text = report::render(report).map_err(std::io::Error::from).map_err(io("write", &path))?;
        write_whole(&path, text.as_bytes())
    }
}

/// Why a directory is not a result of workloads.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A file cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The report is invalid.
    #[error("cannot use {path}")]
    Report {
        /// Path of the file.
        path: PathBuf,
        /// What is wrong with it.
        source: ReportError,
    },
    /// A row is invalid.
    #[error("{path}: line {line} is not a run")]
    Run {
        /// Path of the file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
        /// The parser's error.
        source: serde_json::Error,
    },
}

/// A result read from disk.
#[derive(Debug, Clone)]
pub struct Loaded {
    /// Name of the result's directory.
    pub name: String,
    /// The result's report.
    pub report: Report,
    /// Rows of the result, one per run.
    pub runs: Vec<Run>,
}

impl Loaded {
    /// Returns the runtimes of the result, in the order of their first appearance.
    pub fn runtimes(&self) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for series in &self.report.series {
            if !names.contains(&series.runtime) {
                names.push(series.runtime.clone());
            }
        }
        names
    }

    /// Returns the 95 % bootstrap interval of a series' median; `None` with fewer than four values.
    pub fn interval(&self, series: &Series) -> Option<(f64, f64)> {
        let values = summary::values(&self.runs, series);
        // The ratio to 1 is the median itself.
        let ratio = (values.len() >= COMPARED_OF).then(|| Ratio::estimate(&values, &[1.0])).flatten()?;
        ratio.interval.map(|interval| (interval.ci_low, interval.ci_high))
    }
}

/// Returns whether a directory contains a result of workloads.
pub fn is_one(dir: &Path) -> bool {
    dir.join(REPORT).exists()
}

/// Loads a result that a [`Store`] wrote.
pub fn load(dir: &Path) -> Result<Loaded, LoadError> {
    let path = dir.join(REPORT);
    let text = fs::read_to_string(&path).map_err(io("read", &path))?;
    let report = report::parse(&text).map_err(|source| LoadError::Report { path, source })?;
    let path = dir.join(RUNS);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(io("read", &path)(error).into()),
    };
    let run = |(index, line): (usize, &str)| {
        serde_json::from_str(line).map_err(|source| LoadError::Run {
            path: path.clone(),
            line: index + 1,
            source,
        })
    };
    let runs = text.lines().enumerate().map(run).collect::<Result<_, _>>()?;
    let name = dir.file_name().unwrap_or(dir.as_os_str()).to_string_lossy().into_owned();
    Ok(Loaded { name, report, runs })
}
