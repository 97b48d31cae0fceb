//! Percentiles and the distribution of a set of times.

use serde::{Deserialize, Serialize};

/// Summary of a series. All times in ms.
///
/// A percentile is the nearest rank: the smallest sample such that at least that part of all samples does not exceed
/// it. So it is always a measured time. `sd_ms` divides by n - 1. Without a single time (or, for `sd_ms`, with only
/// one) there is no figure: `None`, never zero.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Number of attempts, failures included.
    pub n: usize,
    /// Number of attempts without a time. The figures below are from the other `n - failures`.
    pub failures: usize,
    /// Shortest time, ms.
    pub min_ms: Option<f64>,
    /// Median time, ms.
    pub p50_ms: Option<f64>,
    /// 90th percentile of the times, ms.
    pub p90_ms: Option<f64>,
    /// 95th percentile of the times, ms.
    pub p95_ms: Option<f64>,
    /// 99th percentile of the times, ms.
    pub p99_ms: Option<f64>,
    /// Longest time, ms.
    pub max_ms: Option<f64>,
    /// Arithmetic mean of the times, ms.
    pub mean_ms: Option<f64>,
    /// Standard deviation of the sample, ms.
    pub sd_ms: Option<f64>,
}

impl Summary {
    /// Summarises `times` (ms, in any order) and `failures` attempts without a time.
    pub fn new(times: &[f64], failures: usize) -> Self {
        let sorted = sorted(times);
        let rank = |percent| nearest_rank(&sorted, percent);
        let count = sorted.len() as f64;
        let mean = (!sorted.is_empty()).then(|| sorted.iter().sum::<f64>() / count);
        let sd = mean.filter(|_| sorted.len() > 1).map(|mean| {
            let squares: f64 = sorted.iter().map(|time| (time - mean).powi(2)).sum();
            (squares / (count - 1.0)).sqrt()
        });
        Self {
            n: sorted.len() + failures,
            failures,
            min_ms: sorted.first().copied(),
            p50_ms: rank(50.0),
            p90_ms: rank(90.0),
            p95_ms: rank(95.0),
            p99_ms: rank(99.0),
            max_ms: sorted.last().copied(),
            mean_ms: mean,
            sd_ms: sd,
        }
    }

    /// Returns the names and values of the figures, in display order.
    pub fn figures(&self) -> [(&'static str, Option<f64>); 8] {
        [
            ("min", self.min_ms),
            ("p50", self.p50_ms),
            ("p90", self.p90_ms),
            ("p95", self.p95_ms),
            ("p99", self.p99_ms),
            ("max", self.max_ms),
            ("mean", self.mean_ms),
            ("sd", self.sd_ms),
        ]
    }
}

/// Returns `times` in ascending order.
pub fn sorted(times: &[f64]) -> Vec<f64> {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// Returns the nearest-rank percentile of ascending `sorted`: the sample of rank ⌈percent/100 · n⌉, counted from 1.
pub fn nearest_rank(sorted: &[f64], percent: f64) -> Option<f64> {
    // Rounding may put the product slightly above a whole number; that must not add a rank.
    let rank = (percent * sorted.len() as f64 / 100.0 - 1e-9).ceil().max(1.0) as usize;
    sorted.get(rank - 1).copied()
}

/// Returns the median of times in any order, nearest rank.
pub fn median(times: &[f64]) -> Option<f64> {
    nearest_rank(&sorted(times), 50.0)
}

/// Returns the empirical distribution: each distinct time, with the part of all samples that does not exceed it.
pub fn cdf(times: &[f64]) -> Vec<(f64, f64)> {
    let sorted = sorted(times);
    let count = sorted.len() as f64;
    let mut points: Vec<(f64, f64)> = Vec::new();
    for (index, time) in sorted.into_iter().enumerate() {
        let part = (index + 1) as f64 / count;
        match points.last_mut() {
            Some(last) if last.0 == time => last.1 = part,
            _ => points.push((time, part)),
        }
    }
    points
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn nearest_rank_as_defined() {
        let five = [15.0, 20.0, 35.0, 40.0, 50.0];
        for (percent, expected) in [(5.0, 15.0), (30.0, 20.0), (40.0, 20.0), (50.0, 35.0), (100.0, 50.0)] {
            assert_eq!(nearest_rank(&five, percent), Some(expected), "p{percent}");
        }
        let hundred: Vec<f64> = (1..=100).map(f64::from).collect();
        for percent in 1..=100 {
            assert_eq!(nearest_rank(&hundred, f64::from(percent)), Some(f64::from(percent)));
        }
        assert_eq!(nearest_rank(&[], 50.0), None);
    }

    #[test]
    fn no_times_give_no_figures() {
        let summary = Summary::new(&[], 3);
        assert_eq!((summary.n, summary.failures), (3, 3));
        assert!(summary.figures().iter().all(|(_, value)| value.is_none()));
        assert_eq!(Summary::new(&[7.0], 0).sd_ms, None);
    }

    #[test]
    fn deviation_is_the_samples() {
        let summary = Summary::new(&[2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0], 0);
        assert_eq!(summary.mean_ms, Some(5.0));
        assert!((summary.sd_ms.unwrap() - (32.0f64 / 7.0).sqrt()).abs() < 1e-12);
    }

    proptest! {
        #[test]
        fn a_percentile_is_the_first_point_of_the_cdf_that_reaches_it(
            times in prop::collection::vec(0u32..500, 1..200), percent in 1u32..=100,
        ) {
            let times: Vec<f64> = times.into_iter().map(f64::from).collect();
            let reached = cdf(&times).into_iter().find(|point| point.1 + 1e-9 >= f64::from(percent) / 100.0);
            prop_assert_eq!(nearest_rank(&sorted(&times), f64::from(percent)), reached.map(|point| point.0));
        }
    }
}
