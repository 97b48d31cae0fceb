//! The cases for any Cloud Hypervisor, the double or the real one. No guest has to boot.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use rustix::process::{Pid, Signal, kill_process};
use sandboxer_vmm::{
    Frozen, HotpluggedMemory, MEMORY, Vm, VmSpec, Vmm, VmmError,
    cloud_hypervisor::{
        api::Api,
        wire::{Disk, Fs, ImageType, Net, PciDevice, Resize, VmState},
    },
};

use super::{Case, LONG, Outcome, Running, Subject, kvm_unusable, refusal, skipped, tap, trial};
use crate::{
    double::behaviour::Behaviour,
    listed,
    test_guest::{
        Guest, Pod,
        contract::{GROWTH_MIB, is_jailed, sealed},
        read_only, vm_config,
    },
};

/// Returns all cases.
pub fn cases() -> impl IntoIterator<Item = Case> {
    listed![
        version_and_process_are_told,
        a_vm_is_made_booted_ended_and_forgotten,
        disks_are_added_and_removed,
        a_network_card_is_added_by_its_open_tap,
        a_shared_file_system_is_added,
        the_cpus_stand_still_and_run_again,
        a_snapshot_is_restored,
        a_frozen_vm_goes_on_as_a_copy,
        a_vmm_is_jailed,
        half_a_template_is_refused_and_leaves_nothing,
        cpus_are_added_up_to_the_most,
        a_vm_tells_how_much_memory_it_can_get,
        the_vmm_ends_when_told_to,
        a_killed_vmm_is_one_error_with_its_call_and_end,
        a_vmm_without_its_socket_is_told_from_a_dead_one,
        a_vm_outlives_its_daemon,
        nothing_is_left_but_logs,
    ]
}

/// Returns a trial for each case on each subject.
pub fn trials() -> Vec<Trial> {
    let double = |version| Subject::Double(Behaviour::of(version));
    let mut trials = Vec::new();
    for (group, subject) in [("double_v53", double("v53.0")), ("double_v52", double("v52.0"))] {
        trials.extend(cases().into_iter().map(|case| trial(group, &subject, case)));
    }
    trials.extend(cases().into_iter().map(|case| match (Subject::real(), kvm_unusable()) {
        (None, _) => skipped(&format!("real::{}", case.0), "CLOUD_HYPERVISOR names no binary".into()),
        (_, Some(why)) => skipped(&format!("real::{}", case.0), why.into()),
        (Some(real), None) => trial("real", &real, case),
    }));
    trials
}

async fn version_and_process_are_told(subject: Subject) -> Result<Outcome> {
    let running = Running::of(&subject).await?;
    let (info, ping) = (running.vmm.info(), running.api.ping().await?);
    ensure!(info.name == "cloud-hypervisor" && info.accelerator == "kvm", "{info:?}");
    // A custom build reports `v53.0-dirty` as a program, and `53.0.0` as a process.
    let number = info.version.split('-').next().unwrap_or_default();
    ensure!(!number.is_empty() && ping.version.starts_with(number), "{ping:?} is not {info:?}");
    ensure!(ping.pid == Some(1), "it is alone in its namespace: {ping:?}");
    running.end().await
}

async fn a_vm_is_made_booted_ended_and_forgotten(subject: Subject) -> Result<Outcome> {
    let running = Running::of(&subject).await?;
    let (api, description) = (&running.api, running.vmm.description(&running.spec));
    let info = api.info().await?;
    ensure!(info.state == VmState::Running, "{info:?}");
    ensure!(info.device_tree.is_some_and(|devices| !devices.is_empty()), "a VM without devices");
    api.counters().await?;
    refusal(api.create(&description).await)?;
    refusal(api.boot().await)?;

    api.shutdown().await?;
    let info = api.info().await?;
    ensure!(info.state != VmState::Running, "{info:?}");
    refusal(api.shutdown().await)?;
    refusal(api.pause().await)?;
    api.delete().await?;
    refusal(api.info().await)?;
    refusal(api.boot().await)?;
    api.delete().await.context("forgetting what isn't there is no error")?;

    api.create(&description).await.context("its place is free again")?;
    let info = api.info().await?;
    ensure!(info.state == VmState::Created, "{info:?}");
    running.end().await
}

async fn disks_are_added_and_removed(subject: Subject) -> Result<Outcome> {
    let running = Running::of(&subject).await?;
    let (api, vm) = (&running.api, &running.vm);
    let first = read_only(&running.pod.limited_disk("a"));
    let before = fs::metadata(first.file.name())?;
    vm.attach_disk(&first).await?;
    let after = fs::metadata(first.file.name())?;
    ensure!((before.mode(), before.uid()) == (after.mode(), after.uid()), "{before:?}, then {after:?}");
    let shown = running.in_room("disks");
    ensure!(fs::read_dir(&shown)?.next().is_none(), "a disk is still shown");
    let path = Path::new("/run/missing").to_owned();
    let disk = Disk {
        id: "disk-a".into(),
        serial: "a".into(),
        path,
        readonly: true,
        image_type: ImageType::Raw,
        rate_limiter_config: None,
    };
    let devices = api.info().await?.device_tree.unwrap_or_default();
    ensure!(devices.contains_key("disk-a"), "{:?}", devices.keys());
    refusal(api.add_disk(&disk).await)?;
    let missing = Disk { id: "disk-b".into(), ..disk };
    let reason = refusal(api.add_disk(&missing).await)?;
    ensure!(reason.contains("No such file"), "{reason}");

    api.remove_device("disk-a").await?;
    refusal(api.remove_device("disk-never").await)?;
    vm.detach_disk("never").await.context("detaching what isn't there is no error")?;
    running.end().await
}

async fn a_network_card_is_added_by_its_open_tap(subject: Subject) -> Result<Outcome> {
    let tap = match tap::open() {
        Ok(tap) => tap,
        Err(error) => return Ok(Outcome::Skipped(format!("no tap can be made here: {error}"))),
    };
    let running = Running::of(&subject).await?;
    let net = Net { id: "net-a".into(), mac: "02:00:00:00:00:01".into(), num_queues: 2 };
    let added = running.api.add_net(&net, vec![tap]).await?;
    ensure!(added.id == "net-a" && is_address(&added), "{added:?}");
    let wrong = Net { id: "net-b".into(), mac: "02:00".into(), num_queues: 2 };
    refusal(running.api.add_net(&wrong, Vec::new()).await)?;
    running.end().await
}

async fn a_shared_file_system_is_added(subject: Subject) -> Result<Outcome> {
    let running = Running::of(&subject).await?;
    let socket = "/run/fs.sock".into();
    let fs = Fs { id: "fs-a".into(), tag: "shared".into(), socket, num_queues: 1, queue_size: 1024 };
    let reason = refusal(running.api.add_fs(&fs).await)?;
    ensure!(reason.contains("shared memory"), "{reason}");
    if let Subject::Real(_) = subject {
        running.end().await?;
        return Ok(Outcome::Skipped(
            "refused on private memory; there is no vhost-user server for more".into(),
        ));
    }
    let mut description = running.vmm.description(&running.spec);
    description.memory.shared = true;
    running.api.delete().await?;
    running.api.create(&description).await?;
    running.api.boot().await?;
    let added = running.api.add_fs(&fs).await?;
    ensure!(added.id == "fs-a" && is_address(&added), "{added:?}");
    running.end().await
}

async fn the_cpus_stand_still_and_run_again(subject: Subject) -> Result<Outcome> {
    let running = Running::of(&subject).await?;
    let api = &running.api;
    api.pause().await?;
    ensure!(api.info().await?.state == VmState::Paused);
    refusal(api.pause().await)?;
    api.resume().await?;
    ensure!(api.info().await?.state == VmState::Running);
    refusal(api.resume().await)?;
    running.end().await
}

async fn a_snapshot_is_restored(subject: Subject) -> Result<Outcome> {
    // Its memory is in a file; else it would be written with the rest, and the jail has no space for it.
    let pod = Pod::new("snapshot");
    let spec = VmSpec { memory_file: Some(pod.path("memory")), ..pod.halting_spec() };
    let vmm = subject.vmm(&pod, vm_config()).await?;
    let (vm, api) = (vmm.boot(&spec).await?, Api::new(&spec.run_dir, LONG));
    let running = Running { pod, spec, vmm, vm, api };
    let (api, dir) = (&running.api, Path::new("/run/snapshot"));
    let written = running.in_room("snapshot");
    fs::create_dir(&written)?;
    fs::set_permissions(&written, fs::Permissions::from_mode(0o777))?;
    refusal(api.snapshot(dir).await).context("it still runs")?;
    refusal(api.restore(dir).await).context("there is a VM already")?;
    api.pause().await?;
    refusal(api.snapshot(Path::new("/nonexistent")).await)?;
    api.snapshot(dir).await?;
    for file in ["config.json", "state.json"] {
        ensure!(written.join(file).exists(), "a snapshot without {file}");
    }
    api.delete().await?;
    api.restore(dir).await?;
    ensure!(api.info().await?.state == VmState::Paused);
    api.resume().await?;
    ensure!(api.info().await?.state == VmState::Running);
    running.end().await
}

/// Freezes a VM.
async fn frozen(subject: &Subject) -> Result<(Pod, Frozen)> {
    let pod = Pod::new("template");
    let dir = pod.path("frozen");
    fs::create_dir(&dir)?;
    let spec = VmSpec { memory_file: Some(dir.join(MEMORY)), ..pod.halting_spec() };
    let vm = subject.vmm(&pod, vm_config()).await?.boot(&spec).await?;
    // Like the daemon's connection, it is open at the freeze.
    let session = match subject {
        Subject::Double(_) => {
            let mut guest = Guest::of(vm.as_ref()).await;
            ensure!(guest.ask("hello").await == "hello host");
            Some(guest)
        }
        Subject::Real(_) => None,
    };
    drop(session);
    let frozen = vm.freeze(&dir).await;
    vm.kill().await?;
    frozen?;
    let mut files: Vec<_> = fs::read_dir(&dir)?.map(|entry| Ok(entry?.file_name())).collect::<Result<_>>()?;
    files.sort();
    ensure!(files == ["config.json", MEMORY, "state.json"], "{files:?}");
    Ok((pod, sealed(dir)))
}

async fn a_frozen_vm_goes_on_as_a_copy(subject: Subject) -> Result<Outcome> {
    let (template, frozen) = frozen(&subject).await?;
    // A copy needs nothing from its template's directory.
    fs::remove_dir_all(frozen.dir())?;
    let (pod, somebody) = (Pod::new("copy"), Pod::new("somebody"));
    let spec = VmSpec { background: true, ..pod.halting_spec() };
    let vmm = subject.vmm(&pod, vm_config()).await?;
    let vm = vmm.restore(&spec, &frozen).await?;
    let info = Api::new(&spec.run_dir, LONG).info().await?;
    ensure!(info.state == VmState::Paused, "{info:?}");
    let pid = vm.record().pid;
    ensure!(niceness(pid)? == 10, "its processes don't give way");
    if let Subject::Real(_) = subject {
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
    let info = Api::new(&run_dir, LONG).info().await?;
    ensure!(info.state == VmState::Running, "{info:?}");
    vm.attach_disk(&pod.disk("late")).await?;
    if let Subject::Double(_) = subject {
        // The real one's guest, which has an agent, is in `pods`.
        let mut guest = Guest::of(vm.as_ref()).await;
        ensure!(guest.ask("hello").await == "hello host", "a copy without an agent");
    }
    vm.kill().await?;
    drop(template);
    Ok(Outcome::Done)
}

async fn a_vmm_is_jailed(subject: Subject) -> Result<Outcome> {
    let (template, frozen) = frozen(&subject).await?;
    let copied = Pod::new("copied");
    let vmm = subject.vmm(&copied, vm_config()).await?;
    let (booted, copy) = (Running::of(&subject).await?, vmm.restore(&copied.halting_spec(), &frozen).await?);
    let users = [&booted.vm, &copy].map(|vm| is_jailed(vm.as_ref(), true, true));
    ensure!(users[0] != users[1], "two VMs are of one user");
    copy.kill().await?;
    drop(template);
    booted.end().await
}

async fn half_a_template_is_refused_and_leaves_nothing(subject: Subject) -> Result<Outcome> {
    let (template, whole) = frozen(&subject).await?;
    let pod = Pod::new("half");
    let (spec, vmm) = (pod.halting_spec(), subject.vmm(&pod, vm_config()).await?);
    for (damaged, content) in
        [("state.json", Some("rubbish")), ("state.json", None), ("config.json", Some("{}")), (MEMORY, None)]
    {
        let mut files = BTreeMap::new();
        for name in ["config.json", MEMORY, "state.json"] {
            match content {
                _ if name != damaged => files.insert(name.to_owned(), whole.file(name)?.into()),
                None => continue,
                Some(content) => {
                    fs::write(pod.path(name), content)?;
                    files.insert(name.to_owned(), File::open(pod.path(name))?)
                }
            };
        }
        let restored = vmm.restore(&spec, &Frozen::new(whole.dir().to_owned(), files)).await;
        let error = restored.err().with_context(|| format!("restored with {damaged} {content:?}"))?;
        let names_it = match (&error, damaged, content) {
            (VmmError::Refused { call, .. }, "state.json", Some(_)) => call == "loading a template",
            (VmmError::Malformed { reason, .. }, _, Some(_)) => reason.contains("config.json"),
            (VmmError::Path { path, .. }, _, None) => path.ends_with(damaged),
            _ => false,
        };
        ensure!(names_it, "{damaged} {content:?}: {error:?}");
        let left = left_in(&spec)?;
        ensure!(left.iter().all(|name| name.ends_with(".log")), "{left:?}");
    }
    drop(template);
    Ok(Outcome::Done)
}

/// Returns the nice value of a process's main thread: field 19 of `/proc/PID/stat`.
fn niceness(pid: u32) -> Result<i32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields = stat.rsplit_once(')').context("malformed")?.1;
    Ok(fields.split_whitespace().nth(16).context("malformed")?.parse()?)
}

async fn cpus_are_added_up_to_the_most(subject: Subject) -> Result<Outcome> {
    let running = Running::of(&subject).await?;
    let cpus = |count| Resize { desired_vcpus: Some(count), ..Resize::default() };
    running.api.resize(&cpus(1)).await?;
    refusal(running.api.resize(&cpus(2)).await)?;
    running.end().await
}

/// Its guest takes nothing, since it does nothing.
async fn a_vm_tells_how_much_memory_it_can_get(subject: Subject) -> Result<Outcome> {
    let pod = Pod::new("grows");
    let spec = VmSpec { growth_mib: GROWTH_MIB, ..pod.halting_spec() };
    let vmm = subject.vmm(&pod, vm_config()).await?;
    let vm = vmm.boot(&spec).await?;
    let memory = vm.hotplugged_memory().await?.context("it keeps its size")?;
    let expected = HotpluggedMemory { plugged_mib: 0, requested_mib: 0, max_mib: GROWTH_MIB };
    ensure!(memory == expected, "{memory:?}");
    let refused = vm.request_memory(2 * GROWTH_MIB).await.err().context("it can get more than that")?;
    ensure!(matches!(refused, VmmError::Refused { .. }), "{refused}");
    vm.kill().await?;
    Ok(Outcome::Done)
}

async fn the_vmm_ends_when_told_to(subject: Subject) -> Result<Outcome> {
    let running = Running::of(&subject).await?;
    running.api.shutdown_vmm().await?;
    let exit = tokio::time::timeout(LONG, running.vm.exited()).await.context("the VMM lives on")?;
    ensure!(exit.how == "exited with status 0", "{exit:?}");
    running.end().await
}

async fn a_killed_vmm_is_one_error_with_its_call_and_end(subject: Subject) -> Result<Outcome> {
    let running = Running::of(&subject).await?;
    let disk = running.pod.disk("late");
    kill(running.vm.as_ref())?;
    let error = running.vm.attach_disk(&disk).await.err().context("a dead VM took a disk")?;
    ensure!(
        matches!(&error, VmmError::Died { call, how, .. }
            if call.contains("as disk late") && how == "was killed by signal 9"),
        "{error:?}"
    );
    ensure!(running.vm.agent_stream().await.is_err(), "a dead VM has an agent");
    running.end().await
}

async fn a_vmm_without_its_socket_is_told_from_a_dead_one(subject: Subject) -> Result<Outcome> {
    let running = Running::of(&subject).await?;
    let socket = running.spec.run_dir.join("control.sock");
    fs::remove_file(&socket)?;
    let error = running.vm.detach_disk("any").await.err().context("asked without a socket")?;
    ensure!(
        matches!(&error, VmmError::Path { action: "connect to", path, .. } if *path == socket),
        "{error:?}"
    );
    running.end().await
}

async fn a_vm_outlives_its_daemon(subject: Subject) -> Result<Outcome> {
    let Running { pod, spec, vmm, vm, api } = Running::of(&subject).await?;
    let record = vm.record();
    drop(vm);
    let vm = vmm.adopt(&record).await?.context("the VM outlived its handle")?;
    ensure!(vm.record() == record);
    ensure!(api.info().await?.state == VmState::Running);
    let again = vmm.adopt(&sandboxer_vmm::VmRecord { start_time: 1, ..record.clone() }).await?;
    ensure!(again.is_none(), "a pid alone was taken for the VM");
    kill(vm.as_ref())?;
    let exit = tokio::time::timeout(LONG, vm.exited()).await.context("the end is seen")?;
    ensure!(exit.how == "is gone", "{exit:?}");
    vm.kill().await?;
    ensure!(vmm.adopt(&record).await?.is_none(), "a dead VM was adopted");
    drop((pod, spec));
    Ok(Outcome::Done)
}

async fn nothing_is_left_but_logs(subject: Subject) -> Result<Outcome> {
    let running = Running::of(&subject).await?;
    let disk = running.pod.disk("late");
    running.vm.attach_disk(&disk).await?;
    let twice = running.vm.attach_disk(&disk).await.err().context("a disk was plugged in twice")?;
    ensure!(matches!(&twice, VmmError::Refused { .. }), "{twice:?}");
    running.vm.kill().await?;
    let left = left_in(&running.spec)?;
    ensure!(left.iter().all(|name| name.ends_with(".log")), "{left:?}");
    fs::remove_dir_all(&running.spec.run_dir).context("nothing is mounted there")?;
    Ok(Outcome::Done)
}

/// Returns the names in a VM's directory.
pub fn left_in(spec: &VmSpec) -> Result<Vec<String>> {
    fs::read_dir(&spec.run_dir)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}

/// Returns whether a device has an address on a PCI bus.
fn is_address(device: &PciDevice) -> bool {
    device.bdf.starts_with("0000:00:") && device.bdf.ends_with(".0") && device.bdf.len() == 12
}

fn kill(vm: &dyn Vm) -> Result<()> {
    let pid = Pid::from_raw(vm.record().pid.try_into()?).context("a VMM has a pid")?;
    Ok(kill_process(pid, Signal::KILL)?)
}
