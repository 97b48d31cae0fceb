//! The contract that every VMM must meet.

use std::{
    fs::{self, File},
    hash::{DefaultHasher, Hasher},
    io,
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use nix::net::if_::if_nametoindex;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use sandboxer_host::network::{namespace, tap};
use sandboxer_process::confinement::Confinement;
use sandboxer_vmm::{
    AgentStream, Destination, DiskRecord, DiskSpec, FIRST_IMAGE, Frozen, HOTPLUG_STEP_MIB, HotpluggedMemory,
    MEMORY, SPARE, Vcpus, Vm, VmRecord, VmSpec, Vmm, VmmError, hotplug,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    sync::Mutex,
    time::timeout,
};

use super::{Guest, Pod, has_open, read_only, share_server::ShareServer};

/// Far longer than anything these tests wait for on a busy host.
const LONG: Duration = Duration::from_secs(90);

/// Returns a VM's network interface lasts as long as its tap.
pub async fn a_tap_is_held_as_long_as_the_vm_runs(
    vmm: &dyn Vmm,
    spec: fn(&Pod) -> VmSpec,
    look: impl AsyncFnOnce(Guest),
) {
    let pod = Pod::new("tap");
    let network = namespace::fresh().expect("only root makes network namespaces");
    let tap = namespace::within(&network, || tap::open(c"tap")).unwrap();
    let is_there = || namespace::within(&network, || Ok::<_, std::io::Error>(if_nametoindex("tap")?)).is_ok();
    let vm = vmm.boot(&VmSpec { nics: 1, taps: vec![Arc::new(tap)], ..spec(&pod) }).await.expect("it boots");
    look(Guest::connect(&*vm).await).await;
    assert!(is_there(), "nobody holds the tap");
    vm.kill().await.unwrap();
    assert!(!is_there(), "the tap outlived its VM");
}

/// Tests a VMM against the contract. `spec` returns, for a pod, a VM whose guest answers as `init.sh` does.
pub async fn keeps_the_contract(vmm: &dyn Vmm, spec: fn(&Pod) -> VmSpec) {
    let pod = Pod::new("contract");
    let (first, second) = (pod.disk("first"), pod.limited_disk("second"));
    let vm = vmm.boot(&spec(&pod)).await.expect("the VM boots");
    let mut guest = Guest::connect(&*vm).await;
    assert_eq!(guest.ask("hello").await, "hello host");

    disks_come_and_go(&*vm, &mut guest, &first, &second).await;
    the_last_stream_wins(&*vm, guest).await;

    // As if the daemon died: only the record remains.
    let record = vm.record();
    drop(vm);
    let stored = serde_json::to_string(&record).unwrap();
    let record: VmRecord = serde_json::from_str(&stored).unwrap();
    let vm = vmm.adopt(&record).await.unwrap().expect("the VM outlived its handle");
    assert_eq!(vm.record(), record);
    let mut guest = Guest::connect(&*vm).await;
    assert_eq!(guest.ask("hello").await, "hello host");
    vm.attach_disk(&second).await.expect("an adopted VM takes disks");
    assert_eq!(guest.ask("await second").await, "disk second ro=0 starts with second");

    let somebody_else = VmRecord { start_time: record.start_time + 1, ..record.clone() };
    assert!(vmm.adopt(&somebody_else).await.unwrap().is_none(), "a pid alone was taken for the VM");

    vm.kill().await.unwrap();
    vm.kill().await.expect("killing the dead is no error");
    let exit = timeout(LONG, vm.exited()).await.expect("the end is seen");
    assert_eq!(timeout(LONG, vm.exited()).await.unwrap(), exit, "the end is told once only");
    assert!(vmm.adopt(&record).await.unwrap().is_none(), "a dead VM was adopted");
    assert!(vm.attach_disk(&first).await.is_err(), "a dead VM took a disk");
    assert!(vm.agent_stream().await.is_err(), "a dead VM has an agent");

    a_guest_that_powers_off_is_seen(vmm, spec, false).await;
    a_guest_that_powers_off_is_seen(vmm, spec, true).await;
}

async fn disks_come_and_go(vm: &dyn Vm, guest: &mut Guest, first: &DiskSpec, second: &DiskSpec) {
    let read_only = read_only(first);
    vm.attach_disk(&read_only).await.expect("a disk is plugged in");
    vm.attach_disk(second).await.expect("so is another");
    assert_eq!(guest.ask("await second").await, "disk second ro=0 starts with second");
    assert_eq!(guest.ask("await first").await, "disk first ro=1 starts with first");

    let twice = vm.attach_disk(&read_only).await.unwrap_err();
    assert!(matches!(twice, VmmError::Refused { .. }), "{twice}");
    assert_eq!(guest.ask("await first").await, "disk first ro=1 starts with first");

    vm.detach_disk("never-there").await.expect("detaching what isn't there is no error");
    vm.detach_disk("second").await.expect("a disk is unplugged");
    assert_eq!(guest.ask("await-gone second").await, "gone second");
    vm.attach_disk(second).await.expect("its serial is free again");
    assert_eq!(guest.ask("await second").await, "disk second ro=0 starts with second");
    vm.detach_disk("second").await.unwrap();
    assert_eq!(guest.ask("await-gone second").await, "gone second");
}

/// Returns the guest's file requests reach their server, and the answers the guest, without the daemon.
pub async fn requests_for_files_have_a_link_of_their_own(vmm: &dyn Vmm, spec: fn(&Pod) -> VmSpec) {
    // State: there it is. Head: 80 bytes, no error, of request 7.
    const ANSWER: &str = "0100000050000000000000000700000000000000";
    let pod = Pod::new("shares");
    let vm = vmm.boot(&spec(&pod)).await.expect("it boots");
    let mut guest = Guest::connect(&*vm).await;
    assert_eq!(guest.ask("hello").await, "hello host");
    let _server = ShareServer::start(&pod, vm.listen_for_shares().expect("it listens for shares"));
    vm.connect_shares().await.expect("the guest gets its end");
    assert_eq!(guest.ask("ask-for-files").await, ANSWER);
    let record = vm.record();
    drop((vm, guest));
    let vm = vmm.adopt(&record).await.unwrap().expect("the VM outlived its handle");
    let mut guest = Guest::connect(&*vm).await;
    assert_eq!(guest.ask("ask-for-files").await, ANSWER, "the link ended with the daemon");
    // A daemon that does not know how far the last one came.
    vm.connect_shares().await.expect("it is begun anew");
    assert_eq!(guest.ask("ask-for-files").await, ANSWER);
    vm.pause().await.expect("it holds up nothing");
    vm.resume().await.unwrap();
    assert_eq!(guest.ask("ask-for-files").await, ANSWER);
    vm.kill().await.unwrap();
}

async fn the_last_stream_wins(vm: &dyn Vm, guest: Guest) {
    let mut old = guest.into_stream();
    let mut new = Guest::connect(vm).await;
    assert_eq!(new.ask("hello").await, "hello host");
    assert!(is_dead(&mut *old).await, "two streams to one agent");
}

async fn is_dead(stream: &mut dyn AgentStream) -> bool {
    let read = timeout(LONG, stream.read_u8()).await.expect("a dead stream says so");
    read.is_err() && stream.write_all(b"hello\n").await.is_err()
}

/// Inspects a VM's process from outside. Returns its user. `kvm`: it needs the device; `has_writable_dir`: it has a
/// directory that it can write to.
pub fn is_jailed(vm: &dyn Vm, kvm: bool, has_writable_dir: bool) -> u32 {
    let proc = Path::new("/proc").join(vm.record().pid.to_string());
    let status = fs::read_to_string(proc.join("status")).unwrap();
    let field = |name: &str| -> Vec<&str> {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        line.trim_start_matches(':').split_whitespace().collect()
    };
    let user: u32 = field("Uid")[0].parse().unwrap();
    assert!(user >= 0x7000_0000 && field("Uid").iter().all(|id| *id == field("Uid")[0]), "{status}");
    assert_eq!(field("Gid"), field("Uid"));
    // Its only group of the host is that of /dev/kvm, if that group may open it.
    let kvm = fs::metadata("/dev/kvm").ok().filter(|_| kvm);
    let groups: Vec<u32> = kvm.iter().map(MetadataExt::gid).filter(|group| *group != 0).collect();
    assert_eq!(field("Groups"), groups.iter().map(u32::to_string).collect::<Vec<_>>(), "{status}");
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(field(set), ["0000000000000000"], "{set}");
    }
    assert_eq!((field("NoNewPrivs"), field("Seccomp")), (vec!["1"], vec!["2"]));
    assert_eq!(field("NSpid").last(), Some(&"1"), "{status}");
    for namespace in ["mnt", "pid", "net", "ipc", "uts", "cgroup", "user"] {
        let namespace_of = |proc: &Path| fs::read_link(proc.join("ns").join(namespace)).unwrap();
        assert_ne!(namespace_of(&proc), namespace_of(Path::new("/proc/self")), "{namespace} is the host's");
    }
    // Its own user namespace maps only itself.
    for map in ["uid_map", "gid_map"] {
        let text = fs::read_to_string(proc.join(map)).unwrap();
        let ids: Vec<u32> = text.split_whitespace().map(|id| id.parse().unwrap()).collect();
        assert_eq!(ids, [user, user, 1], "{map}");
    }
    assert_eq!(fs::read_to_string(proc.join("setgroups")).unwrap().trim(), "deny");
    let root = proc.join("root");
    let names = |dir: &str| {
        let entries = fs::read_dir(root.join(dir)).unwrap().flatten();
        let mut names: Vec<_> = entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    assert_eq!(names("etc"), ["ld.so.cache"]);
    let devices = if kvm.is_some() { vec!["kvm", "null", "urandom"] } else { vec!["null", "urandom"] };
    assert_eq!(names("dev"), devices);
    let mounts = fs::read_to_string(proc.join("mounts")).unwrap();
    for mount in mounts.lines().filter(|mount| !mount.contains(" /dev/") && !mount.contains(" /proc ")) {
        let options = mount.split(' ').nth(3).unwrap();
        let is_writable_dir =
            has_writable_dir && mount.starts_with("room /run tmpfs rw,nosuid,nodev,noexec,");
        assert!(options.starts_with("ro") || is_writable_dir, "{mount} can be written");
    }
    // What people are shown is read here, too.
    let seen = Confinement::read(vm.record().pid).unwrap();
    assert_eq!((seen.uid, seen.gid, &seen.groups), (user, user, &groups));
    assert_eq!((seen.capabilities, seen.capability_bounds), (0, 0));
    assert!(seen.no_new_privileges && seen.seccomp == "filter", "{seen:?}");
    assert_eq!(seen.own_namespaces, ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"]);
    assert!(seen.shared_namespaces.is_empty(), "{seen:?}");
    assert!(seen.root.starts_with("tmpfs ro,"), "{seen:?}");
    // By default a daemon's limit is a million.
    let files = seen.limits.iter().find(|(name, ..)| name == "Max open files");
    assert!(files.is_some_and(|(_, soft, hard)| *soft <= 4096 && hard == soft), "{seen:?}");
    assert_eq!(seen.mounts as usize, mounts.lines().count());
    user
}

/// Tests the disks for which a VM may have a device from its boot on: a VM, and a copy of a frozen one.
pub async fn takes_the_disks_of_a_first_container(vmm: &dyn Vmm, spec: fn(&Pod) -> VmSpec) {
    let pod = Pod::new("first-disks");
    let disks = vec![pod.limited_disk(SPARE)];
    let vm = vmm.boot(&VmSpec { disks, ..spec(&pod) }).await.expect("it boots with its disk for writes");
    let (vm, _guest) = images_come_and_go(vmm, vm, &pod).await;
    vm.detach_disk(SPARE).await.expect("it is unplugged");
    assert!(!has_open(vm.record().pid, &pod.disk(SPARE)).unwrap(), "its file stays open");
    vm.kill().await.unwrap();

    let host = Pod::new("first-disks-of-a-template");
    let frozen = frozen(vmm, spec, async |vm, mut guest| {
        vm.attach_disk(&host.disk(SPARE)).await.expect("the disk comes later");
        assert_eq!(guest.ask("await spare-0").await, "disk spare-0 ro=0 starts with spare-0");
    })
    .await;
    let pod = Pod::new("first-disks-of-a-copy");
    let spare = DiskSpec { serial: SPARE.into(), ..pod.limited_disk("of-the-copy") };
    let copy = VmSpec { disks: vec![spare], ..spec(&pod) };
    let vm = vmm.restore(&copy, &frozen).await.expect("a VM is restored");
    vm.resume().await.unwrap();
    let (vm, mut guest) = images_come_and_go(vmm, vm, &pod).await;
    assert_eq!(guest.ask("await spare-0").await, "disk spare-0 ro=0 starts with of-the-copy");
    vm.kill().await.unwrap();
}

/// Attaches a first image to a VM, and after it another one, by a later daemon.
async fn images_come_and_go(vmm: &dyn Vmm, vm: Arc<dyn Vm>, pod: &Pod) -> (Arc<dyn Vm>, Guest) {
    let image = |name: &str| DiskSpec { serial: FIRST_IMAGE.into(), ..pod.read_only_disk(name) };
    let (one, other) = (image("one"), image("other"));
    let mut guest = Guest::connect(&*vm).await;
    vm.attach_disk(&one).await.expect("it takes an image");
    assert_eq!(guest.ask("await image-0").await, "disk image-0 ro=1 starts with one");
    let twice = vm.attach_disk(&other).await.unwrap_err();
    assert!(matches!(twice, VmmError::Refused { .. }), "{twice}");
    assert_eq!(guest.ask("await image-0").await, "disk image-0 ro=1 starts with one");
    // As if the daemon died: only the record remains.
    let record = vm.record();
    drop((vm, guest));
    let vm = vmm.adopt(&record).await.unwrap().expect("the VM outlived its handle");
    let mut guest = Guest::connect(&*vm).await;
    vm.detach_disk(FIRST_IMAGE).await.expect("it is unplugged");
    assert!(!has_open(record.pid, &one).unwrap(), "its file stays open");
    vm.detach_disk(FIRST_IMAGE).await.expect("detaching what isn't there is no error");
    vm.attach_disk(&other).await.expect("its serial is free again");
    // A guest may still have the first one's device, but not its content.
    assert_eq!(guest.ask("await image-0").await, "disk image-0 ro=1 starts with other");
    (vm, guest)
}

/// Serial of a disk that a VM has when it is frozen.
const KEPT: &str = "kept";

/// Tests a VMM that freezes and restores VMs against the rest of the contract.
pub async fn copies_of_a_frozen_vm_are_vms(vmm: &dyn Vmm, spec: fn(&Pod) -> VmSpec) {
    let host = Pod::new("host");
    let disk = host.disk(KEPT);
    let frozen = frozen(vmm, spec, async |vm, mut guest| {
        vm.attach_disk(&disk).await.expect("a VM that is to be frozen takes disks");
        assert_eq!(guest.ask("await kept").await, "disk kept ro=0 starts with kept");
    })
    .await;
    let (one, two) = (Pod::new("one"), Pod::new("two"));
    let (of_one, of_two) = (spec(&one), spec(&two));
    let of_another_pod =
        VmSpec { pod: of_two.pod, run_dir: of_two.run_dir, boot: of_two.boot, ..of_one.clone() };
    assert_eq!(vmm.template_inputs(&of_one), vmm.template_inputs(&of_another_pod));
    let mut vms = Vec::new();
    for pod in [&one, &two] {
        let disk = DiskSpec { serial: KEPT.into(), ..pod.limited_disk(&format!("of-{}", pod.name())) };
        let spec = VmSpec { disks: vec![disk.clone()], ..spec(pod) };
        let vm = vmm.restore(&spec, &frozen).await.expect("a VM is restored");
        vm.resume().await.expect("and goes on");
        let mut guest = Guest::connect(&*vm).await;
        assert_eq!(guest.ask("hello").await, "hello host");
        let seen = format!("disk kept ro=0 starts with of-{}", pod.name());
        assert_eq!(guest.ask("await kept").await, seen, "a copy has its template's disk");
        vm.detach_disk(KEPT).await.expect("a copy's disk is unplugged");
        assert_eq!(guest.ask("await-gone kept").await, "gone kept");
        assert!(
            !has_open(vm.record().pid, &disk).unwrap(),
            "the file of a disk that is unplugged stays open"
        );
        vm.attach_disk(&pod.disk(pod.name())).await.expect("it takes disks");
        let seen = format!("disk {0} ro=0 starts with {0}", pod.name());
        assert_eq!(guest.ask(&format!("await {}", pod.name())).await, seen);
        vms.push((vm, guest));
    }
    assert_eq!(vms[0].1.ask("await-gone two").await, "gone two", "one guest has the other's disk");

    // A VM without a pod is assigned to one.
    let (nobodys, guest) = vms.remove(0);
    nobodys.pause().await.unwrap();
    let pod = Pod::new("somebody");
    let vm = nobodys.assign(&"somebody".parse().unwrap(), &pod.path("run")).unwrap();
    vm.resume().await.unwrap();
    let record = vm.record();
    assert_eq!((record.pod.as_str(), &record.run_dir), ("somebody", &pod.path("run")));
    assert!(!one.path("run").exists(), "the VM's directory was not moved");
    drop((nobodys, vm, guest));
    let vm = vmm.adopt(&record).await.unwrap().expect("it is found where it was moved to");
    let mut guest = Guest::connect(&*vm).await;
    assert_eq!(guest.ask("hello").await, "hello host");
    for vm in [vm, vms.remove(0).0] {
        vm.kill().await.unwrap();
    }
}

/// Tests that memory which a guest has freed comes back to the host, from a VM that booted and from a copy of a frozen one.
/// `spec` needs some 200 MiB.
pub async fn freed_memory_comes_back(vmm: &dyn Vmm, spec: fn(&Pod) -> VmSpec) {
    let (pod, copy) = (Pod::new("booted"), Pod::new("copied"));
    let booted = vmm.boot(&spec(&pod)).await.expect("it boots");
    gives_back(&*booted).await;
    booted.kill().await.unwrap();

    let frozen = frozen(vmm, spec, async |_, _| {}).await;
    let before = digest_of_memory(&frozen);
    let copied = vmm.restore(&spec(&copy), &frozen).await.expect("a VM is restored");
    copied.resume().await.expect("and goes on");
    gives_back(&*copied).await;
    copied.kill().await.unwrap();
    assert_eq!(digest_of_memory(&frozen), before, "a copy changed the memory that others share with it");
}

/// Tests that a guest gets memory and gives it back while it runs: one that booted, and a copy of a frozen one.
pub async fn grows_and_shrinks(vmm: &dyn Vmm, spec: fn(&Pod) -> VmSpec) {
    let fixed = Pod::new("fixed");
    let vm = vmm.boot(&spec(&fixed)).await.expect("it boots");
    keeps_its_memory(&*vm).await;
    vm.kill().await.unwrap();

    let growing = |pod: &Pod| VmSpec { growth_mib: GROWTH_MIB, ..spec(pod) };
    let (pod, copy) = (Pod::new("booted"), Pod::new("copied"));
    let vm = vmm.boot(&growing(&pod)).await.expect("it boots");
    let guest = Mutex::new(Guest::connect(&*vm).await);
    memory_follows(&*vm, async || guest.lock().await.ask("memory").await.parse().unwrap()).await;
    // As if the daemon died: the VMM knows how much there is.
    vm.request_memory(HOTPLUG_STEP_MIB).await.unwrap();
    hotplug::settled(&*vm, LONG).await.unwrap();
    let record = vm.record();
    drop(vm);
    let vm = vmm.adopt(&record).await.unwrap().expect("the VM outlived its handle");
    assert_eq!(vm.hotplugged_memory().await.unwrap().unwrap().plugged_mib, HOTPLUG_STEP_MIB);
    vm.kill().await.unwrap();

    let frozen = frozen(vmm, growing, async |_, _| {}).await;
    let vm = vmm.restore(&growing(&copy), &frozen).await.expect("a VM is restored");
    vm.resume().await.expect("and goes on");
    let guest = Mutex::new(Guest::connect(&*vm).await);
    memory_follows(&*vm, async || guest.lock().await.ask("memory").await.parse().unwrap()).await;
    vm.kill().await.unwrap();
    assert_ne!(
        vmm.template_inputs(&spec(&pod)),
        vmm.template_inputs(&growing(&pod)),
        "a template of VMs that keep their size was used"
    );
}

/// Most memory that a growing guest gets in these tests, MiB.
pub const GROWTH_MIB: u64 = 3 * HOTPLUG_STEP_MIB;

/// Asserts that a VM without room to grow says so.
pub async fn keeps_its_memory(vm: &dyn Vm) {
    assert_eq!(vm.hotplugged_memory().await.unwrap(), None);
    let refused = vm.request_memory(HOTPLUG_STEP_MIB).await.unwrap_err();
    assert!(matches!(&refused, VmmError::Refused { .. }), "{refused}");
    assert!(refused.to_string().contains("128 MiB"), "{refused}");
}

/// Asserts that a guest has the memory that is requested, of at most [`GROWTH_MIB`]; `seen` is all that it has, MiB.
pub async fn memory_follows(vm: &dyn Vm, seen: impl AsyncFn() -> u64) {
    let boot = seen().await;
    let has =
        |plugged_mib, requested_mib| HotpluggedMemory { plugged_mib, requested_mib, max_mib: GROWTH_MIB };
    assert_eq!(vm.hotplugged_memory().await.unwrap(), Some(has(0, 0)));
    for mib in [2 * HOTPLUG_STEP_MIB, GROWTH_MIB, HOTPLUG_STEP_MIB, 0, GROWTH_MIB, 0] {
        vm.request_memory(mib).await.unwrap();
        vm.request_memory(mib).await.expect("to request it twice is no error");
        let settled = hotplug::settled(vm, Duration::from_secs(20)).await.unwrap();
        assert_eq!(settled, Some(has(mib, mib)), "after a request for {mib} MiB");
        assert_eq!(seen().await, boot + mib);
    }
    let refused = vm.request_memory(GROWTH_MIB + HOTPLUG_STEP_MIB).await.unwrap_err();
    assert!(matches!(&refused, VmmError::Refused { .. }), "{refused}");
    assert_eq!(vm.hotplugged_memory().await.unwrap(), Some(has(0, 0)), "what was refused was done");
}

/// Most vCPUs that a growing guest gets in these tests beside that of its boot.
pub const GROWTH_VCPUS: u32 = 3;

/// Tests that a guest gets vCPUs and gives them up while it runs: one that booted, and a copy of a frozen one.
pub async fn gets_vcpus_and_gives_them_up(vmm: &dyn Vmm, spec: fn(&Pod) -> VmSpec) {
    let growing = |pod: &Pod| VmSpec { growth_vcpus: GROWTH_VCPUS, ..spec(pod) };
    let (fixed, pod, copy) = (Pod::new("fixed"), Pod::new("booted"), Pod::new("copied"));
    let vm = vmm.boot(&spec(&fixed)).await.expect("it boots");
    keeps_its_vcpus(&*vm).await;
    vm.kill().await.unwrap();

    let vm = vmm.boot(&growing(&pod)).await.expect("it boots");
    let guest = Mutex::new(Guest::connect(&*vm).await);
    vcpus_follow(&*vm, async |_| guest.lock().await.ask("vcpus").await.parse().unwrap()).await;
    vm.request_vcpus(2).await.unwrap();
    let record = vm.record();
    drop(vm);
    let vm = vmm.adopt(&record).await.unwrap().expect("the VM outlived its handle");
    assert_eq!(vm.vcpus().await.unwrap().map(|vcpus| (vcpus.plugged, vcpus.requested)), Some((2, 2)));
    vm.kill().await.unwrap();

    let frozen = frozen(vmm, growing, async |_, _| {}).await;
    let vm = vmm.restore(&growing(&copy), &frozen).await.expect("a VM is restored");
    vm.resume().await.expect("and goes on");
    let guest = Mutex::new(Guest::connect(&*vm).await);
    vcpus_follow(&*vm, async |_| guest.lock().await.ask("vcpus").await.parse().unwrap()).await;
    vm.kill().await.unwrap();
    assert_ne!(
        vmm.template_inputs(&spec(&pod)),
        vmm.template_inputs(&growing(&pod)),
        "a template of VMs that keep their vCPUs was used"
    );
}

/// Asserts that a VM without room for vCPUs says so.
pub async fn keeps_its_vcpus(vm: &dyn Vm) {
    let vcpus = vm.vcpus().await.unwrap();
    assert!(vcpus.is_none_or(|vcpus| vcpus.max == 1 && vcpus.plugged == 1), "{vcpus:?}");
    let refused = vm.request_vcpus(2).await.unwrap_err();
    assert!(matches!(&refused, VmmError::Refused { .. }), "{refused}");
    assert!(refused.to_string().contains("2 vCPUs"), "{refused}");
}

/// Asserts that a guest, which has one vCPU, has those that are requested, of at most [`GROWTH_VCPUS`] more; `seen` makes it use
/// so many, and returns how many it has.
pub async fn vcpus_follow(vm: &dyn Vm, seen: impl AsyncFn(u32) -> u32) {
    let max = 1 + GROWTH_VCPUS;
    let has = |plugged, requested| Vcpus { plugged, requested, max };
    assert_eq!(vm.vcpus().await.unwrap(), Some(has(1, 1)));
    for count in [2, max, 2, 1, max, 1] {
        vm.request_vcpus(count).await.unwrap();
        assert_eq!(seen(count).await, count, "after a request for {count} vCPUs");
        let left = hotplug::given_up(vm, Duration::from_secs(20)).await.unwrap();
        assert_eq!(left, Some(has(count, count)));
    }
    let refused = vm.request_vcpus(max + 1).await.unwrap_err();
    assert!(matches!(&refused, VmmError::Refused { .. }), "{refused}");
    assert_eq!(vm.vcpus().await.unwrap(), Some(has(1, 1)), "what was refused was done");
}

/// Tests that a VM is saved while it runs, and that it and its copies go on: a VM that booted, whose memory is its own, and then
/// a copy, which shares a file with others. Returns the last copy and its disks.
pub async fn a_running_vm_is_saved_and_goes_on(
    vmm: &dyn Vmm,
    spec: fn(&Pod) -> VmSpec,
) -> (Pod, Arc<dyn Vm>, Vec<DiskRecord>) {
    let pod = Pod::new("running");
    let disks = vec![pod.limited_disk(SPARE)];
    let mut vm = vmm.boot(&VmSpec { disks, ..spec(&pod) }).await.unwrap();
    let mut guest = Guest::connect(&*vm).await;
    assert_eq!(guest.ask("hello").await, "hello host");
    let image = DiskSpec { serial: FIRST_IMAGE.into(), ..pod.read_only_disk("image") };
    let plugged = [pod.disk("one"), pod.disk("two"), pod.read_only_disk("three")];
    vm.attach_disk(&image).await.unwrap();
    for disk in &plugged {
        vm.attach_disk(disk).await.unwrap();
        let ro = u8::from(disk.read_only);
        let seen = format!("disk {0} ro={ro} starts with {0}", disk.serial);
        assert_eq!(guest.ask(&format!("await {}", disk.serial)).await, seen);
    }
    // In another order than they were plugged.
    let mut records: Vec<_> = plugged.iter().rev().map(DiskSpec::record).collect();
    records.extend([image.record(), pod.disk(SPARE).record()]);
    let (first, second) = (Pod::new("first"), Pod::new("second"));
    for (copy, word) in [(&first, "before"), (&second, "later")] {
        assert_eq!(guest.ask(&format!("remember {word}")).await, "noted");
        let to = Destination { dir: copy.path("saved"), memory_mib: spec(&pod).memory_mib };
        fs::create_dir(&to.dir).unwrap();
        let began = std::time::Instant::now();
        let saved = vm.checkpoint(&to, &records).await.unwrap();
        vm.resume().await.unwrap();
        println!("saved, paused for {:?}", began.elapsed());
        assert_eq!(guest.ask("recall").await, word, "the VM that was saved does not go on");
        assert_eq!(guest.ask("remember meanwhile").await, "noted");

        let disks = saved.iter().map(|disk| {
            let record = &disk.record;
            let content = copy.disk(&format!("{}-of-{}", record.serial, copy.name()));
            let content = if record.read_only { read_only(&content) } else { content };
            DiskSpec { serial: record.serial.clone(), ..content }
        });
        let copied = VmSpec { disks: disks.collect(), ..spec(copy) };
        let frozen = sealed(to.dir);
        let copied = vmm.restore(&copied, &frozen).await.unwrap();
        copied.resume().await.unwrap();
        let mut at_copy = Guest::connect(&*copied).await;
        assert_eq!(at_copy.ask("recall").await, word);
        for disk in records.iter().filter(|disk| disk.serial != SPARE) {
            let ro = u8::from(disk.read_only);
            let seen = format!("disk {0} ro={ro} starts with {0}-of-{1}", disk.serial, copy.name());
            assert_eq!(at_copy.ask(&format!("await {}", disk.serial)).await, seen);
        }
        copied.attach_disk(&copy.disk("further")).await.unwrap();
        assert_eq!(at_copy.ask("await further").await, "disk further ro=0 starts with further");
        copied.detach_disk("further").await.unwrap();
        assert_eq!(guest.ask("recall").await, "meanwhile");
        vm.kill().await.unwrap();
        (vm, guest) = (copied, at_copy);
        records = saved.into_iter().map(|disk| disk.record).collect();
    }
    (second, vm, records)
}

fn digest_of_memory(frozen: &Frozen) -> u64 {
    let memory = File::from(frozen.file(MEMORY).unwrap());
    let (mut hash, mut chunk, mut at) = (DefaultHasher::new(), vec![0; 1 << 20], 0);
    loop {
        match memory.read_at(&mut chunk, at).unwrap() {
            0 => return hash.finish(),
            read => {
                hash.write(&chunk[..read]);
                at += read as u64;
            }
        }
    }
}

/// Asserts that of 100 MiB that the guest uses and frees, twice, the host gets at least 90 back.
async fn gives_back(vm: &dyn Vm) {
    let mut guest = Guest::connect(vm).await;
    assert_eq!(guest.ask("hello").await, "hello host");
    for _ in 0..2 {
        assert_eq!(guest.ask("fill 100").await, "filled");
        let full = private_mib(vm);
        assert_eq!(guest.ask("free").await, "freed");
        let returned = async {
            while private_mib(vm) + 90 > full {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        let returned = timeout(LONG, returned).await;
        assert!(returned.is_ok(), "the VMM had {full} MiB, and still has {} MiB", private_mib(vm));
    }
}

/// Returns the VMM's memory that no other process shares, in MiB.
fn private_mib(vm: &dyn Vm) -> u64 {
    let rollup = fs::read_to_string(format!("/proc/{}/smaps_rollup", vm.record().pid)).unwrap();
    let line = rollup.lines().find_map(|line| line.strip_prefix("Anonymous:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() >> 10
}

/// Freezes a VM after `before` has used its guest.
pub async fn frozen(
    vmm: &dyn Vmm,
    spec: impl Fn(&Pod) -> VmSpec,
    before: impl AsyncFnOnce(&dyn Vm, Guest),
) -> Frozen {
    let pod = Pod::new("template");
    let dir = pod.path("frozen");
    fs::create_dir(&dir).unwrap();
    let vm =
        vmm.boot(&VmSpec { memory_file: Some(dir.join(MEMORY)), ..spec(&pod) }).await.expect("a VM boots");
    let mut guest = Guest::connect(&*vm).await;
    assert_eq!(guest.ask("hello").await, "hello host");
    before(&*vm, guest).await;
    vm.freeze(&dir).await.expect("it is frozen");
    vm.kill().await.unwrap();
    sealed(dir)
}

/// Returns the files of a frozen VM, in sealed memory.
pub fn sealed(dir: PathBuf) -> Frozen {
    let files = fs::read_dir(&dir).unwrap().map(|entry| {
        let (entry, name) = entry.map(|entry| (entry.path(), entry.file_name())).unwrap();
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let mut copy = File::from(memfd_create(&name, flags).unwrap());
        io::copy(&mut File::open(entry).unwrap(), &mut copy).unwrap();
        fcntl_add_seals(&copy, SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW).unwrap();
        (name.into_string().unwrap(), copy)
    });
    let files = files.collect();
    Frozen::new(dir, files)
}

async fn a_guest_that_powers_off_is_seen(vmm: &dyn Vmm, spec: fn(&Pod) -> VmSpec, adopted: bool) {
    let pod = Pod::new("powers-off");
    let mut vm = vmm.boot(&spec(&pod)).await.unwrap();
    let mut guest = Guest::connect(&*vm).await;
    assert_eq!(guest.ask("hello").await, "hello host");
    if adopted {
        let record = vm.record();
        drop((vm, guest));
        vm = vmm.adopt(&record).await.unwrap().expect("the VM runs");
        guest = Guest::connect(&*vm).await;
    }
    guest.tell("power-off").await;
    let exit = timeout(LONG, vm.exited()).await.expect("the end is seen");
    assert!(adopted || exit.how == "exited with status 0", "{exit:?}");
    assert!(exit.last_lines.iter().any(|line| line.contains("guest says goodbye")), "{exit:?}");
    vm.kill().await.unwrap();
}
