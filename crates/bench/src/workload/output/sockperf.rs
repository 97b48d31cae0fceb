//! Parser for sockperf 3.7.

use super::text::{number, whole_lines};
use super::{Figures, OutputError};

/// Parses lines "sockperf: ---> percentile 99.000 =   97.771", µs. Lost or repeated messages make the run a failure.
pub fn parse(text: &str) -> Result<Figures, OutputError> {
    let lost = whole_lines(text)
        .find(|line| line.contains("dropped messages = "))
        .ok_or(OutputError::Missing("line of dropped messages"))?;
    if !lost.contains("dropped messages = 0; # duplicated messages = 0; # out-of-order messages = 0") {
        return Err(OutputError::Failed { tool: "sockperf", message: sandboxer_probe::log::plain(lost) });
    }
    let percentile = |label: &'static str| {
        let line =
            whole_lines(text).find_map(|line| line.split_once(label)).ok_or(OutputError::Missing(label))?;
        number(label, line.1.trim_start().strip_prefix('=').unwrap_or_default())
    };
    Ok(Figures::from([
        ("p50_us".into(), percentile("percentile 50.000")?),
        ("p99_us".into(), percentile("percentile 99.000")?),
        ("p99_9_us".into(), percentile("percentile 99.900")?),
    ]))
}

#[cfg(test)]
mod tests {
    use super::super::{Format, example};
    use super::*;

    #[test]
    fn percentiles_are_round_trips() {
        let figures = parse(example(Format::Sockperf)).unwrap();
        assert_eq!((figures["p50_us"], figures["p99_us"], figures["p99_9_us"]), (19.736, 97.771, 15800.096));
    }

    #[test]
    fn lost_messages_are_a_failure() {
        let text = example(Format::Sockperf).replace("dropped messages = 0", "dropped messages = 7");
        assert!(matches!(parse(&text), Err(OutputError::Failed { .. })));
    }
}
