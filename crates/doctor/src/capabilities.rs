//! Capabilities of the daemon and of containerd.

use super::{
    cri::RuntimeStatus,
    host::Host,
    verdict::{Check, Fix, Subject},
};

/// Bits of `CapEff` (Linux' `include/uapi/linux/capability.h`) that the daemon needs.
const NEEDED: [(u32, &str); 3] = [(1, "CAP_DAC_OVERRIDE"), (12, "CAP_NET_ADMIN"), (21, "CAP_SYS_ADMIN")];
const SYS_RESOURCE: u32 = 24;

const DAEMON: Subject = Subject {
    name: "capabilities",
    why: "the daemon mounts snapshots, reads files of any owner, and creates taps",
};
const OOM_SCORE: Subject = Subject {
    name: "oom score",
    why: "containerd lowers a container's oom_score_adj, which fails without CAP_SYS_RESOURCE",
};

/// Masks of effective capabilities.
#[derive(Debug, Clone, Copy, Default)]
pub struct Reading {
    /// The daemon's mask, or this process's if no daemon runs; `None` if unknown.
    pub daemon: Option<u64>,
    /// Whether `daemon` is the daemon's mask.
    pub is_of_daemon: bool,
    /// The mask of containerd; `None` if unknown.
    pub containerd: Option<u64>,
}

/// Reads the masks of the processes `daemon` and `containerd`.
pub fn read(host: &Host, daemon: Option<u32>, containerd: Option<u32>) -> Reading {
    let mask_of = |pid: Option<u32>| mask(host, &pid?.to_string());
    let daemons = mask_of(daemon);
    Reading {
        daemon: daemons.or_else(|| mask(host, "self")),
        is_of_daemon: daemons.is_some(),
        containerd: mask_of(containerd),
    }
}

fn mask(host: &Host, pid: &str) -> Option<u64> {
    let status = host.text(format!("/proc/{pid}/status")).ok()?;
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(mask.trim(), 16).ok()
}

fn has(mask: u64, bit: u32) -> bool {
    mask >> bit & 1 == 1
}

/// Returns whether process `pid` is known to lack the capability to lower an `oom_score_adj`.
pub fn lacks_sys_resource(pid: u32) -> bool {
    mask(&Host::default(), &pid.to_string()).is_some_and(|mask| !has(mask, SYS_RESOURCE))
}

/// Checks the daemon's capabilities.
pub fn daemon(reading: &Reading) -> Check {
    let Some(mask) = reading.daemon else {
        return DAEMON.warning("capabilities are unknown", Fix::words("see /proc/self/status"));
    };
    let missing: Vec<_> = NEEDED.iter().filter(|(bit, _)| !has(mask, *bit)).map(|(_, name)| *name).collect();
    match (missing.is_empty(), reading.is_of_daemon) {
        (true, true) => DAEMON.ok("the daemon has what it needs"),
        (true, false) => DAEMON.ok("a daemon started from here would have what it needs"),
        (false, true) => DAEMON.failure(
            format!("the daemon lacks {}", missing.join(", ")),
            Fix::words("run it as root, not in a container that drops these capabilities"),
        ),
        (false, false) => DAEMON.warning(
            format!("a daemon started from here would lack {}", missing.join(", ")),
            Fix::words("run this, and the daemon, as root"),
        ),
    }
}

/// Checks that containerd does not lower an `oom_score_adj` without the capability to do so.
pub fn oom_score(reading: &Reading, runtime: Option<&RuntimeStatus>) -> Check {
    let Some(runtime) = runtime else { return OOM_SCORE.not_applicable("no containerd answers") };
    let restricted =
        runtime.config.get("restrictOOMScoreAdj").and_then(|value| value.as_bool()) == Some(true);
    match reading.containerd.map(|mask| has(mask, SYS_RESOURCE)) {
        None if restricted => OOM_SCORE.ok("containerd does not lower it (restrict_oom_score_adj)"),
        None => OOM_SCORE.not_applicable("containerd's capabilities are unknown"),
        Some(true) => OOM_SCORE.ok("containerd has CAP_SYS_RESOURCE"),
        Some(false) if restricted => {
            OOM_SCORE.ok("containerd lacks CAP_SYS_RESOURCE, and restrict_oom_score_adj is set")
        }
        Some(false) => OOM_SCORE.failure(
            "containerd lacks CAP_SYS_RESOURCE, and restrict_oom_score_adj is not set",
            Fix::words(
                "set restrict_oom_score_adj = true in its configuration, as --containerd-config prints it",
            ),
        ),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::Verdict;

    const ALL: u64 = 0x1ff_ffff_ffff;

    #[test]
    fn the_daemon_needs_some() {
        let without = |bit: u32| ALL & !(1 << bit);
        for (daemon_mask, is_of_daemon, verdict) in [
            (Some(ALL), true, Verdict::Ok),
            (Some(ALL), false, Verdict::Ok),
            (Some(without(SYS_RESOURCE)), true, Verdict::Ok),
            (Some(without(21)), true, Verdict::Failure),
            (Some(without(1)), true, Verdict::Failure),
            (Some(0), false, Verdict::Warning),
            (None, false, Verdict::Warning),
        ] {
            let reading = Reading { daemon: daemon_mask, is_of_daemon, containerd: None };
            assert_eq!(daemon(&reading).verdict, verdict, "{reading:?}");
        }
    }

    #[test]
    fn containerd_without_cap_sys_resource_must_be_told_so() {
        let lacking = ALL & !(1 << SYS_RESOURCE);
        for (containerd, config, verdict) in [
            (Some(ALL), json!({}), Verdict::Ok),
            (Some(lacking), json!({}), Verdict::Failure),
            (Some(lacking), json!({ "restrictOOMScoreAdj": false }), Verdict::Failure),
            (Some(lacking), json!({ "restrictOOMScoreAdj": true }), Verdict::Ok),
            (None, json!({ "restrictOOMScoreAdj": true }), Verdict::Ok),
            (None, json!({}), Verdict::NotApplicable),
        ] {
            let runtime = RuntimeStatus {
                name: "containerd".into(),
                version: "v2.4.2".into(),
                pid: None,
                config,
                network: Ok(()),
            };
            let reading = Reading { containerd, ..Reading::default() };
            assert_eq!(
                oom_score(&reading, Some(&runtime)).verdict,
                verdict,
                "{reading:?} {}",
                runtime.config
            );
        }
        assert_eq!(oom_score(&Reading::default(), None).verdict, Verdict::NotApplicable);
    }
}
