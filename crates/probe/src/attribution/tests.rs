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
    // A VM runtime reports pid 20 of the guest; on the host that is somebody else, of another pod even.
    let pods = [pod("pod-a", "ctr-a", 0)];
    let table = vec![process(20, 1, "sshd", "")];
    assert_eq!(roles(table, &pods, &Known::default()), []);
}
