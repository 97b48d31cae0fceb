//! Times in a text file, one sample per line, as other tools write them.
//!
//! `#` begins a comment. A line has one or two columns:
//!
//! | columns | meaning |
//! |---|---|
//! | `ms` | a sample |
//! | `ms part` | a distribution: the parts rise to 1; the samples behind it are reconstructed |
//! | `index ms` | the first column counts up by one from 0 or 1 |
//! | `name ms` | the first column of at least one line is not a number |
//! | `ms anything` | otherwise |
//!
//! A word such as `failed` or `-` in place of a time is a failure: it is counted, never turned into a time.

use crate::sample::{Mode, Outcome, Sample};
use crate::summary::Summary;

/// Words for a failed start.
const FAILURES: [&str; 8] = ["fail", "failed", "failure", "timeout", "nan", "na", "-", "inf"];
/// Maximum number of samples reconstructed from a distribution.
const MAX_SAMPLES: usize = 1_000_000;

/// Contents of a file.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Times {
    /// Times in the order of the file, ms.
    pub times: Vec<f64>,
    /// Number of lines that stand for a failure.
    pub failures: usize,
    /// How the columns were read, as text.
    pub read_as: &'static str,
}

impl Times {
    /// Returns the summary of the times.
    pub fn summary(&self) -> Summary {
        Summary::new(&self.times, self.failures)
    }

    /// Returns the times as samples of serial starts of `runtime`.
    pub fn samples(&self, runtime: &str) -> Vec<Sample> {
        let times = self.times.iter().map(|&time| Some(time)).chain((0..self.failures).map(|_| None));
        times
            .enumerate()
            .map(|(round, time)| Sample {
                runtime: runtime.to_owned(),
                mode: Mode::Serial,
                round: round as u32,
                index: 0,
                warm_up: false,
                released_ms: 0.0,
                pod_ms: None,
                created_ms: None,
                started_ms: None,
                first_byte_ms: time,
                outcome: if time.is_some() { Outcome::Ok } else { Outcome::Failed },
                failed_at: if time.is_some() { String::new() } else { "not stated".into() },
                error: String::new(),
                stages: Default::default(),
                kvm_exits: None,
                first_ping_ms: None,
            })
            .collect()
    }
}

/// Why a text cannot be read as samples.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// A line is not a sample.
    #[error("line {line}: {reason}")]
    Line {
        /// Number of the line, from 1.
        line: usize,
        /// What is wrong with the line.
        reason: String,
    },
    /// The text has no samples.
    #[error("there are no samples in it")]
    Empty,
    /// The fractions of a distribution match no number of samples.
    #[error(
        "its second column looks like a distribution, but matches no number of samples up to {MAX_SAMPLES}"
    )]
    Distribution,
}

/// Parses a text.
pub fn parse(text: &str) -> Result<Times, TextError> {
    let mut rows: Vec<(usize, Vec<&str>)> = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default();
        let words: Vec<&str> = line.split([' ', '\t', ',', ';']).filter(|word| !word.is_empty()).collect();
        match words.len() {
            0 => {}
            1 | 2 => rows.push((index + 1, words)),
            many => {
                return Err(TextError::Line {
                    line: index + 1,
                    reason: format!("{many} columns; one or two expected"),
                });
            }
        }
    }
    let Some((_, first)) = rows.first() else { return Err(TextError::Empty) };
    let columns = first.len();
    if let Some((line, row)) = rows.iter().find(|(_, row)| row.len() != columns) {
        let reason = format!("{} columns after lines with {columns}", row.len());
        return Err(TextError::Line { line: *line, reason });
    }
    if columns == 1 {
        return samples(&rows, 0, "one sample a line");
    }
    let numbers = |column: usize| -> Option<Vec<f64>> {
        rows.iter().map(|(_, row)| row[column].parse().ok().filter(|value: &f64| value.is_finite())).collect()
    };
    match (numbers(0), numbers(1)) {
        (Some(values), Some(parts)) if is_distribution(&values, &parts) => {
            let times = take_apart(&values, &parts).ok_or(TextError::Distribution)?;
            Ok(Times {
                times,
                failures: 0,
                read_as: "a distribution: ms and fraction of samples at or below",
            })
        }
        (Some(values), _) if counts_up(&values) => samples(&rows, 1, "a number and a sample a line"),
        (None, Some(_)) if !rows.iter().any(|(_, row)| is_failure(row[0])) => {
            samples(&rows, 1, "a name and a sample a line")
        }
        _ => samples(&rows, 0, "a sample a line, the second column ignored"),
    }
}

fn samples(rows: &[(usize, Vec<&str>)], column: usize, read_as: &'static str) -> Result<Times, TextError> {
    let mut times = Times { read_as, ..Times::default() };
    for (line, row) in rows {
        let word = row[column];
        if is_failure(word) {
            times.failures += 1;
            continue;
        }
        match word.parse::<f64>() {
            Ok(time) if time.is_finite() && time >= 0.0 => times.times.push(time),
            _ => {
                return Err(TextError::Line { line: *line, reason: format!("'{word}' is not a time in ms") });
            }
        }
    }
    Ok(times)
}

fn is_failure(word: &str) -> bool {
    FAILURES.contains(&word.to_ascii_lowercase().as_str())
}

fn counts_up(values: &[f64]) -> bool {
    values.len() > 1
        && (values[0] == 0.0 || values[0] == 1.0)
        && values.windows(2).all(|pair| pair[1] - pair[0] == 1.0)
}

fn is_distribution(values: &[f64], parts: &[f64]) -> bool {
    let rises = |series: &[f64]| series.windows(2).all(|pair| pair[0] <= pair[1]);
    rises(values)
        && rises(parts)
        && parts.iter().all(|part| (0.0..=1.0 + 1e-6).contains(part))
        && parts.last().is_some_and(|last| (last - 1.0).abs() < 1e-6)
}

/// Returns the samples of a distribution: the smallest number for which every fraction is a whole count.
fn take_apart(values: &[f64], parts: &[f64]) -> Option<Vec<f64>> {
    // Fractions have a few decimals: uses the most precise fraction.
    let tolerance = 0.6e-6;
    let whole = |n: usize| {
        parts.iter().all(|part| {
            let count = part * n as f64;
            (count - count.round()).abs() <= tolerance * n as f64 + 1e-9
        })
    };
    // Beyond the precision of the decimals, any number would match.
    let n = (1..=MAX_SAMPLES.min((0.25 / tolerance) as usize)).find(|&n| whole(n))?;
    let mut times = Vec::with_capacity(n);
    for (value, part) in values.iter().zip(parts) {
        let upto = (part * n as f64).round() as usize;
        times.resize(upto.max(times.len()), *value);
    }
    Some(times)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::summary::cdf;

    #[test]
    fn one_column_with_comments_and_failures() {
        let times = parse("# ms\n10\n 20.5 # warm\n\nfailed\n-\n30\n").unwrap();
        assert_eq!((times.times.as_slice(), times.failures), (&[10.0, 20.5, 30.0][..], 2));
        assert_eq!(times.summary().n, 5);
    }

    #[test]
    fn two_columns_are_told_apart() {
        assert_eq!(parse("1 500\n2 400\n3 450\n").unwrap().times, [500.0, 400.0, 450.0]);
        assert_eq!(parse("pod-a 500\npod-b 400\n").unwrap().times, [500.0, 400.0]);
        assert_eq!(parse("500 7\n400 9\n").unwrap().times, [500.0, 400.0]);
        assert_eq!(
            parse("500 ok\nfailed no\n").unwrap(),
            Times { times: vec![500.0], failures: 1, read_as: "a sample a line, the second column ignored" }
        );
    }

    #[test]
    fn a_distribution_gives_its_samples_back() {
        let samples = [303.0, 303.0, 307.0, 312.0, 312.0, 312.0, 340.0];
        // With a step from zero, as gnuplot users draw it.
        let text: String = std::iter::once("303 0.000000\n".to_owned())
            .chain(cdf(&samples).into_iter().map(|(time, part)| format!("{time} {part:.6}\n")))
            .collect();
        let times = parse(&text).unwrap();
        assert_eq!(times.times, samples, "{}", times.read_as);
    }

    #[test]
    fn a_line_that_is_none_is_named() {
        for (text, line) in [("1\n2\nx7\n", 3), ("1\n2 3\n", 2), ("1 2 3\n", 1), ("5\n-3\n", 2)] {
            assert!(
                matches!(parse(text), Err(TextError::Line { line: found, .. }) if found == line),
                "{text}"
            );
        }
        assert_eq!(parse("# nothing\n"), Err(TextError::Empty));
    }
}
