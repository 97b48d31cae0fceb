//! The scores of the thesis's published figures, by its own rules.

use std::collections::BTreeMap;

use sandboxer_probe::workload::published::thesis;
use serde::Serialize;

use super::figures::Figure;
use super::levels::{Scores, System, grade};
use super::sheet::Levels;

/// The system that counts as 100 %.
const BASELINE: &str = "bare metal";

/// A published score that contradicts its own rule.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Contradiction {
    /// Name of the system.
    pub system: String,
    /// Name of the feature.
    pub feature: String,
    /// Percentage of the baseline.
    pub percent: f64,
    /// The published score.
    pub published: u8,
    /// The score by the rule.
    pub by_rule: u8,
}

/// The published scores compared with their rule.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Check {
    /// Scores by the rule.
    pub scores: Scores,
    /// Number of published cells.
    pub cells: usize,
    /// Cells whose published score differs from the rule's.
    pub contradictions: Vec<Contradiction>,
}

/// Scores the published means by the sheet, and compares the result with the published scores.
pub fn check(levels: &Levels) -> Check {
    let study = thesis();
    let mut systems: BTreeMap<String, System> = BTreeMap::new();
    for feature in &study.features {
        for (name, mean) in feature.means() {
            let system = systems.entry(name.to_owned()).or_default();
            system.name = name.to_owned();
            system.figures.insert(feature.name.clone(), Figure::of_mean(mean));
        }
    }
    let baseline = systems.remove(BASELINE).unwrap_or_default();
    let scores = grade(levels, &baseline, &systems.into_values().collect::<Vec<_>>());
    let (mut cells, mut contradictions) = (0, Vec::new());
    for feature in &study.features {
        for (system, published) in &feature.scores {
            let scored = scores.systems.iter().find(|scored| scored.system == *system);
            let cell =
                scored.and_then(|scored| scored.cells.iter().find(|cell| cell.feature == feature.name));
            let Some((percent, by_rule)) = cell.and_then(|cell| cell.percent.zip(cell.score)) else {
                continue;
            };
            cells += 1;
            if by_rule != *published {
                contradictions.push(Contradiction {
                    system: system.clone(),
                    feature: feature.name.clone(),
                    percent,
                    published: *published,
                    by_rule,
                });
            }
        }
    }
    Check { scores, cells, contradictions }
}

#[cfg(test)]
mod tests {
    use super::super::sheet::{From, Sheet};
    use super::*;

    fn checked() -> Check {
        match Sheet::built_in("desmet") {
            Some(Sheet::Levels(levels)) => check(&levels),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_rows_beside_published_figures_are_those_that_the_sheet_scores() {
        let Some(Sheet::Levels(levels)) = Sheet::built_in("desmet") else { panic!("no levels") };
        for feature in thesis().features {
            let Some(row) = feature.like else { continue };
            let scored = levels.features.iter().find(|scored| scored.name == feature.name).unwrap();
            let from = From::Workload { probe: row.probe, cases: row.cases, metric: row.metric };
            assert_eq!(scored.from, Some(from), "{}", feature.name);
        }
    }

    #[test]
    fn forty_of_forty_three_cells_follow_from_the_means() {
        let check = checked();
        assert_eq!((check.cells, check.contradictions.len()), (43, 3));
        let contradictions: Vec<(&str, &str, u8, u8)> = check
            .contradictions
            .iter()
            .map(|contradiction| {
                (
                    &*contradiction.system,
                    &*contradiction.feature,
                    contradiction.published,
                    contradiction.by_rule,
                )
            })
            .collect();
        let expected = [("Firecracker", "jitter", 3, 2), ("KVM", "db-read", 1, 2), ("KVM", "db-write", 2, 3)];
        assert_eq!(contradictions, expected);
        let percents: Vec<f64> =
            check.contradictions.iter().map(|contradiction| contradiction.percent.round()).collect();
        assert_eq!(percents, [127.0, 75.0, 84.0]);
    }

    #[test]
    fn sums_have_how_much_of_them_was_measured() {
        let check = checked();
        let sums = |system: &str| {
            let scored = check.scores.systems.iter().find(|scored| scored.system == system).unwrap();
            ["low", "high"].map(|level| {
                let sum = scored.sums[level];
                (sum.score, sum.measured, sum.attainable)
            })
        };
        assert_eq!(sums("KVM"), [(19, 7, 28), (11, 5, 20)]);
        assert_eq!(sums("Firecracker"), [(20, 7, 28), (2, 2, 8)]);
        assert_eq!(sums("gVisor"), [(21, 7, 28), (0, 3, 12)]);
        assert_eq!(sums("Docker"), [(24, 7, 28), (20, 5, 20)]);
    }
}
