//! Guests that really boot, with the agent of the guest image.

use std::{fs, process::Command, time::Duration};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use sandboxer_config::VmConfig;
use sandboxer_protocol::agent::{ConfigurePodRequest, Disk};
use sandboxer_vmm::{DiskSpec, MEMORY, Vm, VmSpec, Vmm, firecracker::Firecracker};

use super::{Case, Subject, on_real};
use crate::{
    listed,
    test_guest::{
        Pod,
        contract::{GROWTH_MIB, memory_follows, sealed},
        guest_image, has_open, vm_config,
    },
};

/// Far longer than anything these tests wait for on a busy host.
const LONG: Duration = Duration::from_secs(90);

pub fn trials() -> Vec<Trial> {
    let cases: [Case; _] = listed![
        the_agent_is_ready_and_the_guest_powers_off,
        the_agent_is_greeted_anew_by_the_next_daemon,
        disks_are_found_by_their_serials,
        a_guest_that_stood_still_answers_in_the_same_session,
        a_copy_of_a_frozen_vm_answers_its_agent,
        memory_comes_and_goes,
    ];
    let missing = !guest_image("initramfs.cpio").exists();
    on_real("boots_a_pod", cases, missing.then(|| "there is no guest: run `make guest-image`".into()))
}

/// The VM of a pod, not running yet.
struct Guest {
    config: VmConfig,
    vmm: Firecracker,
    spec: VmSpec,
    // Its files are removed with it.
    pod: Pod,
}

impl Guest {
    async fn of(subject: &Subject) -> Result<Self> {
        let (pod, config) = (Pod::new("boots"), vm_config());
        let spec = pod.spec_of(guest_image("vmlinux"), guest_image("initramfs.cpio"));
        Ok(Self { vmm: subject.vmm(&pod).await?, config, spec, pod })
    }

    async fn greet(&self, vm: &dyn Vm) -> Result<sandboxer_guest::Agent> {
        let greeting =
            sandboxer_guest::connect(&self.spec.pod, vm, &self.spec.boot.link_key, self.config.agent_timeout);
        let greeted = tokio::time::timeout(LONG, greeting).await;
        let console = vm.last_lines().await;
        let (agent, ready) = greeted.with_context(|| format!("the agent is silent: {console:#?}"))??;
        ensure!(!ready.kernel_release.is_empty(), "{ready:?}");
        Ok(agent)
    }
}

async fn the_agent_is_ready_and_the_guest_powers_off(subject: Subject) -> Result<()> {
    let guest = Guest::of(&subject).await?;
    let vm = guest.vmm.boot(&guest.spec).await?;
    let agent = guest.greet(vm.as_ref()).await?;
    agent.configure_pod(ConfigurePodRequest { hostname: "pod".into(), ..Default::default() }).await?;
    agent.power_off().await;
    let exit = tokio::time::timeout(LONG, vm.exited()).await.context("the guest is still on")?;
    ensure!(exit.how == "exited with status 0", "{exit:?}");
    Ok(vm.kill().await?)
}

async fn the_agent_is_greeted_anew_by_the_next_daemon(subject: Subject) -> Result<()> {
    let guest = Guest::of(&subject).await?;
    let vm = guest.vmm.boot(&guest.spec).await?;
    guest.greet(vm.as_ref()).await?;
    let record = vm.record();
    drop(vm);
    let vm = guest.vmm.adopt(&record).await?.context("the VM outlived its handle")?;
    guest.greet(vm.as_ref()).await?;
    Ok(vm.kill().await?)
}

/// As a VM of the pool does.
async fn a_guest_that_stood_still_answers_in_the_same_session(subject: Subject) -> Result<()> {
    let guest = Guest::of(&subject).await?;
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
async fn disks_are_found_by_their_serials(subject: Subject) -> Result<()> {
    let guest = Guest::of(&subject).await?;
    let vm = guest.vmm.boot(&guest.spec).await?;
    let agent = guest.greet(vm.as_ref()).await?;
    let (small, large) = (ext4(&guest.pod, "small", 16)?, ext4(&guest.pod, "large", 48)?);
    vm.attach_disk(&guest.pod.read_only_disk("other")).await?;
    vm.attach_disk(&small).await?;
    vm.detach_disk("small").await?;
    vm.attach_disk(&large).await?;
    vm.attach_disk(&small).await?;
    for serial in ["small", "large"] {
        let disk = Disk { serial: serial.into(), fstype: "ext4".into(), scratch: true, ..Default::default() };
        agent.prepare_disk(disk).await.with_context(|| format!("disk {serial}"))?;
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

/// As a template is built and used: a session is open at the freeze, and each copy is greeted.
async fn a_copy_of_a_frozen_vm_answers_its_agent(subject: Subject) -> Result<()> {
    let guest = Guest::of(&subject).await?;
    let dir = guest.pod.path("frozen");
    fs::create_dir(&dir)?;
    let spec = VmSpec { memory_file: Some(dir.join(MEMORY)), ..guest.spec.clone() };
    let vm = guest.vmm.boot(&spec).await?;
    let session = guest.greet(vm.as_ref()).await?;
    let kept = guest.pod.disk("kept");
    vm.attach_disk(&kept).await?;
    drop(session);
    vm.freeze(&dir).await?;
    vm.kill().await?;
    let frozen = sealed(dir);
    for name in ["one", "two"] {
        let pod = Pod::new(name);
        let own = pod.disk("kept");
        let spec = VmSpec { run_dir: pod.path("run"), disks: vec![own.clone()], ..guest.spec.clone() };
        let copy = guest.vmm.restore(&spec, &frozen).await?;
        let has = |disk| has_open(copy.record().pid, disk);
        ensure!(has(&own)? && !has(&kept)?, "copy {name} does not have a disk of its own");
        copy.resume().await?;
        let agent = guest.greet(copy.as_ref()).await.with_context(|| format!("copy {name}"))?;
        agent.configure_pod(ConfigurePodRequest { hostname: name.into(), ..Default::default() }).await?;
        copy.attach_disk(&ext4(&pod, "late", 16)?).await?;
        let disk = Disk { serial: "late".into(), fstype: "ext4".into(), scratch: true, ..Default::default() };
        agent.prepare_disk(disk).await.with_context(|| format!("copy {name}"))?;
        copy.kill().await?;
    }
    Ok(())
}

/// A guest that booted, and a copy, as the agent in them sees it.
async fn memory_comes_and_goes(subject: Subject) -> Result<()> {
    let guest = Guest::of(&subject).await?;
    let spec = VmSpec { growth_mib: GROWTH_MIB, ..guest.spec.clone() };
    let vm = guest.vmm.boot(&spec).await?;
    follows_requests(&guest, vm.as_ref()).await?;
    vm.kill().await?;

    let (template, copy) = (Pod::new("template"), Pod::new("copy"));
    let dir = template.path("frozen");
    fs::create_dir(&dir)?;
    let frozen =
        VmSpec { run_dir: template.path("run"), memory_file: Some(dir.join(MEMORY)), ..spec.clone() };
    let vm = guest.vmm.boot(&frozen).await?;
    drop(guest.greet(vm.as_ref()).await?);
    vm.freeze(&dir).await?;
    vm.kill().await?;
    let vm = guest.vmm.restore(&VmSpec { run_dir: copy.path("run"), ..spec }, &sealed(dir)).await?;
    vm.resume().await?;
    follows_requests(&guest, vm.as_ref()).await?;
    vm.kill().await?;
    Ok(())
}

async fn follows_requests(guest: &Guest, vm: &dyn Vm) -> Result<()> {
    let agent = guest.greet(vm).await?;
    let seen = async || agent.stats(None).await.expect("the agent answers").memory_limit >> 20;
    memory_follows(vm, seen).await;
    Ok(())
}
