//! The cases for any Firecracker, the double or the real one. No guest has to boot.

use std::{
    ffi::CString,
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::Path,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use sandboxer_host::network::{TapPool, namespace, tap};
use sandboxer_vmm::{Frozen, HotpluggedMemory, MEMORY, VmSpec, Vmm, VmmError};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
};

use super::{
    Case, Running, Subject, jailer::the_jail_promises_what_firecrackers_jailer_does, on_real, trial,
};
use crate::{
    listed,
    test_guest::{
        Pod,
        contract::{
            GROWTH_MIB, copies_of_a_frozen_vm_are_vms, grows_and_shrinks, is_jailed, keeps_the_contract,
            requests_for_files_have_a_link_of_their_own, sealed, takes_the_disks_of_a_first_container,
        },
    },
};

/// Far longer than anything these tests wait for on a busy host.
const LONG: Duration = Duration::from_secs(90);
/// The VMM has this many read-only disks at most.
const READ_ONLY: usize = 12;

/// Returns a trial for each case on each subject.
pub fn trials() -> Vec<Trial> {
    let cases: [Case; _] = listed![
        a_vm_boots_stands_still_and_goes_on,
        disks_come_and_go,
        a_disk_too_many_is_refused_by_name_and_leaves_nothing,
        a_disk_without_content_is_refused,
        a_tap_is_opened_in_a_namespace_of_the_vms_own,
        a_frozen_vm_goes_on_as_a_copy,
        half_a_template_is_refused_and_leaves_nothing,
        a_vm_tells_how_much_memory_it_can_get,
        a_vmm_is_jailed,
        the_jail_promises_what_firecrackers_jailer_does,
        a_vm_outlives_its_daemon,
        what_it_logs_while_no_daemon_reads_does_not_silence_it,
        a_killed_vmm_is_one_error_with_its_call_and_end,
        a_kernel_that_is_none_is_refused_and_leaves_nothing,
    ];
    let double = Subject::Double("1.16.1");
    let doubles = cases.into_iter().map(|case| trial("double_v1_16", &double, case));
    doubles.chain(on_real("real", cases, None)).collect()
}

/// Returns the tests that only a double can pass, since its guest speaks the contract's language.
pub fn contract() -> Vec<Trial> {
    let cases: [Case; _] = listed![the_contract_of_all_vmms_is_kept, an_unknown_version_is_refused_by_name];
    cases.into_iter().map(|case| trial("double_contract", &Subject::Double("1.14.0"), case)).collect()
}

async fn the_contract_of_all_vmms_is_kept(subject: Subject) -> Result<()> {
    let pod = Pod::new("program");
    let vmm = subject.vmm(&pod).await?;
    keeps_the_contract(&vmm, Pod::halting_spec).await;
    takes_the_disks_of_a_first_container(&vmm, Pod::halting_spec).await;
    copies_of_a_frozen_vm_are_vms(&vmm, Pod::halting_spec).await;
    requests_for_files_have_a_link_of_their_own(&vmm, Pod::halting_spec).await;
    grows_and_shrinks(&vmm, Pod::halting_spec).await;
    Ok(())
}

async fn an_unknown_version_is_refused_by_name(_: Subject) -> Result<()> {
    for version in ["1.13.1", "1.17.0"] {
        let pod = Pod::new("program");
        let error = Subject::Double(version).vmm(&pod).await.err().context("taken")?.to_string();
        ensure!(
            error.ends_with(&format!("is Firecracker v{version}; supported are v1.14 to v1.16")),
            "{error}"
        );
    }
    Ok(())
}

async fn a_vm_boots_stands_still_and_goes_on(subject: Subject) -> Result<()> {
    let running = Running::of(&subject).await?;
    let info = running.vmm.info();
    ensure!(info.name == "firecracker" && info.accelerator == "kvm", "{info:?}");
    running.vm.pause().await?;
    running.vm.resume().await?;
    running.end().await
}

async fn disks_come_and_go(subject: Subject) -> Result<()> {
    let running = Running::of(&subject).await?;
    let vm = &running.vm;
    let (first, second) = (running.pod.read_only_disk("a"), running.pod.limited_disk("b"));
    let before = fs::metadata(first.file.name())?;
    vm.attach_disk(&first).await?;
    vm.attach_disk(&second).await?;
    let after = fs::metadata(first.file.name())?;
    ensure!((before.mode(), before.uid()) == (after.mode(), after.uid()), "{before:?}, then {after:?}");
    ensure!(fs::read_dir(running.in_room("disks"))?.next().is_none(), "a disk is still shown");
    let twice = vm.attach_disk(&first).await.err().context("attached twice")?;
    ensure!(matches!(twice, VmmError::Refused { .. }), "{twice}");
    vm.detach_disk("never").await.context("detaching what isn't there is no error")?;
    vm.detach_disk("b").await?;
    vm.attach_disk(&second).await.context("its serial is free again")?;
    running.end().await
}

async fn a_disk_too_many_is_refused_by_name_and_leaves_nothing(subject: Subject) -> Result<()> {
    let running = Running::of(&subject).await?;
    let vm = &running.vm;
    let disk = |number: usize| running.pod.read_only_disk(&format!("d{number}"));
    for number in 0..READ_ONLY {
        vm.attach_disk(&disk(number)).await?;
    }
    let index = fs::read(running.in_room("index"))?;
    let error = vm.attach_disk(&disk(READ_ONLY)).await.err().context("attached")?.to_string();
    ensure!(error.contains("d12") && error.contains("12 read-only disks, the most"), "{error}");
    ensure!(fs::read(running.in_room("index"))? == index, "the index has it");
    ensure!(fs::read_dir(running.in_room("disks"))?.next().is_none(), "it is shown");
    vm.attach_disk(&running.pod.disk("writable")).await.context("there are others")?;
    vm.detach_disk("d3").await?;
    vm.attach_disk(&disk(READ_ONLY)).await.context("a slot is free again")?;
    running.end().await
}

async fn a_disk_without_content_is_refused(subject: Subject) -> Result<()> {
    let running = Running::of(&subject).await?;
    let disk = running.pod.disk("small");
    File::options().write(true).open(disk.file.name())?.set_len(512)?;
    let error = running.vm.attach_disk(&disk).await.err().context("attached")?.to_string();
    ensure!(error.contains("512 bytes, fewer than two sectors"), "{error}");
    running.end().await
}

async fn a_tap_is_opened_in_a_namespace_of_the_vms_own(subject: Subject) -> Result<()> {
    let pod = Pod::new("tap");
    let (taps, _pooled) = TapPool::default().named_taps(2)?;
    let (network, names) = (taps.namespace.clone(), taps.names.clone());
    // One process at a time can open a tap.
    let is_held = |name: &str| -> Result<bool> {
        let name = CString::new(name)?;
        match namespace::within(&*network, || tap::open(&name)) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => Ok(true),
            opened => Ok(opened.map(|_| false)?),
        }
    };
    ensure!(!is_held(&names[0])? && !is_held(&names[1])?, "nobody can hold them yet");
    let spec = VmSpec { nics: 2, named_taps: Some(taps), ..pod.halting_spec() };
    let vm = subject.vmm(&pod).await?.boot(&spec).await?;
    ensure!(is_held(&names[0])? && is_held(&names[1])?, "the VMM does not hold its taps");
    let of_vmm = fs::metadata(format!("/proc/{}/ns/net", vm.record().pid))?.ino();
    ensure!(of_vmm == rustix::fs::fstat(&*network)?.st_ino, "the VMM is in another namespace");
    vm.kill().await?;
    Ok(())
}

/// Freezes a VM whose guest does nothing.
async fn frozen(subject: &Subject) -> Result<(Pod, Frozen)> {
    let pod = Pod::new("template");
    let dir = pod.path("frozen");
    fs::create_dir(&dir)?;
    let spec = VmSpec { memory_file: Some(dir.join(MEMORY)), ..pod.halting_spec() };
    let vm = subject.vmm(&pod).await?.boot(&spec).await?;
    vm.freeze(&dir).await?;
    vm.kill().await?;
    let mut files: Vec<_> = fs::read_dir(&dir)?.map(|entry| Ok(entry?.file_name())).collect::<Result<_>>()?;
    files.sort();
    ensure!(files == [MEMORY, "state"], "{files:?}");
    let memory = fs::metadata(dir.join(MEMORY))?;
    ensure!(memory.uid() == 0 && memory.blocks() * 512 < memory.len(), "it is dense: {memory:?}");
    Ok((pod, sealed(dir)))
}

async fn a_frozen_vm_goes_on_as_a_copy(subject: Subject) -> Result<()> {
    let (_template, frozen) = frozen(&subject).await?;
    // A copy needs nothing from its template's directory.
    fs::remove_dir_all(frozen.dir())?;
    let (pod, somebody) = (Pod::new("copy"), Pod::new("somebody"));
    let vmm = subject.vmm(&pod).await?;
    let vm = vmm.restore(&pod.halting_spec(), &frozen).await?;
    let pid = vm.record().pid;
    if let Subject::Real(_) = subject {
        let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
        let private = |line: &str| line.contains("rw-p") && line.contains("/memfd:memory");
        ensure!(maps.lines().any(private), "the memory isn't mapped privately: {maps}");
    }
    let run_dir = somebody.path("run");
    let assigned = vm.assign(&"somebody".parse()?, &run_dir)?;
    assigned.resume().await?;
    let record = assigned.record();
    ensure!((record.pod.as_str(), &record.run_dir, record.pid) == ("somebody", &run_dir, pid), "{record:?}");
    drop((vm, assigned));
    let vm = vmm.adopt(&record).await?.context("it is found where it was moved to")?;
    vm.attach_disk(&pod.disk("late")).await?;
    vm.kill().await?;
    Ok(())
}

async fn half_a_template_is_refused_and_leaves_nothing(subject: Subject) -> Result<()> {
    let (_template, frozen) = frozen(&subject).await?;
    let pod = Pod::new("half");
    let vmm = subject.vmm(&pod).await?;
    for state in [&b"rubbish"[..], b""] {
        fs::write(pod.path("state"), state)?;
        let state = File::open(pod.path("state"))?;
        let memory = frozen.file(MEMORY)?.into();
        let half = Frozen::new(pod.path(""), [(MEMORY.into(), memory), ("state".into(), state)].into());
        let error = vmm.restore(&pod.halting_spec(), &half).await.err().context("restored")?.to_string();
        ensure!(error.contains("half") && error.contains("loading a template"), "{error}");
    }
    let nothing = Frozen::new(pod.path(""), [].into());
    let error = vmm.restore(&pod.halting_spec(), &nothing).await.err().context("restored")?.to_string();
    ensure!(error.contains("memory"), "{error}");
    gone(&pod).await
}

/// Its guest takes nothing, since it does nothing.
async fn a_vm_tells_how_much_memory_it_can_get(subject: Subject) -> Result<()> {
    let pod = Pod::new("grows");
    let spec = VmSpec { growth_mib: GROWTH_MIB, ..pod.halting_spec() };
    let vmm = subject.vmm(&pod).await?;
    let vm = vmm.boot(&spec).await?;
    let memory = vm.hotplugged_memory().await?.context("it keeps its size")?;
    let expected = HotpluggedMemory { plugged_mib: 0, requested_mib: 0, max_mib: GROWTH_MIB };
    ensure!(memory == expected, "{memory:?}");
    let refused = vm.request_memory(2 * GROWTH_MIB).await.err().context("it can get more than that")?;
    ensure!(matches!(refused, VmmError::Refused { .. }), "{refused}");
    vm.kill().await?;
    Ok(())
}

async fn a_vmm_is_jailed(subject: Subject) -> Result<()> {
    let (_template, frozen) = frozen(&subject).await?;
    let copied = Pod::new("copied");
    let vmm = subject.vmm(&copied).await?;
    let (booted, copy) = (Running::of(&subject).await?, vmm.restore(&copied.halting_spec(), &frozen).await?);
    let users = [&booted.vm, &copy].map(|vm| is_jailed(vm.as_ref(), true, true));
    ensure!(users[0] != users[1], "two VMs are of one user");
    copy.kill().await?;
    booted.end().await
}

async fn a_vm_outlives_its_daemon(subject: Subject) -> Result<()> {
    let running = Running::of(&subject).await?;
    running.vm.attach_disk(&running.pod.disk("early")).await?;
    let record = running.vm.record();
    let Running { vmm, vm, pod, .. } = running;
    drop(vm);
    let vm = vmm.adopt(&record).await?.context("the VM outlived its handle")?;
    let twice = vm.attach_disk(&pod.disk("early")).await.err().context("the next daemon forgot a disk")?;
    ensure!(matches!(twice, VmmError::Refused { .. }), "{twice}");
    vm.detach_disk("early").await?;
    vm.attach_disk(&pod.disk("late")).await?;
    vm.kill().await?;
    ensure!(vmm.adopt(&record).await?.is_none(), "a dead VM was adopted");
    Ok(())
}

async fn what_it_logs_while_no_daemon_reads_does_not_silence_it(subject: Subject) -> Result<()> {
    let running = Running::of(&subject).await?;
    let (api, record) = (running.in_room("api.sock"), running.vm.record());
    let Running { vmm, vm, pod, .. } = running;
    drop(vm);
    let log = fs::read_link(format!("/proc/{}/fd/1", record.pid))?;
    let unread = async {
        while is_open_here(&log)? {
            tokio::task::yield_now().await;
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(LONG, unread).await.context("the daemon still has the log")??;
    // It logs each request that it refuses.
    let refused = async {
        let mut socket = UnixStream::connect(&api).await?;
        socket.write_all(b"GET /nonsense HTTP/1.1\r\n\r\n").await?;
        let mut answer = [0; 12];
        socket.read_exact(&mut answer).await?;
        anyhow::Ok(answer)
    };
    let answer = tokio::time::timeout(LONG, refused).await.context("it answers nothing any more")??;
    ensure!(answer == *b"HTTP/1.1 400", "{:?}", String::from_utf8_lossy(&answer));
    let vm = vmm.adopt(&record).await?.context("the VM outlived its handle")?;
    vm.attach_disk(&pod.disk("late")).await?;
    Ok(vm.kill().await?)
}

/// Returns whether this process has `file` open, such as "pipe:[1]".
fn is_open_here(file: &Path) -> io::Result<bool> {
    let open = fs::read_dir("/proc/self/fd")?.flatten();
    Ok(open.filter_map(|entry| fs::read_link(entry.path()).ok()).any(|target| target == file))
}

async fn a_killed_vmm_is_one_error_with_its_call_and_end(subject: Subject) -> Result<()> {
    let running = Running::of(&subject).await?;
    let disk = running.pod.disk("late");
    running.vm.kill().await?;
    let error = running.vm.attach_disk(&disk).await.err().context("a dead VM took a disk")?;
    ensure!(matches!(&error, VmmError::Died { .. } | VmmError::Path { .. }), "{error:?}");
    let exit = tokio::time::timeout(LONG, running.vm.exited()).await?;
    ensure!(exit.how == "was killed by signal 9", "{exit:?}");
    Ok(())
}

async fn a_kernel_that_is_none_is_refused_and_leaves_nothing(subject: Subject) -> Result<()> {
    let pod = Pod::new("no-kernel");
    let spec = VmSpec { kernel: pod.path("missing"), ..pod.halting_spec() };
    let error = subject.vmm(&pod).await?.boot(&spec).await.err().context("booted")?.to_string();
    ensure!(error.contains("no-kernel") && error.contains("/boot-source"), "{error}");
    gone(&pod).await
}

/// Waits until no process of the pod's VM is left.
async fn gone(pod: &Pod) -> Result<()> {
    let gone = async {
        while !sandboxer_process::strays::of(&pod.path("run"))?.is_empty() {
            tokio::task::yield_now().await;
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(LONG, gone).await.context("a process is left")?
}
