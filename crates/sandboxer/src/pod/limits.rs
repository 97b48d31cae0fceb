//! Limits of containers on memory and CPU time, as amounts that can be added up.

use std::sync::{Mutex, PoisonError};

use oci_spec::runtime::LinuxResources;

use super::spec::Limits;

/// CPU time of one CPU in a second, µs.
pub const CPU: u64 = 1_000_000;
/// Default period of a CPU quota, µs, as in the kernel.
const PERIOD_US: u64 = 100_000;

/// Limits of one container. 0: not specified; negative: no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ContainerLimits {
    /// Memory limit, bytes.
    pub memory_bytes: i64,
    /// Limit of CPU time, µs in each second.
    pub cpu_micros: i64,
}

/// Limits of one container that several tasks read and change.
// A plain lock: held for a copy, never across an await.
#[derive(Debug, Default)]
pub struct SharedLimits(Mutex<ContainerLimits>);

/// An amount of memory and of CPU time; 0: none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Amounts {
    /// Amount of memory, bytes.
    pub memory_bytes: u64,
    /// Amount of CPU time, µs in each second.
    pub cpu_micros: u64,
}

/// The sum of the limits of several containers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sum {
    /// The sum over the containers that have a limit.
    pub amounts: Amounts,
    /// Whether all containers have a memory limit.
    pub all_memory: bool,
    /// Whether all containers have a CPU limit.
    pub all_cpu: bool,
}

impl ContainerLimits {
    /// Returns the limits in OCI's `linux.resources`.
    pub fn from_resources(resources: &LinuxResources) -> Self {
        let memory = resources.memory().as_ref().and_then(|memory| memory.limit());
        let cpu = resources.cpu().as_ref();
        let quota = cpu.and_then(|cpu| cpu.quota()).unwrap_or_default();
        let period = cpu.and_then(|cpu| cpu.period()).unwrap_or_default();
        Self { memory_bytes: memory.unwrap_or_default(), cpu_micros: micros(quota, period) }
    }

    /// Returns the limits in OCI's `linux.resources` as JSON; unspecified limits if it cannot be parsed.
    pub fn of_json(resources: &[u8]) -> Self {
        serde_json::from_slice(resources)
            .map(|resources| Self::from_resources(&resources))
            .unwrap_or_default()
    }

    /// Returns these limits; those that are not specified are taken from `before`.
    pub fn or(self, before: Self) -> Self {
        Self {
            memory_bytes: if self.memory_bytes == 0 { before.memory_bytes } else { self.memory_bytes },
            cpu_micros: if self.cpu_micros == 0 { before.cpu_micros } else { self.cpu_micros },
        }
    }
}

impl SharedLimits {
    /// Returns shared limits with these values.
    pub fn new(limits: ContainerLimits) -> Self {
        Self(Mutex::new(limits))
    }

    /// Returns the limits.
    pub fn get(&self) -> ContainerLimits {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the limits.
    pub fn set(&self, limits: ContainerLimits) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = limits;
    }
}

impl Amounts {
    /// Returns the limits of a pod as amounts.
    pub fn of_pod(limits: &Limits) -> Self {
        let cpu_micros = amount(micros(limits.cpu_quota_us, limits.cpu_period_us));
        Self { memory_bytes: amount(limits.memory_bytes), cpu_micros }
    }

    /// Returns the larger of both amounts, for memory and CPU time each.
    pub fn max(self, other: Self) -> Self {
        Self {
            memory_bytes: self.memory_bytes.max(other.memory_bytes),
            cpu_micros: self.cpu_micros.max(other.cpu_micros),
        }
    }

    /// Returns these amounts as limits of a pod, with this period of its CPU quota.
    pub fn as_limits(self, period_us: u64) -> Limits {
        let cpu_period_us = if period_us == 0 { PERIOD_US } else { period_us };
        let quota = u128::from(self.cpu_micros) * u128::from(cpu_period_us) / u128::from(CPU);
        Limits {
            cpu_quota_us: i64::try_from(quota).unwrap_or(i64::MAX),
            cpu_period_us,
            memory_bytes: i64::try_from(self.memory_bytes).unwrap_or(i64::MAX),
        }
    }
}

impl Sum {
    /// Returns the sum of these limits.
    pub fn from_limits(limits: impl Iterator<Item = ContainerLimits>) -> Self {
        let none = Self { amounts: Amounts::default(), all_memory: true, all_cpu: true };
        limits.fold(none, |sum, limits| Self {
            amounts: Amounts {
                memory_bytes: sum.amounts.memory_bytes.saturating_add(amount(limits.memory_bytes)),
                cpu_micros: sum.amounts.cpu_micros.saturating_add(amount(limits.cpu_micros)),
            },
            all_memory: sum.all_memory && limits.memory_bytes > 0,
            all_cpu: sum.all_cpu && limits.cpu_micros > 0,
        })
    }
}

/// Returns a quota as µs in each second; keeps its sign.
fn micros(quota_us: i64, period_us: u64) -> i64 {
    if quota_us <= 0 {
        return quota_us;
    }
    let period_us = if period_us == 0 { PERIOD_US } else { period_us };
    let micros = u128::from(quota_us.unsigned_abs()) * u128::from(CPU) / u128::from(period_us);
    // At least 1, since 0 would mean no limit.
    i64::try_from(micros).unwrap_or(i64::MAX).max(1)
}

/// Returns a limit as an amount; 0: no limit.
fn amount(limit: i64) -> u64 {
    u64::try_from(limit).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_says_its_limits_or_nothing() {
        let parsed = |json: &str| {
            let limits = ContainerLimits::of_json(json.as_bytes());
            (limits.memory_bytes, limits.cpu_micros)
        };
        assert_eq!(parsed(r#"{"memory":{"limit":67108864}}"#), (64 << 20, 0));
        assert_eq!(parsed(r#"{"memory":{"limit":-1},"cpu":{"quota":-1,"period":100000}}"#), (-1, -1));
        assert_eq!(parsed(r#"{"cpu":{"quota":150000,"period":100000}}"#), (0, 1_500_000));
        assert_eq!(parsed(r#"{"cpu":{"quota":25000}}"#), (0, 250_000));
        assert_eq!(parsed(r#"{"cpu":{"quota":1,"period":18446744073709551615}}"#), (0, 1), "it is a limit");
        assert_eq!((parsed(r#"{"cpu":{"shares":2}}"#), parsed("?")), ((0, 0), (0, 0)));
    }

    #[test]
    fn limits_add_up_and_become_those_of_a_pod() {
        let limits = |memory_bytes, cpu_micros| ContainerLimits { memory_bytes, cpu_micros };
        let sum = Sum::from_limits([limits(1 << 20, 500_000), limits(2 << 20, -1)].into_iter());
        assert!(sum.all_memory && !sum.all_cpu);
        assert_eq!(sum.amounts, Amounts { memory_bytes: 3 << 20, cpu_micros: 500_000 });
        let pod = sum.amounts.as_limits(0);
        assert_eq!(pod, Limits { cpu_quota_us: 50_000, cpu_period_us: 100_000, memory_bytes: 3 << 20 });
        assert_eq!(Amounts::of_pod(&pod), sum.amounts);
        assert_eq!(sum.amounts.as_limits(50_000).cpu_quota_us, 25_000);
        let huge = Sum::from_limits([limits(i64::MAX, i64::MAX); 4].into_iter()).amounts;
        assert_eq!(huge.as_limits(u64::MAX).cpu_quota_us, i64::MAX);
        assert_eq!(limits(0, 7).or(limits(5, 6)), limits(5, 7));
    }
}
