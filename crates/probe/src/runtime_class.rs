//! A Kubernetes RuntimeClass whose `overhead.podFixed` was measured, not guessed.

use crate::attribution::Role;
use crate::ledger::Ledger;
use crate::report::{Marginal, Report};

/// Why there is no overhead.
#[derive(Debug, thiserror::Error)]
#[error("no pods of handler '{0}' are running: their overhead cannot be measured")]
pub struct NoPods(String);

/// From the growth of memory over a sweep.
pub fn from_sweep(handler: &str, marginal: &Marginal, report: &Report) -> String {
    let counts: Vec<String> =
        report.memory.iter().filter(|row| row.runtime == handler).map(|row| row.pods.to_string()).collect();
    let source = format!(
        "slope of PSS over {} pods (r² {:.3}), {} of {}; containers' own processes on the host not counted",
        counts.join(", "),
        marginal.r2,
        report.manifest.cri.get("version").map(crate::manifest::shown).unwrap_or_default(),
        report.manifest.at
    );
    yaml(handler, marginal.overhead, &source)
}

/// From the pods that run now: their mean. The resident process is shared out among them.
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
    Ok(yaml(handler, kib, &source))
}

fn yaml(handler: &str, kib: f64, source: &str) -> String {
    let mib = (kib.max(0.0) / 1024.0).ceil();
    format!(
        "apiVersion: node.k8s.io/v1\n\
         kind: RuntimeClass\n\
         metadata:\n  name: {handler}\n\
         handler: {handler}\n\
         overhead:\n  podFixed:\n    # {source}; rounded up\n    memory: {mib}Mi\n    # cpu: not measured\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workload_is_no_overhead() {
        let by_role = [(Role::Shim, 5 * 1024), (Role::Pause, 512), (Role::Workload, 90 * 1024)];
        let ledger = Ledger { pods: 2, by_role: by_role.into(), ..Ledger::default() };
        let yaml = from_ledger("runc", &ledger).unwrap();
        assert!(yaml.contains("handler: runc\n") && yaml.contains("    memory: 3Mi\n"), "{yaml}");
        assert!(from_ledger("runc", &Ledger::default()).is_err());
    }
}
