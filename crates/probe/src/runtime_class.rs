//! A Kubernetes RuntimeClass whose `overhead.podFixed` was measured, not guessed.

use crate::attribution::Role;
use crate::ledger::Ledger;
use crate::report::{Marginal, Memory, Report};

/// Why there is no overhead.
#[derive(Debug, thiserror::Error)]
#[error("no pods of handler '{0}' are running: their overhead cannot be measured")]
pub struct NoPods(String);

/// Returns a RuntimeClass from the growth of memory over a sweep and the idle CPU use at its largest count.
pub fn from_sweep(handler: &str, marginal: &Marginal, report: &Report) -> String {
    let rows: Vec<&Memory> = report.memory.iter().filter(|row| row.runtime == handler).collect();
    let counts: Vec<String> = rows.iter().map(|row| row.pods.to_string()).collect();
    let memory = format!(
        "slope of PSS over {} pods (r² {:.3}), {} of {}; containers' own processes on the host not counted",
        counts.join(", "),
        marginal.r2,
        report.manifest.cri.get("version").map(crate::manifest::shown).unwrap_or_default(),
        report.manifest.at
    );
    let cpu = rows.iter().find_map(|row| Some((row.idle_cpu_per_pod()?, row.pods)));
    let cpu = match cpu {
        Some((each, pods)) => {
            (Some(each), format!("CPU time of {pods} idle pods, the same processes, per pod"))
        }
        None => (None, "the sweep ended before its largest count".into()),
    };
    yaml(handler, (marginal.overhead, &memory), (cpu.0, &cpu.1))
}

/// Returns a RuntimeClass from the mean of the pods that run now. The resident process is divided among them.
pub fn from_ledger(handler: &str, ledger: &Ledger) -> Result<String, NoPods> {
    if ledger.pods == 0 {
        return Err(NoPods(handler.to_owned()));
    }
    let kib = (ledger.total_kib() - ledger.role(Role::Workload)) as f64 / ledger.pods as f64;
    let source = format!(
        "mean PSS of {} running pods, the resident process shared out among them; in a microVM the containers' \
         own pages are in the guest's memory and in this sum",
        ledger.pods
    );
    let cpu = (None, "pods that run already need not be idle: use --sweep");
    Ok(yaml(handler, (kib, &source), cpu))
}

/// Formats memory in KiB and CPU in thousandths, each with its source; for an unknown CPU, the reason.
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
        let point = |pods: u64, idle_cpu_millicores: Option<f64>| Point {
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
        report.add_memory(&[point(1, None), point(10, Some(46.0))]);
        let yaml = from_sweep("vm", &report.marginal_kib_per_pod["vm"], &report);
        // 40,000 KiB are 39.06 MiB, 46 / 10 thousandths 4.6.
        assert!(yaml.contains("    memory: 40Mi\n") && yaml.contains("    cpu: 5m\n"), "{yaml}");
        assert!(yaml.contains("CPU time of 10 idle pods"), "{yaml}");
        assert!(report.not_measured.is_empty(), "{:?}", report.not_measured);
    }
}
