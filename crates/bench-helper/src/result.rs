//! The line of JSON with a measurement's result: `{"bench_helper":1,"what":"…","metrics":{"…":1.5}}`.

use std::collections::BTreeMap;
use std::io::Write;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use serde::Serialize;

/// Version of the line's format.
const SHAPE: u32 = 1;
/// Longest time in a histogram, ns: an hour.
const LONGEST_NS: u64 = 3_600_000_000_000;

/// Result of a measurement.
#[derive(Debug, Serialize)]
pub struct Line {
    bench_helper: u32,
    what: &'static str,
    metrics: BTreeMap<&'static str, f64>,
}

impl Line {
    /// Returns a result without figures.
    pub fn new(what: &'static str) -> Self {
        Self { bench_helper: SHAPE, what, metrics: BTreeMap::new() }
    }

    /// Adds a figure.
    pub fn figure(mut self, name: &'static str, value: f64) -> Self {
        self.metrics.insert(name, value);
        self
    }

    /// Prints the result on stdout.
    pub fn print(&self) -> Result<()> {
        ensure!(self.metrics.values().all(|value| value.is_finite()), "{} gave no finite figures", self.what);
        let line = serde_json::to_string(self)?;
        writeln!(std::io::stdout(), "{line}").context("cannot print the result")
    }
}

/// A histogram of times, to three digits.
pub struct Times(Histogram<u64>);

impl Times {
    /// Returns an empty set of times.
    pub fn new() -> Result<Self> {
        Ok(Self(Histogram::new_with_bounds(1, LONGEST_NS, 3).context("cannot create a histogram")?))
    }

    /// Adds a time; a time of more than an hour counts as an hour.
    pub fn add(&mut self, time: Duration) {
        self.0.saturating_record(u64::try_from(time.as_nanos()).unwrap_or(LONGEST_NS));
    }

    /// Returns a percentile, ns.
    pub fn percentile(&self, percent: f64) -> f64 {
        self.0.value_at_percentile(percent) as f64
    }

    /// Returns the longest time, ns.
    pub fn longest(&self) -> f64 {
        self.0.max() as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_one_object_of_finite_figures() {
        let line = Line::new("test").figure("b", 2.5).figure("a", 1.0);
        let text = serde_json::to_string(&line).unwrap();
        assert_eq!(text, r#"{"bench_helper":1,"what":"test","metrics":{"a":1.0,"b":2.5}}"#);
        assert!(Line::new("test").figure("a", f64::NAN).print().is_err());
    }

    #[test]
    fn percentiles_are_of_what_was_added() {
        let mut times = Times::new().unwrap();
        (1..=1000).for_each(|us| times.add(Duration::from_micros(us)));
        assert!((times.percentile(50.0) / 500_000.0 - 1.0).abs() < 0.002);
        assert!((times.percentile(99.0) / 990_000.0 - 1.0).abs() < 0.002);
        assert!((times.longest() / 1_000_000.0 - 1.0).abs() < 0.002);
    }
}
