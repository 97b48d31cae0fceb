//! Which process belongs to which pod, and as what: found by the ties between them, in this order.
//!
//! 1. The pod's or a container's id stands in the command line or in the path of a cgroup.
//! 2. The parent belongs to the pod.
//! 3. It is younger than the pod and holds a file of it open: a helper. If it is older and holds a file,
//!    watches a process of the pod by pidfd or is the parent of one, it serves pods: resident.
//! 4. It descends from the CRI runtime or a resident process and none of the above holds: a virtual machine
//!    waits for a pod; anything else is not attributed.
//!
//! Names only tell roles apart among processes that a tie has found.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::process::{Process, Table};

/// What memory is for. The first three are what runs pods, the next what pods are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// A process that serves all pods.
    Daemon,
    /// The runtime's process for one pod.
    Shim,
    /// A container that only holds namespaces.
    Pause,
    /// A virtual machine monitor, its guest's memory not counted.
    Vmm,
    /// Another process of a pod: virtiofsd, gofer, ….
    Helper,
    /// The guest's memory, as far as it is there.
    GuestMemory,
    /// The pods' shares of template pages.
    Template,
    /// A virtual machine that waits for a pod, its guest's memory included.
    Pool,
    /// A container's own processes, where they are on the host.
    Workload,
    /// Started below the runtime, and of no pod.
    Unattributed,
}

impl Role {
    /// Every role.
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

    /// Returns the name used in reports.
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

    /// Returns whether "management only" counts it, as the published figures do.
    pub const fn is_management(self) -> bool {
        matches!(self, Role::Daemon | Role::Shim)
    }
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A pod, by what processes may carry of it.
#[derive(Debug, Clone, Default)]
pub struct PodIds {
    /// Sandbox id.
    pub pod: String,
    /// Container ids.
    pub containers: Vec<String>,
    /// Its process, where the runtime tells it.
    pub pid: Option<i32>,
}

/// Processes that are known from elsewhere.
#[derive(Debug, Clone, Default)]
pub struct Known {
    /// The CRI runtime, by its socket.
    pub cri: Option<i32>,
    /// Resident processes, by their sockets or from earlier.
    pub resident: BTreeSet<i32>,
    /// The observer and its ancestors: they hold logs of pods and are none.
    pub observers: BTreeSet<i32>,
}

/// What a process was found to be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// As what.
    pub role: Role,
    /// Of which pod; `None` for those of all or none.
    pub pod: Option<String>,
    /// By which tie.
    pub tie: String,
}

/// Programs that are virtual machine monitors, for those that hold no KVM machine.
const MONITORS: [&str; 7] = [
    "qemu-system-",
    "cloud-hypervisor",
    "firecracker",
    "stratovirt",
    "crosvm",
    "dragonball",
    "runsc-sandbox",
];

/// Attributes the processes of `table` to `pods`. Those that have nothing to do with pods are not in the answer.
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
    // What a helper has started, too.
    by_descent(table, &skipped, &mut found);
    by_origin(table, known, &skipped, &mut found);
    name_roles(table, pods, known, &mut found);
    found
}

type Skipped<'a> = &'a dyn Fn(i32) -> bool;

fn by_id(table: &Table, pods: &[PodIds], skipped: Skipped<'_>, found: &mut BTreeMap<i32, Found>) {
    for process in table.values().filter(|process| !skipped(process.pid)) {
        let mut ties = pods.iter().filter_map(|pod| Some((pod, id_tie(process, pod)?)));
        // With two pods in its command line it is of neither: somebody's tool.
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
    (pod.pid == Some(process.pid)).then(|| (Role::Helper, "the runtime names it as the pod's process".into()))
}

fn by_descent(table: &Table, skipped: Skipped<'_>, found: &mut BTreeMap<i32, Found>) {
    loop {
        let heirs: Vec<_> = table
            .values()
            .filter(|process| !skipped(process.pid) && !found.contains_key(&process.pid))
            .filter_map(|process| {
                let parent = found.get(&process.parent)?;
                let pod = parent.pod.clone()?;
                // Children of a container's process are the container's.
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
        let held: Vec<&PodIds> = pods
            .iter()
            .filter(|pod| process.files.iter().any(|file| file.contains(pod.pod.as_str())))
            .collect();
        let older = |pod: &str| ages.get(pod).is_none_or(|&age| process.started < age);
        let watched = process.watches.iter().find(|pid| found.get(pid).is_some_and(|tie| tie.pod.is_some()));
        let tie = if let [pod] = held[..]
            && !older(&pod.pod)
        {
            Some((Role::Helper, Some(pod.pod.clone()), "holds a file of the pod open".to_owned()))
        } else if let Some(watched) = watched {
            Some((Role::Daemon, None, format!("watches {watched} by pidfd")))
        } else if process.pid > 1 && parents.contains(&process.pid) {
            Some((Role::Daemon, None, "parent of a pod's process".to_owned()))
        } else {
            held.first().map(|_| (Role::Daemon, None, "holds files of pods open, older than they".to_owned()))
        };
        if let Some((role, pod, tie)) = tie {
            more.insert(process.pid, Found { role, pod, tie });
        }
    }
    found.extend(more);
}

fn by_origin(table: &Table, known: &Known, skipped: Skipped<'_>, found: &mut BTreeMap<i32, Found>) {
    let mut origins: BTreeSet<i32> =
        found.iter().filter(|(_, tie)| tie.role == Role::Daemon).map(|(&pid, _)| pid).collect();
    origins.extend(known.cri);
    for process in table.values().filter(|process| !skipped(process.pid)) {
        if origins.contains(&process.parent) && !found.contains_key(&process.pid) {
            let tie = format!("child of {}, of no pod that is known", process.parent);
            found.insert(process.pid, Found { role: Role::Unattributed, pod: None, tie });
        }
    }
}

/// Tells apart what ties alone do not: monitors, shims and pause containers among a pod's processes.
fn name_roles(table: &Table, pods: &[PodIds], known: &Known, found: &mut BTreeMap<i32, Found>) {
    let own_namespace = known.observers.iter().find_map(|pid| table.get(pid)?.pid_namespace);
    let parents: BTreeMap<i32, String> =
        found.iter().filter_map(|(pid, tie)| Some((table.get(pid)?.parent, tie.pod.clone()?))).collect();
    for (pid, tie) in found.iter_mut() {
        let Some(process) = table.get(pid) else { continue };
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
            || (parents.get(pid) == tie.pod.as_ref() && !contained && !is_pods)
        {
            Role::Shim
        } else {
            Role::Helper
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: i32, parent: i32, name: &str, command: &str) -> Process {
        Process {
            pid,
            parent,
            started: pid as u64,
            name: name.into(),
            command: format!("/usr/bin/{name} {command}"),
            pid_namespace: Some(1),
            ..Process::default()
        }
    }

    fn roles(table: Vec<Process>, pods: &[PodIds], known: &Known) -> Vec<(i32, Role, Option<String>)> {
        let table: Table = table.into_iter().map(|process| (process.pid, process)).collect();
        attribute(&table, pods, known).into_iter().map(|(pid, tie)| (pid, tie.role, tie.pod)).collect()
    }

    fn pod(id: &str, container: &str, pid: i32) -> PodIds {
        PodIds { pod: id.into(), containers: vec![container.into()], pid: Some(pid) }
    }

    #[test]
    fn a_shim_per_pod_with_its_pause_and_workload() {
        let pods = [pod("pod-a", "ctr-a", 11)];
        let known = Known { cri: Some(5), resident: BTreeSet::new(), observers: [3].into() };
        let inside = |pid, parent, name: &str, cgroup: &str, namespace| Process {
            cgroups: vec![format!("/k8s/{cgroup}")],
            pid_namespace: Some(namespace),
            ..process(pid, parent, name, "")
        };
        let table = vec![
            process(3, 1, "observer", "pod-a"),
            process(5, 1, "containerd", ""),
            process(10, 1, "some-shim", "-id pod-a"),
            inside(11, 10, "pause", "pod-a", 7),
            inside(12, 10, "sh", "ctr-a", 8),
            inside(13, 12, "sleep", "ctr-a", 8),
            process(20, 1, "bystander", ""),
            process(21, 5, "unpigz", ""),
        ];
        assert_eq!(
            roles(table, &pods, &known),
            [
                (10, Role::Shim, Some("pod-a".into())),
                (11, Role::Pause, Some("pod-a".into())),
                (12, Role::Workload, Some("pod-a".into())),
                (13, Role::Workload, Some("pod-a".into())),
                (21, Role::Unattributed, None),
            ]
        );
    }

    #[test]
    fn a_resident_daemon_is_known_by_what_it_watches() {
        let pods = [pod("pod-a", "ctr-a", 0), pod("pod-b", "ctr-b", 0)];
        let known = Known { observers: [3].into(), ..Known::default() };
        let daemon = Process { watches: [50].into(), ..process(6, 1, "any-name", "") };
        let virtiofsd =
            Process { files: vec!["/run/pods/pod-b/fs.sock".into()], ..process(60, 1, "virtiofsd", "") };
        let table = vec![
            process(3, 1, "observer", ""),
            daemon,
            Process { has_vm: true, ..process(50, 1, "monitor", "--dir /run/pods/pod-a/") },
            process(51, 50, "child", ""),
            process(55, 1, "qemu-system-x86_64", "-name pod-b"),
            virtiofsd,
        ];
        assert_eq!(
            roles(table, &pods, &known),
            [
                (6, Role::Daemon, None),
                (50, Role::Vmm, Some("pod-a".into())),
                (51, Role::Helper, Some("pod-a".into())),
                (55, Role::Vmm, Some("pod-b".into())),
                (60, Role::Helper, Some("pod-b".into())),
            ]
        );
    }

    #[test]
    fn a_monitor_of_no_pod_below_a_resident_process_waits_for_one() {
        let pods = [pod("pod-a", "ctr-a", 0)];
        let known = Known { cri: Some(5), observers: [3].into(), ..Known::default() };
        let table = vec![
            process(3, 1, "observer", ""),
            process(5, 1, "containerd", ""),
            Process { watches: [50].into(), ..process(6, 1, "any-name", "") },
            process(50, 6, "qemu-system-x86_64", "-name pod-a"),
            process(60, 6, "qemu-system-x86_64", "-name pool-1"),
            Process { has_vm: true, ..process(61, 6, "monitor", "") },
            process(62, 6, "mkfs.erofs", ""),
            process(70, 1, "qemu-system-x86_64", "-name somebodys"),
        ];
        assert_eq!(
            roles(table, &pods, &known),
            [
                (6, Role::Daemon, None),
                (50, Role::Vmm, Some("pod-a".into())),
                (60, Role::Pool, None),
                (61, Role::Pool, None),
                (62, Role::Unattributed, None),
            ]
        );
    }

    #[test]
    fn a_guests_pid_is_not_a_hosts() {
        // A VM runtime reports pid 20 of the guest; on the host that is somebody else, of another pod even.
        let pods = [pod("pod-a", "ctr-a", 0)];
        let table = vec![process(20, 1, "sshd", "")];
        assert_eq!(roles(table, &pods, &Known::default()), []);
    }
}
