//! A Kubernetes RuntimeClass with a measured `overhead.podFixed`.

use crate::attribution::Role;
use crate::busy::Busy;
use crate::ledger::Ledger;
use crate::report::{Marginal, Memory, Report};

/// None of the handler's pods run, so there is no overhead to compute.
#[derive(Debug, thiserror::Error)]
#[error("cannot measure the overhead of handler '{0}': none of its pods are running")]
pub struct NoPods(String);

/// Returns the RuntimeClass from the growth of memory over a sweep, the CPU time of the idle pods at its end, and the
/// memory of a busy pod beyond its limit. Uses the larger of the two memories, so that the host kills no pod that stays
/// within its limits.
pub fn from_sweep(handler: &str, marginal: &Marginal, busy: &Busy, report: &Report) -> String {
    let rows: Vec<&Memory> = report.memory.iter().filter(|row| row.runtime == handler).collect();
    let counts: Vec<String> = rows.iter().map(|row| row.pods.to_string()).collect();
    let kib = marginal.overhead.max(busy.beyond_kib as f64);
    let memory = format!(
        "the larger of two, {} of {}:\n    \
         # {:.1} MiB of an idle pod: slope of PSS over {} pods (r² {:.3}), without the containers' own processes on the host;\n    \
         # {:.1} MiB that one busy pod held beyond its limit of {} MiB, the most of {} readings",
        report.manifest.cri.get("version").map(crate::manifest::shown).unwrap_or_default(),
        report.manifest.at,
        marginal.overhead / 1024.0,
        counts.join(", "),
        marginal.r2,
        busy.beyond_kib as f64 / 1024.0,
        busy.limit_mib,
        busy.looks,
    );
    let cpu = rows.iter().find_map(|row| Some((row.idle_cpu_per_pod()?, row.pods)));
    let cpu = match cpu {
        Some((each, pods)) => {
            (Some(each), format!("CPU time of {pods} idle pods, the same processes, per pod"))
        }
        None => (None, "the sweep ended before its largest count".into()),
    };
    yaml(handler, (kib, &memory), (cpu.0, &cpu.1))
}

/// Returns the RuntimeClass from the mean of the running pods, including their share of the resident process.
pub fn from_ledger(handler: &str, ledger: &Ledger) -> Result<String, NoPods> {
    if ledger.pods == 0 {
        return Err(NoPods(handler.to_owned()));
    }
    let kib = (ledger.total_kib() - ledger.role(Role::Workload)) as f64 / ledger.pods as f64;
    let source = format!(
        "mean PSS of {} running pods, with their share of the resident process; in a microVM the containers' \
         own pages are part of the guest's memory and of this sum",
        ledger.pods
    );
    let cpu = (None, "running pods may not be idle: use --sweep");
    Ok(yaml(handler, (kib, &source), cpu))
}

/// Returns the YAML, with memory in KiB and CPU in millicores, each with its source, or the reason for an unknown CPU
/// time.
fn yaml(handler: &str, (kib, memory): (f64, &str), (millicores, cpu): (Option<f64>, &str)) -> String {
    let mib = (kib.max(0.0) / 1024.0).ceil();
    let cpu = match millicores {
        Some(millicores) => format!("    # {cpu}; rounded up\n    cpu: {}m\n", millicores.ceil()),
        None => format!("    # cpu: not measured: {cpu}\n"),
    };
    format!(
        "apiVersion: node.k8s.io/v1\n\
         kind: RuntimeClass\n\
         metadata:\n  name: {handler}\n\
         handler: {handler}\n\
         overhead:\n  podFixed:\n    # {memory}; rounded up\n    memory: {mib}Mi\n{cpu}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::Manifest;
    use crate::memory::Point;

    #[test]
    fn the_workload_is_no_overhead() {
        let by_role = [(Role::Shim, 5 * 1024), (Role::Pause, 512), (Role::Workload, 90 * 1024)];
        let ledger = Ledger { pods: 2, by_role: by_role.into(), ..Ledger::default() };
        let yaml = from_ledger("runc", &ledger).unwrap();
        assert!(yaml.contains("handler: runc\n") && yaml.contains("    memory: 3Mi\n"), "{yaml}");
        assert!(yaml.contains("    # cpu: not measured: "), "{yaml}");
        assert!(from_ledger("runc", &Ledger::default()).is_err());
    }

    #[test]
    fn a_sweep_tells_the_cpu_of_a_pod_too() {
        let point = |pods: u64, idle_cpu_millicores: Vec<f64>| Point {
            runtime: "vm".into(),
            repetition: 0,
            ledger: Ledger {
                pods: pods as usize,
                by_role: [(Role::Daemon, 9_000), (Role::Vmm, 40_000 * pods)].into(),
                ..Ledger::default()
            },
            idle_daemon_kib: Some(9_000),
            available_fall_kib: Some(50_000 * pods as i64),
            idle_cpu_millicores,
        };
        let mut report = Report::new(Manifest::default());
        report.add_memory(&[point(1, vec![]), point(10, vec![46.0])]);
        let of_busy = |beyond_kib| {
            let busy = Busy { limit_mib: 256, beyond_kib, looks: 20 };
            from_sweep("vm", &report.marginal_kib_per_pod["vm"], &busy, &report)
        };
        let yaml = of_busy(10 << 10);
        // 40,000 KiB are 39.06 MiB; 46 / 10 millicores are 4.6.
        assert!(yaml.contains("    memory: 40Mi\n") && yaml.contains("    cpu: 5m\n"), "{yaml}");
        let busier = of_busy((60 << 10) + 1);
        assert!(busier.contains("    memory: 61Mi\n") && busier.contains("limit of 256 MiB"), "{busier}");
        let commented = busier.lines().all(|line| line.starts_with("    # ") || !line.contains("MiB"));
        assert!(commented, "a text that is no comment: {busier}");
        assert!(yaml.contains("CPU time of 10 idle pods"), "{yaml}");
        assert!(report.not_measured.is_empty(), "{:?}", report.not_measured);
    }
}
