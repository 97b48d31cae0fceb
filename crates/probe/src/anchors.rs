//! Published figures, shown next to measured ones and never mixed with them. The facts and their sources are in
//! `data/published.json`.

use serde::{Deserialize, Serialize};

const DATA: &str = include_str!("../data/published.json");

/// A published figure.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Anchor {
    /// The measured system.
    pub system: String,
    /// Version of the system.
    pub version: String,
    /// Where the figure was published.
    pub source: String,
    /// The source's hardware, which always differs from ours.
    pub hardware: String,
    /// A remark on the figure.
    pub note: String,
    /// What was published: a start-up time or an amount of memory.
    #[serde(flatten)]
    pub figure: Figure,
}

/// What kind of figure a published time is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The median of `n` times.
    Median,
    /// The mean of `n` times.
    Mean,
    /// An upper bound that was promised, not measured.
    Bound,
    /// A number in a text that states neither its kind nor the number of samples.
    Stated,
}

impl Kind {
    /// Returns the word that precedes the time in tables.
    pub const fn as_str(self) -> &'static str {
        match self {
            Kind::Median => "p50",
            Kind::Mean => "mean",
            Kind::Bound => "at most",
            Kind::Stated => "about",
        }
    }
}

/// A published figure by kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Figure {
    /// A start-up time.
    StartUp {
        /// Mode of the starts: "serial", "parallel", "parallel-batch", "vm-boot" or "kubernetes".
        mode: String,
        /// Number of pods started at once.
        group: u32,
        /// Start and end of the measured time, in the source's terms.
        measures: String,
        /// Number of samples; `None` if the source does not state it.
        n: Option<u32>,
        /// What `ms` is: a median, a mean, a bound or a bare number.
        #[serde(rename = "is")]
        statistic: Kind,
        /// The time, ms.
        ms: f64,
        /// The 95th percentile, ms.
        p95_ms: Option<f64>,
        /// The 99th percentile, ms.
        p99_ms: Option<f64>,
        /// The distribution, where raw data are published: pairs of a time in ms and the fraction of samples at or
        /// below it.
        cdf: Vec<(f64, f64)>,
    },
    /// An amount of memory.
    Memory {
        /// Number of pods.
        pods: u32,
        /// What the source counts as memory.
        definition: String,
        /// The sum of PSS, MB, as in the source.
        pss_mb: f64,
    },
}

/// Returns all published figures; none if the embedded text is invalid, which a test checks.
pub fn all() -> Vec<Anchor> {
    serde_json::from_str(DATA).unwrap_or_default()
}

impl Anchor {
    /// Returns the system and its version.
    pub fn name(&self) -> String {
        format!("{} {}", self.system, self.version).trim_end().to_owned()
    }

    /// Returns whether this is a start-up figure in mode `wanted`.
    pub fn is_startup(&self, wanted: &str) -> bool {
        matches!(&self.figure, Figure::StartUp { mode, .. } if mode == wanted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_anchor_is_read_and_says_where_it_is_from() {
        let anchors = all();
        assert!(anchors.len() >= 10);
        for anchor in &anchors {
            assert!(!anchor.source.is_empty() && anchor.hardware.contains("other hardware"), "{anchor:?}");
        }
    }

    #[test]
    fn only_distributions_have_a_median_and_only_measured_times_a_number_of_runs() {
        for anchor in all() {
            let Figure::StartUp { statistic, n, cdf, .. } = &anchor.figure else { continue };
            let (has_runs, is_median) = (n.is_some(), *statistic == Kind::Median);
            assert_eq!(!cdf.is_empty(), is_median, "{}", anchor.name());
            match statistic {
                Kind::Median => assert!(has_runs, "{}", anchor.name()),
                Kind::Bound | Kind::Stated => assert!(!has_runs, "{}", anchor.name()),
                Kind::Mean => {}
            }
        }
    }

    #[test]
    fn distributions_agree_with_their_percentiles() {
        for anchor in all() {
            let Figure::StartUp { ms: p50_ms, p95_ms: Some(p95), cdf, .. } = &anchor.figure else { continue };
            let reached = |part: f64| cdf.iter().find(|point| point.1 >= part - 1e-9).map(|point| point.0);
            // Long distributions are thinned: the next point may be a few ms away.
            for (part, figure) in [(0.5, *p50_ms), (0.95, *p95)] {
                let near = reached(part).is_some_and(|ms| ms >= figure && ms - figure <= 5.0);
                assert!(near, "{}: {part} {figure} {:?}", anchor.system, reached(part));
            }
        }
    }
}
