//! The table of injected faults and their effects, written by the cases.

use std::fs;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::document;

/// One kind of fault and its effect on pods.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Line {
    /// The fault.
    pub fault: String,
    /// Number of injections.
    pub times: usize,
    /// Pods that existed or were starting, at each injection.
    pub pods: usize,
    /// Of these, affected pods.
    pub lost: usize,
    /// Checked log lines.
    pub lines: usize,
    /// Of these, missing or duplicate lines.
    pub lines_lost: usize,
    /// Leaked processes, mounts and files of removed pods.
    pub left: usize,
    /// The test case.
    pub case: String,
    /// Date, UTC.
    pub day: String,
}

static LINES: Mutex<Vec<Line>> = Mutex::new(Vec::new());

/// Adds a line.
pub fn note(line: Line) {
    LINES.lock().unwrap_or_else(PoisonError::into_inner).push(line);
}

/// Returns the file with the newest lines of each case: `target/reliability.json`.
fn path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../target/reliability.json")
}

/// Merges this run's lines with those of earlier runs, and prints them as a table.
pub fn close() -> Result<()> {
    let new = std::mem::take(&mut *LINES.lock().unwrap_or_else(PoisonError::into_inner));
    if new.is_empty() {
        return Ok(());
    }
    let path = path();
    let mut lines: Vec<Line> = match fs::read(&path) {
        // A ledger of an older build is replaced.
        Ok(text) => serde_json::from_slice(&text).unwrap_or_default(),
        Err(_) => Vec::new(),
    };
    println!("\n{}", table(&new));
    lines.retain(|line| !new.iter().any(|newer| newer.fault == line.fault));
    lines.extend(new);
    fs::write(&path, serde_json::to_vec_pretty(&lines)?)
        .with_context(|| format!("cannot write {}", path.display()))?;
    match std::env::var_os("SANDBOXER_E2E_REPORT") {
        Some(report) => document::replace(report.as_ref(), "<!-- made by the cases -->\n", |_| table(&lines)),
        None => Ok(()),
    }
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
