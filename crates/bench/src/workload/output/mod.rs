//! Parsers of tools' output. Output in any other format counts as a failure; the error names what is missing.

mod ab;
mod fio;
mod hackbench;
mod helper;
mod iperf3;
mod redis;
mod sockperf;
mod sysbench;
mod text;

use sandboxer_probe::workload::definition::Format;
use sandboxer_probe::workload::run::Figures;

/// Why an output has no figures.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OutputError {
    /// A required part is missing.
    #[error("the output has no {0}")]
    Missing(&'static str),
    /// A number is invalid.
    #[error("{what} is '{found}', expected a number of at least 0")]
    Number {
        /// Name of the number.
        what: &'static str,
        /// The invalid text.
        found: String,
    },
    /// The JSON is invalid.
    #[error("the output is not JSON of {tool}: {reason}")]
    Json {
        /// Name of the tool.
        tool: &'static str,
        /// What is wrong with the JSON.
        reason: String,
    },
    /// The table is invalid.
    #[error("the output is not a table of {tool}: {reason}")]
    Table {
        /// Name of the tool.
        tool: &'static str,
        /// What is wrong with the table.
        reason: String,
    },
    /// The tool reports a failure.
    #[error("{tool} failed: {message}")]
    Failed {
        /// Name of the tool.
        tool: &'static str,
        /// The tool's message.
        message: String,
    },
    /// Two figures of one output contradict each other.
    #[error("the output contradicts itself: {0}")]
    Contradiction(String),
}

/// Returns the figures of an output. Each is finite and not negative.
pub fn parse(format: Format, text: &str) -> Result<Figures, OutputError> {
    let figures = match format {
        Format::SysbenchCpu => sysbench::cpu(text),
        Format::SysbenchMemory => sysbench::memory(text),
        Format::SysbenchFileio => sysbench::fileio(text),
        Format::SysbenchOltp => sysbench::oltp(text),
        Format::Hackbench => hackbench::parse(text),
        Format::Helper => helper::parse(text),
        Format::RedisBenchmark => redis::parse(text),
        Format::Ab => ab::parse(text),
        Format::Iperf3Tcp => iperf3::tcp(text),
        Format::Iperf3Udp => iperf3::udp(text),
        Format::Sockperf => sockperf::parse(text),
        Format::Fio => fio::parse(text),
    }?;
    match figures.iter().find(|(_, value)| !value.is_finite() || **value < 0.0) {
        Some((name, value)) => {
            Err(OutputError::Contradiction(format!("{name} is {value}, which is not a valid figure")))
        }
        None => Ok(figures),
    }
}

/// Returns a recorded output of the real tool.
pub const fn example(format: Format) -> &'static str {
    match format {
        Format::SysbenchCpu => include_str!("../../../tests/outputs/sysbench-cpu.txt"),
        Format::SysbenchMemory => include_str!("../../../tests/outputs/sysbench-memory.txt"),
        Format::SysbenchFileio => include_str!("../../../tests/outputs/sysbench-fileio.txt"),
        Format::SysbenchOltp => include_str!("../../../tests/outputs/sysbench-oltp.txt"),
        Format::Hackbench => include_str!("../../../tests/outputs/hackbench.txt"),
        Format::Helper => include_str!("../../../tests/outputs/helper.json"),
        Format::RedisBenchmark => include_str!("../../../tests/outputs/redis-benchmark.csv"),
        Format::Ab => include_str!("../../../tests/outputs/ab.txt"),
        Format::Iperf3Tcp => include_str!("../../../tests/outputs/iperf3-tcp.json"),
        Format::Iperf3Udp => include_str!("../../../tests/outputs/iperf3-udp.json"),
        Format::Sockperf => include_str!("../../../tests/outputs/sockperf.txt"),
        Format::Fio => include_str!("../../../tests/outputs/fio-randwrite.json"),
    }
}

#[cfg(test)]
mod tests {
    use sandboxer_probe::workload::definition;

    use super::*;

    #[test]
    fn every_recorded_output_has_figures() {
        for format in Format::ALL {
            assert!(!parse(format, example(format)).unwrap().is_empty(), "{format:?}");
        }
    }

    #[test]
    fn an_output_of_another_tool_or_none_is_an_error_and_no_figure() {
        for format in Format::ALL {
            let json = ["{}", "{\"error\":\"x\"}", "2026", "[]", "null", "\"end\"", "{\"end\":7}"];
            for other in ["", "\n\n", "Killed", "a,b\n1,2\n", "\u{0}\u{1}"].into_iter().chain(json) {
                assert!(parse(format, other).is_err(), "{format:?} of {other:?}");
            }
        }
    }

    #[test]
    fn an_output_that_breaks_off_never_gives_other_figures() {
        for format in Format::ALL {
            let whole = parse(format, example(format)).unwrap();
            let text = example(format);
            for end in (0..text.len()).filter(|end| text.is_char_boundary(*end)) {
                if let Ok(figures) = parse(format, &text[..end]) {
                    assert_eq!(figures, whole, "{format:?} of the first {end} bytes");
                }
            }
        }
    }

    #[test]
    fn every_metric_is_one_that_the_tool_prints() {
        for probe in definition::all() {
            let printed = parse(probe.output, example(probe.output)).unwrap();
            for metric in &probe.metrics {
                // The helper's figures depend on what it measures; its own tests name them.
                let known = probe.output == Format::Helper || printed.contains_key(&metric.name);
                assert!(known, "{} prints no {}: {printed:?}", probe.tool, metric.name);
            }
        }
    }
}
