//! How pods got their machines, and why not in a faster way.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use crate::config::Way;

/// Counts since the daemon's start.
#[derive(Debug, Default)]
pub struct Ways {
    // A plain lock: held for a count or a copy, never across an await.
    counts: Mutex<Counts>,
}

/// What was counted.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Counts {
    /// Pods by the way in which they got their machine.
    pub taken: BTreeMap<Way, u64>,
    /// Ways that could not be taken, by the reason.
    pub missed: BTreeMap<(Way, &'static str), u64>,
}

impl Ways {
    /// A pod got its machine so.
    pub fn taken(&self, way: Way) {
        *self.lock().taken.entry(way).or_default() += 1;
    }

    /// A pod could not get its machine so. Told once for each reason, counted always.
    pub fn missed(&self, way: Way, reason: &'static str) {
        let mut counts = self.lock();
        let count = counts.missed.entry((way, reason)).or_default();
        *count += 1;
        if *count == 1 {
            tracing::info!(%way, reason, "pods start in a slower way; told once, counted always");
        }
    }

    /// The counts so far.
    pub fn counts(&self) -> Counts {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
