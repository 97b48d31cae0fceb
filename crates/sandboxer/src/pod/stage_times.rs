//! Durations of all starts' stages: a histogram per stage and outcome, always on.
//!
//! Recording takes a lock that is held for one addition. It costs a pod about 0.3 µs, measured for eight stages on two
//! busy cores by `cargo bench --bench startup` ("histograms, all stages of a pod").

use std::{
    sync::{Mutex, PoisonError},
    time::Instant,
};

use hdrhistogram::Histogram;
use sandboxer_protocol::stage::Stage;

use super::stages::Outcome;

/// All outcomes, in the order of their discriminants.
const OUTCOMES: [Outcome; 3] = [Outcome::Ok, Outcome::Failed, Outcome::Cancelled];
/// Number of significant decimal digits of a time: a bucket is at most 1 % wide.
const DIGITS: u8 = 2;

/// The histograms since the daemon's start.
#[derive(Debug)]
pub struct StageTimes {
    since: Instant,
    // Plain locks: held for an addition or a copy, never across an await. One each, so that starts in different stages
    // do not contend.
    cells: Vec<Mutex<Option<Cell>>>,
}

/// The histogram of one stage with one outcome, in µs with 32-bit counts: a few KiB once it is used.
#[derive(Debug, Clone)]
struct Cell {
    micros: Histogram<u32>,
    sum_ns: u64,
}

/// A summary of one histogram.
#[derive(Debug, Clone)]
pub struct StageSummary {
    /// The stage of the histogram.
    pub stage: Stage,
    /// The outcome of the stage.
    pub outcome: Outcome,
    /// The sum of all times, ns.
    pub sum_ns: u64,
    micros: Histogram<u32>,
}

impl Default for StageTimes {
    fn default() -> Self {
        let cells = Stage::ALL.len() * OUTCOMES.len();
        Self { since: Instant::now(), cells: (0..cells).map(|_| Mutex::default()).collect() }
    }
}

impl StageTimes {
    /// Adds the duration of one stage.
    pub fn record(&self, stage: Stage, outcome: Outcome, duration_ns: u64) {
        let Some(cell) = self.cells.get(stage as usize * OUTCOMES.len() + outcome as usize) else { return };
        let mut cell = cell.lock().unwrap_or_else(PoisonError::into_inner);
        if cell.is_none() {
            *cell = Histogram::new(DIGITS).ok().map(|micros| Cell { micros, sum_ns: 0 });
        }
        if let Some(cell) = cell.as_mut() {
            // The histogram resizes automatically, so this cannot fail.
            let _ = cell.micros.record(duration_ns / 1000);
            cell.sum_ns = cell.sum_ns.saturating_add(duration_ns);
        }
    }

    /// Returns the summaries in the order of stages, without empty ones.
    pub fn summaries(&self) -> Vec<StageSummary> {
        let kinds = Stage::ALL.into_iter().flat_map(|stage| OUTCOMES.map(|outcome| (stage, outcome)));
        kinds
            .zip(&self.cells)
            .filter_map(|((stage, outcome), cell)| {
                let Cell { micros, sum_ns } = cell.lock().unwrap_or_else(PoisonError::into_inner).clone()?;
                Some(StageSummary { stage, outcome, sum_ns, micros })
            })
            .collect()
    }

    /// Returns the time since counting began.
    pub fn age(&self) -> std::time::Duration {
        self.since.elapsed()
    }
}

impl StageSummary {
    /// Returns the number of recorded times.
    pub fn count(&self) -> u64 {
        self.micros.len()
    }

    /// Returns this quantile (0 to 1), ns; exact to 1 %.
    pub fn quantile_ns(&self, part: f64) -> u64 {
        self.micros.value_at_quantile(part).saturating_mul(1000)
    }

    /// Returns the shortest and longest time, ns.
    pub fn range_ns(&self) -> (u64, u64) {
        (self.micros.min().saturating_mul(1000), self.micros.max().saturating_mul(1000))
    }

    /// Returns the number of times up to this limit, µs.
    pub fn count_up_to(&self, micros: u64) -> u64 {
        self.micros.count_between(0, micros)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_kept_by_stage_and_outcome() {
        let times = StageTimes::default();
        for ms in 1..=100 {
            times.record(Stage::Boot, Outcome::Ok, ms * 1_000_000);
        }
        times.record(Stage::Boot, Outcome::Failed, 30_000_000_000);
        let summaries = times.summaries();
        assert_eq!(summaries.len(), 2);
        let ok = &summaries[0];
        assert_eq!((ok.stage, ok.outcome, ok.count()), (Stage::Boot, Outcome::Ok, 100));
        assert_eq!(ok.sum_ns, 5_050_000_000);
        let p50 = ok.quantile_ns(0.5);
        assert!(p50.abs_diff(50_000_000) <= 500_000, "{p50}");
        assert_eq!((summaries[1].outcome, summaries[1].count()), (Outcome::Failed, 1));
    }
}
