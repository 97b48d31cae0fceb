//! Scores by percentage of a baseline.

use std::collections::BTreeMap;

use sandboxer_probe::ratio::Ratio;
use serde::Serialize;

use super::figures::Figure;
use super::sheet::{Feature, Levels};

/// Number of values that each side needs for an interval.
const INTERVAL_OF: usize = 4;

/// Figures of one system, by the name of their feature.
#[derive(Debug, Clone, Default)]
pub struct System {
    /// Name of the system.
    pub name: String,
    /// Figures by feature.
    pub figures: BTreeMap<String, Figure>,
}

/// Scores of all systems.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Scores {
    /// The baseline's name.
    pub baseline: String,
    /// Scores of each system.
    pub systems: Vec<Scored>,
}

/// Scores of one system.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Scored {
    /// Name of the system.
    pub system: String,
    /// One cell per feature of the sheet.
    pub cells: Vec<Cell>,
    /// Sums of scores by level.
    pub sums: BTreeMap<String, Sum>,
}

/// Score of one feature.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Cell {
    /// Name of the feature.
    pub feature: String,
    /// Level of the feature.
    pub level: String,
    /// Percentage of the baseline's mean; `None` if one of the two was not measured.
    pub percent: Option<f64>,
    /// Score by the means; `None` without a percentage.
    pub score: Option<u8>,
    /// Score by the medians, if there are any.
    pub by_median: Option<u8>,
    /// Scores at both ends of the ratio's interval, if each side has at least four values.
    pub by_interval: Option<(u8, u8)>,
}

/// Sum of the scores of one level.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Sum {
    /// Sum of the scores by the means; features that were not measured add nothing.
    pub score: u32,
    /// Sum of the scores by the medians.
    pub by_median: u32,
    /// Number of measured features.
    pub measured: usize,
    /// Number of all features.
    #[serde(rename = "of")]
    pub features: usize,
    /// Highest possible sum for the measured features.
    pub attainable: u32,
}

impl Cell {
    fn compare(feature: &Feature, baseline: Option<&Figure>, candidate: Option<&Figure>) -> Self {
        let both = baseline.zip(candidate).filter(|(baseline, _)| baseline.mean > 0.0);
        let percent = both.map(|(baseline, candidate)| 100.0 * candidate.mean / baseline.mean);
        let medians = both.and_then(|(baseline, candidate)| Some((baseline.median?, candidate.median?)));
        let by_median = medians.filter(|(baseline, _)| *baseline > 0.0);
        let interval = both.and_then(|(baseline, candidate)| {
            let enough = baseline.values.len().min(candidate.values.len()) >= INTERVAL_OF;
            enough.then(|| Ratio::of_few(&candidate.values, &baseline.values)).flatten()
        });
        Self {
            feature: feature.name.clone(),
            level: feature.level.clone(),
            percent,
            score: percent.map(|percent| feature.score(percent)),
            by_median: by_median.map(|(baseline, candidate)| feature.score(100.0 * candidate / baseline)),
            by_interval: interval
                .and_then(|ratio| ratio.interval)
                .map(|ends| (feature.score(100.0 * ends.ci_low), feature.score(100.0 * ends.ci_high))),
        }
    }

    /// Returns whether the medians or an end of the interval give a different score from the means.
    pub fn changes(&self) -> bool {
        let others = self.by_median.into_iter().chain(self.by_interval.into_iter().flat_map(|(a, b)| [a, b]));
        self.score.is_some_and(|score| others.into_iter().any(|other| other != score))
    }
}

impl Feature {
    /// Returns the highest score whose threshold a percentage reaches, else 0.
    pub fn score(&self, percent: f64) -> u8 {
        let reached = self.thresholds.iter().rposition(|threshold| self.operator.holds(percent, *threshold));
        reached.map_or(0, |at| at as u8 + 1)
    }
}

/// Scores `candidates` against `baseline`.
pub fn grade(levels: &Levels, baseline: &System, candidates: &[System]) -> Scores {
    let scored = |system: &System| {
        let cells: Vec<Cell> = levels
            .features
            .iter()
            .map(|feature| {
                let figure_of = |system: &'_ System| system.figures.get(&feature.name).cloned();
                Cell::compare(feature, figure_of(baseline).as_ref(), figure_of(system).as_ref())
            })
            .collect();
        let mut sums: BTreeMap<String, Sum> = BTreeMap::new();
        for (cell, feature) in cells.iter().zip(&levels.features) {
            let sum = sums.entry(cell.level.clone()).or_default();
            sum.features += 1;
            if let Some(score) = cell.score {
                sum.measured += 1;
                sum.score += u32::from(score);
                sum.by_median += u32::from(cell.by_median.unwrap_or(score));
                sum.attainable += feature.thresholds.len() as u32;
            }
        }
        Scored { system: system.name.clone(), cells, sums }
    };
    Scores { baseline: baseline.name.clone(), systems: candidates.iter().map(scored).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::score::sheet::Sheet;

    fn desmet() -> Levels {
        match Sheet::built_in("desmet") {
            Some(Sheet::Levels(levels)) => levels,
            other => panic!("{other:?}"),
        }
    }

    fn boot(name: &str, values: &[f64]) -> System {
        let figure = Figure::of_cases(&[values.to_vec()]).unwrap();
        System { name: name.into(), figures: [("boot".to_owned(), figure)].into() }
    }

    #[test]
    fn bounds_belong_to_the_better_score() {
        let levels = desmet();
        let score = |name: &str, percent: f64| {
            levels.features.iter().find(|feature| feature.name == name).unwrap().score(percent)
        };
        assert_eq!([90.0, 89.999, 60.0, 59.9].map(|percent| score("cpu", percent)), [4, 3, 1, 0]);
        assert_eq!([10.0, 10.1, 40.0, 40.1].map(|percent| score("boot", percent)), [4, 3, 1, 0]);
    }

    #[test]
    fn one_outlier_changes_a_score_and_is_marked() {
        // The study's virtual machine: seven boots of about 15 s and three of up to 42 s.
        let kvm = [14.0, 14.2, 14.5, 14.8, 14.9, 15.1, 15.4, 24.3, 24.6, 42.2];
        let scores = grade(&desmet(), &boot("metal", &[58.0, 58.4, 58.6, 58.9]), &[boot("kvm", &kvm)]);
        let cell = &scores.systems[0].cells[0];
        assert_eq!((cell.score, cell.by_median), (Some(1), Some(2)));
        assert!(cell.changes());
        let sum = scores.systems[0].sums["low"];
        assert_eq!((sum.score, sum.by_median, sum.measured, sum.features, sum.attainable), (1, 2, 1, 7, 4));
    }

    #[test]
    fn what_was_not_measured_has_no_score_and_adds_nothing() {
        let scores = grade(&desmet(), &boot("metal", &[50.0]), &[System::default()]);
        assert!(scores.systems[0].cells.iter().all(|cell| cell.score.is_none() && cell.percent.is_none()));
        let sum = scores.systems[0].sums["high"];
        assert_eq!((sum.score, sum.measured, sum.features, sum.attainable), (0, 0, 5, 0));
    }
}
