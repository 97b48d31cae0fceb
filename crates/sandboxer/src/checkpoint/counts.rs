//! Counts of saves and restores, for metrics.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

/// Upper bounds of the buckets of pauses, ms.
pub const PAUSES_MS: [u64; 12] = [10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000, 60_000];

/// Successes and failures.
#[derive(Debug, Default)]
pub struct Results([AtomicU64; 2]);

impl Results {
    /// Adds one.
    pub fn add(&self, is_ok: bool) {
        self.0[usize::from(is_ok)].fetch_add(1, Ordering::Relaxed);
    }

    /// Returns both, with their names in metrics.
    pub fn named(&self) -> [(&'static str, u64); 2] {
        let [failed, ok] = &self.0;
        [("ok", ok.load(Ordering::Relaxed)), ("failed", failed.load(Ordering::Relaxed))]
    }
}

/// Lengths of pauses.
#[derive(Debug, Default, Clone)]
pub struct Pauses {
    /// Number of pauses by bucket; the last one has no bound.
    pub counts: [u64; PAUSES_MS.len() + 1],
    /// The sum of all.
    pub sum: Duration,
}

/// What was saved and restored since the daemon's start.
#[derive(Debug, Default)]
pub struct Counts {
    /// Saves of pods.
    pub saves: Results,
    /// Restores of pods.
    pub restores: Results,
    // A plain lock: held for an addition or a copy, never across an await.
    pauses: Mutex<Pauses>,
}

impl Counts {
    /// Adds the pause of a saved pod.
    pub fn paused(&self, pause: Duration) {
        let bucket = PAUSES_MS.iter().position(|&end| pause <= Duration::from_millis(end));
        let mut pauses = self.pauses.lock().unwrap_or_else(PoisonError::into_inner);
        pauses.counts[bucket.unwrap_or(PAUSES_MS.len())] += 1;
        pauses.sum += pause;
    }

    /// Returns all pauses.
    pub fn pauses(&self) -> Pauses {
        self.pauses.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
