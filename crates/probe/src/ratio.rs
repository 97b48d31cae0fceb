//! Ratios of medians, with confidence intervals.

use rand::rngs::SmallRng;
use rand::{Rng, RngExt, SeedableRng};
use serde::{Deserialize, Serialize};

use crate::summary::median;

/// Resamples of an interval: with more, its ends move by less than a hundredth of its width.
pub const RESAMPLES: usize = 2000;
/// Confidence level, if samples are independent.
pub const CONFIDENCE: f64 = 0.95;
/// Below this number of values an interval of resamples is too narrow: of four values, 6 of 100 miss the true ratio.
const FEW: usize = 8;

/// Ratio of the medians of two series.
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

    /// Same as [`Ratio::of`], with a given generator.
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

    /// Same as [`Ratio::of`], for few values: below [`FEW`] of one side the interval is exact, from the ranks of the two sets
    /// (Hodges and Lehmann, by Mann and Whitney's statistic), since that of resamples is too narrow then. With four values of each
    /// it is the whole range of ratios. Where no interval from ranks has the level, it is that of resamples.
    pub fn of_few(a: &[f64], b: &[f64]) -> Option<Self> {
        let resampled = Self::of(a, b)?;
        // A value of zero has no ratio to it.
        let few = a.len().min(b.len()) < FEW && b.iter().all(|value| *value > 0.0);
        let excluded = few.then(|| excluded(a.len(), b.len())).flatten();
        let Some(excluded) = excluded else { return Some(resampled) };
        let mut ratios: Vec<f64> = a.iter().flat_map(|a| b.iter().map(move |b| a / b)).collect();
        ratios.sort_by(f64::total_cmp);
        let ends = (ratios.get(excluded), ratios.iter().rev().nth(excluded));
        let (Some(&ci_low), Some(&ci_high)) = ends else { return Some(resampled) };
        Some(Self { ci_low, ci_high, ..resampled })
    }

    /// Returns the text for a table cell: "0.52 (0.46–0.67)".
    pub fn short(&self) -> String {
        format!("{:.2} ({:.2}–{:.2})", self.p50, self.ci_low, self.ci_high)
    }

    /// Returns whether the interval contains 1: the data show no difference.
    pub fn shows_no_difference(&self) -> bool {
        self.ci_low <= 1.0 && self.ci_high >= 1.0
    }
}

/// Formats as "2.31 × (95 % CI 2.24 to 2.39)".
impl std::fmt::Display for Ratio {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.2} × (95 % CI {:.2} to {:.2}", self.p50, self.ci_low, self.ci_high)?;
        f.write_str(if self.shows_no_difference() { "; no difference shown)" } else { ")" })
    }
}

/// Returns how many ratios of `a` values to `b` values are outside at each end of an interval with [`CONFIDENCE`]; `None` if
/// there are too few values.
fn excluded(a: usize, b: usize) -> Option<usize> {
    // For each number of values of `b`: how many orders of all values have how many pairs in which that of `a` is the larger one.
    let mut orders = vec![vec![1.0_f64]; b + 1];
    for _ in 0..a {
        for of_b in 1..=b {
            // The largest value is of `a`, and in a pair with each of `b`; or it is of `b`.
            let mut counts = vec![0.0; of_b];
            counts.extend(&orders[of_b]);
            counts.iter_mut().zip(&orders[of_b - 1]).for_each(|(count, more)| *count += more);
            orders[of_b] = counts;
        }
    }
    let counts = &orders[b];
    let all: f64 = counts.iter().sum();
    let mut tail = 0.0;
    let outside = counts.iter().take_while(|count| {
        tail += **count;
        2.0 * tail / all <= 1.0 - CONFIDENCE
    });
    outside.count().checked_sub(1)
}

/// Returns the median of a resample with replacement.
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
    fn intervals_of_few_values_hold_the_truth_at_least_as_often_as_they_say() {
        let mut random = SmallRng::seed_from_u64(9);
        for n in [4, 5, 7] {
            let held = (0..400)
                .filter(|_| {
                    let (a, b) = (times(n, 200.0, &mut random), times(n, 100.0, &mut random));
                    let ratio = Ratio::of_few(&a, &b).unwrap();
                    assert!(ratio.ci_low <= ratio.p50 && ratio.p50 <= ratio.ci_high, "{ratio}");
                    ratio.ci_low <= 2.0 && 2.0 <= ratio.ci_high
                })
                .count();
            let part = held as f64 / 400.0;
            // As above.
            assert!(part > CONFIDENCE - 0.033, "{part} of the intervals of {n} values held the true ratio");
        }
    }

    #[test]
    fn ratios_outside_an_interval_are_as_many_as_in_tables_of_the_statistic() {
        for (a, b, expected) in [
            (3, 3, None),
            (4, 4, Some(0)),
            (4, 5, Some(1)),
            (5, 5, Some(2)),
            (7, 7, Some(8)),
            (2, 8, Some(0)),
        ] {
            assert_eq!((excluded(a, b), excluded(b, a)), (expected, expected), "{a} and {b}");
        }
        let (a, b) = ([2.0, 4.0, 6.0, 8.0], [1.0, 2.0, 3.0, 4.0]);
        let ratio = Ratio::of_few(&a, &b).unwrap();
        assert_eq!((ratio.ci_low, ratio.p50, ratio.ci_high), (0.5, 2.0, 8.0));
        // Too few for any, and enough for resamples.
        assert_eq!(Ratio::of_few(&a[..2], &b), Ratio::of(&a[..2], &b));
        let many = times(8, 100.0, &mut SmallRng::seed_from_u64(1));
        assert_eq!(Ratio::of_few(&many, &many), Ratio::of(&many, &many));
    }

    #[test]
    fn no_times_no_ratio() {
        assert_eq!(Ratio::of(&[], &[1.0]), None);
        assert_eq!(Ratio::of(&[1.0], &[0.0]), None);
        assert_eq!(Ratio::of_few(&[1.0; 4], &[0.0; 4]), None);
    }
}
