//! sysbench 1.0.

use super::text::{after, check_rate, number, number_after};
use super::{Figures, OutputError};

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

fn seconds(text: &str) -> Result<f64, OutputError> {
    number("total time:", after(text, "total time:")?.trim_end_matches('s'))
}

fn check_total(text: &str, rate: f64) -> Result<(), OutputError> {
    check_rate(rate, seconds(text)?, number_after(text, "total number of events:")?)
}

#[cfg(test)]
mod tests {
    use super::super::Format;
    use super::*;

    #[test]
    fn the_rate_is_that_per_second() {
        let figures = cpu(Format::SysbenchCpu.example()).unwrap();
        assert_eq!(figures["events_per_s"], 841.02);
        assert_eq!(figures["p95_ms"], 28.16);
        assert_eq!(memory(Format::SysbenchMemory.example()).unwrap()["mib_per_s"], 1591.31);
    }

    #[test]
    fn a_count_in_the_place_of_a_rate_is_refused() {
        let text = Format::SysbenchCpu.example().replace("841.02", "1699");
        assert!(matches!(cpu(&text), Err(OutputError::Contradiction(_))));
        let text = Format::SysbenchMemory.example().replace("(1591.31", "(3222.33");
        assert!(matches!(memory(&text), Err(OutputError::Contradiction(_))));
    }

    #[test]
    fn what_is_no_number_is_shown() {
        let text = Format::SysbenchCpu.example().replace("841.02", "nan");
        let error = cpu(&text).unwrap_err().to_string();
        assert!(error.contains("events per second") && error.contains("'nan'"), "{error}");
    }
}
