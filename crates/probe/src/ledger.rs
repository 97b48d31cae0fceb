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
    /// `/proc` cannot be read.
    #[error("cannot read the processes of this host")]
    Processes(#[from] procfs::ProcError),
}

/// One process of a ledger.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// Process id.
    pub pid: i32,
    /// File name of the process's program.
    pub name: String,
    /// Role, pod and tie of the process.
    #[serde(flatten)]
    pub found: Found,
    /// PSS by role, KiB: a VMM has up to three parts.
    pub pss_kib: BTreeMap<Role, u64>,
}

/// Memory of pods at one moment: PSS by role.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Ledger {
    /// Number of pods.
    pub pods: usize,
    /// PSS of each role, KiB.
    pub by_role: BTreeMap<Role, u64>,
    /// PSS of the CRI runtime itself, KiB. Every handler shares it, so no sum includes it.
    pub cri_kib: Option<u64>,
    /// All processes of the ledger.
    pub entries: Vec<Entry>,
    /// What could not be read, and the effect on the sums.
    pub missing: Vec<String>,
    /// `MemAvailable` at the same moment, KiB.
    pub available_kib: u64,
}

impl Ledger {
    /// Returns "management only" as in published figures: the resident process and the shims, KiB.
    pub fn management_kib(&self) -> u64 {
        self.by_role.iter().filter(|(role, _)| role.is_management()).map(|(_, kib)| kib).sum()
    }

    /// Returns the total, including the whole resident process, KiB.
    pub fn total_kib(&self) -> u64 {
        self.by_role.values().sum()
    }

    /// Returns one role's memory, KiB.
    pub fn role(&self, role: Role) -> u64 {
        self.by_role.get(&role).copied().unwrap_or_default()
    }

    /// Adds the memory of a process, unless it has ended. A kernel thread has no memory, but its CPU time counts.
    fn add(&mut self, table: &Table, pid: i32, found: Found) {
        let process = table.get(&pid);
        let is_kernel_thread = process.is_some_and(|process| process.is_kernel_thread);
        match if is_kernel_thread { Ok(BTreeMap::new()) } else { parts(pid, found.role) } {
            Ok(pss_kib) => {
                for (role, kib) in &pss_kib {
                    *self.by_role.entry(*role).or_default() += kib;
                }
                let name = process.map(|process| process.name.clone()).unwrap_or_default();
                self.entries.push(Entry { pid, name, found, pss_kib });
            }
            Err(PssError::Gone(_)) => {}
            Err(error) => self.missing.push(format!("{}: {error}", found.role)),
        }
    }

    /// Returns the resident processes of the ledger.
    pub fn residents(&self) -> BTreeSet<i32> {
        self.entries.iter().filter(|entry| entry.found.role == Role::Daemon).map(|entry| entry.pid).collect()
    }
}

/// Takes the ledger of the pods that `counts` selects, without the node's other pods. `residents` are processes known
/// to serve these pods: they count even without a visible tie.
pub async fn take(
    runtime: &Runtime,
    counts: impl Fn(&Listed) -> bool,
    residents: &BTreeSet<i32>,
) -> Result<Ledger, LedgerError> {
    let listed = runtime.pods(&Default::default()).await?;
    let containers = runtime.containers(None).await?;
    let mut pods = Vec::new();
    let mut pod_ids = BTreeSet::new();
    for pod in &listed {
        if counts(pod) && pod.running {
            pod_ids.insert(pod.id.clone());
        }
        // A pod that is being removed has no status.
        let state = runtime.pod(&pod.id, true).await.ok();
        pods.push(PodIds {
            pod: pod.id.clone(),
            containers: containers.iter().filter(|c| c.pod == pod.id).map(|c| c.id.clone()).collect(),
            pid: state.and_then(|state| pid_in_info(state.info.get("info")?)),
        });
    }
    let cri = process::listener(runtime.socket());
    let known = Known { cri, resident: residents.clone(), ..Known::default() };
    tokio::task::spawn_blocking(move || count(&pods, &pod_ids, known))
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

/// Returns `pid` from a runtime's JSON information on a pod.
pub fn pid_in_info(info: &str) -> Option<i32> {
    let info: serde_json::Value = serde_json::from_str(info).ok()?;
    i32::try_from(info.get("pid")?.as_i64()?).ok().filter(|&pid| pid > 1)
}

fn count(pods: &[PodIds], pod_ids: &BTreeSet<String>, mut known: Known) -> Result<Ledger, LedgerError> {
    let table = process::table()?;
    known.resident.retain(|pid| table.contains_key(pid));
    known.observers = process::lineage(&table, std::process::id() as i32);
    let attributed = attribution::attribute(&table, pods, &known);
    let mut ledger = Ledger { pods: pod_ids.len(), available_kib: pss::available()?, ..Ledger::default() };
    let serving = serving(&table, &attributed, pod_ids, &known);
    for (pid, found) in attributed {
        if found.pod.as_ref().is_some_and(|pod| !pod_ids.contains(pod)) {
            continue;
        }
        // A resident process belongs to the ledger of the pods that it serves.
        if found.role == Role::Daemon && !serving.contains(&pid) {
            continue;
        }
        ledger.add(&table, pid, found);
    }
    ledger.cri_kib = known.cri.and_then(|pid| pss::total(pid).ok());
    Ok(ledger)
}

/// Returns the resident processes that serve these pods, with their parents and children of the same family.
fn serving(
    table: &Table,
    found: &BTreeMap<i32, Found>,
    pod_ids: &BTreeSet<String>,
    known: &Known,
) -> BTreeSet<i32> {
    let residents: BTreeSet<i32> =
        found.iter().filter(|(_, tie)| tie.role == Role::Daemon).map(|(pid, _)| *pid).collect();
    let mut serving: BTreeSet<i32> =
        residents.iter().copied().filter(|pid| serves(table, *pid, pod_ids, known)).collect();
    let parent = |pid: &i32| table.get(pid).map(|process| process.parent);
    loop {
        let beside = |pid: &&i32| {
            parent(pid).is_some_and(|parent| serving.contains(&parent))
                || serving.iter().any(|served| parent(served) == Some(**pid))
        };
        let more: Vec<i32> =
            residents.iter().filter(|pid| !serving.contains(pid)).filter(beside).copied().collect();
        if more.is_empty() {
            return serving;
        }
        serving.extend(more);
    }
}

/// Returns whether a resident process serves these pods. A named one serves all; others need a tie to one of the pods.
fn serves(table: &Table, pid: i32, pod_ids: &BTreeSet<String>, known: &Known) -> bool {
    if known.resident.contains(&pid) {
        return true;
    }
    let Some(process) = table.get(&pid) else { return false };
    let of_pods = |text: &str| pod_ids.iter().any(|id| text.contains(id.as_str()));
    process.files.iter().any(|file| of_pods(file))
        || table
            .values()
            .filter(|other| process.watches.contains(&other.pid) || other.parent == pid)
            .any(|other| of_pods(&other.command) || other.cgroups.iter().any(|cgroup| of_pods(cgroup)))
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
        assert_eq!(pid_in_info(r#"{"pid": 4242, "processStatus": "running"}"#), Some(4242));
        for none in ["", "{}", r#"{"pid": 0}"#, r#"{"pid": "x"}"#] {
            assert_eq!(pid_in_info(none), None, "{none}");
        }
    }

    #[test]
    fn all_processes_of_a_daemon_are_in_the_ledger_of_its_pods_and_in_no_other() {
        let process = |pid: i32, parent: i32, name: &str| process::Process {
            pid,
            parent,
            name: name.into(),
            started: pid as u64,
            ..process::Process::default()
        };
        // A daemon with a front, its keeper and a helper, and a VM of pod-a; another runtime's daemon with a VM of
        // pod-b.
        let program = Some((1, 7));
        let table: Table = [
            process(4, 1, "sandboxer-front"),
            process(5, 4, "sandboxer-front"),
            process::Process { watches: [50].into(), program, ..process(6, 5, "sandboxer") },
            process::Process { program, ..process(7, 6, "exe") },
            process::Process { command: "qemu -name pod-a".into(), has_vm: true, ..process(50, 6, "qemu") },
            process::Process { watches: [60].into(), ..process(9, 1, "other-daemon") },
            process::Process { command: "qemu -name pod-b".into(), has_vm: true, ..process(60, 9, "qemu") },
        ]
        .into_iter()
        .map(|process| (process.pid, process))
        .collect();
        let pods = ["pod-a", "pod-b"].map(|id| PodIds { pod: id.into(), ..PodIds::default() });
        let known = Known::default();
        let found = attribution::attribute(&table, &pods, &known);
        let serving_pids = |pod: &str| serving(&table, &found, &[pod.to_owned()].into(), &known);
        assert_eq!(serving_pids("pod-a"), [4, 5, 6, 7].into(), "{found:?}");
        assert_eq!(serving_pids("pod-b"), [9].into());
    }

    #[test]
    fn management_is_what_published_figures_count() {
        let by_role =
            [(Role::Daemon, 1), (Role::Shim, 2), (Role::Pause, 4), (Role::Vmm, 8), (Role::GuestMemory, 16)];
        let ledger = Ledger { by_role: by_role.into(), ..Ledger::default() };
        assert_eq!((ledger.management_kib(), ledger.total_kib()), (3, 31));
    }
}
