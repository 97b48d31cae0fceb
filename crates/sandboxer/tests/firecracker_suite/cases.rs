//! The cases for any Firecracker, the double or the real one, in addition to those of all VMMs. No guest has to boot.

use std::{
    ffi::CString,
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::Path,
};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use sandboxer_host::network::{TapPool, namespace, tap};
use sandboxer_vmm::{MEMORY, VmSpec, Vmm};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
};

use super::{Firecracker, jailer::the_jail_promises_what_firecrackers_jailer_does};
use crate::{
    listed,
    test_guest::{Pod, vm_config},
    vmm_suite::{
        Case, LONG, Running, Subject,
        cases::{cases as common, the_contract_of_all_vmms_is_kept},
        on_real, trial,
    },
};

/// The VMM has this many read-only disks at most.
const READ_ONLY: usize = 12;

/// Returns a trial for each case on each subject.
pub fn trials() -> Vec<Trial> {
    let cases: [Case<Firecracker>; _] = listed![
        a_disk_too_many_is_refused_by_name_and_leaves_nothing,
        a_disk_without_content_is_refused,
        a_tap_is_opened_in_a_namespace_of_the_vms_own,
        memory_that_no_guest_touched_is_not_in_a_template,
        the_jail_promises_what_firecrackers_jailer_does,
        what_it_logs_while_no_daemon_reads_does_not_silence_it,
        a_kernel_that_is_none_is_refused_and_leaves_nothing,
    ];
    let double = Firecracker::Double("1.16.1");
    let doubles = common().into_iter().chain(cases).map(|case| trial("double_v1_16", &double, case));
    doubles.chain(on_real("real", common().into_iter().chain(cases), None)).collect()
}

/// Returns the tests that only a double can pass, since its guest speaks the contract's language.
pub fn contract() -> Vec<Trial> {
    let cases: [Case<Firecracker>; _] =
        listed![the_contract_of_all_vmms_is_kept, an_unknown_version_is_refused_by_name];
    cases.into_iter().map(|case| trial("double_contract", &Firecracker::Double("1.14.0"), case)).collect()
}

async fn an_unknown_version_is_refused_by_name(_: Firecracker) -> Result<()> {
    for version in ["1.13.1", "1.17.0"] {
        let pod = Pod::new("program");
        let error =
            Firecracker::Double(version).vmm(&pod, vm_config()).await.err().context("taken")?.to_string();
        ensure!(
            error.ends_with(&format!("is Firecracker v{version}; supported are v1.14 to v1.16")),
            "{error}"
        );
    }
    Ok(())
}

async fn a_disk_too_many_is_refused_by_name_and_leaves_nothing(subject: Firecracker) -> Result<()> {
    let running = Running::start(&subject).await?;
    let vm = &running.vm;
    let disk = |number: usize| running.pod.read_only_disk(&format!("d{number}"));
    for number in 0..READ_ONLY {
        vm.attach_disk(&disk(number)).await?;
    }
    let index = fs::read(running.in_jail_dir("index"))?;
    let error = vm.attach_disk(&disk(READ_ONLY)).await.err().context("attached")?.to_string();
    ensure!(error.contains("d12") && error.contains("12 read-only disks, the most"), "{error}");
    ensure!(fs::read(running.in_jail_dir("index"))? == index, "the index has it");
    ensure!(fs::read_dir(running.in_jail_dir("disks"))?.next().is_none(), "it is shown");
    vm.attach_disk(&running.pod.disk("writable")).await.context("there are others")?;
    vm.detach_disk("d3").await?;
    vm.attach_disk(&disk(READ_ONLY)).await.context("a slot is free again")?;
    running.end().await
}

async fn a_disk_without_content_is_refused(subject: Firecracker) -> Result<()> {
    let running = Running::start(&subject).await?;
    let disk = running.pod.disk("small");
    File::options().write(true).open(disk.file.name())?.set_len(512)?;
    let error = running.vm.attach_disk(&disk).await.err().context("attached")?.to_string();
    ensure!(error.contains("512 bytes, fewer than two sectors"), "{error}");
    running.end().await
}

async fn a_tap_is_opened_in_a_namespace_of_the_vms_own(subject: Firecracker) -> Result<()> {
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
    let vm = subject.vmm(&pod, vm_config()).await?.boot(&spec).await?;
    ensure!(is_held(&names[0])? && is_held(&names[1])?, "the VMM does not hold its taps");
    let of_vmm = fs::metadata(format!("/proc/{}/ns/net", vm.record().pid))?.ino();
    ensure!(of_vmm == rustix::fs::fstat(&*network)?.st_ino, "the VMM is in another namespace");
    vm.kill().await?;
    Ok(())
}

/// The VMM writes all memory.
async fn memory_that_no_guest_touched_is_not_in_a_template(subject: Firecracker) -> Result<()> {
    let pod = Pod::new("template");
    let dir = pod.path("frozen");
    fs::create_dir(&dir)?;
    let spec = VmSpec { memory_file: Some(dir.join(MEMORY)), ..pod.halting_spec() };
    let vm = subject.vmm(&pod, vm_config()).await?.boot(&spec).await?;
    vm.freeze(&dir).await?;
    let memory = fs::metadata(dir.join(MEMORY))?;
    ensure!(memory.blocks() * 512 < memory.len(), "it is dense: {memory:?}");
    Ok(vm.kill().await?)
}

async fn what_it_logs_while_no_daemon_reads_does_not_silence_it(subject: Firecracker) -> Result<()> {
    let running = Running::start(&subject).await?;
    let (api, record) = (running.in_jail_dir("api.sock"), running.vm.record());
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

async fn a_kernel_that_is_none_is_refused_and_leaves_nothing(subject: Firecracker) -> Result<()> {
    let pod = Pod::new("no-kernel");
    let spec = VmSpec { kernel: pod.path("missing"), ..pod.halting_spec() };
    let error = subject.vmm(&pod, vm_config()).await?.boot(&spec).await.err().context("booted")?.to_string();
    ensure!(error.contains("no-kernel") && error.contains("/boot-source"), "{error}");
    pod.assert_nothing_left().await;
    Ok(())
}
