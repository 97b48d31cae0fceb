//! The table `[traces]`: where traces are sent.

use serde::{Deserialize, Serialize};

use super::{ConfigError, bounds::Bounds};
use crate::TracesConfig;

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawTraces {
    endpoint: Option<String>,
    sampling_ratio: Option<f64>,
}

impl RawTraces {
    /// Returns the settings, or `None` without an endpoint.
    pub fn resolve(self, bounds: &Bounds<'_>) -> Result<Option<TracesConfig>, ConfigError> {
        let sampling_ratio = self.sampling_ratio.unwrap_or(1.0);
        let fine = (0.0..=1.0).contains(&sampling_ratio);
        bounds.check("traces.sampling_ratio", sampling_ratio.to_string(), "0 to 1", fine)?;
        let Some(endpoint) = self.endpoint else { return Ok(None) };
        let takes = "http://HOST:PORT of a collector that receives OTLP by gRPC, without TLS";
        bounds.check("traces.endpoint", format!("{endpoint:?}"), takes, is_endpoint(&endpoint))?;
        Ok(Some(TracesConfig { endpoint, sampling_ratio }))
    }
}

/// Returns whether `text` is `http://HOST:PORT`.
fn is_endpoint(text: &str) -> bool {
    let host = |host: &str| {
        let inner = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        match inner {
            Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
            None => {
                !host.is_empty() && host.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b))
            }
        }
    };
    text.strip_prefix("http://")
        .and_then(|rest| rest.rsplit_once(':'))
        .is_some_and(|(name, port)| host(name) && port.parse::<u16>().is_ok_and(|port| port > 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_a_host_and_a_port() {
        for good in ["http://127.0.0.1:4317", "http://[::1]:4317", "http://otel-agent.monitoring.svc:4317"] {
            assert!(is_endpoint(good), "{good}");
        }
        for bad in [
            "https://a:4317",
            "a:4317",
            "http://a",
            "http://:4317",
            "http://a:0",
            "http://a:4317/v1",
            "http://a b:1",
        ] {
            assert!(!is_endpoint(bad), "{bad}");
        }
    }
}
