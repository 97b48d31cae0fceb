//! CPU time and frequency of the host during a run. Unknown values are `None`.

use serde::{Deserialize, Serialize};

/// CPU time of all processors between two readings, s. Guest time is only in `guest_s`; time of guests without KVM is
/// in `user_s`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct CpuUse {
    /// Time in programs, s.
    pub user_s: f64,
    /// Time in the kernel, s.
    pub system_s: f64,
    /// Time in interrupts and soft interrupts, s.
    pub softirq_s: f64,
    /// Time in guests on KVM, s.
    pub guest_s: Option<f64>,
    /// Time stolen by the host's hypervisor, s.
    pub steal_s: Option<f64>,
    /// Idle time, s.
    pub idle_s: f64,
}

/// The host during a run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct HostUse {
    /// CPU time of all programs on the host.
    pub cpu: Option<CpuUse>,
    /// Mean frequency of the processors before the run, MHz.
    pub mhz_before: Option<f64>,
    /// Mean frequency of the processors after the run, MHz.
    pub mhz_after: Option<f64>,
    /// Dirty pages before the run, KiB.
    #[serde(default)]
    pub dirty_before_kib: Option<u64>,
    /// Dirty pages after the run, KiB: writes that are not on the disk yet.
    pub dirty_kib: Option<u64>,
    /// Number of times that processors were throttled because of heat.
    #[serde(default)]
    pub throttled: Option<u64>,
    /// Governor of the first processor's clock.
    #[serde(default)]
    pub governor: Option<String>,
}
