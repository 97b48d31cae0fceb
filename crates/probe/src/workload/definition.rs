//! The probes: which tool, from which study, with which parameters. They are defined in `data/probes.toml`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::output::Format;
use super::volume::Storage;

const DATA: &str = include_str!("../../data/probes.toml");

/// Duration and parameters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Profile {
    /// Scaled down: for a quick look, and to test that everything runs.
    #[default]
    Quick,
    /// The study's own parameters.
    Paper,
}

impl Profile {
    /// Returns its name, as the command line and results have it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Profile::Quick => "quick",
            Profile::Paper => "paper",
        }
    }
}

impl std::fmt::Display for Profile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

impl std::str::FromStr for Profile {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        [Profile::Quick, Profile::Paper]
            .into_iter()
            .find(|profile| profile.as_str() == text)
            .ok_or_else(|| format!("no such profile '{text}': quick or paper"))
    }
}

/// Which values of a metric are better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    /// A rate.
    Higher,
    /// A time, or a loss.
    Lower,
}

impl Better {
    /// Returns the direction in a word.
    pub const fn as_str(self) -> &'static str {
        match self {
            Better::Higher => "higher",
            Better::Lower => "lower",
        }
    }
}

/// A metric with unit and direction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Metric {
    /// Its name; ends with the unit.
    pub name: String,
    /// Its unit; empty for a number of things.
    pub unit: String,
    /// Its direction.
    pub better: Better,
}

impl Metric {
    /// Returns whether it is something per second.
    pub fn is_rate(&self) -> bool {
        self.unit.ends_with("/s")
    }
}

/// An image with tools.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Image {
    /// Most tools.
    #[default]
    BenchSmall,
    /// Compilers and checkers.
    BenchBuild,
}

impl Image {
    /// Returns whether it is the image of most tools.
    pub fn is_small(&self) -> bool {
        *self == Image::BenchSmall
    }
}

/// Values for the placeholders of a command.
pub type Values = BTreeMap<String, String>;

/// The parameters of a profile.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Parameters {
    /// How long the tool runs, s.
    pub takes: f64,
    /// Placeholders.
    #[serde(flatten)]
    pub values: Values,
}

/// One variant of a probe: a row of its own in every table.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Case {
    /// Its name; empty where a probe has no variants.
    pub name: String,
    /// The only profile that has it; both with `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub only: Option<Profile>,
    /// Placeholders.
    #[serde(flatten)]
    pub values: Values,
}

/// A probe.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Probe {
    /// Its name on the command line.
    pub name: String,
    /// What it measures, in a few words.
    pub what: String,
    /// Its study.
    pub study: String,
    /// The tool and its version.
    pub tool: String,
    /// The image that has it.
    #[serde(default, skip_serializing_if = "Image::is_small")]
    pub image: Image,
    /// The tool's output format.
    pub output: Format,
    /// The tool's command line.
    pub command: Vec<String>,
    /// Command line of a server, which then runs in the pod under test; the tool runs in a pod of the clients' runtime.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub server: Vec<String>,
    /// The port at which the server answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Storage of the server's files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server_storage: Option<Storage>,
    /// Its metrics; the first one is the main figure.
    pub metrics: Vec<Metric>,
    /// Scaled down.
    pub quick: Parameters,
    /// Parameters of the study.
    pub paper: Parameters,
    /// Variants.
    #[serde(default = "one_case")]
    pub cases: Vec<Case>,
}

fn one_case() -> Vec<Case> {
    vec![Case::default()]
}

impl Probe {
    /// Returns the parameters of a profile.
    pub fn parameters(&self, profile: Profile) -> &Parameters {
        match profile {
            Profile::Quick => &self.quick,
            Profile::Paper => &self.paper,
        }
    }

    /// Returns the variants that a profile has.
    pub fn cases(&self, profile: Profile) -> impl Iterator<Item = &Case> {
        self.cases.iter().filter(move |case| case.only.is_none_or(|only| only == profile))
    }

    /// Returns a metric by its name.
    pub fn metric(&self, name: &str) -> Option<&Metric> {
        self.metrics.iter().find(|metric| metric.name == name)
    }

    /// Returns how long one run of each variant takes, s, without the pods' own time.
    pub fn takes(&self, profile: Profile) -> f64 {
        self.parameters(profile).takes * self.cases(profile).count() as f64
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    probe: Vec<Probe>,
}

/// Returns all probes, in the order in which they run; none if the embedded text is invalid, which a test checks.
pub fn all() -> Vec<Probe> {
    toml::from_str::<File>(DATA).map(|file| file.probe).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_data_are_probes_with_names_of_their_own() {
        let file: File = toml::from_str(DATA).unwrap();
        let names: BTreeSet<&str> = file.probe.iter().map(|probe| &*probe.name).collect();
        assert_eq!(names.len(), file.probe.len());
        for probe in &file.probe {
            let cases: BTreeSet<&str> = probe.cases.iter().map(|case| &*case.name).collect();
            assert_eq!(cases.len(), probe.cases.len(), "{}", probe.name);
            assert!(!probe.metrics.is_empty() && !probe.study.is_empty(), "{}", probe.name);
            assert_eq!(probe.server.is_empty(), probe.port.is_none(), "{}", probe.name);
            assert!(probe.server_storage.is_none() || !probe.server.is_empty(), "{}", probe.name);
            for profile in [Profile::Quick, Profile::Paper] {
                assert!(probe.takes(profile) > 0.0, "{} has nothing in {profile}", probe.name);
            }
        }
    }

    #[test]
    fn quick_is_never_longer_than_paper() {
        for probe in all() {
            assert!(probe.takes(Profile::Quick) <= probe.takes(Profile::Paper), "{}", probe.name);
        }
    }

    #[test]
    fn every_metric_is_one_that_the_tool_prints() {
        for probe in all() {
            let printed = probe.output.parse(probe.output.example()).unwrap();
            for metric in &probe.metrics {
                // The helper's figures differ by what it measures: its own tests name them.
                let known = probe.output == Format::Helper || printed.contains_key(&metric.name);
                assert!(known, "{} prints no {}: {printed:?}", probe.tool, metric.name);
            }
        }
    }
}
