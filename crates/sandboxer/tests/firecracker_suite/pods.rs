//! Guests that really boot, with the agent of the guest image, as only Firecracker has them.

use std::{fs, process::Command, time::Duration};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use sandboxer_guest::Agent;
use sandboxer_protocol::agent::{ConfigurePodRequest, Disk};
use sandboxer_vmm::{DiskSpec, Vm, Vmm};

use super::Firecracker;
use crate::{
    listed,
    test_guest::Pod,
    vmm_suite::{Case, LONG, pods, pods::Guest},
};

pub fn trials() -> Vec<Trial> {
    let own: [Case<Firecracker>; _] = listed![
        disks_are_found_by_their_serials,
        a_guest_that_stood_still_answers_in_the_same_session,
        a_copy_of_a_frozen_vm_answers_its_agent,
    ];
    pods::trials(own)
}

/// As a VM of the pool does.
async fn a_guest_that_stood_still_answers_in_the_same_session(subject: Firecracker) -> Result<()> {
    let guest = Guest::prepare(&subject).await?;
    let vm = guest.vmm.boot(&guest.spec).await?;
    let agent = guest.greet(vm.as_ref()).await?;
    for hostname in ["one", "two"] {
        vm.pause().await?;
        tokio::time::sleep(Duration::from_secs(3)).await;
        vm.resume().await?;
        let identity = ConfigurePodRequest { hostname: hostname.into(), ..Default::default() };
        let answer = tokio::time::timeout(LONG, agent.configure_pod(identity)).await;
        answer.with_context(|| format!("{hostname}: the agent is silent"))??;
    }
    Ok(vm.kill().await?)
}

/// Also in a slot that another disk had before, of another size.
async fn disks_are_found_by_their_serials(subject: Firecracker) -> Result<()> {
    let guest = Guest::prepare(&subject).await?;
    let vm = guest.vmm.boot(&guest.spec).await?;
    let agent = guest.greet(vm.as_ref()).await?;
    let (small, large) = (ext4(&guest.pod, "small", 16)?, ext4(&guest.pod, "large", 48)?);
    vm.attach_disk(&guest.pod.read_only_disk("other")).await?;
    vm.attach_disk(&small).await?;
    vm.detach_disk("small").await?;
    vm.attach_disk(&large).await?;
    vm.attach_disk(&small).await?;
    for serial in ["small", "large"] {
        prepare(&agent, serial).await?;
    }
    Ok(vm.kill().await?)
}

/// Creates a disk with a file system of `mib` MiB.
fn ext4(pod: &Pod, serial: &str, mib: u64) -> Result<DiskSpec> {
    let disk = pod.disk(serial);
    fs::File::options().write(true).open(disk.file.name())?.set_len(mib << 20)?;
    let made = Command::new("mkfs.ext4").args(["-q", "-F"]).arg(disk.file.name()).status()?;
    ensure!(made.success(), "mkfs.ext4: {made}");
    Ok(disk)
}

/// Formats a disk in the guest.
async fn prepare(agent: &Agent, serial: &str) -> Result<()> {
    let disk = Disk { serial: serial.into(), fstype: "ext4".into(), scratch: true, ..Default::default() };
    agent.prepare_disk(disk).await.with_context(|| format!("disk {serial}"))?;
    Ok(())
}

/// As a template is built and used. A copy finds a disk that it gets later.
async fn a_copy_of_a_frozen_vm_answers_its_agent(subject: Firecracker) -> Result<()> {
    let guest = Guest::prepare(&subject).await?;
    let finds_a_disk = async |agent: &Agent, copy: &dyn Vm, pod: &Pod, _: Duration| {
        copy.attach_disk(&ext4(pod, "late", 16)?).await?;
        prepare(agent, "late").await
    };
    guest.copies_answer(finds_a_disk).await
}
