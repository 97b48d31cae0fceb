//! CPU time of one run by role: VMM, shim, daemon, the container's own processes, the CRI runtime, and the rest of the
//! host.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The part of the host that CPU time belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// The pod's VMM, with its guest.
    Vmm,
    /// The runtime's process for the pod.
    Shim,
    /// Processes that serve all pods.
    Daemon,
    /// The pod's pause container.
    Pause,
    /// Other processes of the pod: virtiofsd, gofer, ….
    Helper,
    /// The container's processes, where they run on the host, and the runtime's short commands for the container.
    Workload,
    /// VMs in the pool.
    Pool,
    /// The CRI runtime with its short commands.
    Cri,
    /// The client's pod.
    Client,
    /// This probe.
    Probe,
    /// Everything else on the host.
    Rest,
}

impl Part {
    /// All parts, in the order of reports.
    pub const ALL: [Part; 11] = [
        Part::Vmm,
        Part::Shim,
        Part::Daemon,
        Part::Pause,
        Part::Helper,
        Part::Workload,
        Part::Pool,
        Part::Cri,
        Part::Client,
        Part::Probe,
        Part::Rest,
    ];

    /// Returns the part's name in reports.
    pub const fn as_str(self) -> &'static str {
        match self {
            Part::Vmm => "vmm",
            Part::Shim => "shim",
            Part::Daemon => "daemon",
            Part::Pause => "pause",
            Part::Helper => "helper",
            Part::Workload => "workload",
            Part::Pool => "pool",
            Part::Cri => "cri",
            Part::Client => "client",
            Part::Probe => "probe",
            Part::Rest => "rest",
        }
    }

    /// Returns whether the part works for the pod under test, so that efficiency counts it.
    pub const fn is_pods(self) -> bool {
        matches!(self, Part::Vmm | Part::Shim | Part::Daemon | Part::Pause | Part::Helper | Part::Workload)
    }
}

/// CPU time, s. Guest time on KVM is only in `guest_s`; time of emulated guests is in `user_s`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Time {
    /// Time in programs, s.
    pub user_s: f64,
    /// Time in the kernel, s.
    pub system_s: f64,
    /// Time in guests on KVM, s.
    pub guest_s: f64,
}

impl Time {
    /// Returns the sum of the three, s.
    pub fn total_s(self) -> f64 {
        self.user_s + self.system_s + self.guest_s
    }

    /// Adds another time.
    pub fn add(&mut self, other: Self) {
        self.user_s += other.user_s;
        self.system_s += other.system_s;
        self.guest_s += other.guest_s;
    }
}

/// CPU time of a run by role.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RoleUse {
    /// Time between the two readings, s.
    pub window_s: f64,
    /// Running time of the tool, s, by the runtime's timestamps of its container; `None` if they are absent.
    pub tool_s: Option<f64>,
    /// CPU time of each part; parts without time are absent.
    pub parts: BTreeMap<Part, Time>,
}

impl RoleUse {
    /// Returns the CPU time of everything that worked for the pod under test, s.
    pub fn pods_s(&self) -> f64 {
        self.parts.iter().filter(|(part, _)| part.is_pods()).map(|(_, time)| time.total_s()).sum()
    }

    /// Returns a rate per CPU: the work done in one second of CPU time. `None` if no time was seen.
    pub fn per_cpu_s(&self, rate: f64) -> Option<f64> {
        let cpus = self.pods_s() / self.tool_s.filter(|tool| *tool > 0.0)?;
        (cpus > 0.0).then(|| rate / cpus)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn efficiency_counts_what_works_for_the_pod() {
        let one = Time { user_s: 1.0, ..Time::default() };
        let parts = [(Part::Vmm, one), (Part::Daemon, one), (Part::Client, one), (Part::Rest, one)].into();
        let mut used = RoleUse { window_s: 5.0, tool_s: Some(4.0), parts };
        assert_eq!((used.pods_s(), used.per_cpu_s(100.0)), (2.0, Some(200.0)));
        used.tool_s = None;
        assert_eq!(used.per_cpu_s(100.0), None);
        assert_eq!(RoleUse { tool_s: Some(1.0), ..RoleUse::default() }.per_cpu_s(1.0), None);
    }
}
