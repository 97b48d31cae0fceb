//! The published figures of the thesis, and its scores by its own rules: `data/thesis.toml`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::figures::Figure;
use super::levels::{Scores, System, grade};
use super::sheet::{From, Levels, Sheet};

const DATA: &str = include_str!("../../data/thesis.toml");
/// The system that counts as 100 %.
const BASELINE: &str = "bare metal";

/// Published figures of a study.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Study {
    /// Title of the study.
    pub study: String,
    /// Hardware and software of the study.
    pub hardware: String,
    /// Number of runs behind each figure.
    pub n: u32,
    /// Published features.
    #[serde(rename = "feature")]
    pub features: Vec<Published>,
}

/// A published feature.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Published {
    /// Name of the feature on the sheet.
    pub name: String,
    /// What was measured.
    pub what: String,
    /// Unit of the figures after division.
    pub unit: String,
    /// Whether our probe with the profile "paper" has the same parameters.
    #[serde(default)]
    pub same_parameters: bool,
    /// Divisor that converts printed figures to the unit.
    #[serde(default = "one")]
    divide_by: f64,
    /// Remark on the figures.
    #[serde(default)]
    pub note: String,
    /// Means as printed, by system.
    printed: BTreeMap<String, f64>,
    /// Standard deviations as printed, by system.
    #[serde(default)]
    pub sd: BTreeMap<String, f64>,
    /// Published scores, by system.
    pub scores: BTreeMap<String, u8>,
}

fn one() -> f64 {
    1.0
}

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

impl Published {
    /// Returns the published mean of each system, in its unit.
    pub fn means(&self) -> impl Iterator<Item = (&str, f64)> {
        self.printed.iter().map(|(system, printed)| (&**system, printed / self.divide_by))
    }
}

/// Returns the thesis's study; an empty one if the embedded text is invalid, which a test checks.
pub fn thesis() -> Study {
    toml::from_str(DATA).unwrap_or_default()
}

/// Returns the published features with the same parameters as this workload's profile "paper", each with the cases
/// whose mean is comparable.
pub fn like(probe: &str, metric: &str) -> Vec<(Published, Vec<String>)> {
    let Some(Sheet::Levels(levels)) = Sheet::built_in("desmet") else { return Vec::new() };
    let cases_of = |name: &str| {
        levels.features.iter().find(|feature| feature.name == name).and_then(|feature| match &feature.from {
            Some(From::Workload { probe: of, cases, metric: what }) if of == probe && what == metric => {
                Some(cases.clone())
            }
            _ => None,
        })
    };
    let features = thesis().features.into_iter().filter(|feature| feature.same_parameters);
    features.filter_map(|feature| Some((cases_of(&feature.name)?, feature))).map(|(a, b)| (b, a)).collect()
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
    use super::*;

    fn checked() -> Check {
        match Sheet::built_in("desmet") {
            Some(Sheet::Levels(levels)) => check(&levels),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_data_are_read_and_databases_are_per_second() {
        let study: Study = toml::from_str(DATA).unwrap();
        assert_eq!(study.features.len(), 12);
        assert!(study.hardware.starts_with("other hardware"));
        for (name, docker) in [("db-read", 1762.157), ("db-write", 329.687), ("db-read-write", 184.743)] {
            let feature = study.features.iter().find(|feature| feature.name == name).unwrap();
            let mean = feature.means().find(|(system, _)| *system == "Docker").unwrap().1;
            assert!((mean - docker).abs() < 1e-3, "{name} {mean}");
            assert!(feature.note.contains("per run of 20 s"));
        }
    }

    #[test]
    fn forty_of_forty_three_cells_follow_from_the_means() {
        let check = checked();
        assert_eq!((check.cells, check.contradictions.len()), (43, 3));
        let told: Vec<(&str, &str, u8, u8)> = check
            .contradictions
            .iter()
            .map(|of| (&*of.system, &*of.feature, of.published, of.by_rule))
            .collect();
        let expected = [("Firecracker", "jitter", 3, 2), ("KVM", "db-read", 1, 2), ("KVM", "db-write", 2, 3)];
        assert_eq!(told, expected);
        let percents: Vec<f64> = check.contradictions.iter().map(|of| of.percent.round()).collect();
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
