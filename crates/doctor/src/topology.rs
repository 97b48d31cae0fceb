//! Processors: threads that share a core, and NUMA nodes.

use sandboxer_config::PlacementPolicy;

use super::{
    host::Host,
    verdict::{Check, Fix, Subject},
};

const SMT: Subject = Subject {
    name: "smt",
    why: "pods on two threads of a core can observe each other and slow each other down",
};
const NUMA: Subject =
    Subject { name: "numa", why: "a VM with vCPUs and memory on different nodes is slower" };

/// The kernel's topology.
#[derive(Debug, Clone, Default)]
pub struct Reading {
    /// State of SMT: "on", "off", "forceoff", "notsupported" or "notimplemented"; `None` if unknown.
    pub smt: Option<String>,
    /// Whether two threads of a core run.
    pub smt_active: bool,
    /// Text of the kernel about its MDS vulnerability, if any.
    pub mds: Option<String>,
    /// Number of NUMA nodes.
    pub nodes: usize,
}

/// Reads the topology.
pub fn read(host: &Host) -> Reading {
    let numbered = |name: &String| {
        name.strip_prefix("node").is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
    };
    Reading {
        smt: host.text("/sys/devices/system/cpu/smt/control").ok(),
        smt_active: host.number("/sys/devices/system/cpu/smt/active") == Some(1),
        mds: host.text("/sys/devices/system/cpu/vulnerabilities/mds").ok(),
        nodes: host.names("/sys/devices/system/node").iter().filter(|name| numbered(name)).count(),
    }
}

/// Checks SMT. Warns only if the kernel reports that threads leak data to each other.
pub fn smt(reading: &Reading) -> Check {
    let control = reading.smt.as_deref().unwrap_or("unknown");
    let leaks = reading.mds.as_deref().is_some_and(|mds| mds.contains("SMT vulnerable"));
    match (reading.smt_active, leaks) {
        (false, _) => SMT.ok(format!("no two threads share a core ({control})")),
        (true, false) => SMT.ok("on; pods may share a core"),
        (true, true) => SMT.warning(
            "on, and this processor leaks data between threads of a core (MDS)",
            Fix::commands(
                "turn SMT off if pods do not trust each other",
                ["echo off > /sys/devices/system/cpu/smt/control"],
            ),
        ),
    }
}

/// Checks NUMA. No verdict is bad, because the policy is the administrator's.
pub fn numa(reading: &Reading, policy: PlacementPolicy) -> Check {
    match (reading.nodes, policy) {
        (0 | 1, _) => NUMA.ok("one node"),
        (nodes, PlacementPolicy::Numa) => NUMA.ok(format!("{nodes} nodes; a pod that fits one gets one")),
        (nodes, PlacementPolicy::Off) => {
            NUMA.ok(format!("{nodes} nodes; the kernel places the pods (placement.policy is off)"))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::Verdict;

    #[test]
    fn the_kernel_is_read_and_judged() {
        for (active, mds, nodes, verdict, smt_seen, numa_seen) in [
            ("0", "Not affected", &["node0"][..], Verdict::Ok, "no two threads", "one node"),
            ("1", "Not affected", &["node0", "node1", "nodes"], Verdict::Ok, "on; pods may", "2 nodes"),
            (
                "1",
                "Mitigation: Clear CPU buffers; SMT vulnerable",
                &[],
                Verdict::Warning,
                "on, and",
                "one node",
            ),
        ] {
            let root = tempfile::tempdir().unwrap();
            let system = root.path().join("sys/devices/system");
            for dir in ["cpu/smt", "cpu/vulnerabilities", "node"] {
                fs::create_dir_all(system.join(dir)).unwrap();
            }
            fs::write(system.join("cpu/smt/control"), "on\n").unwrap();
            fs::write(system.join("cpu/smt/active"), active).unwrap();
            fs::write(system.join("cpu/vulnerabilities/mds"), mds).unwrap();
            for node in nodes {
                fs::create_dir(system.join("node").join(node)).unwrap();
            }
            let reading = read(&Host::below(root.path()));
            let check = smt(&reading);
            assert_eq!(check.verdict, verdict, "{check}");
            assert!(check.seen.starts_with(smt_seen), "{check}");
            for (policy, by) in [(PlacementPolicy::Numa, "gets one"), (PlacementPolicy::Off, "is off")] {
                let seen = numa(&reading, policy).seen;
                let fine = seen.starts_with(numa_seen) && (numa_seen == "one node" || seen.contains(by));
                assert!(fine, "{seen}");
            }
        }
    }
}
