//! Whether one series is faster than another, and how sure that is.

use rand::rngs::SmallRng;
use rand::{Rng, RngExt, SeedableRng};
use serde::{Deserialize, Serialize};

use crate::summary::median;

/// Resamples behind an interval: the ends move by less than a hundredth of its width beyond that.
pub const RESAMPLES: usize = 2000;
/// The part of intervals that hold the true ratio, if samples are drawn independently.
pub const CONFIDENCE: f64 = 0.95;

/// How the medians of two series compare.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// Median of a over median of b.
    pub p50: f64,
    /// Lower end of the interval.
    pub ci_low: f64,
    /// Upper end.
    pub ci_high: f64,
}

impl Ratio {
    /// Returns the ratio of two sets of times, with a percentile bootstrap interval. `None` when one has no times or b's
    /// median is zero. The same input gives the same interval: the generator's seed is fixed.
    pub fn of(a: &[f64], b: &[f64]) -> Option<Self> {
        Self::resampled(a, b, RESAMPLES, &mut SmallRng::seed_from_u64(0x5eed))
    }

    /// Same as [`Ratio::of`], with one's own generator.
    pub fn resampled(a: &[f64], b: &[f64], resamples: usize, random: &mut impl Rng) -> Option<Self> {
        let over = |a: f64, b: f64| (b > 0.0).then(|| a / b);
        let p50 = over(median(a)?, median(b)?)?;
        let (mut of_a, mut of_b) = (vec![0.0; a.len()], vec![0.0; b.len()]);
        let mut ratios: Vec<f64> = (0..resamples)
            .filter_map(|_| over(draw(a, &mut of_a, random), draw(b, &mut of_b, random)))
            .collect();
        ratios.sort_by(f64::total_cmp);
        let tail = (1.0 - CONFIDENCE) / 2.0;
        let end = |part: f64| ratios.get((part * ratios.len() as f64) as usize).copied();
        Some(Self { p50, ci_low: end(tail)?, ci_high: end(1.0 - tail).or(ratios.last().copied())? })
    }

    /// Formats a table cell: "0.52 (0.46–0.67)".
    pub fn short(&self) -> String {
        format!("{:.2} ({:.2}–{:.2})", self.p50, self.ci_low, self.ci_high)
    }

    /// Returns whether the interval spans 1: the data show no difference.
    pub fn shows_no_difference(&self) -> bool {
        self.ci_low <= 1.0 && self.ci_high >= 1.0
    }
}

/// For people: "2.31 × (95 % CI 2.24 to 2.39)".
impl std::fmt::Display for Ratio {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.2} × (95 % CI {:.2} to {:.2}", self.p50, self.ci_low, self.ci_high)?;
        f.write_str(if self.shows_no_difference() { "; no difference shown)" } else { ")" })
    }
}

/// Returns the median of as many draws, with replacement, as there are samples.
fn draw(from: &[f64], into: &mut [f64], random: &mut impl Rng) -> f64 {
    for slot in into.iter_mut() {
        *slot = from[random.random_range(0..from.len())];
    }
    let middle = into.len().div_ceil(2) - 1;
    *into.select_nth_unstable_by(middle, f64::total_cmp).1
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a log-normal time: the product of many small delays.
    fn times(n: usize, median: f64, random: &mut SmallRng) -> Vec<f64> {
        (0..n)
            .map(|_| {
                let normal = (0..12).map(|_| random.random::<f64>()).sum::<f64>() - 6.0;
                median * (0.15 * normal).exp()
            })
            .collect()
    }

    #[test]
    fn intervals_hold_the_truth_as_often_as_they_say() {
        let mut random = SmallRng::seed_from_u64(7);
        let (runs, truth) = (400, 2.0);
        let held = (0..runs)
            .filter(|_| {
                let (a, b) = (times(40, 200.0, &mut random), times(40, 100.0, &mut random));
                let ratio = Ratio::resampled(&a, &b, 400, &mut random).unwrap();
                ratio.ci_low <= truth && truth <= ratio.ci_high
            })
            .count();
        // Three standard errors of a proportion of 0.95 at 400 runs are 0.033.
        let part = held as f64 / f64::from(runs);
        assert!((part - CONFIDENCE).abs() < 0.033, "{part} of the intervals held the true ratio");
    }

    #[test]
    fn equal_series_show_no_difference_and_different_ones_do() {
        let mut random = SmallRng::seed_from_u64(8);
        let a = times(200, 100.0, &mut random);
        assert!(Ratio::of(&a, &a).unwrap().shows_no_difference());
        let b = times(200, 200.0, &mut random);
        let ratio = Ratio::of(&b, &a).unwrap();
        assert!(!ratio.shows_no_difference(), "{ratio}");
        assert_eq!(Ratio::of(&b, &a), Ratio::of(&b, &a));
    }

    #[test]
    fn no_times_no_ratio() {
        assert_eq!(Ratio::of(&[], &[1.0]), None);
        assert_eq!(Ratio::of(&[1.0], &[0.0]), None);
    }
}
