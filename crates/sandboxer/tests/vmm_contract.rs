//! The contract of every VMM (`test_guest/contract.rs`). The double in `sandboxer-vmm-fake` and QEMU with the
//! real guest kernel must both meet it.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail their test")]

mod test_guest;
mod vmm_suite;

use std::{
    path::{Path, PathBuf},
    task::Poll,
    time::Duration,
};

use sandboxer_config::VmConfig;
use sandboxer_vmm::{Destination, MEMORY, VmSpec, Vmm, VmmError, qemu::Qemu};
use sandboxer_vmm_fake::FakeVmm;
use tokio::time::timeout;

use crate::{
    test_guest::{
        Guest, Pod,
        contract::{
            a_running_vm_is_saved_and_goes_on, a_tap_is_held_as_long_as_the_vm_runs,
            copies_of_a_frozen_vm_are_vms, freed_memory_comes_back, frozen, grows_and_shrinks,
            keeps_the_contract, requests_for_files_have_a_link_of_their_own,
            takes_the_disks_of_a_first_container,
        },
        serve_in_memory,
    },
    vmm_suite::{Subject, cases},
};

/// Far longer than anything these tests wait for on a busy host.
const LONG: Duration = Duration::from_secs(90);

/// QEMU with the guest of `init.sh`, and the accelerator that works here.
#[derive(Debug, Clone)]
struct RealQemu;

impl Subject for RealQemu {
    type Vmm = Qemu;

    const NAME: &'static str = "qemu";
    const PROGRAM: &'static str = "QEMU";
    const TEMPLATE: &'static [&'static str] = &[MEMORY, "state"];
    const HAS_JAIL_DIR: bool = false;
    const HAS_HOTPLUG_MEMORY: bool = false;
    const SAVES: bool = true;
    const HAS_HOTPLUG_VCPUS: bool = false;
    const DETACHES_ALONE: bool = true;

    fn real(_: PathBuf) -> Self {
        Self
    }

    fn is_real(&self) -> bool {
        true
    }

    async fn vmm(&self, _: &Pod, config: VmConfig) -> anyhow::Result<Qemu> {
        Ok(Qemu::new(&config).await?)
    }

    fn spec(&self, pod: &Pod) -> VmSpec {
        pod.spec()
    }

    fn answers(&self) -> bool {
        true
    }
}

/// Makes tests of cases of all VMMs.
macro_rules! on_qemu {
    ($($case:ident),+ $(,)?) => {$(
        #[tokio::test(flavor = "multi_thread")]
        async fn $case() {
            cases::$case(RealQemu).await.unwrap();
        }
    )+};
}

on_qemu![
    a_vm_boots_stands_still_and_goes_on,
    disks_come_and_go,
    a_frozen_vm_goes_on_as_a_copy,
    half_a_template_is_refused_and_leaves_nothing,
    a_vm_tells_how_much_memory_it_can_get,
    a_vmm_is_jailed,
    a_vm_outlives_its_daemon,
    a_killed_vmm_is_one_error_with_its_call_and_end,
    nothing_is_left_but_logs,
];

#[tokio::test(flavor = "multi_thread")]
async fn the_double_keeps_the_contract() {
    let vmm = FakeVmm::new(serve_in_memory);
    keeps_the_contract(&vmm, Pod::spec).await;
    takes_the_disks_of_a_first_container(&vmm, Pod::spec).await;
    copies_of_a_frozen_vm_are_vms(&vmm, Pod::spec).await;
    requests_for_files_have_a_link_of_their_own(&vmm, Pod::spec).await;
    grows_and_shrinks(&vmm, Pod::spec).await;
    a_tap_is_held_as_long_as_the_vm_runs(&vmm, Pod::spec, async |_| ()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn qemu_keeps_the_contract() {
    let vmm = test_guest::qemu().await;
    keeps_the_contract(&vmm, Pod::spec).await;
    copies_of_a_frozen_vm_are_vms(&vmm, Pod::spec).await;
    a_tap_is_held_as_long_as_the_vm_runs(&vmm, Pod::spec, async |mut guest| {
        assert_eq!(guest.ask("nic").await, "02:73:62:78:00:00");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn qemu_takes_the_disks_of_a_first_container() {
    let vmm = test_guest::qemu().await;
    takes_the_disks_of_a_first_container(&vmm, Pod::spec).await;
    // More interfaces than a VM with slots has: the disks are plugged in.
    takes_the_disks_of_a_first_container(&vmm, |pod| VmSpec { nics: 3, ..pod.spec() }).await;
}

/// A guest waits 10 ms for the first disk of a controller when the second one comes.
#[tokio::test(flavor = "multi_thread")]
async fn an_image_and_a_writable_disk_have_a_controller_each() {
    let vmm = test_guest::qemu().await;
    let pod = Pod::new("disks");
    let vm = vmm.boot(&pod.spec()).await.unwrap();
    let mut guest = Guest::connect(&*vm).await;
    // A disk that comes before the kernel knows its controller is not found.
    assert_eq!(guest.ask("hello").await, "hello host");
    for (serial, read_only) in [("writable", false), ("image", true), ("another", true)] {
        let disk = if read_only { pod.read_only_disk(serial) } else { pod.disk(serial) };
        vm.attach_disk(&disk).await.unwrap();
        let ro = u8::from(read_only);
        let seen = guest.ask(&format!("await {serial}")).await;
        assert_eq!(seen, format!("disk {serial} ro={ro} starts with {serial}"));
    }
    assert_eq!(guest.ask("controllers").await, "1 0 0");
    vm.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_asks_for_files_by_a_link_that_outlives_the_daemon() {
    requests_for_files_have_a_link_of_their_own(&test_guest::qemu().await, Pod::spec).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_that_a_guest_frees_comes_back() {
    let spec = |pod: &Pod| VmSpec { memory_mib: 256, ..pod.spec() };
    freed_memory_comes_back(&test_guest::qemu().await, spec).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_remembers_what_its_template_knew_and_tells_nobody_what_it_learnt() {
    let vmm = test_guest::qemu().await;
    let frozen = frozen(&vmm, Pod::spec, async |_, mut guest| {
        assert_eq!(guest.ask("remember before").await, "noted");
    })
    .await;
    let (one, two) = (Pod::new("one"), Pod::new("two"));
    let first = vmm.restore(&one.spec(), &frozen).await.unwrap();
    first.resume().await.unwrap();
    let mut guest = Guest::connect(&*first).await;
    assert_eq!(guest.ask("recall").await, "before");
    assert_eq!(guest.ask("remember after").await, "noted");
    let second = vmm.restore(&two.spec(), &frozen).await.unwrap();
    second.resume().await.unwrap();
    assert_eq!(Guest::connect(&*second).await.ask("recall").await, "before");
    assert_eq!(guest.ask("recall").await, "after");
    for vm in [first, second] {
        vm.kill().await.unwrap();
    }
}

/// Of a VM that booted, whose memory is QEMU's own, and then of a copy, whose memory is in a file that it shares.
#[tokio::test(flavor = "multi_thread")]
async fn a_running_vm_is_saved_and_goes_on_and_so_do_its_copies() {
    let vmm = test_guest::qemu().await;
    let (pod, vm, mut records) = a_running_vm_is_saved_and_goes_on(&vmm, Pod::spec).await;
    let mut guest = Guest::connect(&*vm).await;
    assert_eq!(guest.ask("recall").await, "later");
    // Where a disk was removed, a copy would have the next one at its place.
    vm.detach_disk("one").await.unwrap();
    records.retain(|disk| disk.serial != "one");
    let to = Destination { dir: pod.path("again"), memory_mib: pod.spec().memory_mib };
    std::fs::create_dir(&to.dir).unwrap();
    let error = vm.checkpoint(&to, &records).await.unwrap_err();
    assert!(error.to_string().contains("disk two is at place 1 of its controller and not at 0"), "{error}");
    vm.resume().await.unwrap();
    assert_eq!(guest.ask("recall").await, "later");
    vm.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_panics_leaves_its_last_words() {
    let pod = Pod::new("panics");
    let vm = test_guest::qemu().await.boot(&pod.spec()).await.unwrap();
    Guest::connect(&*vm).await.tell("panic").await;
    let exit = timeout(LONG, vm.exited()).await.expect("a panic ends the VM");
    assert!(exit.last_lines.iter().any(|line| line.contains("Kernel panic")), "{exit:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn disks_of_the_first_moment_are_there() {
    let pod = Pod::new("boot-disk");
    let spec = VmSpec { disks: vec![pod.disk("early")], ..pod.spec() };
    let vm = test_guest::qemu().await.boot(&spec).await.unwrap();
    let mut guest = Guest::connect(&*vm).await;
    assert_eq!(guest.ask("await early").await, "disk early ro=0 starts with early");
    vm.attach_disk(&pod.disk("late")).await.unwrap();
    assert_eq!(guest.ask("await late").await, "disk late ro=0 starts with late");
    vm.kill().await.unwrap();
}

/// Uses a script in QEMU's place: only the jail's filter is between it and the kernel. The kernel's own limit is
/// checked, too.
#[tokio::test(flavor = "multi_thread")]
async fn no_user_namespace_is_made_from_a_jail() {
    let pod = Pod::new("nested");
    let tries = pod.script(
        "tries",
        "read -r limit < /proc/sys/user/max_user_namespaces; echo $limit >&2; \
         exec perl -e 'print STDERR syscall(272, 0x10000000) == -1 ? \"unshare: $!\" : \"made one\", \"\\n\"; exit 3'",
    );
    let config = VmConfig { qemu: Some(tries), jail: true, ..test_guest::vm_config() };
    let error = Qemu::on(&config, "tcg", String::new()).await.boot(&pod.spec()).await.unwrap_err();
    let VmmError::Died { last_lines, .. } = &error else { panic!("{error}") };
    assert!(last_lines.starts_with("0 | "), "{last_lines}");
    assert!(last_lines.contains("unshare: Operation not permitted"), "{last_lines}");
    assert!(!last_lines.contains("made one"), "{last_lines}");
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

    let hangs = pod.script("hangs", "exec sleep 1000");
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

/// At any moment: while QEMU starts, while it loads the state, and right before its VM is handed over.
#[tokio::test(flavor = "multi_thread")]
async fn a_restore_that_is_dropped_leaves_nothing() {
    let vmm = test_guest::qemu().await;
    let frozen = frozen(&vmm, Pod::spec, async |_, _| {}).await;
    let (mut polls, mut dropped) = (1, 0);
    loop {
        let pod = Pod::new("dropped");
        let spec = pod.spec();
        let mut restore = vmm.restore(&spec, &frozen);
        let mut polled = 0;
        let cut = std::future::poll_fn(|context| {
            polled += 1;
            match restore.as_mut().poll(context) {
                Poll::Ready(restored) => Poll::Ready(Some(restored)),
                Poll::Pending if polled == polls => Poll::Ready(None),
                Poll::Pending => Poll::Pending,
            }
        });
        let cut = timeout(LONG, cut).await.expect("a restore ends");
        drop(restore);
        match cut {
            None => dropped += 1,
            Some(restored) => restored.unwrap().kill().await.unwrap(),
        }
        pod.assert_nothing_left().await;
        if polled < polls {
            break;
        }
        polls += 1;
    }
    assert!(dropped > 3, "only {dropped} moments were found");
}
