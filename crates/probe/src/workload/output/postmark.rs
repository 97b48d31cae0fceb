//! PostMark 1.53. It counts whole seconds: a run of a few is too short for a figure.

use super::text::{number, whole_lines};
use super::{Figures, OutputError};

/// Least duration, s: one second more or less is then a fifth.
const SHORTEST_S: f64 = 5.0;

/// Takes counts and amounts, and divides them by the seconds of all transactions: PostMark's own rates are rounded.
pub fn parse(text: &str) -> Result<Figures, OutputError> {
    let before = |label: &'static str| -> Result<f64, OutputError> {
        let line = whole_lines(text).find(|line| line.contains(label)).ok_or(OutputError::Missing(label))?;
        number(label, line)
    };
    let total = before(" seconds total")?;
    let seconds = before(" seconds of transactions (")?;
    if seconds < SHORTEST_S {
        let said = format!("{seconds} s of transactions are too few: it counts whole seconds");
        return Err(OutputError::Failed { tool: "postmark", said });
    }
    let transactions = before(" read (")? + before(" appended (")?;
    let read = before(" megabytes read (")?;
    let written = before(" megabytes written (")?;
    Ok(Figures::from([
        ("transactions_per_s".into(), transactions / seconds),
        ("read_mib_per_s".into(), read / total),
        ("written_mib_per_s".into(), written / total),
    ]))
}

#[cfg(test)]
mod tests {
    use super::super::Format;
    use super::*;

    #[test]
    fn rates_are_counts_over_seconds() {
        let figures = parse(Format::Postmark.example()).unwrap();
        assert!(figures["transactions_per_s"] > 0.0, "{figures:?}");
    }

    #[test]
    fn a_run_of_a_second_is_no_figure() {
        let short = "\t1 seconds total\n\t1 seconds of transactions (500 per second)\n";
        assert!(parse(short).unwrap_err().to_string().contains("too few"));
    }
}
