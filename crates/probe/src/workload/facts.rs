//! Resources of a container, read from inside, and whether those of two containers are equal.

use serde::{Deserialize, Serialize};

/// Accepted relative difference of memory: a guest kernel reserves some of its VM's memory.
const MEMORY_TOLERANCE: f64 = 0.2;
/// Accepted relative difference of quotas, due to rounding.
const CPU_TOLERANCE: f64 = 0.01;

/// Processors and memory of a container, as `bench-helper` prints them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Facts {
    /// Number of processors on which the container's processes may run.
    pub cpus: u32,
    /// CPU time per second by the container's quota; `None` without a quota.
    pub quota_cpus: Option<f64>,
    /// Memory limit of the container, bytes; `None` without a limit.
    pub memory_limit: Option<u64>,
    /// Memory of the kernel on which the container runs, bytes.
    pub memory_total: Option<u64>,
    /// Release of the kernel on which the container runs.
    pub kernel: Option<String>,
}

#[derive(Deserialize)]
struct Line {
    bench_facts: Facts,
}

impl Facts {
    /// Returns the facts in a container's stderr, from the first line that has them.
    pub fn find(stderr: &str) -> Option<Self> {
        let mut lines = stderr.lines().filter(|line| line.starts_with("{\"bench_facts\""));
        serde_json::from_str::<Line>(lines.next()?).ok().map(|line| line.bench_facts)
    }

    /// Returns the effective number of CPUs: the smaller of the processors and the quota.
    pub fn effective_cpus(&self) -> f64 {
        f64::from(self.cpus).min(self.quota_cpus.unwrap_or(f64::INFINITY))
    }

    /// Returns the usable memory, bytes: the smaller of the limit and the kernel's memory.
    pub fn effective_memory(&self) -> Option<u64> {
        self.memory_limit.into_iter().chain(self.memory_total).min()
    }

    /// Returns the difference that makes two containers incomparable, if any.
    pub fn differs(&self, other: &Self) -> Option<String> {
        let (a, b) = (self.effective_cpus(), other.effective_cpus());
        if apart(a, b) > CPU_TOLERANCE {
            return Some(format!("{a} effective CPUs against {b}"));
        }
        match (self.effective_memory(), other.effective_memory()) {
            (Some(a), Some(b)) if apart(a as f64, b as f64) > MEMORY_TOLERANCE => {
                Some(format!("{} MiB of memory against {}", a >> 20, b >> 20))
            }
            _ => None,
        }
    }
}

/// Returns whether a server's stderr reports that the server listens.
pub fn listens(stderr: &str) -> bool {
    stderr.lines().any(|line| line.starts_with("{\"bench_listening\":"))
}

/// Returns the difference of two numbers relative to the larger one.
fn apart(a: f64, b: f64) -> f64 {
    let larger = a.max(b);
    if larger > 0.0 { (a - b).abs() / larger } else { 0.0 }
}

/// Returns the number of threads that a tool runs: the smallest number of effective CPUs, at least one.
pub fn threads<'a>(sides: impl IntoIterator<Item = &'a Facts>) -> u32 {
    let smallest = sides.into_iter().map(Facts::effective_cpus).fold(f64::INFINITY, f64::min);
    if smallest.is_finite() { (smallest as u32).max(1) } else { 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(cpus: u32, quota: Option<f64>, limit: Option<u64>, total: u64) -> Facts {
        Facts { cpus, quota_cpus: quota, memory_limit: limit, memory_total: Some(total), kernel: None }
    }

    #[test]
    fn facts_stand_in_a_line_among_others() {
        let text = "warning: something\n{\"bench_facts\":{\"cpus\":2,\"quota_cpus\":1.5,\"memory_limit\":268435456,\
                    \"memory_total\":1073741824,\"kernel\":\"6.1.0\"}}\nmore\n";
        let facts = Facts::find(text).unwrap();
        assert_eq!((facts.cpus, facts.quota_cpus), (2, Some(1.5)));
        assert_eq!(facts.effective_memory(), Some(256 << 20));
        assert_eq!(Facts::find("{\"bench_facts\":{}}"), None);
        assert_eq!(Facts::find(""), None);
    }

    #[test]
    fn a_server_tells_that_it_listens() {
        assert!(listens("banner\n{\"bench_listening\":5201}\n"));
        assert!(!listens("{\"bench_facts\":{}}\nit says {\"bench_listening\":5201}\n"));
    }

    #[test]
    fn a_container_of_a_large_host_and_a_small_guest_are_alike() {
        let on_host = facts(64, Some(2.0), Some(512 << 20), 64 << 30);
        let guest = facts(2, None, None, 480 << 20);
        assert_eq!(on_host.differs(&guest), None);
        assert_eq!(threads([&on_host, &guest]), 2);
    }

    #[test]
    fn sixteen_against_fifteen_is_a_difference() {
        let difference = facts(16, None, None, 1 << 30).differs(&facts(15, None, None, 1 << 30)).unwrap();
        assert!(difference.contains("16") && difference.contains("15"), "{difference}");
        let memory = facts(2, None, None, 1 << 30).differs(&facts(2, None, None, 2 << 30)).unwrap();
        assert!(memory.contains("1024 MiB") && memory.contains("2048"), "{memory}");
    }

    #[test]
    fn threads_are_never_more_than_the_smallest_side_has() {
        assert_eq!(threads([&facts(16, None, None, 1), &facts(15, None, None, 1)]), 15);
        assert_eq!(threads([&facts(4, Some(1.5), None, 1)]), 1);
        assert_eq!(threads([&facts(4, Some(0.5), None, 1)]), 1);
        assert_eq!(threads([]), 1);
    }
}
