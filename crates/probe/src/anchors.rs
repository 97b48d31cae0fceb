//! Published figures, to be shown beside measured ones and never mixed with them. The facts and their sources
//! stand in `data/published.json`.

use serde::{Deserialize, Serialize};

const DATA: &str = include_str!("../data/published.json");

/// A published figure.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Anchor {
    /// Whose.
    pub system: String,
    /// Which version of it.
    pub version: String,
    /// Where it is published.
    pub source: String,
    /// On what; always something else than here.
    pub hardware: String,
    /// What to know about it.
    pub note: String,
    /// The figure.
    #[serde(flatten)]
    pub figure: Figure,
}

/// What is published.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Figure {
    /// A start-up time.
    StartUp {
        /// serial, parallel, parallel-batch, vm-boot or kubernetes.
        mode: String,
        /// Pods at once.
        group: u32,
        /// From where to where, in the source's sense.
        measures: String,
        /// Samples; not always stated.
        n: Option<u32>,
        /// Median, ms.
        p50_ms: f64,
        /// ms.
        p95_ms: Option<f64>,
        /// ms.
        p99_ms: Option<f64>,
        /// The distribution where raw data are published: ms, part.
        cdf: Vec<(f64, f64)>,
    },
    /// An amount of memory.
    Memory {
        /// Pods that it is for.
        pods: u32,
        /// What is counted.
        definition: String,
        /// MB as the source has them.
        pss_mb: f64,
    },
}

/// Returns all published figures; the text is a part of the program and tested, so a fault in it shows as none.
pub fn all() -> Vec<Anchor> {
    serde_json::from_str(DATA).unwrap_or_default()
}

impl Anchor {
    /// Returns the system and its version.
    pub fn name(&self) -> String {
        format!("{} {}", self.system, self.version).trim_end().to_owned()
    }

    /// Returns whether this is a start-up figure in this mode.
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
    fn distributions_agree_with_their_percentiles() {
        for anchor in all() {
            let Figure::StartUp { p50_ms, p95_ms: Some(p95), cdf, .. } = &anchor.figure else { continue };
            let reached = |part: f64| cdf.iter().find(|point| point.1 >= part - 1e-9).map(|point| point.0);
            // Long distributions are thinned: the next point may be a few ms on.
            for (part, figure) in [(0.5, *p50_ms), (0.95, *p95)] {
                let near = reached(part).is_some_and(|ms| ms >= figure && ms - figure <= 5.0);
                assert!(near, "{}: {part} {figure} {:?}", anchor.system, reached(part));
            }
        }
    }
}
