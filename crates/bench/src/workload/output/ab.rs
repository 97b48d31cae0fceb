//! Parser for ab of Apache 2.4.

use super::text::{after, check_rate, number, number_after, whole_lines};
use super::{Figures, OutputError};

/// Returns rate and times. Failed requests, or responses other than 2xx, make the whole run a failure.
pub fn parse(text: &str) -> Result<Figures, OutputError> {
    let (complete, failed) =
        (number_after(text, "Complete requests:")?, number_after(text, "Failed requests:")?);
    let other =
        if text.contains("Non-2xx responses:") { number_after(text, "Non-2xx responses:")? } else { 0.0 };
    if failed > 0.0 || other > 0.0 {
        let message =
            format!("of {complete} requests {failed} failed and {other} had a status other than 2xx");
        return Err(OutputError::Failed { tool: "ab", message });
    }
    let rate = number_after(text, "Requests per second:")?;
    check_rate(rate, number_after(text, "Time taken for tests:")?, complete)?;
    let percentile = |percent: &'static str| number(percent, after(text, percent)?);
    let figures = Figures::from([
        ("per_s".into(), rate),
        ("mean_ms".into(), number_after(text, "Time per request:")?),
        ("p50_ms".into(), percentile("50%")?),
        ("p95_ms".into(), percentile("95%")?),
        ("p99_ms".into(), percentile("99%")?),
    ]);
    // The last line of the output: if it is there, everything before it is complete.
    match whole_lines(text).any(|line| line.contains("(longest request)")) {
        true => Ok(figures),
        false => Err(OutputError::Missing("(longest request)")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Format, example};
    use super::*;

    #[test]
    fn rate_and_percentiles() {
        let figures = parse(example(Format::Ab)).unwrap();
        assert_eq!((figures["per_s"], figures["mean_ms"]), (2171.01, 4.606));
        assert_eq!((figures["p50_ms"], figures["p99_ms"]), (2.0, 30.0));
    }

    #[test]
    fn redirects_are_no_answers() {
        let error = parse(include_str!("../../../tests/outputs/ab-non-2xx.txt")).unwrap_err().to_string();
        assert!(error.contains("200 had a status other than 2xx"), "{error}");
    }
}
