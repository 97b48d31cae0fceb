//! Parsers for iperf3 3.12.

use sandboxer_probe::log::plain;
use serde_json::Value;

use super::{Figures, OutputError};

const TOOL: &str = "iperf3";

/// Returns the received rate and the retransmits.
pub fn tcp(text: &str) -> Result<Figures, OutputError> {
    let end = end(text)?;
    let received = number(&end["sum_received"]["bits_per_second"], "end.sum_received.bits_per_second")?;
    let again = number(&end["sum_sent"]["retransmits"], "end.sum_sent.retransmits")?;
    Ok(Figures::from([("mbit_per_s".into(), received / 1e6), ("retransmits".into(), again)]))
}

/// Returns jitter and loss as the receiver saw them.
pub fn udp(text: &str) -> Result<Figures, OutputError> {
    let end = end(text)?;
    let sum = &end["sum"];
    Ok(Figures::from([
        ("jitter_ms".into(), number(&sum["jitter_ms"], "end.sum.jitter_ms")?),
        ("lost_percent".into(), number(&sum["lost_percent"], "end.sum.lost_percent")?),
    ]))
}

fn end(text: &str) -> Result<Value, OutputError> {
    let value: Value = serde_json::from_str(text)
        .map_err(|error| OutputError::Json { tool: TOOL, reason: error.to_string() })?;
    if let Some(message) = value.get("error").and_then(Value::as_str) {
        return Err(OutputError::Failed { tool: TOOL, message: plain(message) });
    }
    // Not by index: the value may not be an object.
    value.get("end").cloned().ok_or(OutputError::Missing("end"))
}

fn number(value: &Value, what: &'static str) -> Result<f64, OutputError> {
    value.as_f64().ok_or(OutputError::Missing(what))
}

#[cfg(test)]
mod tests {
    use super::super::{Format, example};
    use super::*;

    #[test]
    fn bandwidth_is_the_receiver_s() {
        let figures = tcp(example(Format::Iperf3Tcp)).unwrap();
        assert!((figures["mbit_per_s"] - 7784.727).abs() < 0.001, "{figures:?}");
        assert_eq!(figures["retransmits"], 1.0);
    }

    #[test]
    fn the_other_direction_has_the_same_fields() {
        let figures = tcp(include_str!("../../../tests/outputs/iperf3-reverse.json")).unwrap();
        assert!(figures["mbit_per_s"] > 0.0, "{figures:?}");
    }

    #[test]
    fn jitter_is_in_ms() {
        let figures = udp(example(Format::Iperf3Udp)).unwrap();
        assert!((figures["jitter_ms"] - 0.126587).abs() < 1e-6, "{figures:?}");
        assert_eq!(figures["lost_percent"], 0.0);
    }

    #[test]
    fn an_error_is_told_in_its_words() {
        let error = tcp(include_str!("../../../tests/outputs/iperf3-error.json")).unwrap_err().to_string();
        assert!(error.contains("Connection refused"), "{error}");
    }
}
