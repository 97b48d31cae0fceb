//! Parser for redis-benchmark of Redis 7: a table with one line per test.

use super::text::number;
use super::{Figures, OutputError};

const TOOL: &str = "redis-benchmark";

/// Columns that become figures, and the endings of their names.
const COLUMNS: [(&str, &str); 3] =
    [("rps", "per_s"), ("p50_latency_ms", "p50_ms"), ("p99_latency_ms", "p99_ms")];
/// Tests that the output must contain.
const TESTS: [&str; 2] = ["SET", "GET"];

/// Parses the tests SET and GET: "set_per_s", "set_p50_ms" and so on.
pub fn parse(text: &str) -> Result<Figures, OutputError> {
    let broken = |reason: String| OutputError::Table { tool: TOOL, reason };
    // A last line without a newline may be incomplete.
    let whole = text.rfind('\n').map_or("", |end| &text[..=end]);
    let start = whole.find("\"test\"").ok_or(OutputError::Missing("heading of redis-benchmark"))?;
    let mut rows = csv::Reader::from_reader(&whole.as_bytes()[start..]);
    let heading = rows.headers().map_err(|error| broken(error.to_string()))?.clone();
    let mut figures = Figures::new();
    for row in rows.records() {
        let row = row.map_err(|error| broken(error.to_string()))?;
        let test = row.get(0).unwrap_or_default();
        for (column, name) in COLUMNS.iter().filter(|_| TESTS.contains(&test)) {
            let at = heading.iter().position(|title| title == *column).ok_or(OutputError::Missing(column))?;
            let value = number(column, row.get(at).unwrap_or_default())?;
            figures.insert(format!("{}_{name}", test.to_ascii_lowercase()), value);
        }
    }
    if figures.len() == TESTS.len() * COLUMNS.len() {
        Ok(figures)
    } else {
        Err(OutputError::Missing("line of each of SET and GET"))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Format, example};
    use super::*;

    #[test]
    fn both_tests_are_read() {
        let figures = parse(example(Format::RedisBenchmark)).unwrap();
        assert_eq!(figures["set_per_s"], 13306.72);
        assert_eq!(figures["get_p99_ms"], 5.279);
        assert_eq!(figures.len(), 6);
    }

    #[test]
    fn a_test_that_is_not_there_is_missed() {
        let only_set: String =
            example(Format::RedisBenchmark).lines().take(2).map(|line| format!("{line}\n")).collect();
        assert_eq!(parse(&only_set), Err(OutputError::Missing("line of each of SET and GET")));
    }
}
