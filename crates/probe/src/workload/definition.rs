//! The probes, defined in `data/probes.toml`: tool, study and parameters.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

const DATA: &str = include_str!("../../data/probes.toml");
/// Mount point of a volume in a container.
pub const VOLUME: &str = "/data";

/// Duration and parameters of the probes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Profile {
    /// Scaled down, for a quick look and to test that everything runs.
    #[default]
    Quick,
    /// Parameters of the studies.
    Paper,
}

impl Profile {
    /// Returns the profile's name on the command line and in results.
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
    /// Higher values are better, as for a rate.
    Higher,
    /// Lower values are better, as for a time or a loss.
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
    /// Name of the metric, which ends with the unit.
    pub name: String,
    /// Unit of the metric; empty for a count.
    pub unit: String,
    /// Whether higher or lower values are better.
    pub better: Better,
}

impl Metric {
    /// Returns whether the metric is a rate per second.
    pub fn is_rate(&self) -> bool {
        self.unit.ends_with("/s")
    }
}

/// An image with tools.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Image {
    /// The image with most tools.
    #[default]
    BenchSmall,
    /// The image with compilers and checkers.
    BenchBuild,
}

impl Image {
    /// Returns whether this is the image with most tools.
    pub fn is_small(&self) -> bool {
        *self == Image::BenchSmall
    }
}

/// Output format of a tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// Output of `sysbench cpu`.
    SysbenchCpu,
    /// Output of `sysbench memory`.
    SysbenchMemory,
    /// Output of `sysbench fileio`.
    SysbenchFileio,
    /// Output of `sysbench oltp_*`.
    SysbenchOltp,
    /// Output of `hackbench`.
    Hackbench,
    /// Output of our own helper.
    Helper,
    /// Output of `redis-benchmark --csv`.
    RedisBenchmark,
    /// Output of `ab`.
    Ab,
    /// Output of `iperf3 -J` over TCP.
    Iperf3Tcp,
    /// Output of `iperf3 -u -J`.
    Iperf3Udp,
    /// Output of `sockperf ping-pong`.
    Sockperf,
    /// Output of `fio --output-format=json` with one job.
    Fio,
}

impl Format {
    /// All formats.
    pub const ALL: [Self; 12] = [
        Format::SysbenchCpu,
        Format::SysbenchMemory,
        Format::SysbenchFileio,
        Format::SysbenchOltp,
        Format::Hackbench,
        Format::Helper,
        Format::RedisBenchmark,
        Format::Ab,
        Format::Iperf3Tcp,
        Format::Iperf3Udp,
        Format::Sockperf,
        Format::Fio,
    ];
}

/// A kind of storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Storage {
    /// The container's own memory.
    Tmpfs,
    /// A Kubernetes emptyDir on the host's disk.
    EmptyDir,
    /// A host directory shared with the container.
    Share,
    /// A block device of the host.
    Block,
}

impl Storage {
    /// Returns the kind named `name`.
    pub fn of_name(name: &str) -> Option<Self> {
        match name {
            "tmpfs" => Some(Storage::Tmpfs),
            "emptydir" => Some(Storage::EmptyDir),
            "share" => Some(Storage::Share),
            "block" => Some(Storage::Block),
            _ => None,
        }
    }

    /// Returns the storage's directory in the container; `None` for a block device.
    pub const fn inside(self) -> Option<&'static str> {
        match self {
            Storage::Tmpfs => Some("/dev/shm"),
            Storage::EmptyDir | Storage::Share => Some(VOLUME),
            Storage::Block => None,
        }
    }
}

/// Values for the placeholders of a command.
pub type Values = BTreeMap<String, String>;

/// The parameters of a profile.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Parameters {
    /// Running time of the tool, s.
    pub takes: f64,
    /// Values of the placeholders in the command.
    #[serde(flatten)]
    pub values: Values,
}

/// A variant of a probe, which has its own row in every table.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Case {
    /// Name of the variant; empty if the probe has no variants.
    pub name: String,
    /// The only profile that has the variant; `None` if both have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub only: Option<Profile>,
    /// Values of the placeholders in the command.
    #[serde(flatten)]
    pub values: Values,
}

/// A probe.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Probe {
    /// Name of the probe on the command line.
    pub name: String,
    /// What the probe measures, in a few words.
    pub what: String,
    /// Study that the probe follows.
    pub study: String,
    /// The tool and its version.
    pub tool: String,
    /// Image with the tool.
    #[serde(default, skip_serializing_if = "Image::is_small")]
    pub image: Image,
    /// The tool's output format.
    pub output: Format,
    /// The tool's command line.
    pub command: Vec<String>,
    /// Command line of a server that runs in the pod under test; empty without a server. The tool then runs in a pod of
    /// the clients' runtime.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub server: Vec<String>,
    /// Port on which the server listens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Storage of the server's files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server_storage: Option<Storage>,
    /// Metrics of the probe. The first one is the main figure.
    pub metrics: Vec<Metric>,
    /// Parameters of the profile quick.
    pub quick: Parameters,
    /// Parameters of the profile paper.
    pub paper: Parameters,
    /// Variants of the probe.
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

    /// Returns the variants of a profile.
    pub fn cases(&self, profile: Profile) -> impl Iterator<Item = &Case> {
        self.cases.iter().filter(move |case| case.only.is_none_or(|only| only == profile))
    }

    /// Returns the metric named `name`.
    pub fn metric(&self, name: &str) -> Option<&Metric> {
        self.metrics.iter().find(|metric| metric.name == name)
    }

    /// Returns the running time of one run of each variant, s, without the pods' own time.
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
}
