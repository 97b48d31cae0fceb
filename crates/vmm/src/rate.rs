//! Limits of a disk's rate, as token buckets.

use sandboxer_config::LimitsConfig;
use serde::{Deserialize, Serialize};

/// A token bucket: it holds `burst` tokens, and `per_second` flow into it. A disk that was idle can use the whole
/// burst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rate {
    /// Tokens per second.
    pub per_second: u64,
    /// Maximum number of tokens, at least those of one second.
    pub burst: u64,
}

impl Rate {
    /// Returns a rate whose burst is the tokens of one second.
    pub fn plain(per_second: u64) -> Self {
        Self { per_second, burst: per_second }
    }
}

/// Limits of what a guest reads and writes on one disk, in total.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskLimits {
    /// Limit of bytes.
    pub bytes: Option<Rate>,
    /// Limit of operations.
    pub operations: Option<Rate>,
}

impl DiskLimits {
    /// Returns the configured limits.
    pub fn configured(config: &LimitsConfig) -> Self {
        Self { bytes: config.disk_bps.map(Rate::plain), operations: config.disk_iops.map(Rate::plain) }
    }

    /// Returns whether there are no limits.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// A [`Rate`] as in the APIs of Cloud Hypervisor and Firecracker.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct TokenBucket {
    /// Maximum number of tokens.
    size: u64,
    /// Time in which the bucket fills, milliseconds.
    refill_time: u64,
}

impl TokenBucket {
    fn from_rate(Rate { per_second, burst }: Rate) -> Self {
        // The time is at least a second, so rounding is an error of at most a thousandth.
        let refill_ms = u128::from(burst) * 1000 / u128::from(per_second.max(1));
        Self { size: burst, refill_time: refill_ms.try_into().unwrap_or(u64::MAX) }
    }
}

/// [`DiskLimits`] as in the APIs of Cloud Hypervisor and Firecracker.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct RateLimiter {
    #[serde(skip_serializing_if = "Option::is_none")]
    bandwidth: Option<TokenBucket>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ops: Option<TokenBucket>,
}

impl RateLimiter {
    /// Returns the description of a new disk's limits. `None`: there are none.
    pub fn from_limits(limits: DiskLimits) -> Option<Self> {
        let DiskLimits { bytes, operations } = limits;
        (!limits.is_none()).then(|| Self {
            bandwidth: bytes.map(TokenBucket::from_rate),
            ops: operations.map(TokenBucket::from_rate),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_bucket_fills_at_the_rate_and_holds_the_burst() {
        let bytes = Some(Rate { per_second: 3 << 20, burst: 8 << 20 });
        let limits = DiskLimits { bytes, operations: None };
        let written = serde_json::to_value(RateLimiter::from_limits(limits)).unwrap();
        assert_eq!(written, json!({ "bandwidth": { "size": 8 << 20, "refill_time": 2666 } }));
        assert!(RateLimiter::from_limits(DiskLimits::default()).is_none());
        let limits = DiskLimits { operations: Some(Rate::plain(100)), ..DiskLimits::default() };
        let written = serde_json::to_value(RateLimiter::from_limits(limits)).unwrap();
        assert_eq!(written, json!({ "ops": { "size": 100, "refill_time": 1000 } }));
    }
}
