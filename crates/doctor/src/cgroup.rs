//! Control groups: version and controllers.

use super::{
    host::Host,
    verdict::{Check, Fix, Subject},
};

/// Controllers that containerd and kubelet use for every pod.
const NEEDED: [&str; 3] = ["cpu", "memory", "pids"];
/// All controllers that a kernel may have; v1 mount options contain them among others.
const KNOWN: [&str; 13] = [
    "blkio",
    "cpu",
    "cpuacct",
    "cpuset",
    "devices",
    "freezer",
    "hugetlb",
    "memory",
    "misc",
    "net_cls",
    "perf_event",
    "pids",
    "rdma",
];

const CGROUP: Subject =
    Subject { name: "cgroup", why: "containerd and kubelet limit and count pods with it" };

/// The mounted hierarchies.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reading {
    /// Controllers of v1 hierarchies.
    pub v1: Vec<String>,
    /// Controllers of the v2 hierarchy, if it is mounted.
    pub v2: Option<Vec<String>>,
}

/// Reads the mounts.
pub fn read(host: &Host) -> Reading {
    let mut reading = Reading::default();
    for line in host.text("/proc/self/mounts").unwrap_or_default().lines() {
        let mut words = line.split(' ').skip(1);
        let (Some(at), Some(kind), Some(options)) = (words.next(), words.next(), words.next()) else {
            continue;
        };
        match kind {
            "cgroup" => {
                let controllers = options.split(',').filter(|option| KNOWN.contains(option));
                reading.v1.extend(controllers.map(str::to_owned));
            }
            "cgroup2" if reading.v2.is_none() => {
                let controllers = host.text(format!("{at}/cgroup.controllers")).unwrap_or_default();
                reading.v2 = Some(controllers.split_whitespace().map(str::to_owned).collect());
            }
            _ => {}
        }
    }
    reading.v1.sort();
    reading.v1.dedup();
    reading
}

/// Checks the hierarchies. A VM's size holds without any cgroup, so nothing here is a failure.
pub fn judge(reading: &Reading) -> Check {
    let v2 = reading.v2.as_deref().unwrap_or_default();
    let all = |name: &&str| v2.iter().chain(&reading.v1).any(|controller| controller == name);
    let missing: Vec<_> = NEEDED.into_iter().filter(|name| !all(name)).collect();
    let kind = match (reading.v1.is_empty(), &reading.v2) {
        (true, None) => {
            return CGROUP.warning(
                "none is mounted",
                Fix::commands("mount the v2 hierarchy", ["mount -t cgroup2 cgroup2 /sys/fs/cgroup"]),
            );
        }
        (true, Some(_)) => "v2",
        (false, None) => "v1",
        (false, Some(_)) => "hybrid of v1 and v2",
    };
    let names: Vec<&str> = v2.iter().chain(&reading.v1).map(String::as_str).collect();
    let seen = format!("{kind}: {}", names.join(" "));
    if !missing.is_empty() {
        let seen = format!("{seen}; no {}", missing.join(", "));
        return CGROUP.warning(
            seen,
            Fix::words(
                "boot with these controllers enabled; check cgroup_disable= on the kernel's command line",
            ),
        );
    }
    if kind == "v2" {
        return CGROUP.ok(seen);
    }
    CGROUP.warning(
        format!("{seen}; Kubernetes keeps v1 in maintenance only"),
        Fix::words("boot with systemd.unified_cgroup_hierarchy=1"),
    )
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::Verdict;

    #[test]
    fn mounts_tell_kind_and_controllers() {
        const V1: &str = "cgroup /cg/cpu cgroup rw,relatime,cpu,cpuacct 0 0\n\
                          cgroup /cg/memory cgroup rw,memory 0 0\ncgroup /cg/pids cgroup rw,pids 0 0\n";
        const V2: &str = "cgroup2 /cg/unified cgroup2 rw 0 0\n";
        let both = format!("{V1}{V2}");
        for (mounts, controllers, verdict, seen) in [
            ("", "", Verdict::Warning, "none is mounted"),
            (V2, "cpu memory pids", Verdict::Ok, "v2: cpu memory pids"),
            (V2, "cpu memory", Verdict::Warning, "v2: cpu memory; no pids"),
            (V1, "", Verdict::Warning, "v1: cpu cpuacct memory pids; Kubernetes"),
            (&both, "", Verdict::Warning, "hybrid of v1 and v2: cpu cpuacct"),
            ("garbage\n\n", "", Verdict::Warning, "none is mounted"),
        ] {
            let root = tempfile::tempdir().unwrap();
            for dir in ["proc/self", "cg/unified"] {
                fs::create_dir_all(root.path().join(dir)).unwrap();
            }
            fs::write(root.path().join("proc/self/mounts"), mounts).unwrap();
            fs::write(root.path().join("cg/unified/cgroup.controllers"), controllers).unwrap();
            let check = judge(&read(&Host::below(root.path())));
            assert_eq!(check.verdict, verdict, "{check}");
            assert!(check.seen.starts_with(seen), "{seen}: {check}");
        }
    }
}
