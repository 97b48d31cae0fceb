//! Parser for our own helper: one line of JSON, with figures by name.

use serde::Deserialize;

use super::{Figures, OutputError};

/// Supported version of the line.
const SHAPE: u32 = 1;

#[derive(Deserialize)]
struct Line {
    bench_helper: u32,
    metrics: Figures,
}

/// Parses the first line that the helper wrote.
pub fn parse(text: &str) -> Result<Figures, OutputError> {
    let line = text
        .lines()
        .find(|line| line.starts_with("{\"bench_helper\""))
        .ok_or(OutputError::Missing("line of bench-helper"))?;
    let json = |reason: String| OutputError::Json { tool: "bench-helper", reason };
    let line: Line = serde_json::from_str(line).map_err(|error| json(error.to_string()))?;
    match line.bench_helper {
        SHAPE => Ok(line.metrics),
        other => {
            Err(json(format!("its format version is {other}, this probe reads {SHAPE}: rebuild the image")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Format, example};
    use super::*;

    #[test]
    fn figures_have_the_helper_s_names() {
        let figures = parse(example(Format::Helper)).unwrap();
        assert!(figures["mean_ns"] > 0.0 && figures["p99_ns"] >= figures["p50_ns"], "{figures:?}");
    }

    #[test]
    fn a_line_of_another_shape_is_refused_by_its_number() {
        let text = example(Format::Helper).replace("\"bench_helper\":1", "\"bench_helper\":9");
        assert!(parse(&text).unwrap_err().to_string().contains("format version is 9"));
    }
}
