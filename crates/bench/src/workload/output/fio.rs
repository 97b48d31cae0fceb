//! Parser for fio 3.33, with one job that either reads or writes.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{Figures, OutputError};

const TOOL: &str = "fio";

#[derive(Deserialize)]
struct Output {
    jobs: Vec<Job>,
}

#[derive(Deserialize)]
struct Job {
    error: i64,
    read: Direction,
    write: Direction,
}

#[derive(Deserialize)]
struct Direction {
    total_ios: u64,
    bw_bytes: f64,
    iops: f64,
    clat_ns: Latency,
}

#[derive(Deserialize)]
struct Latency {
    #[serde(default)]
    percentile: BTreeMap<String, f64>,
}

/// Returns bandwidth, rate and the percentiles of completion latency.
pub fn parse(text: &str) -> Result<Figures, OutputError> {
    let broken = |reason: String| OutputError::Json { tool: TOOL, reason };
    // fio may print warnings before its JSON.
    let start = text.find('{').ok_or(OutputError::Missing("JSON of fio"))?;
    let output: Output = serde_json::from_str(&text[start..]).map_err(|error| broken(error.to_string()))?;
    let [job] = &output.jobs[..] else { return Err(broken(format!("it has {} jobs", output.jobs.len()))) };
    if job.error != 0 {
        return Err(OutputError::Failed {
            tool: TOOL,
            message: format!("its job ended with error {}", job.error),
        });
    }
    let direction = match (job.read.total_ios, job.write.total_ios) {
        (0, 0) => return Err(OutputError::Missing("request that was done")),
        (_, 0) => &job.read,
        (0, _) => &job.write,
        (_, _) => return Err(broken("its job reads and writes".into())),
    };
    let percentile = |name: &'static str| {
        let ns = direction.clat_ns.percentile.get(name).ok_or(OutputError::Missing("percentiles of clat_ns"));
        ns.map(|ns| ns / 1e3)
    };
    Ok(Figures::from([
        ("mib_per_s".into(), direction.bw_bytes / f64::from(1 << 20)),
        ("iops".into(), direction.iops),
        ("p50_us".into(), percentile("50.000000")?),
        ("p99_us".into(), percentile("99.000000")?),
    ]))
}

#[cfg(test)]
mod tests {
    use super::super::{Format, example};
    use super::*;

    #[test]
    fn the_direction_that_was_used_is_read() {
        let figures = parse(example(Format::Fio)).unwrap();
        assert!((figures["iops"] - 50274.36).abs() < 0.01, "{figures:?}");
        assert!((figures["mib_per_s"] - 196.384).abs() < 0.01, "{figures:?}");
        assert!(figures["p50_us"] > 0.0 && figures["p99_us"] >= figures["p50_us"]);
    }

    #[test]
    fn a_job_that_failed_has_no_figures() {
        let text = example(Format::Fio).replacen("\"error\": 0", "\"error\": 28", 1);
        assert!(parse(&text).unwrap_err().to_string().contains("error 28"));
    }
}
