//! Cost of the probe itself, measured in each run.

use std::io::Write;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::first_byte::LogWatch;
use crate::runtime::Runtime;
use crate::summary::median;

/// Repetitions of each measurement; the median varies by a few per cent.
const REPETITIONS: usize = 100;
/// Number of CRI calls in a start.
const CALLS: f64 = 3.0;

/// Medians of the probe's own times in a start, ms.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Overhead {
    /// Time of an empty CRI call (Version), including the runtime's: an upper bound of the probe's time per call.
    pub empty_call_ms: Option<f64>,
    /// Time from a write to a log until the watching thread's timestamp.
    pub mark_ms: Option<f64>,
    /// Three empty calls and one mark: an upper bound of the probe's part of a start.
    pub per_pod_ms: Option<f64>,
}

/// Measures the probe's cost, in the directory that the starts use.
pub async fn measure(runtime: &Runtime, watch: &LogWatch) -> Overhead {
    let mut calls = Vec::new();
    for _ in 0..REPETITIONS {
        let begun = Instant::now();
        if runtime.version().await.is_ok() {
            calls.push(begun.elapsed().as_secs_f64() * 1e3);
        }
    }
    let mut marks = Vec::new();
    for index in 0..REPETITIONS {
        if let Some(mark) = mark(watch, index).await {
            marks.push(mark);
        }
    }
    let (empty_call_ms, mark_ms) = (median(&calls), median(&marks));
    Overhead {
        empty_call_ms,
        mark_ms,
        per_pod_ms: empty_call_ms.zip(mark_ms).map(|(call, mark)| CALLS * call + mark),
    }
}

async fn mark(watch: &LogWatch, index: usize) -> Option<f64> {
    let name = format!("overhead-{index}");
    let path = watch.dir().join(&name);
    let mut file = std::fs::File::create(&path).ok()?;
    let first_byte = watch.expect(&name);
    let begun = Instant::now();
    file.write_all(b"x").ok()?;
    let seen = first_byte.seen().await.ok();
    let _ = std::fs::remove_file(&path);
    seen.map(|seen| seen.saturating_duration_since(begun).as_secs_f64() * 1e3)
}
