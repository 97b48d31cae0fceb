//! Memory that a pod holds on the host beyond its memory limit while its container uses all of that limit.
//!
//! An idle pod does not show this. In a microVM, the guest's kernel needs more memory the more its containers do. If
//! the VM outgrows the pod's cgroup on the host (the limit plus the RuntimeClass's overhead), the host's kernel kills
//! the VM of a pod that stays within its limits.

use std::{collections::BTreeSet, time::Duration};

use tokio_util::sync::CancellationToken;

use crate::{
    attribution::Role,
    first_byte::LogWatch,
    ledger::{self, Ledger},
    runtime::{Listed, Runtime},
    timeline::{self, RUN_LABEL, Recipe},
};

/// Number of memory readings.
const LOOKS: u32 = 20;
/// Interval between two readings.
const LOOK: Duration = Duration::from_millis(500);
/// Maximum time for a container to fill its limit once.
const FILL: Duration = Duration::from_secs(180);

/// The most memory that a busy pod held.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Busy {
    /// Memory limit of the pod and of its container, MiB.
    pub limit_mib: u64,
    /// Largest memory on the host beyond the limit, KiB of PSS, in [`Busy::looks`] readings. For a runtime without VMs:
    /// all memory of the runtime's own processes.
    pub beyond_kib: u64,
    /// Number of readings.
    pub looks: u32,
}

/// Starts a pod on `handler` whose container repeatedly writes and reads a file larger than its memory limit, so that
/// the file's cache fills the limit. Measures and removes the pod. Returns as an error what was not measured.
pub async fn measure(
    runtime: &Runtime,
    watch: &LogWatch,
    recipe: &Recipe,
    handler: &str,
    limit_mib: u64,
    cancel: &CancellationToken,
) -> Result<Busy, String> {
    let name = format!("{}-{handler}-busy", recipe.run);
    let recipe = Recipe {
        command: fill(limit_mib),
        memory_mib: Some(limit_mib),
        timeout: recipe.timeout + FILL,
        ..recipe.clone()
    };
    let start = timeline::start(runtime, watch, &recipe, handler, &name, cancel).await;
    let measured = match &start.end {
        Ok(()) => look(runtime, &recipe, limit_mib, cancel).await,
        Err(error) => Err(error.to_string()),
    };
    let removed = timeline::remove(runtime, watch, &recipe, &name, start.pod_id.as_deref()).await;
    let busy = measured.map_err(|error| format!("a busy pod of {limit_mib} MiB on {handler}: {error}"))?;
    removed.map_err(|error| format!("cannot remove the busy pod on {handler}: {error}"))?;
    Ok(busy)
}

/// Returns a command that prints a line once the file was written and read.
fn fill(limit_mib: u64) -> Vec<String> {
    let once = format!(
        "dd if=/dev/zero of=/full bs=1M count={} 2>/dev/null && cat /full >/dev/null",
        limit_mib * 3 / 2
    );
    let script = format!("{once} && echo full && while {once}; do :; done");
    ["sh", "-c", &script].map(str::to_owned).to_vec()
}

async fn look(
    runtime: &Runtime,
    recipe: &Recipe,
    limit_mib: u64,
    cancel: &CancellationToken,
) -> Result<Busy, String> {
    let mine = |pod: &Listed| pod.labels.get(RUN_LABEL) == Some(&recipe.run);
    let mut most = None;
    for _ in 0..LOOKS {
        tokio::select! {
            () = cancel.cancelled() => return Err("interrupted".into()),
            () = tokio::time::sleep(LOOK) => {}
        }
        let ledger =
            ledger::take(runtime, mine, &BTreeSet::new()).await.map_err(|error| error.to_string())?;
        if ledger.pods != 1 {
            return Err("it ended, or something else removed it".into());
        }
        most = most.max(Some(beyond_kib(&ledger, limit_mib)));
    }
    Ok(Busy { limit_mib, beyond_kib: most.unwrap_or_default(), looks: LOOKS })
}

/// Returns the memory of the pod's own processes beyond the limit, KiB. Guest memory includes the containers' memory.
fn beyond_kib(ledger: &Ledger, limit_mib: u64) -> u64 {
    let others = [Role::Daemon, Role::Pool, Role::Workload].map(|role| ledger.role(role)).iter().sum::<u64>();
    let own = ledger.total_kib() - others;
    if ledger.role(Role::GuestMemory) == 0 { own } else { own.saturating_sub(limit_mib << 10) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_in_a_guests_memory_and_in_no_shim() {
        let ledger = |roles: &[(Role, u64)]| Ledger {
            pods: 1,
            by_role: roles.iter().copied().collect(),
            ..Ledger::default()
        };
        let vm = ledger(&[
            (Role::Daemon, 9 << 10),
            (Role::Pool, 80 << 10),
            (Role::Vmm, 14 << 10),
            (Role::GuestMemory, 290 << 10),
            (Role::Template, 6 << 10),
        ]);
        assert_eq!(beyond_kib(&vm, 256), (14 + 290 + 6 - 256) << 10);
        let runc = ledger(&[(Role::Shim, 9 << 10), (Role::Pause, 512), (Role::Workload, 300 << 10)]);
        assert_eq!(beyond_kib(&runc, 256), (9 << 10) + 512);
        assert_eq!(beyond_kib(&ledger(&[(Role::GuestMemory, 100 << 10)]), 256), 0, "less than its limit");
    }
}
