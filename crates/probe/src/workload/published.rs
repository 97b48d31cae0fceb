//! The published figures of the thesis: `data/thesis.toml`.

use std::collections::BTreeMap;

use serde::Deserialize;

const DATA: &str = include_str!("../../data/thesis.toml");

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
    /// Our row with the same parameters, with the profile "paper".
    #[serde(default)]
    pub like: Option<Row>,
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

/// A metric of a workload, averaged over cases.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// Name of the probe.
    pub probe: String,
    /// Cases of the probe.
    pub cases: Vec<String>,
    /// Name of the metric.
    pub metric: String,
}

fn one() -> f64 {
    1.0
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

/// Returns the published features with the same parameters as this metric with the profile "paper", each with the cases
/// whose mean is comparable.
pub fn like(probe: &str, metric: &str) -> Vec<(Published, Vec<String>)> {
    let of_metric = |feature: Published| {
        let row = feature.like.clone().filter(|row| row.probe == probe && row.metric == metric)?;
        Some((feature, row.cases))
    };
    thesis().features.into_iter().filter_map(of_metric).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
