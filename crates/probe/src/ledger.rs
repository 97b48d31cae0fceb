//! Memory of pods at one moment, by role.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::attribution::{self, Found, Known, PodIds, Role};
use crate::process::{self, Table};
use crate::pss::{self, PssError};
use crate::runtime::{Listed, Runtime, RuntimeError};

/// Why a ledger failed.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// The runtime cannot list its pods.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// `/proc` can't be read.
    #[error("cannot read the processes of this host")]
    Processes(#[from] procfs::ProcError),
}

/// A line of a ledger.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// Process.
    pub pid: i32,
    /// File name of its program.
    pub name: String,
    /// Its role, pod and tie.
    #[serde(flatten)]
    pub found: Found,
    /// PSS, KiB, by role: a VMM has up to three parts.
    pub pss_kib: BTreeMap<Role, u64>,
}

/// PSS by role.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Ledger {
    /// Number of pods.
    pub pods: usize,
    /// KiB.
    pub by_role: BTreeMap<Role, u64>,
    /// The CRI runtime itself, KiB: the same for every handler, so not included in sums.
    pub cri_kib: Option<u64>,
    /// All lines.
    pub entries: Vec<Entry>,
    /// What could not be read, and the effect.
    pub missing: Vec<String>,
    /// `MemAvailable` at the same moment, KiB.
    pub available_kib: u64,
}

impl Ledger {
    /// Returns "management only" as in published figures: the resident process and the shims, KiB.
    pub fn management_kib(&self) -> u64 {
        self.by_role.iter().filter(|(role, _)| role.is_management()).map(|(_, kib)| kib).sum()
    }

    /// Returns the total with the whole resident process, KiB.
    pub fn total_kib(&self) -> u64 {
        self.by_role.values().sum()
    }

    /// Returns one role's memory, KiB.
    pub fn role(&self, role: Role) -> u64 {
        self.by_role.get(&role).copied().unwrap_or_default()
    }

    /// Adds the memory of a process, unless it has ended.
    fn add(&mut self, table: &Table, pid: i32, found: Found) {
        match parts(pid, found.role) {
            Ok(pss_kib) => {
                for (role, kib) in &pss_kib {
                    *self.by_role.entry(*role).or_default() += kib;
                }
                let name = table.get(&pid).map(|process| process.name.clone()).unwrap_or_default();
                self.entries.push(Entry { pid, name, found, pss_kib });
            }
            Err(PssError::Gone(_)) => {}
            Err(error) => self.missing.push(format!("{}: {error}", found.role)),
        }
    }

    /// Returns the resident processes in it.
    pub fn residents(&self) -> BTreeSet<i32> {
        self.entries.iter().filter(|entry| entry.found.role == Role::Daemon).map(|entry| entry.pid).collect()
    }
}

/// Takes the ledger of the pods that `counts` selects, without the node's other pods.
/// `residents` are processes known to serve these pods: they count also without a visible tie.
pub async fn take(
    runtime: &Runtime,
    counts: impl Fn(&Listed) -> bool,
    residents: &BTreeSet<i32>,
) -> Result<Ledger, LedgerError> {
    let listed = runtime.pods(&Default::default()).await?;
    let containers = runtime.containers(None).await?;
    let mut pods = Vec::new();
    let mut counted = BTreeSet::new();
    for pod in &listed {
        if counts(pod) && pod.running {
            counted.insert(pod.id.clone());
        }
        // A pod that is being removed has no status.
        let state = runtime.pod(&pod.id, true).await.ok();
        pods.push(PodIds {
            pod: pod.id.clone(),
            containers: containers.iter().filter(|c| c.pod == pod.id).map(|c| c.id.clone()).collect(),
            pid: state.and_then(|state| told_pid(state.info.get("info")?)),
        });
    }
    let cri = process::listener(runtime.socket());
    let known = Known { cri, resident: residents.clone(), ..Known::default() };
    tokio::task::spawn_blocking(move || count(&pods, &counted, known))
        .await
        .map_err(|error| procfs::ProcError::Other(error.to_string()))?
}

/// Takes the ledger of processes that this process started in place of pods, each with its role.
pub async fn take_own(processes: Vec<(i32, Role)>) -> Result<Ledger, LedgerError> {
    let count = move || {
        let table = process::table()?;
        let mut ledger =
            Ledger { pods: processes.len(), available_kib: pss::available()?, ..Ledger::default() };
        for (pid, role) in processes {
            ledger.pods -= usize::from(!table.contains_key(&pid));
            let found = Found { role, pod: None, tie: "started by the probe".into() };
            ledger.add(&table, pid, found);
        }
        Ok(ledger)
    };
    tokio::task::spawn_blocking(count).await.map_err(|error| procfs::ProcError::Other(error.to_string()))?
}

/// Returns `pid` in a runtime's JSON information on a pod.
pub(crate) fn told_pid(info: &str) -> Option<i32> {
    let info: serde_json::Value = serde_json::from_str(info).ok()?;
    i32::try_from(info.get("pid")?.as_i64()?).ok().filter(|&pid| pid > 1)
}

fn count(pods: &[PodIds], counted: &BTreeSet<String>, mut known: Known) -> Result<Ledger, LedgerError> {
    let table = process::table()?;
    known.resident.retain(|pid| table.contains_key(pid));
    known.observers = process::lineage(&table, std::process::id() as i32);
    let attributed = attribution::attribute(&table, pods, &known);
    let mut ledger = Ledger { pods: counted.len(), available_kib: pss::available()?, ..Ledger::default() };
    for (pid, found) in attributed {
        if found.pod.as_ref().is_some_and(|pod| !counted.contains(pod)) {
            continue;
        }
        // A resident process belongs to the ledger of the pods that it serves.
        if found.role == Role::Daemon && !serves(&table, pid, counted, &known) {
            continue;
        }
        ledger.add(&table, pid, found);
    }
    ledger.cri_kib = known.cri.and_then(|pid| pss::total(pid).ok());
    Ok(ledger)
}

/// Returns whether a resident process serves these pods: a named one serves all; others need a tie to one of them.
fn serves(table: &Table, pid: i32, counted: &BTreeSet<String>, known: &Known) -> bool {
    if known.resident.contains(&pid) {
        return true;
    }
    let Some(process) = table.get(&pid) else { return false };
    let of_counted = |text: &str| counted.iter().any(|id| text.contains(id.as_str()));
    process.files.iter().any(|file| of_counted(file))
        || table
            .values()
            .filter(|other| process.watches.contains(&other.pid) || other.parent == pid)
            .any(|other| of_counted(&other.command) || other.cgroups.iter().any(|cgroup| of_counted(cgroup)))
}

fn parts(pid: i32, role: Role) -> Result<BTreeMap<Role, u64>, PssError> {
    if role != Role::Vmm {
        return Ok([(role, pss::total(pid)?)].into());
    }
    let split = pss::split(pid)?;
    let parts = [(Role::Vmm, split.own), (Role::GuestMemory, split.guest), (Role::Template, split.template)];
    Ok(parts.into_iter().filter(|(_, kib)| *kib > 0).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pids_are_taken_from_what_runtimes_tell() {
        assert_eq!(told_pid(r#"{"pid": 4242, "processStatus": "running"}"#), Some(4242));
        for none in ["", "{}", r#"{"pid": 0}"#, r#"{"pid": "x"}"#] {
            assert_eq!(told_pid(none), None, "{none}");
        }
    }

    #[test]
    fn management_is_what_published_figures_count() {
        let by_role =
            [(Role::Daemon, 1), (Role::Shim, 2), (Role::Pause, 4), (Role::Vmm, 8), (Role::GuestMemory, 16)];
        let ledger = Ledger { by_role: by_role.into(), ..Ledger::default() };
        assert_eq!((ledger.management_kib(), ledger.total_kib()), (3, 31));
    }
}
