//! Tables of made-up processes.

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
    // A VM runtime reports pid 20 of the guest; on the host, pid 20 may even be a process of another pod.
    let pods = [pod("pod-a", "ctr-a", 0)];
    let table = vec![process(20, 1, "sshd", "")];
    assert_eq!(roles(table, &pods, &Known::default()), []);
}

#[test]
fn kata_s_processes_are_a_shim_a_vmm_and_a_helper() {
    let (a, b) = (pod("pod-a", "ctr-a", 0), pod("pod-b", "ctr-b", 0));
    let known = Known { cri: Some(5), observers: [3].into(), ..Known::default() };
    let add_pod = |id: &str, shim: i32, table: &mut Vec<Process>| {
        table.push(process(shim, 1, "containerd-shim-kata-v2", &format!("-namespace k8s.io -id {id}")));
        // Its virtiofsd starts a second one; its VMM is found without KVM, too.
        table.push(process(
            shim + 1,
            shim,
            "virtiofsd",
            &format!("--socket-path=/run/vc/vm/{id}/vhost-fs.sock"),
        ));
        table.push(process(shim + 2, shim + 1, "virtiofsd", "--syslog"));
        table.push(process(
            shim + 3,
            shim,
            "cloud-hypervisor",
            &format!("--api-socket /run/vc/vm/{id}/clh-api.sock"),
        ));
    };
    let mut table = vec![process(3, 1, "observer", ""), process(5, 1, "containerd", "")];
    add_pod("pod-a", 10, &mut table);
    add_pod("pod-b", 20, &mut table);
    let mut expected = Vec::new();
    for (id, shim) in [("pod-a", 10), ("pod-b", 20)] {
        for (pid, role) in [(0, Role::Shim), (1, Role::Helper), (2, Role::Helper), (3, Role::Vmm)] {
            expected.push((shim + pid, role, Some(id.to_owned())));
        }
    }
    assert_eq!(roles(table, &[a, b], &known), expected);
}

/// Programs with Kata's names that only sleep. `/proc` shows them like Kata's own processes.
struct DoubleKata {
    shim: std::process::Child,
    children: Vec<i32>,
}

impl DoubleKata {
    fn start(dir: &std::path::Path, id: &str) -> Self {
        use std::os::unix::process::CommandExt;
        let (reader, writer) = std::io::pipe().unwrap();
        // Each program has one of Kata's names as its first argument.
        let script = format!(
            "bash -c 'exec -a virtiofsd sleep 600' --socket-path=/run/vc/vm/{id}/vhost-fs.sock >/dev/null & echo $!; \
             bash -c 'exec -a cloud-hypervisor sleep 600' >/dev/null & echo $!; exec >&-; wait"
        );
        let shim = std::process::Command::new("bash")
            .arg0("containerd-shim-kata-v2")
            .args(["-c", &script, "shim", "-id", id])
            .current_dir(dir)
            .stdout(writer)
            .spawn()
            .unwrap();
        let output = std::io::read_to_string(reader).unwrap();
        let children = output.lines().map(|line| line.parse().unwrap()).collect();
        Self { shim, children }
    }
}

impl Drop for DoubleKata {
    fn drop(&mut self) {
        for pid in self.children.iter().copied().chain([self.shim.id() as i32]) {
            if let Some(pid) = rustix::process::Pid::from_raw(pid) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
        let _ = self.shim.wait();
    }
}

#[test]
fn kata_s_processes_as_proc_shows_them_have_their_roles_and_their_memory() {
    let dir = tempfile::tempdir().unwrap();
    let id = "5a4d0e6c2f7b4a18953c2be6f10a7d44";
    let double = DoubleKata::start(dir.path(), id);
    let [virtiofsd, vmm] = double.children[..] else { panic!("{:?}", double.children) };
    let pods = [PodIds { pod: id.into(), ..PodIds::default() }];
    let named = |table: &Table| {
        [(virtiofsd, "virtiofsd"), (vmm, "cloud-hypervisor")]
            .iter()
            .all(|(pid, name)| table.get(pid).is_some_and(|process| process.name == *name))
    };
    // The children are bash until they have executed the program with the name.
    let begun = std::time::Instant::now();
    let table = loop {
        let table = crate::process::table().unwrap();
        if named(&table) {
            break table;
        }
        assert!(begun.elapsed() < std::time::Duration::from_secs(20), "the doubles did not start");
    };
    let known = Known { observers: [std::process::id() as i32].into(), ..Known::default() };
    let found = attribute(&table, &pods, &known);
    let role = |pid: i32| found.get(&pid).map(|tie| (tie.role, tie.pod.as_deref()));
    assert_eq!(role(double.shim.id() as i32), Some((Role::Shim, Some(id))));
    assert_eq!(role(virtiofsd), Some((Role::Helper, Some(id))));
    assert_eq!(role(vmm), Some((Role::Vmm, Some(id))));
    assert!(!role(virtiofsd).unwrap().0.is_management() && !role(vmm).unwrap().0.is_management());
    assert!([double.shim.id() as i32, virtiofsd, vmm].iter().all(|pid| crate::pss::total(*pid).unwrap() > 0));
}

/// Returns the rows of a recorded ledger at one number of pods as (runtime, process, role, pod). The ledger has the
/// ties; Kata's cgroups are the ones that its processes had in that run.
fn recorded(
    runtime: &str,
    pods: &str,
    cgroup: impl Fn(&str, &str) -> String,
) -> Vec<(Process, Role, String)> {
    let text = include_str!("../../../../docs/results/kata/memory-image/ledger.csv");
    let mut rows = csv::Reader::from_reader(text.as_bytes());
    let mut found: Vec<(Process, Role, String)> = Vec::new();
    for row in rows.records().map(Result::unwrap) {
        let [row_runtime, _, count, pid, name, pod, role, ..] = row.iter().collect::<Vec<_>>()[..] else {
            panic!("{row:?}")
        };
        let pid: i32 = pid.parse().unwrap();
        // A VMM has one row for each part of its memory.
        if row_runtime != runtime || count != pods || found.iter().any(|(process, ..)| process.pid == pid) {
            continue;
        }
        let process =
            Process { cgroups: vec![cgroup(name, pod)], command: name.into(), ..process(pid, 1, name, "") };
        found.push((process, serde_json::from_value(role.into()).unwrap(), pod.into()));
    }
    found
}

fn assert_as_recorded(rows: &[(Process, Role, String)], pods: usize) {
    let mut ids: Vec<&String> = rows.iter().map(|(.., pod)| pod).collect();
    ids.sort();
    ids.dedup();
    assert_eq!((ids.len(), rows.len()), (pods, 4 * pods), "a shim, a VMM and two virtiofsd each");
    let ids: Vec<PodIds> =
        ids.into_iter().map(|id| PodIds { pod: id.clone(), ..PodIds::default() }).collect();
    let mut table: Table = rows.iter().map(|(process, ..)| (process.pid, process.clone())).collect();
    // Other processes of such a node: containerd, and three kernel threads for each VM.
    table.insert(5, process(5, 1, "containerd", ""));
    let vmms: Vec<(i32, String)> = rows
        .iter()
        .filter(|(_, role, _)| *role == Role::Vmm)
        .map(|(process, _, pod)| (process.pid, pod.clone()))
        .collect();
    for (index, (vmm, _)) in vmms.iter().flat_map(|vmm| [vmm; 3]).enumerate() {
        let name = format!("vhost-{vmm}");
        let worker = Process { is_kernel_thread: true, ..process(90_000 + index as i32, *vmm, &name, "") };
        table.insert(worker.pid, Process { command: String::new(), ..worker });
    }
    let known = Known { cri: Some(5), observers: [3].into(), ..Known::default() };
    let found = attribute(&table, &ids, &known);
    for (process, role, pod) in rows {
        let tie = found.get(&process.pid).map(|tie| (tie.role, tie.pod.as_ref()));
        assert_eq!(tie, Some((*role, Some(pod))), "{process:?}");
    }
    for (vmm, pod) in vmms {
        let workers: Vec<&Found> = table
            .values()
            .filter(|process| process.is_kernel_thread && process.parent == vmm)
            .map(|process| &found[&process.pid])
            .collect();
        assert_eq!(workers.len(), 3);
        assert!(
            workers.iter().all(|tie| tie.role == Role::Vmm && tie.pod.as_ref() == Some(&pod)),
            "{workers:?}"
        );
    }
    assert!(found.values().all(|tie| tie.role != Role::Unattributed), "{found:?}");
}

#[test]
fn the_processes_of_a_real_kata_have_the_roles_that_a_person_found() {
    // Kata's Go shim has two cgroups for a pod, its Rust shim one.
    let go = |name: &str, pod: &str| match name {
        "qemu-system-x86_64" => format!("/k8s.io/kata_{pod}"),
        _ => format!("/kata_overhead/{pod}"),
    };
    for (count, pods) in [("1", 1), ("5", 5), ("10", 10)] {
        assert_as_recorded(&recorded("kata-image", count, go), pods);
        assert_as_recorded(&recorded("kata-rs-image", count, |_, pod| format!("/k8s.io/{pod}")), pods);
    }
}

#[test]
fn all_of_our_own_processes_are_management() {
    // In the recording, the helper had no role, and the front's two processes were in no row.
    let mut rows = recorded("sandboxer", "10", |_, pod| format!("/pods/{pod}"));
    let daemon = rows.iter().find(|(_, role, _)| *role == Role::Daemon).unwrap().0.pid;
    let vmms: BTreeSet<i32> =
        rows.iter().filter(|(_, role, _)| *role == Role::Vmm).map(|(process, ..)| process.pid).collect();
    for (process, role, _) in &mut rows {
        match role {
            Role::Daemon => (process.watches, process.parent) = (vmms.clone(), 271),
            Role::Unattributed | Role::Pool => process.parent = daemon,
            _ => process.parent = daemon,
        }
        process.program = Some((1, if process.name.starts_with("qemu") { 9 } else { 7 }));
        process.has_vm = process.name.starts_with("qemu");
    }
    let ids: Vec<PodIds> = rows
        .iter()
        .filter(|(_, role, _)| *role == Role::Vmm)
        .map(|(.., pod)| PodIds { pod: pod.clone(), ..PodIds::default() })
        .collect();
    let mut table: Table = rows.iter().map(|(process, ..)| (process.pid, process.clone())).collect();
    for (pid, parent) in [(270, 260), (271, 270)] {
        table.insert(pid, Process { program: Some((1, 8)), ..process(pid, parent, "sandboxer-front", "") });
    }
    // The program that started them does not belong to them.
    table.insert(260, process(260, 1, "bash", ""));
    // A short command of the daemon that makes a disk does not, either.
    table.insert(99, Process { program: Some((1, 5)), ..process(99, daemon, "mkfs.erofs", "") });
    let found = attribute(&table, &ids, &Known::default());
    let pids = |role: Role| {
        found.iter().filter(|(_, tie)| tie.role == role).map(|(pid, _)| *pid).collect::<Vec<_>>()
    };
    let helper = rows.iter().find(|(_, role, _)| *role == Role::Unattributed).unwrap().0.pid;
    assert_eq!(pids(Role::Daemon), [270, 271, daemon, helper]);
    assert_eq!(pids(Role::Unattributed), [99]);
    assert_eq!((pids(Role::Vmm).len(), pids(Role::Pool).len()), (10, 2));
}
