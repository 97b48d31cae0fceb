//! What every VMM owes the daemon. The double in `vmm/fake.rs` and QEMU with the real guest kernel
//! are held to the same words.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail their test")]

mod test_guest;

use std::{future::Future, path::Path, time::Duration};

use sandboxer::vmm::{
    AgentStream, DiskSpec, Frozen, MEMORY, Machine, MachineRecord, VmSpec, Vmm, VmmError, fake::FakeVmm,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::timeout,
};

use crate::test_guest::{Guest, Pod, serve_in_memory};

/// Far beyond anything these tests wait for on a busy machine.
const LONG: Duration = Duration::from_secs(90);

#[tokio::test(flavor = "multi_thread")]
async fn the_double_keeps_the_contract() {
    keeps_the_contract(&FakeVmm::new(serve_in_memory)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn qemu_keeps_the_contract() {
    keeps_the_contract(&test_guest::qemu().await).await;
}

async fn keeps_the_contract(vmm: &dyn Vmm) {
    let pod = Pod::new("contract");
    let (first, second) = (pod.disk("first"), pod.disk("second"));
    let machine = vmm.boot(&pod.spec()).await.expect("the machine boots");
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

    copies_of_a_frozen_machine_are_machines(vmm).await;
    a_guest_that_powers_off_is_seen(vmm, false).await;
    a_guest_that_powers_off_is_seen(vmm, true).await;
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

async fn copies_of_a_frozen_machine_are_machines(vmm: &dyn Vmm) {
    let frozen = frozen(vmm, |_| async {}).await;
    let (one, two) = (Pod::new("one"), Pod::new("two"));
    let spec = one.spec();
    let of_another_pod =
        VmSpec { pod: two.spec().pod, run_dir: two.path("run"), boot: two.spec().boot, ..spec.clone() };
    assert_eq!(vmm.template_inputs(&spec), vmm.template_inputs(&of_another_pod));
    let mut machines = Vec::new();
    for pod in [&one, &two] {
        let machine = vmm.restore(&pod.spec(), &frozen).await.expect("a machine is restored");
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
    let (machine, guest) = machines.remove(0);
    machine.pause().await.unwrap();
    let pod = Pod::new("somebody");
    let machine = machine.assign(&"somebody".parse().unwrap(), &pod.spec().run_dir).unwrap();
    machine.resume().await.unwrap();
    let record = machine.record();
    assert_eq!((record.pod.as_str(), &record.run_dir), ("somebody", &pod.spec().run_dir));
    assert!(!one.path("run").exists(), "the machine's directory was not moved");
    drop((machine, guest));
    let machine = vmm.adopt(&record).await.unwrap().expect("it is found where it was moved to");
    let mut guest = Guest::of(&*machine).await;
    assert_eq!(guest.ask("hello").await, "hello host");
    for machine in [machine, machines.remove(0).0] {
        machine.kill().await.unwrap();
    }
}

/// A machine that was frozen after `before` had its way with the guest.
async fn frozen<F: Future<Output = ()>>(vmm: &dyn Vmm, before: impl FnOnce(Guest) -> F) -> Frozen {
    let pod = Pod::new("template");
    let dir = pod.path("frozen");
    std::fs::create_dir(&dir).unwrap();
    let machine = vmm
        .boot(&VmSpec { memory_file: Some(dir.join(MEMORY)), ..pod.spec() })
        .await
        .expect("a machine boots");
    let mut guest = Guest::of(&*machine).await;
    assert_eq!(guest.ask("hello").await, "hello host");
    before(guest).await;
    machine.freeze(&dir).await.expect("it is frozen");
    machine.kill().await.unwrap();
    let files = std::fs::read_dir(&dir).unwrap().map(|entry| {
        let entry = entry.unwrap();
        (entry.file_name().into_string().unwrap(), std::fs::File::open(entry.path()).unwrap())
    });
    let files = files.collect();
    Frozen::new(dir, files)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_remembers_what_its_template_knew_and_tells_nobody_what_it_learnt() {
    let vmm = test_guest::qemu().await;
    let frozen = frozen(&vmm, |mut guest| async move {
        assert_eq!(guest.ask("remember before").await, "noted");
    })
    .await;
    let (one, two) = (Pod::new("one"), Pod::new("two"));
    let first = vmm.restore(&one.spec(), &frozen).await.unwrap();
    first.resume().await.unwrap();
    let mut guest = Guest::of(&*first).await;
    assert_eq!(guest.ask("recall").await, "before");
    assert_eq!(guest.ask("remember after").await, "noted");
    let second = vmm.restore(&two.spec(), &frozen).await.unwrap();
    second.resume().await.unwrap();
    assert_eq!(Guest::of(&*second).await.ask("recall").await, "before");
    assert_eq!(guest.ask("recall").await, "after");
    for machine in [first, second] {
        machine.kill().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn half_a_template_is_refused_and_leaves_nothing() {
    let vmm = test_guest::qemu().await;
    let frozen = frozen(&vmm, |_| async {}).await;
    let pod = Pod::new("half");
    let memory = || frozen.file(MEMORY).unwrap().into();
    for (state, error_says) in [(&b"rubbish"[..], "loading a template"), (b"", "loading a template")] {
        std::fs::write(pod.path("state"), state).unwrap();
        let state = std::fs::File::open(pod.path("state")).unwrap();
        let damaged = Frozen::new(pod.path(""), [(MEMORY.into(), memory()), ("state".into(), state)].into());
        let error = vmm.restore(&pod.spec(), &damaged).await.unwrap_err();
        assert!(error.to_string().contains(error_says) || error.to_string().contains("exited"), "{error}");
    }
    let error = vmm.restore(&pod.spec(), &Frozen::new(pod.path(""), [].into())).await.unwrap_err();
    assert!(error.to_string().contains("memory"), "{error}");
    let left: Vec<_> = std::fs::read_dir(pod.path("run")).unwrap().flatten().map(|e| e.file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().ends_with(".sock")), "left behind: {left:?}");
}

async fn a_guest_that_powers_off_is_seen(vmm: &dyn Vmm, adopted: bool) {
    let pod = Pod::new("powers-off");
    let mut machine = vmm.boot(&pod.spec()).await.unwrap();
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

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_panics_leaves_its_last_words() {
    let pod = Pod::new("panics");
    let machine = test_guest::qemu().await.boot(&pod.spec()).await.unwrap();
    Guest::of(&*machine).await.tell("panic").await;
    let exit = timeout(LONG, machine.exited()).await.expect("a panic ends the machine");
    assert!(exit.last_lines.iter().any(|line| line.contains("Kernel panic")), "{exit:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn disks_of_the_first_moment_are_there() {
    let pod = Pod::new("boot-disk");
    let spec = sandboxer::vmm::VmSpec { disks: vec![pod.disk("early")], ..pod.spec() };
    let machine = test_guest::qemu().await.boot(&spec).await.unwrap();
    let mut guest = Guest::of(&*machine).await;
    assert_eq!(guest.ask("await early").await, "disk early ro=0 starts with early");
    machine.attach_disk(&pod.disk("late")).await.unwrap();
    assert_eq!(guest.ask("await late").await, "disk late ro=0 starts with late");
    machine.kill().await.unwrap();
}

#[tokio::test]
async fn a_vmm_that_is_missing_exits_or_hangs_is_told_apart() {
    let pod = Pod::new("bad-vmm");
    let missing = test_guest::qemu_program(Path::new("/nonexistent/qemu")).await;
    let error = missing.boot(&pod.spec()).await.unwrap_err();
    assert!(
        matches!(&error, VmmError::Spawn { program, .. } if program == Path::new("/nonexistent/qemu")),
        "{error}"
    );

    let exits = pod.script("exits", "echo cannot allocate 3 bytes >&2; exit 3");
    let error = test_guest::qemu_program(&exits).await.boot(&pod.spec()).await.unwrap_err();
    assert!(
        matches!(&error, VmmError::Died { how, last_lines, .. }
            if how == "exited with status 3" && last_lines.contains("cannot allocate 3 bytes")),
        "{error}"
    );

    let hangs = pod.script("hangs", &format!("echo $$ > {}; exec sleep 1000", pod.path("pid").display()));
    let error = test_guest::qemu_program(&hangs).await.boot(&pod.spec()).await.unwrap_err();
    assert!(matches!(error, VmmError::Hung { .. }), "{error}");
    pod.assert_nothing_left().await;
}

#[tokio::test]
async fn a_boot_that_is_dropped_leaves_nothing() {
    let pod = Pod::new("dropped");
    let hangs = pod.script("hangs", &format!("echo $$ > {}; exec sleep 1000", pod.path("pid").display()));
    let vmm = test_guest::qemu_program(&hangs).await;
    let spec = pod.spec();
    {
        let boot = vmm.boot(&spec);
        tokio::pin!(boot);
        let started = async {
            while !std::fs::read_to_string(pod.path("pid")).is_ok_and(|pid| pid.ends_with('\n')) {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            _ = &mut boot => panic!("a VMM that hangs has booted"),
            () = started => {}
        }
    }
    pod.assert_nothing_left().await;
}
