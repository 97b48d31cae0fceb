//! What every VMM owes the daemon, whatever runs its guests.

use std::{
    fs::{self, File},
    future::Future,
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use nix::net::if_::if_nametoindex;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use sandboxer::host::network::{namespace, tap};
use sandboxer::vmm::{
    AgentStream, DiskSpec, Frozen, MEMORY, Machine, MachineRecord, VmSpec, Vmm, VmmError,
    confinement::Confinement,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::timeout,
};

use super::{Guest, Pod, share_server::ShareServer};

/// Far beyond anything these tests wait for on a busy machine.
const LONG: Duration = Duration::from_secs(90);

/// A machine's network interface is its tap, which goes with it.
pub async fn a_tap_is_held_as_long_as_the_machine_runs(
    vmm: &dyn Vmm,
    spec: fn(&Pod) -> VmSpec,
    look: impl AsyncFnOnce(Guest),
) {
    let pod = Pod::new("tap");
    let network = namespace::fresh().expect("only root makes network namespaces");
    let tap = namespace::within(&network, || tap::open(c"tap")).unwrap();
    let is_there = || namespace::within(&network, || Ok(if_nametoindex("tap")?)).is_ok();
    let machine =
        vmm.boot(&VmSpec { nics: 1, taps: vec![Arc::new(tap)], ..spec(&pod) }).await.expect("it boots");
    look(Guest::of(&*machine).await).await;
    assert!(is_there(), "nobody holds the tap");
    machine.kill().await.unwrap();
    assert!(!is_there(), "the tap outlived its machine");
}

/// Holds a VMM to its word. `spec` makes of a pod a machine whose guest answers as `init.sh` does.
pub async fn keeps_the_contract(vmm: &dyn Vmm, spec: fn(&Pod) -> VmSpec) {
    let pod = Pod::new("contract");
    let (first, second) = (pod.disk("first"), pod.disk("second"));
    let machine = vmm.boot(&spec(&pod)).await.expect("the machine boots");
    let mut guest = Guest::of(&*machine).await;
    assert_eq!(guest.ask("hello").await, "hello host");

    disks_come_and_go(&*machine, &mut guest, &first, &second).await;
    the_last_stream_wins(&*machine, guest).await;

    // As if the daemon died: all it has is the record.
    let record = machine.record();
    drop(machine);
    let stored = serde_json::to_string(&record).unwrap();
    let record: MachineRecord = serde_json::from_str(&stored).unwrap();
    let machine = vmm.adopt(&record).await.unwrap().expect("the machine outlived its handle");
    assert_eq!(machine.record(), record);
    let mut guest = Guest::of(&*machine).await;
    assert_eq!(guest.ask("hello").await, "hello host");
    machine.attach_disk(&second).await.expect("an adopted machine takes disks");
    assert_eq!(guest.ask("await second").await, "disk second ro=0 starts with second");

    let somebody_else = MachineRecord { start_time: record.start_time + 1, ..record.clone() };
    assert!(vmm.adopt(&somebody_else).await.unwrap().is_none(), "a pid alone was taken for the machine");

    machine.kill().await.unwrap();
    machine.kill().await.expect("killing the dead is no error");
    let exit = timeout(LONG, machine.exited()).await.expect("the end is seen");
    assert_eq!(timeout(LONG, machine.exited()).await.unwrap(), exit, "the end is told once only");
    assert!(vmm.adopt(&record).await.unwrap().is_none(), "a dead machine was adopted");
    assert!(machine.attach_disk(&first).await.is_err(), "a dead machine took a disk");
    assert!(machine.agent_stream().await.is_err(), "a dead machine has an agent");

    a_guest_that_powers_off_is_seen(vmm, spec, false).await;
    a_guest_that_powers_off_is_seen(vmm, spec, true).await;
}

async fn disks_come_and_go(machine: &dyn Machine, guest: &mut Guest, first: &DiskSpec, second: &DiskSpec) {
    let read_only = DiskSpec { read_only: true, ..first.clone() };
    machine.attach_disk(&read_only).await.expect("a disk is plugged in");
    machine.attach_disk(second).await.expect("so is another");
    assert_eq!(guest.ask("await second").await, "disk second ro=0 starts with second");
    assert_eq!(guest.ask("await first").await, "disk first ro=1 starts with first");

    let twice = machine.attach_disk(&read_only).await.unwrap_err();
    assert!(matches!(twice, VmmError::Refused { .. }), "{twice}");
    assert_eq!(guest.ask("await first").await, "disk first ro=1 starts with first");

    let missing = DiskSpec { serial: "third".into(), path: "/nonexistent/image".into(), read_only: true };
    let missing = machine.attach_disk(&missing).await.unwrap_err();
    assert!(missing.to_string().contains("/nonexistent/image"), "{missing}");

    machine.detach_disk("never-there").await.expect("detaching what isn't there is no error");
    machine.detach_disk("second").await.expect("a disk is unplugged");
    assert_eq!(guest.ask("await-gone second").await, "gone second");
    machine.attach_disk(second).await.expect("its serial is free again");
    assert_eq!(guest.ask("await second").await, "disk second ro=0 starts with second");
    machine.detach_disk("second").await.unwrap();
    assert_eq!(guest.ask("await-gone second").await, "gone second");
}

/// What a guest asks for files gets to who serves them, and the answers back, by a link that the daemon has no part in.
pub async fn requests_for_files_have_a_link_of_their_own(vmm: &dyn Vmm, spec: fn(&Pod) -> VmSpec) {
    // State: there it is. Head: 80 bytes, no error, of request 7.
    const ANSWER: &str = "0100000050000000000000000700000000000000";
    let pod = Pod::new("shares");
    let machine = vmm.boot(&spec(&pod)).await.expect("it boots");
    let mut guest = Guest::of(&*machine).await;
    assert_eq!(guest.ask("hello").await, "hello host");
    let _server = ShareServer::start(&pod, machine.listen_for_shares().expect("it listens for shares"));
    machine.connect_shares().await.expect("the guest gets its end");
    assert_eq!(guest.ask("ask-for-files").await, ANSWER);
    let record = machine.record();
    drop((machine, guest));
    let machine = vmm.adopt(&record).await.unwrap().expect("the machine outlived its handle");
    let mut guest = Guest::of(&*machine).await;
    assert_eq!(guest.ask("ask-for-files").await, ANSWER, "the link ended with the daemon");
    // By a daemon that knows not how far the last one came.
    machine.connect_shares().await.expect("it is begun anew");
    assert_eq!(guest.ask("ask-for-files").await, ANSWER);
    machine.pause().await.expect("it holds up nothing");
    machine.resume().await.unwrap();
    assert_eq!(guest.ask("ask-for-files").await, ANSWER);
    machine.kill().await.unwrap();
}

async fn the_last_stream_wins(machine: &dyn Machine, guest: Guest) {
    let mut old = guest.into_stream();
    let mut new = Guest::of(machine).await;
    assert_eq!(new.ask("hello").await, "hello host");
    assert!(is_dead(&mut *old).await, "two streams to one agent");
}

async fn is_dead(stream: &mut dyn AgentStream) -> bool {
    let read = timeout(LONG, stream.read_u8()).await.expect("a dead stream says so");
    read.is_err() && stream.write_all(b"hello\n").await.is_err()
}

/// Looks at a machine's process as the kernel has it, from outside; its user. `kvm`: it needs the device; `has_room`: it
/// has a directory that it can write to.
pub fn is_jailed(machine: &dyn Machine, kvm: bool, has_room: bool) -> u32 {
    let proc = Path::new("/proc").join(machine.record().pid.to_string());
    let status = fs::read_to_string(proc.join("status")).unwrap();
    let field = |name: &str| -> Vec<&str> {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        line.trim_start_matches(':').split_whitespace().collect()
    };
    let user: u32 = field("Uid")[0].parse().unwrap();
    assert!(user >= 0x7000_0000 && field("Uid").iter().all(|id| *id == field("Uid")[0]), "{status}");
    assert_eq!(field("Gid"), field("Uid"));
    // Of the host's it is in the group that may open /dev/kvm, where it may.
    let kvm = fs::metadata("/dev/kvm").ok().filter(|_| kvm);
    let groups: Vec<u32> = kvm.iter().map(MetadataExt::gid).filter(|group| *group != 0).collect();
    assert_eq!(field("Groups"), groups.iter().map(u32::to_string).collect::<Vec<_>>(), "{status}");
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(field(set), ["0000000000000000"], "{set}");
    }
    assert_eq!((field("NoNewPrivs"), field("Seccomp")), (vec!["1"], vec!["2"]));
    assert_eq!(field("NSpid").last(), Some(&"1"), "{status}");
    for namespace in ["mnt", "pid", "net", "ipc", "uts", "cgroup", "user"] {
        let of = |proc: &Path| fs::read_link(proc.join("ns").join(namespace)).unwrap();
        assert_ne!(of(&proc), of(Path::new("/proc/self")), "{namespace} is the host's");
    }
    // Its own user namespace knows itself and nobody else.
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
        let is_room = has_room && mount.starts_with("room /run tmpfs rw,nosuid,nodev,noexec,");
        assert!(options.starts_with("ro") || is_room, "{mount} can be written");
    }
    // What people are shown is what is read here, from outside.
    let seen = Confinement::of(machine.record().pid).unwrap();
    assert_eq!((seen.uid, seen.gid, &seen.groups), (user, user, &groups));
    assert_eq!((seen.capabilities, seen.capability_bounds), (0, 0));
    assert!(seen.no_new_privileges && seen.seccomp == "filter", "{seen:?}");
    assert_eq!(seen.own_namespaces, ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"]);
    assert!(seen.shared_namespaces.is_empty(), "{seen:?}");
    assert!(seen.root.starts_with("tmpfs ro,"), "{seen:?}");
    assert_eq!(seen.mounts as usize, mounts.lines().count());
    user
}

/// Holds a VMM that freezes and restores machines to its word, too.
pub async fn copies_of_a_frozen_machine_are_machines(vmm: &dyn Vmm, spec: fn(&Pod) -> VmSpec) {
    let frozen = frozen(vmm, spec, |_| async {}).await;
    let (one, two) = (Pod::new("one"), Pod::new("two"));
    let (of_one, of_two) = (spec(&one), spec(&two));
    let of_another_pod =
        VmSpec { pod: of_two.pod, run_dir: of_two.run_dir, boot: of_two.boot, ..of_one.clone() };
    assert_eq!(vmm.template_inputs(&of_one), vmm.template_inputs(&of_another_pod));
    let mut machines = Vec::new();
    for pod in [&one, &two] {
        let machine = vmm.restore(&spec(pod), &frozen).await.expect("a machine is restored");
        machine.resume().await.expect("and goes on");
        let mut guest = Guest::of(&*machine).await;
        assert_eq!(guest.ask("hello").await, "hello host");
        machine.attach_disk(&pod.disk(pod.name())).await.expect("it takes disks");
        let seen = format!("disk {0} ro=0 starts with {0}", pod.name());
        assert_eq!(guest.ask(&format!("await {}", pod.name())).await, seen);
        machines.push((machine, guest));
    }
    assert_eq!(machines[0].1.ask("await-gone two").await, "gone two", "one guest has the other's disk");

    // A machine that was nobody's becomes a pod's.
    let (nobodys, guest) = machines.remove(0);
    nobodys.pause().await.unwrap();
    let pod = Pod::new("somebody");
    let machine = nobodys.assign(&"somebody".parse().unwrap(), &pod.path("run")).unwrap();
    machine.resume().await.unwrap();
    let record = machine.record();
    assert_eq!((record.pod.as_str(), &record.run_dir), ("somebody", &pod.path("run")));
    assert!(!one.path("run").exists(), "the machine's directory was not moved");
    drop((nobodys, machine, guest));
    let machine = vmm.adopt(&record).await.unwrap().expect("it is found where it was moved to");
    let mut guest = Guest::of(&*machine).await;
    assert_eq!(guest.ask("hello").await, "hello host");
    for machine in [machine, machines.remove(0).0] {
        machine.kill().await.unwrap();
    }
}

/// A machine that was frozen after `before` had its way with the guest.
pub async fn frozen<F: Future<Output = ()>>(
    vmm: &dyn Vmm,
    spec: fn(&Pod) -> VmSpec,
    before: impl FnOnce(Guest) -> F,
) -> Frozen {
    let pod = Pod::new("template");
    let dir = pod.path("frozen");
    fs::create_dir(&dir).unwrap();
    let machine = vmm
        .boot(&VmSpec { memory_file: Some(dir.join(MEMORY)), ..spec(&pod) })
        .await
        .expect("a machine boots");
    let mut guest = Guest::of(&*machine).await;
    assert_eq!(guest.ask("hello").await, "hello host");
    before(guest).await;
    machine.freeze(&dir).await.expect("it is frozen");
    machine.kill().await.unwrap();
    sealed(dir)
}

/// What a machine was frozen into, in memory that nobody can change any more.
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
    let mut machine = vmm.boot(&spec(&pod)).await.unwrap();
    let mut guest = Guest::of(&*machine).await;
    assert_eq!(guest.ask("hello").await, "hello host");
    if adopted {
        let record = machine.record();
        drop((machine, guest));
        machine = vmm.adopt(&record).await.unwrap().expect("the machine runs");
        guest = Guest::of(&*machine).await;
    }
    guest.tell("power-off").await;
    let exit = timeout(LONG, machine.exited()).await.expect("the end is seen");
    assert!(adopted || exit.how == "exited with status 0", "{exit:?}");
    assert!(exit.last_lines.iter().any(|line| line.contains("guest says goodbye")), "{exit:?}");
    machine.kill().await.unwrap();
}
