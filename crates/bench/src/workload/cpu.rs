//! Measures the CPU time of one run by role.
//!
//! `/proc` is read twice: after the tool's start, and after its end before its pod is removed. The time of a process
//! that ended in between counts for the parent that waited for it, so what a shim waited for counts as the container's.
//! Soft interrupts belong to no process and appear only in the host's time.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use procfs::process::Stat;
use procfs::{CpuTime, CurrentSI, KernelStats};
use sandboxer_probe::attribution::{self, Found, Known, PodIds, Role};
use sandboxer_probe::process::{self, Table};
use sandboxer_probe::workload::cpu::{Part, RoleUse, Time};
use sandboxer_probe::workload::host::CpuUse;

use super::host;

/// Clock ticks of a process: its own, and those of the children it waited for.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Ticks {
    own: [u64; 3],
    children: [u64; 3],
}

impl Ticks {
    fn from_stat(stat: &Stat) -> Self {
        let ticks_or_0 =
            |ticks: Option<i64>| ticks.and_then(|ticks| u64::try_from(ticks).ok()).unwrap_or_default();
        let child = |ticks: i64| u64::try_from(ticks).unwrap_or_default();
        Self {
            own: [stat.utime, stat.stime, stat.guest_time.unwrap_or_default()],
            children: [child(stat.cutime), child(stat.cstime), ticks_or_0(stat.cguest_time)],
        }
    }

    fn since(self, before: Self) -> Self {
        let less = |a: [u64; 3], b: [u64; 3]| [0, 1, 2].map(|at| a[at].saturating_sub(b[at]));
        Self { own: less(self.own, before.own), children: less(self.children, before.children) }
    }
}

/// Converts ticks; the kernel includes guest time in user time.
fn time([user, system, guest]: [u64; 3]) -> Time {
    let seconds = |ticks: u64| ticks as f64 / procfs::ticks_per_second() as f64;
    Time { user_s: seconds(user.saturating_sub(guest)), system_s: seconds(system), guest_s: seconds(guest) }
}

/// CPU time of all processes of the host at one moment.
#[derive(Debug, Clone)]
pub struct Reading {
    at: Instant,
    host: Option<CpuTime>,
    /// Start and ticks of each process, by pid.
    processes: BTreeMap<i32, (u64, Ticks)>,
}

impl Reading {
    /// Reads `/proc`. Skips processes that end meanwhile.
    pub fn now() -> Self {
        let all = procfs::process::all_processes().into_iter().flatten().flatten();
        let processes = all
            .filter_map(|process| process.stat().ok())
            .map(|stat| (stat.pid, (stat.starttime, Ticks::from_stat(&stat))))
            .collect();
        Self { at: Instant::now(), host: KernelStats::current().ok().map(|stats| stats.total), processes }
    }

    /// Returns the ticks of each process since `before`; all its ticks if it began later.
    fn since(&self, before: &Self) -> BTreeMap<i32, Ticks> {
        let spent = |(pid, (started, ticks)): (&i32, &(u64, Ticks))| {
            let same = before.processes.get(pid).filter(|(known, _)| known == started);
            (*pid, ticks.since(same.map(|(_, ticks)| *ticks).unwrap_or_default()))
        };
        self.processes.iter().map(spent).collect()
    }
}

/// The pods of a run.
#[derive(Debug, Clone, Default)]
pub struct Pods {
    /// Pod under test; `None` for a tool outside pods: native, or in a VM of this probe.
    pub tested: Option<PodIds>,
    /// Pod of the client.
    pub client: Option<PodIds>,
    /// Process id of the CRI runtime.
    pub cri: Option<i32>,
    /// Whether the tool runs in a VM of this probe, outside pods.
    pub in_vm: bool,
}

/// Returns the CPU time since `before` by role. Reads all of `/proc`, which takes some milliseconds.
pub fn since(before: &Reading, pods: &Pods, tool_s: Option<f64>) -> procfs::ProcResult<RoleUse> {
    let after = Reading::now();
    let table = process::table()?;
    let me = std::process::id() as i32;
    let known = Known { cri: pods.cri, resident: BTreeSet::new(), observers: process::lineage(&table, me) };
    let ids: Vec<PodIds> = pods.tested.iter().chain(&pods.client).cloned().collect();
    let found = attribution::attribute(&table, &ids, &known);
    let mut parts = split(&after.since(before), &table, &found, pods, me);
    let host = before.host.as_ref().zip(after.host.as_ref()).map(|(a, b)| host::cpu_use(a, b));
    if let Some(host) = host {
        parts.insert(Part::Rest, rest(&host, &parts));
    }
    parts.retain(|_, time| time.total_s() > 0.0);
    Ok(RoleUse { window_s: (after.at - before.at).as_secs_f64(), tool_s, parts })
}

fn split(
    spent: &BTreeMap<i32, Ticks>,
    table: &Table,
    found: &BTreeMap<i32, Found>,
    pods: &Pods,
    me: i32,
) -> BTreeMap<Part, Time> {
    let mine = if pods.in_vm { Part::Vmm } else { Part::Workload };
    let native = if pods.tested.is_none() { descendants(table, me) } else { BTreeSet::new() };
    let mut parts: BTreeMap<Part, Time> = BTreeMap::new();
    for (pid, ticks) in spent {
        let (own, children) = if *pid == me {
            // The probe's only children are native tools and VMs.
            (Part::Probe, if pods.tested.is_none() { mine } else { Part::Probe })
        } else if native.contains(pid) {
            (mine, mine)
        } else if pods.cri == Some(*pid) {
            (Part::Cri, Part::Cri)
        } else {
            let Some(part) = found.get(pid).and_then(|found| part(found, pods)) else { continue };
            (part, if part == Part::Shim { Part::Workload } else { part })
        };
        parts.entry(own).or_default().add(time(ticks.own));
        parts.entry(children).or_default().add(time(ticks.children));
    }
    parts
}

/// Returns the part that a process belongs to; `None` if it belongs to the rest.
fn part(found: &Found, pods: &Pods) -> Option<Part> {
    let belongs_to =
        |pod: &Option<PodIds>| pod.as_ref().is_some_and(|pod| found.pod.as_ref() == Some(&pod.pod));
    if belongs_to(&pods.client) {
        return Some(Part::Client);
    }
    match found.role {
        // A process of no pod may also serve other pods meanwhile.
        Role::Daemon => Some(Part::Daemon),
        Role::Pool => Some(Part::Pool),
        _ if !belongs_to(&pods.tested) => None,
        Role::Vmm | Role::GuestMemory | Role::Template => Some(Part::Vmm),
        Role::Shim => Some(Part::Shim),
        Role::Pause => Some(Part::Pause),
        Role::Helper => Some(Part::Helper),
        Role::Workload => Some(Part::Workload),
        Role::Unattributed => None,
    }
}

fn descendants(table: &Table, parent: i32) -> BTreeSet<i32> {
    let mut found = BTreeSet::from([parent]);
    loop {
        let more: Vec<i32> = table
            .values()
            .filter(|process| found.contains(&process.parent) && !found.contains(&process.pid))
            .map(|process| process.pid)
            .collect();
        if more.is_empty() {
            found.remove(&parent);
            return found;
        }
        found.extend(more);
    }
}

/// Returns the host's time without the parts' time. Ticks are coarse, so the result is at least 0.
fn rest(host: &CpuUse, parts: &BTreeMap<Part, Time>) -> Time {
    let sum = |kind: fn(&Time) -> f64| parts.values().map(kind).sum::<f64>();
    Time {
        user_s: (host.user_s - sum(|time| time.user_s)).max(0.0),
        system_s: (host.system_s + host.softirq_s - sum(|time| time.system_s)).max(0.0),
        guest_s: (host.guest_s.unwrap_or_default() - sum(|time| time.guest_s)).max(0.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sandboxer_probe::process::Process;

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

    fn pod(id: &str) -> Option<PodIds> {
        Some(PodIds { pod: id.into(), containers: vec![format!("container-of-{id}")], pid: None })
    }

    /// Returns `seconds` s of own user time, and ten times as much of the children's.
    fn busy(seconds: u64) -> Ticks {
        let ticks = seconds * procfs::ticks_per_second();
        Ticks { own: [ticks, 0, 0], children: [10 * ticks, 0, 0] }
    }

    fn parts(processes: Vec<Process>, spent: &[(i32, u64)], pods: &Pods) -> Vec<(Part, f64)> {
        let table: Table = processes.into_iter().map(|process| (process.pid, process)).collect();
        let known = Known { cri: pods.cri, observers: [3].into(), ..Known::default() };
        let ids: Vec<PodIds> = pods.tested.iter().chain(&pods.client).cloned().collect();
        let found = attribution::attribute(&table, &ids, &known);
        let spent = spent.iter().map(|(pid, seconds)| (*pid, busy(*seconds))).collect();
        split(&spent, &table, &found, pods, 3)
            .into_iter()
            .map(|(part, time)| (part, time.total_s()))
            .collect()
    }

    #[test]
    fn what_a_shim_waited_for_is_the_container() {
        let table = vec![
            process(3, 1, "probe", ""),
            process(5, 1, "containerd", ""),
            process(10, 1, "containerd-shim-runc-v2", "-id pod-a"),
            process(20, 1, "containerd-shim-runc-v2", "-id pod-b"),
            process(30, 1, "bystander", ""),
        ];
        let pods = Pods { tested: pod("pod-a"), client: pod("pod-b"), cri: Some(5), in_vm: false };
        assert_eq!(
            parts(table, &[(3, 1), (5, 2), (10, 3), (20, 4), (30, 9)], &pods),
            [
                (Part::Shim, 3.0),
                (Part::Workload, 30.0),
                (Part::Cri, 22.0),
                (Part::Client, 44.0),
                (Part::Probe, 11.0)
            ]
        );
    }

    #[test]
    fn a_vm_runtime_has_its_daemon_its_vmm_and_its_pool_apart() {
        let table = vec![
            process(3, 1, "probe", ""),
            Process { watches: [50].into(), ..process(6, 1, "any-name", "") },
            process(50, 6, "qemu-system-x86_64", "-name pod-a"),
            process(51, 50, "helper-of-it", ""),
            process(60, 6, "qemu-system-x86_64", "-name pool-1"),
        ];
        let pods = Pods { tested: pod("pod-a"), ..Pods::default() };
        assert_eq!(
            parts(table, &[(6, 1), (50, 2), (51, 3), (60, 4)], &pods),
            [(Part::Vmm, 22.0), (Part::Daemon, 11.0), (Part::Helper, 33.0), (Part::Pool, 44.0)]
        );
    }

    #[test]
    fn a_native_tool_is_a_child_of_the_probe_also_when_it_has_ended() {
        let table =
            vec![process(3, 1, "probe", ""), process(9, 3, "sysbench", ""), process(11, 9, "its-child", "")];
        assert_eq!(
            parts(table, &[(3, 1), (9, 2), (11, 3)], &Pods::default()),
            [(Part::Workload, 10.0 + 22.0 + 33.0), (Part::Probe, 1.0)]
        );
        let table = vec![process(3, 1, "probe", ""), process(9, 3, "qemu-system-x86_64", "")];
        let pods = Pods { in_vm: true, ..Pods::default() };
        assert_eq!(parts(table, &[(9, 2)], &pods), [(Part::Vmm, 22.0)]);
    }

    #[test]
    fn guest_time_is_not_user_time_and_a_new_process_counts_whole() {
        let hertz = procfs::ticks_per_second();
        let used = time([3 * hertz, hertz, 2 * hertz]);
        assert_eq!((used.user_s, used.system_s, used.guest_s, used.total_s()), (1.0, 1.0, 2.0, 4.0));
        let reading = |processes: &[(i32, u64, u64)]| Reading {
            at: Instant::now(),
            host: None,
            processes: processes
                .iter()
                .map(|(pid, started, seconds)| (*pid, (*started, busy(*seconds))))
                .collect(),
        };
        let spent = reading(&[(1, 1, 5), (2, 9, 7)]).since(&reading(&[(1, 1, 4), (2, 2, 6)]));
        // The second pid belongs to a different process now.
        assert_eq!((spent[&1], spent[&2]), (busy(1), busy(7)));
    }

    #[test]
    fn this_test_is_seen_at_work() {
        let before = Reading::now();
        // Measured by this thread's own clock: the host may be busy.
        let spun = || {
            let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
            now.tv_sec * 1_000 + now.tv_nsec / 1_000_000
        };
        let begun = spun();
        while spun() - begun < 150 {}
        let used =
            since(&before, &Pods { tested: pod("no-such-pod-4711"), ..Pods::default() }, None).unwrap();
        assert!(used.parts[&Part::Probe].total_s() >= 0.1, "{used:?}");
    }
}
