//! Sheets of rules, in TOML. Unknown keys are errors.

use serde::{Deserialize, Serialize};

/// The built-in sheets, by file name.
const BUILT_IN: [(&str, &str); 3] = [
    ("gate", include_str!("../../data/sheets/gate.toml")),
    ("sla", include_str!("../../data/sheets/sla.toml")),
    ("desmet", include_str!("../../data/sheets/desmet.toml")),
];

/// Rules of one of three kinds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Sheet {
    /// Every metric must be within a tolerance of the baseline's.
    Gate(Gate),
    /// The highest rates within bounds of latency are scored.
    Sla(Sla),
    /// Percentages of the baseline are scored.
    Levels(Levels),
}

/// Rules of a gate.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gate {
    /// Name of the sheet.
    pub name: String,
    /// What the sheet judges.
    pub what: String,
    /// Runtime with which the others are compared.
    pub baseline: String,
    /// Tolerated difference, % of the baseline.
    pub tolerance_percent: f64,
}

/// Rules for rates within bounds of latency.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sla {
    /// Name of the sheet.
    pub name: String,
    /// What the sheet judges.
    pub what: String,
    /// Runtime whose score is 1.
    pub baseline: String,
    /// Probe whose cases are rates.
    pub probe: String,
    /// Name of the cases' value that is the rate, per s.
    pub rate: String,
    /// Metric of the completed work, per s.
    pub done: String,
    /// Metric of the latency, µs.
    pub latency: String,
    /// Bounds of the latency, ms.
    pub bounds_ms: Vec<f64>,
    /// Minimum share of the rate that must be completed, %.
    pub done_percent: f64,
}

/// Rules for scores by percentage of a baseline.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Levels {
    /// Name of the sheet.
    pub name: String,
    /// What the sheet judges.
    pub what: String,
    /// Runtime that counts as 100 %.
    pub baseline: String,
    /// Scored features.
    #[serde(rename = "feature")]
    pub features: Vec<Feature>,
}

/// A scored feature.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Feature {
    /// Name of the feature.
    pub name: String,
    /// Level of the feature, such as low or high. Scores are summed by level.
    pub level: String,
    /// Importance of the feature; only shown.
    #[serde(default)]
    pub importance: String,
    /// Which side of a threshold is good.
    pub operator: Operator,
    /// Thresholds of the scores from 1 up, % of the baseline.
    pub thresholds: Vec<f64>,
    /// Source of the figure; `None` if no probe measures it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<From>,
}

/// Which side of a threshold is good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Operator {
    /// At or above the threshold is good.
    AtLeast,
    /// At or below the threshold is good.
    AtMost,
}

/// Where in the results a feature's figure is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
pub enum From {
    /// A workload's metric, averaged over cases.
    Workload {
        /// Name of the probe.
        probe: String,
        /// Cases of the probe. All must be measured.
        cases: Vec<String>,
        /// Name of the metric.
        metric: String,
    },
    /// Start-up times in one mode.
    Startup {
        /// Mode: serial or parallel.
        startup: sandboxer_probe::sample::Mode,
    },
}

/// Why a text is not a sheet.
#[derive(Debug, thiserror::Error)]
pub enum SheetError {
    /// The text is not TOML of a sheet.
    #[error("not a sheet of rules")]
    Shape(#[from] toml::de::Error),
    /// The rules cannot be applied.
    #[error("{0}")]
    Rules(String),
}

impl Operator {
    /// Returns whether a percentage reaches a threshold.
    pub fn holds(self, percent: f64, threshold: f64) -> bool {
        match self {
            Operator::AtLeast => percent >= threshold,
            Operator::AtMost => percent <= threshold,
        }
    }
}

impl Sheet {
    /// Returns the names of the built-in sheets.
    pub fn names() -> [&'static str; 3] {
        BUILT_IN.map(|(name, _)| name)
    }

    /// Returns the built-in sheet `name`; `None` if there is none.
    pub fn built_in(name: &str) -> Option<Self> {
        let (_, text) = BUILT_IN.iter().find(|(known, _)| *known == name)?;
        Self::parse(text).ok()
    }

    /// Parses a sheet, and checks that its rules can be applied.
    pub fn parse(text: &str) -> Result<Self, SheetError> {
        let sheet: Self = toml::from_str(text)?;
        let fault = match &sheet {
            Sheet::Gate(gate) => gate.fault(),
            Sheet::Sla(sla) => sla.fault(),
            Sheet::Levels(levels) => levels.fault(),
        };
        fault.map_or(Ok(sheet), |fault| Err(SheetError::Rules(fault)))
    }

    /// Returns the baseline's name, to replace it.
    pub fn baseline_mut(&mut self) -> &mut String {
        match self {
            Sheet::Gate(gate) => &mut gate.baseline,
            Sheet::Sla(sla) => &mut sla.baseline,
            Sheet::Levels(levels) => &mut levels.baseline,
        }
    }

    /// Returns the baseline's name.
    pub fn baseline(&self) -> &str {
        match self {
            Sheet::Gate(gate) => &gate.baseline,
            Sheet::Sla(sla) => &sla.baseline,
            Sheet::Levels(levels) => &levels.baseline,
        }
    }
}

impl Gate {
    fn fault(&self) -> Option<String> {
        let valid = self.tolerance_percent > 0.0 && self.tolerance_percent < 100.0;
        (!valid).then(|| format!("tolerance_percent is {}, expected 0 to 100", self.tolerance_percent))
    }
}

impl Sla {
    fn fault(&self) -> Option<String> {
        let valid = !self.bounds_ms.is_empty() && self.bounds_ms.iter().all(|bound| *bound > 0.0);
        (!valid).then(|| "bounds_ms needs positive bounds".into())
    }
}

impl Levels {
    fn fault(&self) -> Option<String> {
        self.features.iter().find_map(|feature| {
            let stricter = |pair: &[f64]| match feature.operator {
                Operator::AtLeast => pair[0] < pair[1],
                Operator::AtMost => pair[0] > pair[1],
            };
            if feature.thresholds.is_empty() || feature.thresholds.len() > 9 {
                return Some(format!("feature {} needs one to nine thresholds", feature.name));
            }
            let ordered = feature.thresholds.windows(2).all(stricter);
            (!ordered).then(|| format!("feature {}: thresholds must become stricter", feature.name))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sandboxer_probe::workload::definition::{self, Profile};

    #[test]
    fn built_in_sheets_name_what_probes_measure() {
        for name in Sheet::names() {
            assert!(
                Sheet::built_in(name).is_some(),
                "{name}: {:?}",
                BUILT_IN.map(|(_, t)| Sheet::parse(t).err())
            );
        }
        let probes = definition::all();
        let Some(Sheet::Levels(levels)) = Sheet::built_in("desmet") else { panic!("no levels") };
        for feature in &levels.features {
            let Some(From::Workload { probe, cases, metric }) = &feature.from else { continue };
            let probe = probes.iter().find(|known| known.name == *probe).unwrap();
            assert!(probe.metric(metric).is_some(), "{}", feature.name);
            let known: Vec<&str> = probe.cases(Profile::Paper).map(|case| &*case.name).collect();
            assert!(cases.iter().all(|case| known.contains(&&**case)), "{}: {known:?}", feature.name);
        }
        let Some(Sheet::Sla(sla)) = Sheet::built_in("sla") else { panic!("no bounds") };
        let probe = probes.iter().find(|known| known.name == sla.probe).unwrap();
        assert!(probe.metric(&sla.done).is_some() && probe.metric(&sla.latency).is_some());
        assert!(probe.cases.iter().all(|case| case.values[&sla.rate].parse::<f64>().is_ok()));
    }

    #[test]
    fn rules_without_meaning_are_refused_by_name() {
        let error_of = |name: &str, from: &str, to: &str| {
            let text = BUILT_IN.iter().find(|(known, _)| *known == name).unwrap().1.replacen(from, to, 1);
            Sheet::parse(&text).unwrap_err().to_string()
        };
        assert!(
            error_of("gate", "tolerance_percent = 5", "tolerance_percent = 0")
                .contains("tolerance_percent is 0")
        );
        assert!(error_of("sla", "[10, 25, 50, 75, 100]", "[]").contains("positive bounds"));
        assert!(
            error_of("desmet", "[40, 30, 20, 10]", "[10, 20, 30, 40]")
                .contains("boot: thresholds must become")
        );
        assert!(error_of("desmet", "operator", "operater").contains("not a sheet"));
    }
}
