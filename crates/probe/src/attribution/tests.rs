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

#[test]
fn kata_s_processes_are_a_shim_a_vmm_and_a_helper() {
    let (a, b) = (pod("pod-a", "ctr-a", 0), pod("pod-b", "ctr-b", 0));
    let known = Known { cri: Some(5), observers: [3].into(), ..Known::default() };
    let of = |id: &str, shim: i32, table: &mut Vec<Process>| {
        table.push(process(shim, 1, "containerd-shim-kata-v2", &format!("-namespace k8s.io -id {id}")));
        // Its virtiofsd starts another one; its VMM is found without KVM, too.
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
    of("pod-a", 10, &mut table);
    of("pod-b", 20, &mut table);
    let mut expected = Vec::new();
    for (id, shim) in [("pod-a", 10), ("pod-b", 20)] {
        for (pid, role) in [(0, Role::Shim), (1, Role::Helper), (2, Role::Helper), (3, Role::Vmm)] {
            expected.push((shim + pid, role, Some(id.to_owned())));
        }
    }
    assert_eq!(roles(table, &[a, b], &known), expected);
}

/// Programs with Kata's names that sleep: doubles of its processes, which `/proc` shows like the real ones.
struct DoubleKata {
    shim: std::process::Child,
    children: Vec<i32>,
}

impl DoubleKata {
    fn start(dir: &std::path::Path, id: &str) -> Self {
        use std::os::unix::process::CommandExt;
        let (reader, writer) = std::io::pipe().unwrap();
        // Each has a name of Kata's as its first argument.
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
        let said = std::io::read_to_string(reader).unwrap();
        let children = said.lines().map(|line| line.parse().unwrap()).collect();
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
