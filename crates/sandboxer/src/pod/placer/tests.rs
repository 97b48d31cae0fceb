//! Choices of nodes, on hosts that a test describes.

use tempfile::TempDir;

use super::*;

/// Describes a host: CPUs, memory and available memory (MiB) of each node.
fn host(nodes: &[(&str, u64, u64)]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (id, (cpus, total, available)) in nodes.iter().enumerate() {
        let node = dir.path().join(format!("node{id}"));
        fs::create_dir(&node).unwrap();
        fs::write(node.join("cpulist"), format!("{cpus}\n")).unwrap();
        has(dir.path(), id, *total, *available);
    }
    dir
}

fn has(dir: &Path, node: usize, total: u64, available: u64) {
    let text =
        format!("Node {node} MemTotal: {} kB\nNode {node} MemFree: {} kB\n", total << 10, available << 10);
    fs::write(dir.join(format!("node{node}/meminfo")), text).unwrap();
}

fn placer(dir: &TempDir, policy: PlacementPolicy, reserved: &str) -> Arc<Placer> {
    let config = PlacementConfig {
        policy,
        reserved_cpus: Cpus::parse(reserved),
        huge_pages: false,
        nodes_dir: dir.path().to_owned(),
    };
    Arc::new(Placer::new(&config, &Hierarchies::default(), "/idle"))
}

fn shape(vcpus: u32, memory_mib: u64) -> Shape {
    Shape { vcpus, memory_mib, nics: 1 }
}

const TWO: [(&str, u64, u64); 2] = [("0-3", 1000, 900), ("4-7", 1000, 800)];

#[test]
fn vms_go_where_fewest_vcpus_are_and_then_where_most_memory_is() {
    let dir = host(&TWO);
    let placer = placer(&dir, PlacementPolicy::Numa, "");
    let seats: Vec<Seat> = [2, 1, 1, 2].map(|vcpus| placer.seat(shape(vcpus, 100)).unwrap()).into();
    // An empty host: the node with the most memory. Then the emptier node, until both are equally loaded.
    assert_eq!(seats.iter().map(Seat::node).collect::<Vec<_>>(), [0, 1, 1, 0]);
    assert_eq!(placer.load(0), Load { vms: 2, vcpus: 4, memory_mib: 200 });
    assert_eq!(placer.bounds(Some(&seats[1])).cpus.unwrap().to_string(), "4-7");

    // A clone is the same place.
    let clone = seats[0].clone();
    drop(seats);
    assert_eq!((placer.load(0).vcpus, placer.load(1)), (2, Load::default()));
    drop(clone);
    assert_eq!(placer.load(0), Load::default());
}

#[test]
fn a_vm_counts_with_the_size_that_it_has_now() {
    let dir = host(&TWO);
    let placer = placer(&dir, PlacementPolicy::Numa, "");
    let seat = placer.seat(shape(1, 100)).unwrap();
    seat.resize(3, 300);
    assert_eq!(placer.load(0), Load { vms: 1, vcpus: 3, memory_mib: 300 });
    seat.clone().resize(2, 100);
    assert_eq!(placer.load(0), Load { vms: 1, vcpus: 2, memory_mib: 100 });
    drop(seat);
    assert_eq!(placer.load(0), Load::default());
}

#[test]
fn a_vm_in_huge_pages_needs_those_and_no_other_memory() {
    let dir = host(&TWO);
    let placer = placer(&dir, PlacementPolicy::Numa, "");
    assert_eq!(placer.seat_in_huge_pages(shape(1, 100)).unwrap_err(), Unplaced::NoMemory, "a kernel without");
    for (node, pages) in [(0, "49"), (1, "50\n")] {
        let pages_dir = dir.path().join(format!("node{node}/hugepages/hugepages-2048kB"));
        fs::create_dir_all(&pages_dir).unwrap();
        fs::write(pages_dir.join("free_hugepages"), pages).unwrap();
        has(dir.path(), node, 1000, 0);
    }
    assert_eq!(placer.seat_in_huge_pages(shape(1, 100)).unwrap().node(), 1);
    assert_eq!(placer.seat_in_huge_pages(shape(1, 102)).unwrap_err(), Unplaced::NoMemory);
    assert_eq!(placer.seat_in_huge_pages(shape(5, 2)).unwrap_err(), Unplaced::TooLarge);
}

#[test]
fn a_node_without_memory_is_left_out() {
    let dir = host(&TWO);
    let placer = placer(&dir, PlacementPolicy::Numa, "");
    has(dir.path(), 0, 1000, 99);
    let seats = [0; 3].map(|_| placer.seat(shape(1, 100)).unwrap());
    assert!(seats.iter().all(|seat| seat.node() == 1), "{seats:?}");
    has(dir.path(), 1, 1000, 99);
    assert_eq!(placer.seat(shape(1, 100)).unwrap_err(), Unplaced::NoMemory);
    fs::remove_file(dir.path().join("node1/meminfo")).unwrap();
    assert_eq!(placer.seat(shape(1, 100)).unwrap_err(), Unplaced::NoMemory);
}

#[test]
fn a_vm_that_is_larger_than_a_node_has_none() {
    let dir = host(&[("0-3", 1000, 900), ("4-5", 2000, 1900)]);
    let placer = placer(&dir, PlacementPolicy::Numa, "0");
    for (vcpus, memory_mib, node) in
        [(3, 1000, None), (3, 900, Some(0)), (2, 1900, Some(1)), (4, 100, None), (2, 2001, None)]
    {
        let seat = placer.seat(shape(vcpus, memory_mib));
        assert_eq!(seat.as_ref().ok().map(Seat::node), node, "{vcpus} {memory_mib}");
        if node.is_none() && (vcpus > 3 || memory_mib > 2000) {
            assert_eq!(seat.unwrap_err(), Unplaced::TooLarge);
        }
    }
}

#[test]
fn with_one_node_or_without_a_policy_nothing_is_placed_and_nothing_read() {
    for (nodes, policy) in
        [(&TWO[..1], PlacementPolicy::Numa), (&[], PlacementPolicy::Numa), (&TWO[..], PlacementPolicy::Off)]
    {
        let dir = host(nodes);
        let placer = placer(&dir, policy, "");
        drop(dir);
        assert!(!placer.is_active() && !placer.places_idle());
        assert_eq!(placer.seat(shape(1, 1)).unwrap_err(), Unplaced::Nothing);
        assert_eq!(placer.bounds(None), Bounds::default());
        assert_eq!(placer.seat_on(0, shape(1, 1)).unwrap_err(), NoSeat::Nothing);
        let again = placer.again(Some(PlacementRecord { node: Some(1), reason: "x".into() }), shape(1, 1));
        assert_eq!(again.record(), None);
    }
}

#[test]
fn reserved_cpus_are_left_out_with_any_policy() {
    let dir = host(&TWO);
    for policy in [PlacementPolicy::Off, PlacementPolicy::Numa] {
        let placer = placer(&dir, policy, "0,4-5");
        assert_eq!(placer.bounds(None).cpus.unwrap().to_string(), "1-3,6-7");
    }
    let numa = placer(&dir, PlacementPolicy::Numa, "0,4-5");
    assert_eq!(numa.seat_on(1, shape(2, 1)).unwrap().cpus().to_string(), "6-7");
    // A node whose CPUs are all reserved is not available for VMs.
    assert!(!placer(&dir, PlacementPolicy::Numa, "4-7").is_active());
    assert_eq!(placer(&dir, PlacementPolicy::Numa, "0-7").bounds(None), Bounds::default());
}

#[test]
fn a_move_names_what_is_in_its_way() {
    let dir = host(&TWO);
    let placer = placer(&dir, PlacementPolicy::Numa, "");
    let refused = |node, shape| placer.seat_on(node, shape).unwrap_err().to_string();
    assert_eq!(refused(2, shape(1, 1)), "the host has no node 2 with CPUs for VMs: it has 0, 1");
    assert_eq!(
        refused(1, shape(5, 64)),
        "its 5 vCPU, 64 MiB do not fit node 1, which has 4 CPUs for VMs and 1000 MiB"
    );
    assert_eq!(refused(1, shape(1, 801)), "node 1 has 800 MiB available, the pod may use 801");
    let seat = placer.seat_on(1, shape(1, 800)).unwrap();
    assert_eq!((seat.node(), placer.load(1).vms), (1, 1));
}

#[test]
fn a_placement_is_the_same_after_a_restart() {
    let dir = host(&TWO);
    let (before, after) = (placer(&dir, PlacementPolicy::Numa, ""), placer(&dir, PlacementPolicy::Numa, ""));
    let seat = before.seat_on(1, shape(2, 64)).unwrap();
    let record = Placement { seat: Some(seat), reason: "because".into() }.record();
    assert_eq!(record, Some(PlacementRecord { node: Some(1), reason: "because".into() }));
    // Regardless of the memory available now: the VM's memory is there already.
    has(dir.path(), 1, 1000, 0);
    let again = after.again(record.clone(), shape(2, 64));
    assert_eq!((again.record(), after.load(1).vcpus), (record, 2));
    let lost = after.again(Some(PlacementRecord { node: Some(7), reason: String::new() }), shape(1, 1));
    assert!(lost.seat.is_none() && lost.reason.contains("no node 7"), "{lost:?}");
    assert_eq!(after.again(None, shape(1, 1)).record(), None);
    let off = placer(&dir, PlacementPolicy::Off, "");
    assert_eq!(off.again(again.record(), shape(1, 1)).record(), None);
}
