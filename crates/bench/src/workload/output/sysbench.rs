//! Parsers for sysbench 1.0.

use super::text::{after, check_rate, number, number_after};
use super::{Figures, OutputError};

/// Size of a request of `fileio`, KiB.
const FILEIO_KIB: f64 = 16.0;

/// Returns rate and latency; checks the rate against count and time.
pub fn cpu(text: &str) -> Result<Figures, OutputError> {
    let rate = number_after(text, "events per second:")?;
    check_total(text, rate)?;
    Ok(Figures::from([
        ("events_per_s".into(), rate),
        ("p95_ms".into(), number_after(text, "95th percentile:")?),
    ]))
}

/// Parses a line "3222.33 MiB transferred (1591.31 MiB/sec)".
pub fn memory(text: &str) -> Result<Figures, OutputError> {
    const WHAT: &str = "line 'MiB transferred (… MiB/sec)'";
    let line =
        text.lines().find(|line| line.contains("MiB transferred (")).ok_or(OutputError::Missing(WHAT))?;
    let (total, rest) = line.split_once("MiB transferred (").ok_or(OutputError::Missing(WHAT))?;
    let (rate, _) = rest.split_once("MiB/sec)").ok_or(OutputError::Missing(WHAT))?;
    let (total, rate) = (number(WHAT, total)?, number(WHAT, rate)?);
    let seconds = seconds(text)?;
    check_rate(rate, seconds, total)?;
    Ok(Figures::from([("mib_per_s".into(), rate)]))
}

/// Returns the rates of `fileio`; checks the bandwidth against the requests, which have 16 KiB each.
pub fn fileio(text: &str) -> Result<Figures, OutputError> {
    let both = |read: &'static str, written: &'static str| -> Result<f64, OutputError> {
        Ok(number_after(text, read)? + number_after(text, written)?)
    };
    let requests = both("reads/s:", "writes/s:")?;
    let rate = both("read, MiB/s:", "written, MiB/s:")?;
    // Both are printed with two decimals, so a difference of half the last digit is accepted.
    let expected = requests * FILEIO_KIB / 1024.0;
    if (rate - expected).abs() > 0.02 * expected + 0.01 {
        return Err(OutputError::Contradiction(format!(
            "{requests} requests per second are not {rate} MiB/s"
        )));
    }
    seconds(text)?;
    Ok(Figures::from([("mib_per_s".into(), rate), ("fsyncs_per_s".into(), number_after(text, "fsyncs/s:")?)]))
}

/// Returns the rates and latency of `oltp_*`. In lines like "transactions: 4274 (1421.23 per sec.)", the rate is in
/// brackets; it is checked against count and time.
pub fn oltp(text: &str) -> Result<Figures, OutputError> {
    let seconds = seconds(text)?;
    let bracketed = |label: &'static str| -> Result<(f64, f64), OutputError> {
        let line = after(text, label)?;
        let (count, rest) = line.split_once('(').ok_or(OutputError::Missing(label))?;
        Ok((number(label, count)?, number(label, rest)?))
    };
    let rate = |label: &'static str| -> Result<f64, OutputError> {
        let (count, rate) = bracketed(label)?;
        check_rate(rate, seconds, count)?;
        Ok(rate)
    };
    Ok(Figures::from([
        ("per_s".into(), rate("transactions:")?),
        ("queries_per_s".into(), rate("queries:")?),
        ("ignored_errors".into(), bracketed("ignored errors:")?.0),
        ("p95_ms".into(), number_after(text, "95th percentile:")?),
    ]))
}

fn seconds(text: &str) -> Result<f64, OutputError> {
    number("total time:", after(text, "total time:")?.trim_end_matches('s'))
}

fn check_total(text: &str, rate: f64) -> Result<(), OutputError> {
    check_rate(rate, seconds(text)?, number_after(text, "total number of events:")?)
}

#[cfg(test)]
mod tests {
    use super::super::{Format, example};
    use super::*;

    #[test]
    fn the_rate_is_that_per_second() {
        let figures = cpu(example(Format::SysbenchCpu)).unwrap();
        assert_eq!(figures["events_per_s"], 841.02);
        assert_eq!(figures["p95_ms"], 28.16);
        assert_eq!(memory(example(Format::SysbenchMemory)).unwrap()["mib_per_s"], 1591.31);
    }

    #[test]
    fn a_count_in_the_place_of_a_rate_is_refused() {
        let text = example(Format::SysbenchCpu).replace("841.02", "1699");
        assert!(matches!(cpu(&text), Err(OutputError::Contradiction(_))));
        let text = example(Format::SysbenchMemory).replace("(1591.31", "(3222.33");
        assert!(matches!(memory(&text), Err(OutputError::Contradiction(_))));
    }

    #[test]
    fn a_database_s_rate_is_the_one_in_brackets() {
        let figures = oltp(example(Format::SysbenchOltp)).unwrap();
        assert_eq!(figures["per_s"], 1421.23);
        assert_eq!((figures["queries_per_s"], figures["p95_ms"]), (22739.65, 15.0));
        assert_eq!(figures["ignored_errors"], 0.0);
        // The study's error: it took the count of a run for a rate.
        let text = example(Format::SysbenchOltp).replace("(1421.23 per sec.)", "(4274 per sec.)");
        assert!(matches!(oltp(&text), Err(OutputError::Contradiction(_))));
    }

    #[test]
    fn files_have_one_rate_of_either_direction() {
        let figures = fileio(example(Format::SysbenchFileio)).unwrap();
        assert_eq!((figures["mib_per_s"], figures["fsyncs_per_s"]), (6700.38, 68612.14));
        let text = example(Format::SysbenchFileio).replace("6700.38", "3350.19");
        assert!(matches!(fileio(&text), Err(OutputError::Contradiction(_))));
    }

    #[test]
    fn what_is_no_number_is_shown() {
        let text = example(Format::SysbenchCpu).replace("841.02", "nan");
        let error = cpu(&text).unwrap_err().to_string();
        assert!(error.contains("events per second") && error.contains("'nan'"), "{error}");
    }
}
