//! Attributes processes to pods and roles by their ties, tried in this order:
//!
//! 1. A process has the id of a pod or container in its command line or in the path of a cgroup.
//! 2. Its parent belongs to the pod.
//! 3. It is younger than the pod and has one of the pod's files open: a helper. If it is older and has such a file
//!    open, watches a process of the pod by pidfd or is the parent of one, it serves pods: resident.
//! 4. It is the parent of a resident process with a name of the same family, or a child of one that runs the same
//!    program: resident, too.
//! 5. It descends from the CRI runtime or a resident process, and none of the above holds: a VM is in the pool, and
//!    anything else stays unattributed.
//!
//! A kernel thread that carries a VM's packets has the role of the process it works for. Program names only distinguish
//! between roles of processes that have a tie.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::process::{Process, Table};

/// Role of a process, or of a part of its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// A process that serves all pods.
    Daemon,
    /// The runtime's process for one pod.
    Shim,
    /// A container that only holds namespaces.
    Pause,
    /// A VMM, without its guest's memory.
    Vmm,
    /// Another process of a pod: virtiofsd, gofer, ….
    Helper,
    /// The guest's resident memory.
    GuestMemory,
    /// The pods' shares of template pages.
    Template,
    /// A VM in the pool, with its guest's memory.
    Pool,
    /// A container's own processes, where they run on the host.
    Workload,
    /// A descendant of the runtime that belongs to no pod.
    Unattributed,
}

impl Role {
    /// All roles, in the order of reports.
    pub const ALL: [Role; 10] = [
        Role::Daemon,
        Role::Shim,
        Role::Pause,
        Role::Vmm,
        Role::Helper,
        Role::GuestMemory,
        Role::Template,
        Role::Pool,
        Role::Workload,
        Role::Unattributed,
    ];

    /// Returns the name in reports.
    pub const fn as_str(self) -> &'static str {
        match self {
            Role::Daemon => "daemon",
            Role::Shim => "shim",
            Role::Pause => "pause",
            Role::Vmm => "vmm",
            Role::Helper => "helper",
            Role::GuestMemory => "guest_memory",
            Role::Template => "template",
            Role::Pool => "pool",
            Role::Workload => "workload",
            Role::Unattributed => "unattributed",
        }
    }

    /// Returns whether the role counts as "management only", as in published figures.
    pub const fn is_management(self) -> bool {
        matches!(self, Role::Daemon | Role::Shim)
    }
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Identifiers of a pod.
#[derive(Debug, Clone, Default)]
pub struct PodIds {
    /// The sandbox's id.
    pub pod: String,
    /// The ids of the pod's containers.
    pub containers: Vec<String>,
    /// The pod's process; `None` if the runtime does not report it.
    pub pid: Option<i32>,
}

/// Processes that are known in advance.
#[derive(Debug, Clone, Default)]
pub struct Known {
    /// The CRI runtime, found by its socket.
    pub cri: Option<i32>,
    /// Resident processes, found by their sockets or in an earlier table.
    pub resident: BTreeSet<i32>,
    /// The probe and its ancestors, which have pods' logs open but belong to no pod.
    pub observers: BTreeSet<i32>,
}

/// The attribution of a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// Role of the process.
    pub role: Role,
    /// Id of the process's pod; `None` if it serves all pods or none.
    pub pod: Option<String>,
    /// The tie that decided, as text.
    pub tie: String,
}

/// Programs of VMMs, to recognise them without KVM.
const MONITORS: [&str; 7] = [
    "qemu-system-",
    "cloud-hypervisor",
    "firecracker",
    "stratovirt",
    "crosvm",
    "dragonball",
    "runsc-sandbox",
];

/// Attributes the processes of `table` to `pods`. Omits unrelated processes.
pub fn attribute(table: &Table, pods: &[PodIds], known: &Known) -> BTreeMap<i32, Found> {
    let mut found = BTreeMap::new();
    let skipped =
        |pid: i32| known.cri == Some(pid) || known.observers.contains(&pid) || known.resident.contains(&pid);
    for &pid in &known.resident {
        found.insert(pid, Found { role: Role::Daemon, pod: None, tie: "listens on its socket".into() });
    }
    by_id(table, pods, &skipped, &mut found);
    by_descent(table, &skipped, &mut found);
    by_files_and_watches(table, pods, &skipped, &mut found);
    by_family(table, &skipped, &mut found);
    // This includes children of helpers.
    by_descent(table, &skipped, &mut found);
    by_origin(table, known, &skipped, &mut found);
    name_roles(table, pods, known, &mut found);
    found
}

type Skipped<'a> = &'a dyn Fn(i32) -> bool;

fn by_id(table: &Table, pods: &[PodIds], skipped: Skipped<'_>, found: &mut BTreeMap<i32, Found>) {
    for process in table.values().filter(|process| !skipped(process.pid)) {
        let mut ties = pods.iter().filter_map(|pod| Some((pod, id_tie(process, pod)?)));
        // A process with two pods in its command line is a tool and belongs to neither.
        if let (Some((pod, (role, tie))), None) = (ties.next(), ties.next()) {
            found.insert(process.pid, Found { role, pod: Some(pod.pod.clone()), tie });
        }
    }
}

fn id_tie(process: &Process, pod: &PodIds) -> Option<(Role, String)> {
    let in_cgroup = |id: &str| process.cgroups.iter().any(|cgroup| cgroup.contains(id));
    if pod.containers.iter().any(|id| in_cgroup(id)) {
        return Some((Role::Workload, "container's id in its cgroup".into()));
    }
    if in_cgroup(&pod.pod) {
        return Some((Role::Helper, "pod's id in its cgroup".into()));
    }
    let named = |id: &String| process.command.contains(id.as_str());
    if named(&pod.pod) || pod.containers.iter().any(named) {
        return Some((Role::Helper, "pod's id in its command line".into()));
    }
    (pod.pid == Some(process.pid))
        .then(|| (Role::Helper, "the runtime reports it as the pod's process".into()))
}

fn by_descent(table: &Table, skipped: Skipped<'_>, found: &mut BTreeMap<i32, Found>) {
    loop {
        let heirs: Vec<_> = table
            .values()
            .filter(|process| !skipped(process.pid) && !found.contains_key(&process.pid))
            .filter_map(|process| {
                let parent = found.get(&process.parent)?;
                let pod = parent.pod.clone()?;
                // Children of a container's process belong to the container.
                let role = if parent.role == Role::Workload { Role::Workload } else { Role::Helper };
                Some((
                    process.pid,
                    Found { role, pod: Some(pod), tie: format!("child of {}", process.parent) },
                ))
            })
            .collect();
        if heirs.is_empty() {
            return;
        }
        found.extend(heirs);
    }
}

fn by_files_and_watches(
    table: &Table,
    pods: &[PodIds],
    skipped: Skipped<'_>,
    found: &mut BTreeMap<i32, Found>,
) {
    // A pod is as old as its oldest process.
    let mut ages: BTreeMap<String, u64> = BTreeMap::new();
    for (pid, tie) in found.iter() {
        if let (Some(pod), Some(process)) = (&tie.pod, table.get(pid)) {
            let age = ages.entry(pod.clone()).or_insert(process.started);
            *age = process.started.min(*age);
        }
    }
    let parents: BTreeSet<i32> = found
        .iter()
        .filter(|(_, tie)| tie.pod.is_some())
        .filter_map(|(pid, _)| table.get(pid).map(|process| process.parent))
        .collect();
    let mut more = BTreeMap::new();
    for process in table.values().filter(|process| !skipped(process.pid) && !found.contains_key(&process.pid))
    {
        let owners: Vec<&PodIds> = pods
            .iter()
            .filter(|pod| process.files.iter().any(|file| file.contains(pod.pod.as_str())))
            .collect();
        let older = |pod: &str| ages.get(pod).is_none_or(|&age| process.started < age);
        let watched = process.watches.iter().find(|pid| found.get(pid).is_some_and(|tie| tie.pod.is_some()));
        let tie = if let [pod] = owners[..]
            && !older(&pod.pod)
        {
            Some((Role::Helper, Some(pod.pod.clone()), "has a file of the pod open".to_owned()))
        } else if let Some(watched) = watched {
            Some((Role::Daemon, None, format!("watches {watched} by pidfd")))
        } else if process.pid > 1 && parents.contains(&process.pid) {
            Some((Role::Daemon, None, "parent of a pod's process".to_owned()))
        } else {
            owners
                .first()
                .map(|_| (Role::Daemon, None, "older than the pods whose files it has open".to_owned()))
        };
        if let Some((role, pod, tie)) = tie {
            more.insert(process.pid, Found { role, pod, tie });
        }
    }
    found.extend(more);
}

/// Adds the parents of resident processes, and their children that run the same program.
fn by_family(table: &Table, skipped: Skipped<'_>, found: &mut BTreeMap<i32, Found>) {
    loop {
        let residents: Vec<&Process> = found
            .iter()
            .filter(|(_, tie)| tie.role == Role::Daemon)
            .filter_map(|(pid, _)| table.get(pid))
            .collect();
        let mut more = BTreeMap::new();
        for process in
            table.values().filter(|process| !skipped(process.pid) && !found.contains_key(&process.pid))
        {
            let parent_of = residents.iter().find(|resident| {
                resident.parent == process.pid && process.pid > 1 && are_family(&resident.name, &process.name)
            });
            let same =
                |resident: &&&Process| process.parent == resident.pid && process.program == resident.program;
            let child_of = residents.iter().find(same).filter(|_| process.program.is_some());
            let tie = match (parent_of, child_of) {
                (Some(resident), _) => format!("parent of {}, of the same family", resident.pid),
                (None, Some(resident)) => format!("child of {}, of the same program", resident.pid),
                (None, None) => continue,
            };
            more.insert(process.pid, Found { role: Role::Daemon, pod: None, tie });
        }
        if more.is_empty() {
            return;
        }
        found.extend(more);
    }
}

/// Returns whether two program names are of one family, such as `sandboxer` and `sandboxer-front`.
fn are_family(a: &str, b: &str) -> bool {
    !a.is_empty() && !b.is_empty() && (a.starts_with(b) || b.starts_with(a))
}

fn by_origin(table: &Table, known: &Known, skipped: Skipped<'_>, found: &mut BTreeMap<i32, Found>) {
    let mut origins: BTreeSet<i32> =
        found.iter().filter(|(_, tie)| tie.role == Role::Daemon).map(|(&pid, _)| pid).collect();
    origins.extend(known.cri);
    for process in table.values().filter(|process| !skipped(process.pid)) {
        if origins.contains(&process.parent) && !found.contains_key(&process.pid) {
            let tie = format!("child of {}, of no known pod", process.parent);
            found.insert(process.pid, Found { role: Role::Unattributed, pod: None, tie });
        }
    }
}

/// Distinguishes VMMs, shims and pause containers among a pod's processes.
fn name_roles(table: &Table, pods: &[PodIds], known: &Known, found: &mut BTreeMap<i32, Found>) {
    let own_namespace = known.observers.iter().find_map(|pid| table.get(pid)?.pid_namespace);
    let parents: BTreeMap<i32, String> =
        found.iter().filter_map(|(pid, tie)| Some((table.get(pid)?.parent, tie.pod.clone()?))).collect();
    let pods_of: BTreeMap<i32, Option<String>> =
        found.iter().map(|(pid, tie)| (*pid, tie.pod.clone())).collect();
    for (pid, tie) in found.iter_mut() {
        let Some(process) = table.get(pid) else { continue };
        // A helper that forks is also the parent of a process; a shim's own parent belongs to no pod.
        let is_top = pods_of.get(&process.parent) != Some(&tie.pod);
        let monitor = process.has_vm || MONITORS.iter().any(|name| process.name.starts_with(name));
        if tie.role == Role::Unattributed && monitor {
            tie.role = Role::Pool;
        }
        if tie.role != Role::Helper {
            continue;
        }
        let contained = process.pid_namespace.is_some() && process.pid_namespace != own_namespace;
        let is_pods = pods.iter().any(|pod| pod.pid == Some(*pid));
        tie.role = if monitor {
            Role::Vmm
        } else if is_pods && contained {
            Role::Pause
        } else if process.name.starts_with("containerd-shim")
            || (is_top && parents.get(pid) == tie.pod.as_ref() && !contained && !is_pods)
        {
            Role::Shim
        } else {
            Role::Helper
        };
    }
    let of_owners: Vec<(i32, Role)> = table
        .values()
        .filter(|process| process.is_kernel_thread && found.contains_key(&process.pid))
        .filter_map(|process| Some((process.pid, found.get(&process.parent)?.role)))
        .collect();
    for (pid, role) in of_owners {
        if let Some(tie) = found.get_mut(&pid) {
            tie.role = role;
        }
    }
}

#[cfg(test)]
mod tests;
