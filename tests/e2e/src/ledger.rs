//! What was injected, what was at stake, and what was lost: the lines of one table, made by the cases themselves.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// One kind of fault, and what became of the pods.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Line {
    /// What was done.
    pub fault: String,
    /// So often.
    pub times: usize,
    /// Pods that were there, or in the making, at each.
    pub pods: usize,
    /// Of those, the ones that were not as they should be.
    pub lost: usize,
    /// Lines of logs that were looked at.
    pub lines: usize,
    /// Of those, missing or doubled.
    pub lines_lost: usize,
    /// Processes, mounts, files of pods that were gone.
    pub left: usize,
    /// The case, by which it is repeated.
    pub case: String,
    /// When, in UTC, to the day.
    pub day: String,
}

static LINES: Mutex<Vec<Line>> = Mutex::new(Vec::new());

/// Adds a line.
pub fn note(line: Line) {
    LINES.lock().unwrap_or_else(PoisonError::into_inner).push(line);
}

/// Returns where the lines of all runs are kept, the newest of each case: `target/reliability.json`.
fn path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../target/reliability.json")
}

/// Puts this run's lines among those of earlier runs, and prints them as a table.
pub fn close() -> Result<()> {
    let new = std::mem::take(&mut *LINES.lock().unwrap_or_else(PoisonError::into_inner));
    if new.is_empty() {
        return Ok(());
    }
    let path = path();
    let mut lines: Vec<Line> = match fs::read(&path) {
        // One that an older build wrote is begun anew.
        Ok(text) => serde_json::from_slice(&text).unwrap_or_default(),
        Err(_) => Vec::new(),
    };
    println!("\n{}", table(&new));
    lines.retain(|line| !new.iter().any(|newer| newer.fault == line.fault));
    lines.extend(new);
    fs::write(&path, serde_json::to_vec_pretty(&lines)?)
        .with_context(|| format!("cannot write {}", path.display()))?;
    match std::env::var_os("SANDBOXER_E2E_REPORT") {
        Some(report) => put_into(&PathBuf::from(report), &lines),
        None => Ok(()),
    }
}

/// Replaces the table in a document, between two marks.
fn put_into(report: &Path, lines: &[Line]) -> Result<()> {
    let (from, to) = ("<!-- made by the cases -->\n", "<!-- to here -->");
    let text = fs::read_to_string(report).with_context(|| format!("cannot read {}", report.display()))?;
    let (before, rest) = text.split_once(from).context("the report has no place for the table")?;
    let (_, after) = rest.split_once(to).context("the report's place for the table has no end")?;
    fs::write(report, format!("{before}{from}{}{to}{after}", table(lines)))
        .with_context(|| format!("cannot write {}", report.display()))
}

/// Returns the lines as a table in Markdown.
pub fn table(lines: &[Line]) -> String {
    let mut table = String::from(
        "| fault | times | pods at stake | pods lost | log lines | lost or doubled | left behind | case | run on |\n\
         |---|---:|---:|---:|---:|---:|---:|---|---|\n",
    );
    for line in lines {
        let Line { fault, times, pods, lost, lines, lines_lost, left, case, day } = line;
        table += &format!(
            "| {fault} | {times} | {pods} | {lost} | {lines} | {lines_lost} | {left} | `{case}` | {day} |\n"
        );
    }
    table
}
