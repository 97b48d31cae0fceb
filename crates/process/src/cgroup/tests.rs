//! Tests of control groups, on directories that a test creates.

use super::*;

fn hierarchies(dir: &Path) -> Hierarchies {
    Hierarchies { roots: vec![dir.join("cpu"), dir.join("memory")], cpuset: None }
}

#[test]
fn parents_are_paths_or_slices_and_never_leave_the_hierarchy() {
    for (parent, path) in [
        ("", None),
        ("/", None),
        ("/kubepods/burstable/pod1", Some("kubepods/burstable/pod1")),
        ("a-b-c.slice", Some("a.slice/a-b.slice/a-b-c.slice")),
        ("/x/a-b.slice", Some("x/a-b.slice")),
        ("../../etc", Some("etc")),
    ] {
        assert_eq!(relative(parent), path.map(PathBuf::from), "{parent:?}");
    }
}

#[test]
fn a_burstable_pod_without_a_limit_of_its_own_has_containers_without() {
    let root = tempfile::tempdir().unwrap();
    let groups = hierarchies(root.path());
    let write = |parent: &str, file: &str, text: &str| {
        let (hierarchy, _) = file.split_once('.').unwrap();
        let dir = root.path().join(hierarchy).join(parent);
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join(file), text).unwrap();
    };
    let (none, all) = (Unlimited::default(), Unlimited { cpu: true, memory: true });
    assert_eq!(groups.unlimited("kubepods/burstable/pod1"), none, "it is not there");
    write("kubepods/burstable/pod1", "memory.max", "max\n");
    write("kubepods/burstable/pod1", "cpu.max", "max 100000\n");
    assert_eq!(groups.unlimited("kubepods/burstable/pod1"), all);
    write("kubepods/burstable/pod1", "memory.max", "67108864\n");
    assert_eq!(groups.unlimited("kubepods/burstable/pod1"), Unlimited { cpu: true, memory: false });
    write("kubepods/burstable/pod2", "memory.limit_in_bytes", "9223372036854771712\n");
    write("kubepods/burstable/pod2", "cpu.cfs_quota_us", "-1\n");
    assert_eq!(groups.unlimited("/kubepods/burstable/pod2"), all);
    write("kubepods/burstable/pod2", "memory.limit_in_bytes", "67108864\n");
    write("kubepods/burstable/pod2", "cpu.cfs_quota_us", "50000\n");
    assert_eq!(groups.unlimited("kubepods/burstable/pod2"), none);
    write("kubepods/pod3", "memory.max", "max\n");
    write("elsewhere", "memory.max", "max\n");
    assert_eq!((groups.unlimited("kubepods/pod3"), groups.unlimited("elsewhere")), (none, none));
}

fn on(cpus: &str, nodes: Option<&str>) -> Bounds {
    Bounds { cpus: Cpus::parse(cpus), nodes: nodes.and_then(Cpus::parse) }
}

#[tokio::test]
async fn a_vmm_is_confined_in_either_version() {
    let root = tempfile::tempdir().unwrap();
    let read = |path: &str| fs::read_to_string(root.path().join(path)).unwrap();
    let pod = "p".parse().unwrap();

    // Version 1: a group accepts a process once it has CPUs and nodes, which default to its parent's.
    let groups = Hierarchies { cpuset: Some(Cpuset::Own(root.path().join("v1"))), ..Hierarchies::default() };
    fs::create_dir_all(root.path().join("v1/pods")).unwrap();
    fs::write(root.path().join("v1/pods/cpuset.cpus"), "0-7\n").unwrap();
    fs::write(root.path().join("v1/pods/cpuset.mems"), "0\n").unwrap();
    let group = groups.for_pod("/pods", &pod).unwrap();
    group.confine(&[42], &on("2-3", None)).unwrap();
    let seen =
        ["cpuset.cpus", "cpuset.mems", "cgroup.procs"].map(|f| read(&format!("v1/pods/sandboxer-p/{f}")));
    assert_eq!(seen, ["2-3", "0", "42"]);
    assert!(!root.path().join("v1/pods/sandboxer-p/cpuset.memory_migrate").exists());
    assert_eq!(group.bounds(), on("2-3", None));
    group.confine(&[42], &on("4", Some("0"))).unwrap();
    assert_eq!(read("v1/pods/sandboxer-p/cpuset.memory_migrate"), "1");
    group.confine(&[42], &Bounds::default()).unwrap();
    assert_eq!(
        (read("v1/pods/sandboxer-p/cpuset.cpus").as_str(), group.bounds()),
        ("0-7", Bounds::default())
    );
    // A process that starts in the group, or moves to it, is confined from its first moment.
    assert_eq!(group.entries().unwrap().procs.len(), 1);
    group.enter(43).unwrap();
    assert_eq!(read("v1/pods/sandboxer-p/cgroup.procs"), "43");
    let other = groups.for_pod("/pods", &"other".parse().unwrap()).unwrap();
    assert!(other.entries().unwrap().procs.is_empty(), "a group that was never confined");

    // Version 2: the parent passes the controller on.
    let unified = root.path().join("v2");
    let groups = Hierarchies::unified(&unified);
    let group = groups.for_pod("/pods", &pod).unwrap();
    group.make().unwrap();
    group.restrict(&Bounds::default()).unwrap();
    assert!(!root.path().join("v2/pods/cgroup.subtree_control").exists(), "nothing to do");
    group.confine(&[42], &on("2-3", None)).unwrap();
    assert_eq!(read("v2/pods/cgroup.subtree_control"), "+cpuset");
    assert_eq!(read("v2/pods/sandboxer-p/cpuset.cpus"), "2-3");
    assert!(!root.path().join("v2/pods/sandboxer-p/cpuset.mems").exists());
    group.confine(&[42], &on("2-3", Some("1"))).unwrap();
    assert_eq!((group.bounds(), other.bounds()), (on("2-3", Some("1")), Bounds::default()));
    assert_eq!(read("v2/pods/sandboxer-p/cpuset.mems"), "1");
    group.confine(&[42], &Bounds::default()).unwrap();
    assert_eq!(["cpus", "mems"].map(|f| read(&format!("v2/pods/sandboxer-p/cpuset.{f}"))), ["", ""]);

    let none = Hierarchies::default().for_pod("/pods", &pod).unwrap();
    let (_, error) = none.confine(&[42], &on("0", None)).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::Unsupported);
}

#[test]
fn a_group_that_yields_has_a_tenth_of_the_weight_in_either_version() {
    let root = tempfile::tempdir().unwrap();
    let group = hierarchies(root.path()).named("/idle").unwrap();
    group.make().unwrap();
    let files = [("cpu/idle/cpu.shares", "102"), ("memory/idle/cpu.weight", "10")];
    files.iter().for_each(|(file, _)| fs::write(root.path().join(file), "1024").unwrap());
    group.yield_to_others().unwrap();
    for (file, weight) in files {
        assert_eq!(fs::read_to_string(root.path().join(file)).unwrap(), weight);
    }
}

#[tokio::test]
async fn a_group_is_made_entered_and_removed_in_each_hierarchy() {
    let root = tempfile::tempdir().unwrap();
    let group = hierarchies(root.path()).for_pod("/pods", &"p".parse().unwrap()).unwrap();
    group.make().unwrap();
    group.make().unwrap();
    group.enter(42).unwrap();
    for hierarchy in ["cpu", "memory"] {
        let processes = root.path().join(hierarchy).join("pods/sandboxer-p/cgroup.procs");
        assert_eq!(fs::read_to_string(&processes).unwrap(), "42");
        // The kernel's own files do not keep a group from being removed.
        fs::remove_file(processes).unwrap();
    }
    group.remove().await.unwrap();
    group.remove().await.unwrap();
    assert!(root.path().join("cpu/pods").exists(), "the parent is the manager's");
    assert!(!root.path().join("cpu/pods/sandboxer-p").exists());
}

#[test]
fn the_processes_in_a_busy_group_are_named() {
    let group = tempfile::tempdir().unwrap();
    let me = std::process::id();
    fs::write(group.path().join(PROCESSES), format!("{me}\n4194304\n")).unwrap();
    let own = fs::read_to_string("/proc/self/comm").unwrap();
    let named = format!("processes have not ended: {me} ({}), 4194304 ()", own.trim_end());
    assert_eq!(still_in(group.path()), named);
    fs::write(group.path().join(PROCESSES), "").unwrap();
    assert!(still_in(group.path()).starts_with("it has groups below it"));
}

#[test]
fn the_strictest_limit_of_huge_pages_counts_with_what_is_in_use() {
    let root = tempfile::tempdir().unwrap();
    let group = Hierarchies::unified(root.path()).for_pod("kubepods/pod1", &"p".parse().unwrap()).unwrap();
    let write = |name: &str, limit: &str, used: &str| {
        let dir = root.path().join(name);
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("hugetlb.2MB.max"), limit).unwrap();
        fs::write(dir.join("hugetlb.2MB.current"), used).unwrap();
    };
    assert_eq!(group.huge_pages_allowed(), None, "no controller");
    write("kubepods", "max\n", "4194304\n");
    write("kubepods/pod1/sandboxer-p", "max\n", "0\n");
    assert_eq!(group.huge_pages_allowed(), None, "no limit");
    write("kubepods/pod1", "6291456\n", "2097152\n");
    let limit = root.path().join("kubepods/pod1/hugetlb.2MB.max");
    assert_eq!(group.huge_pages_allowed(), Some((limit.clone(), 4 << 20)));
    write("kubepods/pod1", "0\n", "2097152\n");
    assert_eq!(group.huge_pages_allowed(), Some((limit, 0)), "lowered below what is in use");
}
