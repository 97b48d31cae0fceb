//! Ratios of medians, with confidence intervals.

use rand::rngs::SmallRng;
use rand::{Rng, RngExt, SeedableRng};
use serde::{Deserialize, Serialize};

use crate::summary::median;

/// Number of resamples of an interval. With more, its ends move by less than a hundredth of its width.
pub const RESAMPLES: usize = 2000;
/// Confidence level if samples are independent.
pub const CONFIDENCE: f64 = 0.95;
const SEED: u64 = 0x5eed;
/// Number of values below which an interval from resamples is too narrow: with four values, 6 of 100 miss the true
/// ratio.
const FEW: usize = 8;

/// Minimum number of groups on each side for an interval. Pods of one group share a queue, a disk and an instant, so a
/// group is one sample, and two groups show nothing about the spread of groups.
pub const MIN_GROUPS: usize = 3;

/// Ratio of the medians of two series.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// Median of a divided by the median of b.
    pub p50: f64,
    /// Confidence interval; `None` if there are too few independent samples.
    #[serde(flatten)]
    pub interval: Option<Interval>,
}

/// Interval of a ratio, at confidence level [`CONFIDENCE`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// Lower end.
    pub ci_low: f64,
    /// Upper end.
    pub ci_high: f64,
}

impl Ratio {
    /// Returns the ratio of two sets of independent times, with a percentile bootstrap interval. `None` if one set is
    /// empty or b's median is zero. The same input gives the same interval: the generator's seed is fixed.
    pub fn estimate(a: &[f64], b: &[f64]) -> Option<Self> {
        Self::resampled(a, b, RESAMPLES, &mut SmallRng::seed_from_u64(SEED))
    }

    /// Same as [`Ratio::estimate`], with a given number of resamples and a given generator.
    pub fn resampled(a: &[f64], b: &[f64], resamples: usize, random: &mut impl Rng) -> Option<Self> {
        let p50 = over(median(a)?, median(b)?)?;
        let (mut of_a, mut of_b) = (vec![0.0; a.len()], vec![0.0; b.len()]);
        let ratios = (0..resamples)
            .filter_map(|_| over(draw(a, &mut of_a, random), draw(b, &mut of_b, random)))
            .collect();
        Some(Self { p50, interval: Some(Interval::from_ratios(ratios)?) })
    }

    /// Returns the ratio of the medians of all times in two sets of groups. Resamples groups, not their times, because
    /// times of one group depend on each other. There is no interval if a side has fewer than [`MIN_GROUPS`] groups.
    pub fn of_groups(a: &[Vec<f64>], b: &[Vec<f64>]) -> Option<Self> {
        Self::resampled_groups(a, b, RESAMPLES, &mut SmallRng::seed_from_u64(SEED))
    }

    fn resampled_groups(
        a: &[Vec<f64>],
        b: &[Vec<f64>],
        resamples: usize,
        random: &mut impl Rng,
    ) -> Option<Self> {
        let p50 = over(median(&a.concat())?, median(&b.concat())?)?;
        if a.len().min(b.len()) < MIN_GROUPS {
            return Some(Self { p50, interval: None });
        }
        let ratios = (0..resamples)
            .filter_map(|_| over(median(&draw_groups(a, random))?, median(&draw_groups(b, random))?))
            .collect();
        Some(Self { p50, interval: Some(Interval::from_ratios(ratios)?) })
    }

    /// Same as [`Ratio::estimate`], for few values. If a side has fewer than [`FEW`], an interval from resamples is too
    /// narrow, so the interval is exact, from the ranks of the two sets (Hodges and Lehmann, by Mann and Whitney's
    /// statistic). With four values each, it is the whole range of ratios. If no interval from ranks has the level, it
    /// is the one from resamples.
    pub fn of_few(a: &[f64], b: &[f64]) -> Option<Self> {
        let resampled = Self::estimate(a, b)?;
        // No ratio to zero exists.
        let few = a.len().min(b.len()) < FEW && b.iter().all(|value| *value > 0.0);
        let excluded = few.then(|| excluded(a.len(), b.len())).flatten();
        let Some(excluded) = excluded else { return Some(resampled) };
        let mut ratios: Vec<f64> = a.iter().flat_map(|a| b.iter().map(move |b| a / b)).collect();
        ratios.sort_by(f64::total_cmp);
        let ends = (ratios.get(excluded), ratios.iter().rev().nth(excluded));
        let (Some(&ci_low), Some(&ci_high)) = ends else { return Some(resampled) };
        Some(Self { interval: Some(Interval { ci_low, ci_high }), ..resampled })
    }

    /// Returns the text for a table cell: "0.52 (0.46–0.67)", or "≈ 0.52" without an interval.
    pub fn short(&self) -> String {
        match self.interval {
            Some(Interval { ci_low, ci_high }) => {
                let digits = digits(self.p50);
                format!("{:.digits$} ({ci_low:.digits$}–{ci_high:.digits$})", self.p50)
            }
            None => format!("≈ {:.*}", digits(self.p50), self.p50),
        }
    }

    /// Returns whether the data show no difference: the interval contains 1, or there is no interval.
    pub fn shows_no_difference(&self) -> bool {
        self.interval.is_none_or(|interval| interval.contains(1.0))
    }

    /// Returns how many times faster or slower a is than b, if the ratio is one of times: "11.2 times faster (10.6 to
    /// 11.3)". `None` if no difference is shown.
    pub fn times_faster(&self) -> Option<String> {
        let Interval { ci_low, ci_high } = self.interval.filter(|interval| !interval.contains(1.0))?;
        let (word, [p50, low, high]) = if self.p50 < 1.0 {
            ("faster", [1.0 / self.p50, 1.0 / ci_high, 1.0 / ci_low])
        } else {
            ("slower", [self.p50, ci_low, ci_high])
        };
        let digits = if p50 < 10.0 { 2 } else { 1 };
        Some(format!("{p50:.digits$} times {word} ({low:.digits$} to {high:.digits$})"))
    }
}

/// Formats as "2.31 × (95 % CI 2.24 to 2.39)".
impl std::fmt::Display for Ratio {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let digits = digits(self.p50);
        let Some(interval) = self.interval else {
            return write!(f, "≈ {:.digits$} × (fewer than {MIN_GROUPS} groups: no interval)", self.p50);
        };
        let Interval { ci_low, ci_high } = interval;
        write!(f, "{:.digits$} × (95 % CI {ci_low:.digits$} to {ci_high:.digits$}", self.p50)?;
        f.write_str(if interval.contains(1.0) { "; no difference shown)" } else { ")" })
    }
}

impl Interval {
    /// Returns the interval of a set of resampled ratios; `None` for an empty set.
    fn from_ratios(mut ratios: Vec<f64>) -> Option<Self> {
        ratios.sort_by(f64::total_cmp);
        let tail = (1.0 - CONFIDENCE) / 2.0;
        let end = |part: f64| ratios.get((part * ratios.len() as f64) as usize).copied();
        Some(Self { ci_low: end(tail)?, ci_high: end(1.0 - tail).or(ratios.last().copied())? })
    }

    /// Returns whether a ratio is within the interval.
    pub fn contains(&self, ratio: f64) -> bool {
        self.ci_low <= ratio && ratio <= self.ci_high
    }
}

fn over(a: f64, b: f64) -> Option<f64> {
    (b > 0.0).then(|| a / b)
}

/// Returns the number of digits after which a ratio is cut: a small ratio keeps three.
fn digits(ratio: f64) -> usize {
    match ratio.abs() {
        ratio if ratio >= 0.3 => 2,
        ratio if ratio >= 0.01 => 3,
        _ => 4,
    }
}

/// Returns the times of equally many groups, drawn with replacement.
fn draw_groups(from: &[Vec<f64>], random: &mut impl Rng) -> Vec<f64> {
    (0..from.len()).flat_map(|_| from[random.random_range(0..from.len())].iter().copied()).collect()
}

/// Returns how many ratios of values of a to values of b lie outside each end of an interval with [`CONFIDENCE`];
/// `None` if there are too few values. `a` and `b` are the numbers of values.
fn excluded(a: usize, b: usize) -> Option<usize> {
    // For each number of values of b: the number of orders of all values, by the number of pairs in which a's value is
    // larger.
    let mut orders = vec![vec![1.0_f64]; b + 1];
    for _ in 0..a {
        for of_b in 1..=b {
            // Either the largest value belongs to a and is larger in a pair with each of b's, or it belongs to b.
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
        let containing = (0..runs)
            .filter(|_| {
                let (a, b) = (times(40, 200.0, &mut random), times(40, 100.0, &mut random));
                let ratio = Ratio::resampled(&a, &b, 400, &mut random).unwrap();
                ratio.interval.unwrap().contains(truth)
            })
            .count();
        // Three standard errors of a proportion of 0.95 at 400 runs are 0.033.
        let part = containing as f64 / f64::from(runs);
        assert!((part - CONFIDENCE).abs() < 0.033, "{part} of the intervals held the true ratio");
    }

    #[test]
    fn equal_series_show_no_difference_and_different_ones_do() {
        let mut random = SmallRng::seed_from_u64(8);
        let a = times(200, 100.0, &mut random);
        assert!(Ratio::estimate(&a, &a).unwrap().shows_no_difference());
        let b = times(200, 200.0, &mut random);
        let ratio = Ratio::estimate(&b, &a).unwrap();
        assert!(!ratio.shows_no_difference(), "{ratio}");
        assert_eq!(Ratio::estimate(&b, &a), Ratio::estimate(&b, &a));
    }

    #[test]
    fn intervals_of_few_values_hold_the_truth_at_least_as_often_as_they_say() {
        let mut random = SmallRng::seed_from_u64(9);
        for n in [4, 5, 7] {
            let containing = (0..400)
                .filter(|_| {
                    let (a, b) = (times(n, 200.0, &mut random), times(n, 100.0, &mut random));
                    let ratio = Ratio::of_few(&a, &b).unwrap();
                    let interval = ratio.interval.unwrap();
                    assert!(interval.contains(ratio.p50), "{ratio}");
                    interval.contains(2.0)
                })
                .count();
            let part = containing as f64 / 400.0;
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
        assert_eq!(ratio, Ratio { p50: 2.0, interval: Some(Interval { ci_low: 0.5, ci_high: 8.0 }) });
        // Too few for any interval from ranks, so the one from resamples is used.
        assert_eq!(Ratio::of_few(&a[..2], &b), Ratio::estimate(&a[..2], &b));
        let many = times(8, 100.0, &mut SmallRng::seed_from_u64(1));
        assert_eq!(Ratio::of_few(&many, &many), Ratio::estimate(&many, &many));
    }

    /// Returns groups of pods that share their group's luck: most of the spread is between groups.
    fn groups(n: usize, median: f64, random: &mut SmallRng) -> Vec<Vec<f64>> {
        times(n, median, random)
            .into_iter()
            .map(|group| (0..6).map(|pod| group + f64::from(pod) / 10.0).collect())
            .collect()
    }

    #[test]
    fn intervals_of_groups_hold_the_truth_where_those_of_their_pods_do_not() {
        let mut random = SmallRng::seed_from_u64(10);
        let (mut by_groups, mut by_pods) = (0, 0);
        for _ in 0..100 {
            let (a, b) = (groups(12, 200.0, &mut random), groups(12, 100.0, &mut random));
            // The medians of pods are slightly above those of groups.
            let truth = 200.25 / 100.25;
            let holds = |ratio: Ratio| usize::from(ratio.interval.unwrap().contains(truth));
            by_groups += holds(Ratio::resampled_groups(&a, &b, 300, &mut random).unwrap());
            by_pods += holds(Ratio::resampled(&a.concat(), &b.concat(), 300, &mut random).unwrap());
        }
        assert!(by_groups >= 85, "{by_groups} of 100 intervals over groups held the true ratio");
        assert!(by_pods < 75, "{by_pods} of 100 intervals over pods: the groups are not what this tests");
    }

    #[test]
    fn one_or_two_groups_show_nothing() {
        let groups = |n: usize, ms: f64| vec![vec![ms, ms + 1.0, ms + 2.0]; n];
        for few in [1, 2] {
            let ratio = Ratio::of_groups(&groups(few, 100.0), &groups(9, 200.0)).unwrap();
            assert_eq!((ratio.interval, ratio.times_faster()), (None, None));
            assert!(ratio.shows_no_difference());
            assert_eq!(ratio.short(), "≈ 0.50");
            assert!(ratio.to_string().contains("fewer than 3 groups"), "{ratio}");
        }
        assert!(!Ratio::of_groups(&groups(3, 100.0), &groups(3, 200.0)).unwrap().shows_no_difference());
        assert_eq!(Ratio::of_groups(&[], &groups(3, 1.0)), None);
    }

    #[test]
    fn small_ratios_keep_three_digits_and_say_how_many_times_faster() {
        let ratio = |p50, ci_low, ci_high| Ratio { p50, interval: Some(Interval { ci_low, ci_high }) };
        let small = ratio(0.08903, 0.08850, 0.09391);
        assert_eq!(small.short(), "0.089 (0.088–0.094)");
        assert_eq!(small.times_faster().unwrap(), "11.2 times faster (10.6 to 11.3)");
        assert_eq!(ratio(0.01384, 0.0138, 0.0145).short(), "0.014 (0.014–0.015)");
        assert_eq!(ratio(0.43, 0.41, 0.46).short(), "0.43 (0.41–0.46)");
        assert_eq!(ratio(4.82, 4.61, 5.0).times_faster().unwrap(), "4.82 times slower (4.61 to 5.00)");
        assert_eq!(ratio(0.98, 0.9, 1.1).times_faster(), None);
    }

    #[test]
    fn ratios_are_written_as_before() {
        let text = r#"{"p50":0.5,"ci_low":0.4,"ci_high":0.6}"#;
        let ratio: Ratio = serde_json::from_str(text).unwrap();
        assert_eq!(ratio.interval, Some(Interval { ci_low: 0.4, ci_high: 0.6 }));
        assert_eq!(serde_json::to_string(&ratio).unwrap(), text);
        let none: Ratio = serde_json::from_str(r#"{"p50":0.5}"#).unwrap();
        assert_eq!(none.interval, None);
        assert_eq!(serde_json::to_string(&none).unwrap(), r#"{"p50":0.5}"#);
    }

    #[test]
    fn no_times_no_ratio() {
        assert_eq!(Ratio::estimate(&[], &[1.0]), None);
        assert_eq!(Ratio::estimate(&[1.0], &[0.0]), None);
        assert_eq!(Ratio::of_few(&[1.0; 4], &[0.0; 4]), None);
    }
}
