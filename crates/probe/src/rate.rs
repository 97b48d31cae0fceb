//! A runtime's sustained rate: pods per minute without pauses, and the CPU time of the whole host per pod.
//!
//! Serial starts with pauses measure how soon a pod runs if its runtime had time to prepare: a pool is full at each
//! start. Without pauses, the pool's VMs are made while pods start, and that work counts.

use std::time::Duration;

use procfs::{CurrentSI, KernelStats};
use serde::{Deserialize, Serialize};

/// Maximum duration of the work that the last pods left behind, such as new VMs for a pool. It counts as theirs.
pub const SETTLE: Duration = Duration::from_secs(10);

/// A sustained rate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Rate {
    /// Number of pods that started.
    pub pods: usize,
    /// Duration of starts and removals, s.
    pub seconds: f64,
    /// CPU time of the host during that time and until the runtime's later work was done, s; `None` if the host does
    /// not report it.
    pub processor_s: Option<f64>,
}

impl Rate {
    /// Returns the rate over both measurements.
    pub fn and(self, other: Self) -> Self {
        Self {
            pods: self.pods + other.pods,
            seconds: self.seconds + other.seconds,
            processor_s: self.processor_s.zip(other.processor_s).map(|(a, b)| a + b),
        }
    }

    /// Returns the pods per minute.
    pub fn per_minute(&self) -> f64 {
        self.pods as f64 / self.seconds * 60.0
    }

    /// Returns the CPU time per pod, ms.
    pub fn processor_ms(&self) -> Option<f64> {
        Some(self.processor_s? / self.pods.max(1) as f64 * 1e3)
    }
}

/// Formats as "212 pods a minute, 283 ms of processor time a pod".
impl std::fmt::Display for Rate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.0} pods a minute, ", self.per_minute())?;
        match self.processor_ms() {
            Some(ms) => write!(f, "{ms:.0} ms of processor time a pod"),
            None => f.write_str("processor time not measured"),
        }
    }
}

/// Returns the time that the host's processors have worked since its boot, guests included.
pub fn processor_time() -> Option<Duration> {
    let total = KernelStats::current().ok()?.total;
    // `user` already includes guests; stolen time is no work of this host.
    let ticks = total.user + total.nice + total.system + total.irq.unwrap_or(0) + total.softirq.unwrap_or(0);
    Some(Duration::from_secs_f64(ticks as f64 / procfs::ticks_per_second() as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_of_the_pods_that_started() {
        let rate = Rate { pods: 10, seconds: 5.0, processor_s: Some(2.5) };
        assert_eq!((rate.per_minute(), rate.processor_ms()), (120.0, Some(250.0)));
        assert_eq!(rate.to_string(), "120 pods a minute, 250 ms of processor time a pod");
        assert_eq!(rate.and(rate), Rate { pods: 20, seconds: 10.0, processor_s: Some(5.0) });
        let unknown = Rate { processor_s: None, ..rate }.and(rate);
        assert!(unknown.to_string().ends_with("not measured"), "{unknown}");
    }

    #[test]
    fn the_processors_have_worked_since_the_boot() {
        assert!(processor_time().unwrap() > Duration::ZERO);
    }
}
