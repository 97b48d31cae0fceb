//! The cases for any Cloud Hypervisor, the double or the real one, in addition to those of all VMMs. No guest has to
//! boot.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, sync::Arc};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use sandboxer_vmm::{
    Destination, VmSpec, Vmm, VmmError,
    cloud_hypervisor::wire::{Disk, ImageType, Net, PciDevice, Resize, VmState},
};

use super::{CloudHypervisor, api, refusal, tap};
use crate::{
    double::behaviour::Behaviour,
    listed,
    test_guest::{Pod, contract::sealed, vm_config},
    vmm_suite::{Case, LONG, Outcome, Running, Subject, cases::cases as common, on_real, trial},
};

/// Returns all cases: those of all VMMs, and Cloud Hypervisor's own.
pub fn cases() -> impl Iterator<Item = Case<CloudHypervisor>> {
    let own: [Case<CloudHypervisor>; _] = listed![
        version_and_process_are_told,
        a_vm_is_made_booted_ended_and_forgotten,
        disks_are_refused_and_removed,
        a_network_card_is_added_by_its_open_tap,
        the_cpus_stand_still_and_run_again,
        a_snapshot_is_restored,
        a_copy_of_a_saved_vm_has_the_network_cards_of_its_pod,
        cpus_are_added_up_to_the_most,
        the_vmm_ends_when_told_to,
        a_vmm_without_its_socket_is_told_from_a_dead_one,
    ];
    common().into_iter().chain(own)
}

/// Returns a trial for each case on each subject.
pub fn trials() -> Vec<Trial> {
    let double = |version| CloudHypervisor::Double(Behaviour::for_version(version));
    let mut trials = Vec::new();
    for (group, subject) in [("double_v53", double("v53.0")), ("double_v52", double("v52.0"))] {
        trials.extend(cases().map(|case| trial(group, &subject, case)));
    }
    trials.extend(on_real("real", cases(), None));
    trials
}

async fn version_and_process_are_told(subject: CloudHypervisor) -> Result<()> {
    let running = Running::start(&subject).await?;
    let (info, ping) = (running.vmm.info(), api(running.vm.as_ref()).ping().await?);
    ensure!(info.name == "cloud-hypervisor" && info.accelerator == "kvm", "{info:?}");
    // A custom build reports `v53.0-dirty` as a program, and `53.0.0` as a process.
    let number = info.version.split('-').next().unwrap_or_default();
    ensure!(!number.is_empty() && ping.version.starts_with(number), "{ping:?} is not {info:?}");
    ensure!(ping.pid == Some(1), "it is alone in its namespace: {ping:?}");
    running.end().await
}

async fn a_vm_is_made_booted_ended_and_forgotten(subject: CloudHypervisor) -> Result<()> {
    let running = Running::start(&subject).await?;
    let (api, description) = (api(running.vm.as_ref()), running.vmm.description(&running.spec));
    let info = api.info().await?;
    ensure!(info.state == VmState::Running, "{info:?}");
    ensure!(info.device_tree.is_some_and(|devices| !devices.is_empty()), "a VM without devices");
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

async fn disks_are_refused_and_removed(subject: CloudHypervisor) -> Result<()> {
    let running = Running::start(&subject).await?;
    let (api, vm) = (api(running.vm.as_ref()), &running.vm);
    vm.attach_disk(&running.pod.read_only_disk("a")).await?;
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
    running.end().await
}

async fn a_network_card_is_added_by_its_open_tap(subject: CloudHypervisor) -> Result<Outcome> {
    let tap = match tap::open() {
        Ok(tap) => tap,
        Err(error) => return Ok(Outcome::Skipped(format!("no tap can be made here: {error}"))),
    };
    let running = Running::start(&subject).await?;
    let net = Net { id: "net-a".into(), mac: "02:00:00:00:00:01".into(), num_queues: 2 };
    let api = api(running.vm.as_ref());
    let added = api.add_net(&net, vec![tap]).await?;
    ensure!(added.id == "net-a" && is_address(&added), "{added:?}");
    let wrong = Net { id: "net-b".into(), mac: "02:00".into(), num_queues: 2 };
    refusal(api.add_net(&wrong, Vec::new()).await)?;
    running.end().await?;
    Ok(Outcome::Done)
}

async fn the_cpus_stand_still_and_run_again(subject: CloudHypervisor) -> Result<()> {
    let running = Running::start(&subject).await?;
    let api = api(running.vm.as_ref());
    api.pause().await?;
    ensure!(api.info().await?.state == VmState::Paused);
    refusal(api.pause().await)?;
    api.resume().await?;
    ensure!(api.info().await?.state == VmState::Running);
    refusal(api.resume().await)?;
    running.end().await
}

async fn a_snapshot_is_restored(subject: CloudHypervisor) -> Result<()> {
    // Its memory is in a file; else it would be written with the rest, and the jail has no space for it.
    let pod = Pod::new("snapshot");
    let spec = VmSpec { memory_file: Some(pod.path("memory")), ..pod.halting_spec() };
    let vmm = subject.vmm(&pod, vm_config()).await?;
    let vm = vmm.boot(&spec).await?;
    let running = Running::<CloudHypervisor> { pod, spec, vmm, vm };
    let (api, dir) = (api(running.vm.as_ref()), Path::new("/run/snapshot"));
    let written = running.in_jail_dir("snapshot");
    fs::create_dir(&written)?;
    fs::set_permissions(&written, fs::Permissions::from_mode(0o777))?;
    refusal(api.snapshot(dir).await).context("it still runs")?;
    refusal(api.restore(dir, Vec::new()).await).context("there is a VM already")?;
    api.pause().await?;
    refusal(api.snapshot(Path::new("/nonexistent")).await)?;
    api.snapshot(dir).await?;
    for file in ["config.json", "state.json"] {
        ensure!(written.join(file).exists(), "a snapshot without {file}");
    }
    api.delete().await?;
    api.restore(dir, Vec::new()).await?;
    ensure!(api.info().await?.state == VmState::Paused);
    api.resume().await?;
    ensure!(api.info().await?.state == VmState::Running);
    running.end().await
}

async fn a_copy_of_a_saved_vm_has_the_network_cards_of_its_pod(subject: CloudHypervisor) -> Result<Outcome> {
    let tap = || tap::open().map(Arc::new);
    let first = match tap() {
        Ok(tap) => tap,
        Err(error) => return Ok(Outcome::Skipped(format!("no tap can be made here: {error}"))),
    };
    let (pod, copy) = (Pod::new("saved"), Pod::new("copy"));
    let with = |pod: &Pod, taps| VmSpec { nics: 1, taps, ..pod.halting_spec() };
    let vmm = subject.vmm(&pod, vm_config()).await?;
    let vm = vmm.boot(&with(&pod, vec![first])).await?;
    let to = Destination { dir: pod.path("saved"), memory_mib: 128 };
    fs::create_dir(&to.dir)?;
    vm.checkpoint(&to, &[]).await?;
    vm.kill().await?;
    let frozen = sealed(to.dir);
    let error =
        vmm.restore(&with(&copy, Vec::new()), &frozen).await.err().context("restored without a tap")?;
    ensure!(error.to_string().contains("it has 1 network interfaces, and the pod 0"), "{error}");
    let vm = vmm.restore(&with(&copy, vec![tap()?]), &frozen).await?;
    let devices = api(vm.as_ref()).info().await?.device_tree.unwrap_or_default();
    ensure!(!subject.is_real() || devices.contains_key("nic0"), "{:?}", devices.keys());
    vm.resume().await?;
    vm.kill().await?;
    Ok(Outcome::Done)
}

async fn cpus_are_added_up_to_the_most(subject: CloudHypervisor) -> Result<()> {
    let running = Running::start(&subject).await?;
    let api = api(running.vm.as_ref());
    let cpus = |count| Resize { desired_vcpus: Some(count), ..Resize::default() };
    api.resize(&cpus(1)).await?;
    refusal(api.resize(&cpus(2)).await)?;
    running.end().await
}

async fn the_vmm_ends_when_told_to(subject: CloudHypervisor) -> Result<()> {
    let running = Running::start(&subject).await?;
    api(running.vm.as_ref()).shutdown_vmm().await?;
    let exit = tokio::time::timeout(LONG, running.vm.exited()).await.context("the VMM lives on")?;
    ensure!(exit.how == "exited with status 0", "{exit:?}");
    running.end().await
}

async fn a_vmm_without_its_socket_is_told_from_a_dead_one(subject: CloudHypervisor) -> Result<()> {
    let running = Running::start(&subject).await?;
    let socket = running.spec.run_dir.join("control.sock");
    fs::remove_file(&socket)?;
    let error = running.vm.detach_disk("any").await.err().context("asked without a socket")?;
    ensure!(
        matches!(&error, VmmError::Path { action: "connect to", path, .. } if *path == socket),
        "{error:?}"
    );
    running.end().await
}

/// Returns whether a device has an address on a PCI bus.
fn is_address(device: &PciDevice) -> bool {
    device.bdf.starts_with("0000:00:") && device.bdf.ends_with(".0") && device.bdf.len() == 12
}
