//! The cases that every VMM passes, a double or the real one. No guest has to boot.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    os::unix::fs::MetadataExt,
};

use anyhow::{Context, Result, bail, ensure};
use sandboxer_vmm::{
    Destination, DiskRecord, DiskSpec, Frozen, HotpluggedMemory, MEMORY, Vm, VmRecord, VmSpec, Vmm, VmmError,
};

use super::{Case, LONG, Running, Subject, kill, left_in};
use crate::{
    listed,
    test_guest::{
        Guest, Pod,
        contract::{
            GROWTH_MIB, a_running_vm_is_saved_and_goes_on, copies_of_a_frozen_vm_are_vms,
            gets_vcpus_and_gives_them_up, grows_and_shrinks, is_jailed, keeps_its_memory, keeps_the_contract,
            requests_for_files_have_a_link_of_their_own, sealed, takes_the_disks_of_a_first_container,
        },
        vm_config,
    },
};

pub fn cases<S: Subject>() -> impl IntoIterator<Item = Case<S>> {
    listed![
        a_vm_boots_stands_still_and_goes_on,
        disks_come_and_go,
        a_frozen_vm_goes_on_as_a_copy,
        half_a_template_is_refused_and_leaves_nothing,
        a_vm_is_saved_or_refuses_and_goes_on,
        a_vm_tells_how_much_memory_it_can_get,
        a_vmm_is_jailed,
        a_vm_outlives_its_daemon,
        a_killed_vmm_is_one_error_with_its_call_and_end,
        nothing_is_left_but_logs,
    ]
}

/// For doubles alone: their guests answer.
pub async fn the_contract_of_all_vmms_is_kept<S: Subject>(subject: S) -> Result<()> {
    let pod = Pod::new("program");
    let vmm = subject.vmm(&pod, vm_config()).await?;
    keeps_the_contract(&vmm, Pod::halting_spec).await;
    takes_the_disks_of_a_first_container(&vmm, Pod::halting_spec).await;
    copies_of_a_frozen_vm_are_vms(&vmm, Pod::halting_spec).await;
    requests_for_files_have_a_link_of_their_own(&vmm, Pod::halting_spec).await;
    if S::SAVES {
        a_running_vm_is_saved_and_goes_on(&vmm, Pod::halting_spec).await;
    }
    if S::HAS_HOTPLUG_MEMORY {
        grows_and_shrinks(&vmm, Pod::halting_spec).await;
    }
    if S::HAS_HOTPLUG_VCPUS {
        gets_vcpus_and_gives_them_up(&vmm, Pod::halting_spec).await;
    }
    Ok(())
}

pub async fn a_vm_boots_stands_still_and_goes_on<S: Subject>(subject: S) -> Result<()> {
    let running = Running::start(&subject).await?;
    let (info, vm) = (running.vmm.info(), &running.vm);
    ensure!(info.name == S::NAME && vm.record().vmm == S::NAME, "{info:?}");
    ensure!(info.version.starts_with(|first: char| first.is_ascii_digit()), "{info:?}");
    ensure!(subject.is_running(vm.as_ref()).await? != Some(false), "it stands still");
    vm.pause().await?;
    vm.resume().await?;
    ensure!(subject.is_running(vm.as_ref()).await? != Some(false), "it did not go on");
    running.end().await
}

pub async fn disks_come_and_go<S: Subject>(subject: S) -> Result<()> {
    let running = Running::start(&subject).await?;
    let vm = &running.vm;
    let (first, second) = (running.pod.read_only_disk("a"), running.pod.limited_disk("b"));
    let before = fs::metadata(first.file.name())?;
    vm.attach_disk(&first).await?;
    vm.attach_disk(&second).await?;
    let after = fs::metadata(first.file.name())?;
    ensure!((before.mode(), before.uid()) == (after.mode(), after.uid()), "{before:?}, then {after:?}");
    if S::HAS_JAIL_DIR {
        ensure!(fs::read_dir(running.in_jail_dir("disks"))?.next().is_none(), "a disk is still mounted");
    }
    let twice = vm.attach_disk(&first).await.err().context("attached twice")?;
    ensure!(matches!(twice, VmmError::Refused { .. }), "{twice}");
    vm.detach_disk("never").await.context("detaching what isn't there is no error")?;
    if S::DETACHES_ALONE {
        vm.detach_disk("b").await?;
        vm.attach_disk(&second).await.context("its serial is free again")?;
    }
    running.end().await
}

/// Freezes a VM. Like the daemon's connection, the guest's is open at the freeze.
async fn frozen<S: Subject>(subject: &S) -> Result<(Pod, Frozen)> {
    let pod = Pod::new("template");
    let dir = pod.path("frozen");
    fs::create_dir(&dir)?;
    let spec = VmSpec { memory_file: Some(dir.join(MEMORY)), ..subject.spec(&pod) };
    let vm = subject.vmm(&pod, vm_config()).await?.boot(&spec).await?;
    if subject.answers() {
        let mut guest = Guest::connect(vm.as_ref()).await;
        ensure!(guest.ask("hello").await == "hello host");
    }
    let frozen = vm.freeze(&dir).await;
    vm.kill().await?;
    frozen?;
    let mut files: Vec<_> = fs::read_dir(&dir)?.map(|entry| Ok(entry?.file_name())).collect::<Result<_>>()?;
    files.sort();
    ensure!(files == S::TEMPLATE, "{files:?}");
    ensure!(fs::metadata(dir.join(MEMORY))?.uid() == 0, "the VMM's user can still open the memory");
    Ok((pod, sealed(dir)))
}

pub async fn a_frozen_vm_goes_on_as_a_copy<S: Subject>(subject: S) -> Result<()> {
    let (_template, frozen) = frozen(&subject).await?;
    // A copy needs nothing from its template's directory.
    fs::remove_dir_all(frozen.dir())?;
    let (pod, somebody) = (Pod::new("copy"), Pod::new("somebody"));
    let spec = VmSpec { background: true, ..subject.spec(&pod) };
    let vmm = subject.vmm(&pod, vm_config()).await?;
    let vm = vmm.restore(&spec, &frozen).await?;
    ensure!(subject.is_running(vm.as_ref()).await? != Some(true), "a copy is not paused");
    let pid = vm.record().pid;
    ensure!(niceness(pid)? == 10, "its processes don't give way");
    if subject.is_real() {
        let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
        let private = |line: &str| line.contains("rw-p") && line.contains("/memfd:memory");
        ensure!(maps.lines().any(private), "the memory isn't mapped privately: {maps}");
    }

    let run_dir = somebody.path("run");
    let assigned = vm.assign(&"somebody".parse()?, &run_dir)?;
    ensure!(niceness(pid)? == 0, "a pod's VM gives way");
    assigned.resume().await?;
    let record = assigned.record();
    ensure!((record.pod.as_str(), &record.run_dir, record.pid) == ("somebody", &run_dir, pid), "{record:?}");
    ensure!(!spec.run_dir.exists(), "the VM's directory was not moved");
    drop((vm, assigned));
    let vm = vmm.adopt(&record).await?.context("it is found where it was moved to")?;
    ensure!(subject.is_running(vm.as_ref()).await? != Some(false), "it stands still");
    vm.attach_disk(&pod.disk("late")).await?;
    if subject.answers() {
        let mut guest = Guest::connect(vm.as_ref()).await;
        ensure!(guest.ask("hello").await == "hello host", "a copy without an agent");
    }
    Ok(vm.kill().await?)
}

/// Returns the nice value of a process's main thread: field 19 of `/proc/PID/stat`.
fn niceness(pid: u32) -> Result<i32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields = stat.rsplit_once(')').context("malformed")?.1;
    Ok(fields.split_whitespace().nth(16).context("malformed")?.parse()?)
}

pub async fn half_a_template_is_refused_and_leaves_nothing<S: Subject>(subject: S) -> Result<()> {
    let (_template, whole) = frozen(&subject).await?;
    let pod = Pod::new("half");
    let (spec, vmm) = (subject.spec(&pod), subject.vmm(&pod, vm_config()).await?);
    let contents = [None, Some("rubbish"), Some("")];
    let cases = S::TEMPLATE.iter().flat_map(|name| contents.map(|content| (*name, content)));
    // A memory of another size is no error of every VMM.
    for (damaged, content) in cases.filter(|(name, content)| *name != MEMORY || content.is_none()) {
        let mut files = BTreeMap::new();
        for name in S::TEMPLATE {
            match content {
                _ if *name != damaged => files.insert((*name).to_owned(), whole.file(name)?.into()),
                None => continue,
                Some(content) => {
                    fs::write(pod.path(name), content)?;
                    files.insert((*name).to_owned(), File::open(pod.path(name))?)
                }
            };
        }
        let restored = vmm.restore(&spec, &Frozen::new(whole.dir().to_owned(), files)).await;
        let error = restored.err().with_context(|| format!("restored with {damaged} {content:?}"))?;
        let names_it = match (&error, content) {
            (VmmError::Path { path, .. }, None) => path.ends_with(damaged),
            (
                VmmError::Refused { call, .. }
                | VmmError::Malformed { call, .. }
                | VmmError::Died { call, .. },
                Some(_),
            ) => call == "loading a template",
            _ => false,
        };
        ensure!(names_it && error.to_string().contains("half"), "{damaged} {content:?}: {error:?}");
        pod.assert_nothing_left().await;
        let left = left_in(&spec)?;
        ensure!(left.iter().all(|name| name.ends_with(".log")), "{left:?}");
    }
    Ok(())
}

/// The guest takes nothing, since it does nothing.
/// A VM that booted, and a copy of it, as the next daemon has them.
pub async fn a_vm_is_saved_or_refuses_and_goes_on<S: Subject>(subject: S) -> Result<()> {
    let Running { pod, vmm, vm, .. } = Running::start(&subject).await?;
    let goes_on = async |vm: &dyn Vm| {
        vm.resume().await?;
        ensure!(subject.is_running(vm).await? != Some(false), "it stands still");
        if subject.answers() {
            ensure!(Guest::connect(vm).await.ask("hello").await == "hello host");
        }
        anyhow::Ok(())
    };
    let destination = |pod: &Pod| {
        let to = Destination { dir: pod.path("saved"), memory_mib: 128 };
        fs::create_dir(&to.dir).map(|()| to)
    };
    goes_on(vm.as_ref()).await.context("it runs already")?;
    let first = pod.disk("first");
    vm.attach_disk(&first).await?;
    let record = vm.record();
    drop(vm);
    let mut vm = vmm.adopt(&record).await?.context("the VM outlived its handle")?;
    let never = DiskRecord { serial: "never".into(), ..first.record() };
    let refused = vm.checkpoint(&destination(&pod)?, &[never]).await.err().context("saved without a disk")?;
    let reason = if S::SAVES { "no disk never" } else { "cannot be saved while they run" };
    ensure!(
        matches!(&refused, VmmError::Refused { .. }) && refused.to_string().contains(reason),
        "{refused}"
    );
    goes_on(vm.as_ref()).await?;
    if !S::SAVES {
        return Ok(vm.kill().await?);
    }
    let (mut pods, mut disk) = (vec![pod], first);
    for name in ["copy", "copy-of-copy"] {
        let pod = Pod::new(name);
        let to = destination(&pod)?;
        let saved = vm.checkpoint(&to, &[disk.record()]).await?;
        ensure!(subject.is_running(vm.as_ref()).await? != Some(true), "a VM that is saved runs");
        let [open] = &saved[..] else { bail!("{saved:?}") };
        ensure!(
            open.record == disk.record() && open.file.metadata()?.ino() == disk.file.inode()?.1,
            "{open:?}"
        );
        goes_on(vm.as_ref()).await?;
        let mut files: Vec<_> =
            fs::read_dir(&to.dir)?.map(|entry| Ok(entry?.file_name())).collect::<Result<_>>()?;
        files.sort();
        ensure!(files == S::TEMPLATE, "{files:?}");
        let memory = fs::metadata(to.dir.join(MEMORY))?;
        ensure!(memory.len() == 128 << 20 && memory.uid() == 0, "{memory:?}");
        ensure!(memory.blocks() * 512 < 64 << 20, "memory that no guest touched takes space: {memory:?}");
        vm.kill().await?;

        disk = DiskSpec { serial: "first".into(), ..pod.disk("of-the-copy") };
        let spec = VmSpec { disks: vec![disk.clone()], ..subject.spec(&pod) };
        vm = vmm.restore(&spec, &sealed(to.dir)).await?;
        ensure!(subject.is_running(vm.as_ref()).await? != Some(true), "a copy is not paused");
        goes_on(vm.as_ref()).await?;
        pods.push(pod);
    }
    Ok(vm.kill().await?)
}

pub async fn a_vm_tells_how_much_memory_it_can_get<S: Subject>(subject: S) -> Result<()> {
    let pod = Pod::new("grows");
    let spec = VmSpec { growth_mib: GROWTH_MIB, ..subject.spec(&pod) };
    let vm = subject.vmm(&pod, vm_config()).await?.boot(&spec).await?;
    if S::HAS_HOTPLUG_MEMORY {
        let memory = vm.hotplugged_memory().await?.context("it keeps its size")?;
        let expected = HotpluggedMemory { plugged_mib: 0, requested_mib: 0, max_mib: GROWTH_MIB };
        ensure!(memory == expected, "{memory:?}");
    } else {
        keeps_its_memory(vm.as_ref()).await;
    }
    let refused = vm.request_memory(2 * GROWTH_MIB).await.err().context("it can get more than that")?;
    ensure!(matches!(refused, VmmError::Refused { .. }), "{refused}");
    Ok(vm.kill().await?)
}

/// As the kernel reports it, from outside. Booted and restored VMs alike.
pub async fn a_vmm_is_jailed<S: Subject>(subject: S) -> Result<()> {
    let (_template, frozen) = frozen(&subject).await?;
    let copied = Pod::new("copied");
    let vmm = subject.vmm(&copied, vm_config()).await?;
    let (booted, copy) =
        (Running::start(&subject).await?, vmm.restore(&subject.spec(&copied), &frozen).await?);
    let kvm = vmm.info().accelerator == "kvm";
    let users = [&booted.vm, &copy].map(|vm| is_jailed(vm.as_ref(), kvm, S::HAS_JAIL_DIR));
    ensure!(users[0] != users[1], "two VMs are of one user");
    copy.kill().await?;
    booted.end().await
}

pub async fn a_vm_outlives_its_daemon<S: Subject>(subject: S) -> Result<()> {
    let Running { pod, vmm, vm, .. } = Running::start(&subject).await?;
    let early = pod.disk("early");
    vm.attach_disk(&early).await?;
    let record = vm.record();
    drop(vm);
    let vm = vmm.adopt(&record).await?.context("the VM outlived its handle")?;
    ensure!(vm.record() == record);
    ensure!(subject.is_running(vm.as_ref()).await? != Some(false), "it stands still");
    let twice = vm.attach_disk(&early).await.err().context("the next daemon forgot a disk")?;
    ensure!(matches!(twice, VmmError::Refused { .. }), "{twice}");
    if S::DETACHES_ALONE {
        vm.detach_disk("early").await?;
    }
    vm.attach_disk(&pod.disk("late")).await?;
    let another = vmm.adopt(&VmRecord { start_time: 1, ..record.clone() }).await?;
    ensure!(another.is_none(), "a pid alone was taken for the VM");
    kill(vm.as_ref())?;
    let exit = tokio::time::timeout(LONG, vm.exited()).await.context("the end is seen")?;
    ensure!(exit.how == "is gone", "{exit:?}");
    vm.kill().await?;
    ensure!(vmm.adopt(&record).await?.is_none(), "a dead VM was adopted");
    Ok(())
}

pub async fn a_killed_vmm_is_one_error_with_its_call_and_end<S: Subject>(subject: S) -> Result<()> {
    let running = Running::start(&subject).await?;
    let (vm, disk) = (&running.vm, running.pod.disk("late"));
    kill(vm.as_ref())?;
    let exit = tokio::time::timeout(LONG, vm.exited()).await.context("the end is seen")?;
    ensure!(exit.how == "was killed by signal 9", "{exit:?}");
    let error = vm.attach_disk(&disk).await.err().context("a dead VM took a disk")?;
    let names_it = match &error {
        VmmError::Died { call, how, .. } => call.contains("as disk late") && *how == exit.how,
        // A connection that is older than the call has ended.
        VmmError::Malformed { call, .. } => !S::HAS_JAIL_DIR && call.contains("as disk late"),
        _ => false,
    };
    ensure!(names_it, "{error:?}");
    ensure!(vm.agent_stream().await.is_err(), "a dead VM has an agent");
    running.end().await
}

pub async fn nothing_is_left_but_logs<S: Subject>(subject: S) -> Result<()> {
    let Running { pod, spec, vm, .. } = Running::start(&subject).await?;
    vm.attach_disk(&pod.disk("late")).await?;
    vm.kill().await?;
    let left = left_in(&spec)?;
    ensure!(left.iter().all(|name| name.ends_with(".log")), "{left:?}");
    pod.assert_nothing_left().await;
    fs::remove_dir_all(&spec.run_dir).context("nothing is mounted there")
}
