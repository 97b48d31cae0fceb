//! The result of measuring a cluster's start-up times.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::startup::{Plan, Row};
use crate::sample::Outcome;
use crate::summary::{nearest_rank, sorted};

/// Version of the result's format.
pub const SCHEMA: u32 = 1;
/// Number of pods of a class below which a note says that the mean is of few pods.
const ENOUGH: usize = 30;

/// Result of a measurement in a cluster.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`] of the probe that wrote it.
    pub schema: u32,
    /// What is measured: "created to Ready, by the cluster's own timestamps".
    pub measures: String,
    /// Resolution of the timestamps, s.
    pub resolution_s: f64,
    /// Version of the API server.
    pub cluster: String,
    /// Image of the pods.
    pub image: String,
    /// Whether the measurement ended early.
    pub partial: bool,
    /// Times by RuntimeClass.
    pub classes: BTreeMap<String, Class>,
    /// Notes on the measurement.
    pub notes: Vec<String>,
    /// Every pod, warm-ups and failures included.
    pub rows: Vec<Row>,
}

/// Times of a RuntimeClass, s.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Class {
    /// Number of pods, failures included.
    pub n: usize,
    /// Number of pods that did not become Ready. The figures below are from the others.
    pub failures: usize,
    /// Shortest time, s.
    pub min_s: Option<f64>,
    /// Median time by nearest rank, s.
    pub p50_s: Option<f64>,
    /// 90th percentile of the times, s.
    pub p90_s: Option<f64>,
    /// Longest time, s.
    pub max_s: Option<f64>,
    /// Mean time, s: the only figure that the coarse resolution does not distort.
    pub mean_s: Option<f64>,
    /// Standard deviation of the times, s.
    pub sd_s: Option<f64>,
    /// Number of pods by their time, s.
    pub pods_by_s: BTreeMap<i64, usize>,
    /// Mean time of each condition since creation, s.
    pub conditions_mean_s: BTreeMap<String, f64>,
    /// Mean time of each event since creation, s.
    pub events_mean_s: BTreeMap<String, f64>,
}

/// Returns the result of these rows.
pub fn build(plan: &Plan, cluster: String, rows: Vec<Row>, partial: bool, mut notes: Vec<String>) -> Report {
    let name = |class: &String| if class.is_empty() { "(none)".to_owned() } else { class.clone() };
    let classes: BTreeMap<String, Class> =
        plan.classes.iter().map(|class| (name(class), summary(&rows, class))).collect();
    notes.push(
        "timestamps of a cluster have whole seconds: a single time is up to 1 s wrong, the mean of many is not, because pods are \
         created at a random part of a second"
            .into(),
    );
    if classes.values().any(|class| class.n - class.failures < ENOUGH) {
        notes.push(format!(
            "fewer than {ENOUGH} pods of a class: its mean is uncertain by a part of a second"
        ));
    }
    for row in rows.iter().filter(|row| row.outcome() == Outcome::Failed && !row.warm_up) {
        notes.push(format!("{} pod {}: {}", name(&row.class), row.index, row.error));
    }
    Report {
        schema: SCHEMA,
        measures: "from a pod's creationTimestamp until its condition Ready, by the cluster's own timestamps"
            .into(),
        resolution_s: 1.0,
        cluster,
        image: plan.image.clone(),
        partial,
        classes,
        notes,
        rows,
    }
}

fn summary(rows: &[Row], class: &str) -> Class {
    let rows_of_class: Vec<&Row> = rows.iter().filter(|row| row.class == class && !row.warm_up).collect();
    let failures = rows_of_class.iter().filter(|row| row.outcome() == Outcome::Failed).count();
    let times: Vec<f64> = rows_of_class.iter().filter_map(|row| row.ready_s()).collect();
    let ordered = sorted(&times);
    let mean = mean(&times);
    let sd = mean.filter(|_| times.len() > 1).map(|mean| {
        (times.iter().map(|time| (time - mean).powi(2)).sum::<f64>() / (times.len() - 1) as f64).sqrt()
    });
    let mut pods_by_s = BTreeMap::new();
    for time in &times {
        *pods_by_s.entry(time.round() as i64).or_default() += 1;
    }
    let ok: Vec<&Row> = rows_of_class.into_iter().filter(|row| row.outcome() == Outcome::Ok).collect();
    Class {
        n: times.len() + failures,
        failures,
        min_s: ordered.first().copied(),
        p50_s: nearest_rank(&ordered, 50.0),
        p90_s: nearest_rank(&ordered, 90.0),
        max_s: ordered.last().copied(),
        mean_s: mean,
        sd_s: sd,
        pods_by_s,
        conditions_mean_s: means(ok.iter().map(|row| &row.conditions)),
        events_mean_s: means(ok.iter().map(|row| &row.events)),
    }
}

fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

fn means<'a>(maps: impl Iterator<Item = &'a BTreeMap<String, f64>>) -> BTreeMap<String, f64> {
    let mut all: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for (name, value) in maps.flatten() {
        all.entry(name.clone()).or_default().push(*value);
    }
    all.into_iter().filter_map(|(name, values)| Some((name, mean(&values)?))).collect()
}
